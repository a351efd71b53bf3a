// SPDX-License-Identifier: Apache-2.0
// The kernel on the shim, behind a C function for the tests' ctypes.
#include "compact_shim.h"

#include "../cuda/compact_kernel.cuh"

namespace randkv {

std::string launch_on_shim(const CompactParams& params, unsigned grid_size, uint64_t seed) {
  const shim::Launch launch = {grid_size, kThreads, sizeof(CompactShared), seed};
  switch (vector_bytes(params)) {
    case 16:
      return shim::launch(launch, [&] { compact_kernel<Vector16>(params); });
    case 4:
      return shim::launch(launch, [&] { compact_kernel<uint32_t>(params); });
    default:
      return shim::launch(launch, [&] { compact_kernel<uint8_t>(params); });
  }
}

}  // namespace randkv

// Returns what went wrong, or ""; valid until the next call. Arguments are the operator's; `sizes`,
// `strides` (elements) and `element_bytes` are those of every cache.
extern "C" const char* randkv_compact(uint8_t* const* caches, int64_t num_layers,
                                      const int64_t* sizes, const int64_t* strides,
                                      int64_t element_bytes, const int32_t* rounds,
                                      int64_t num_rounds, const int32_t* block_ids,
                                      int64_t num_block_ids, const int32_t* layers,
                                      const int64_t* layout, int64_t num_layout,
                                      int64_t first_kv_head, int64_t manager_block_size,
                                      int64_t* counters, unsigned grid_size, uint64_t seed) {
  static std::string error;
  randkv::CacheTensor cache = {};
  for (int i = 0; i < 4; ++i) {
    cache.sizes[i] = sizes[i];
    cache.strides[i] = strides[i];
  }
  cache.element_bytes = element_bytes;
  randkv::CompactParams params = {};
  error = randkv::set_layout(params, cache, layout, num_layout, first_kv_head, manager_block_size);
  if (!error.empty()) return error.c_str();
  for (int64_t i = 0; i < num_layers; ++i) params.caches[i] = caches[i];
  params.rounds = reinterpret_cast<const randkv::Round*>(rounds);
  params.block_ids = block_ids;
  params.layers = layers;
  params.counters = counters;
  params.num_block_ids = num_block_ids;
  params.num_rounds = static_cast<int32_t>(num_rounds);
  params.num_layers = static_cast<int32_t>(num_layers);
  error = randkv::launch_on_shim(params, grid_size, seed);
  return error.c_str();
}
