// SPDX-License-Identifier: Apache-2.0
// randkv::compact on CUDA tensors: checks, then one launch on the current stream. It waits for
// nothing and allocates nothing.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "compact_launch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool is_supported(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Byte:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return true;
    default:
      return false;
  }
}

void check_tensor(const Tensor& tensor, const char* name, ScalarType type, int64_t num_dims,
                  int32_t device) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has dtype ", tensor.scalar_type(), ", not ",
                  type);
  STD_TORCH_CHECK(tensor.dim() == num_dims, name, " has ", tensor.dim(), " dimensions, not ",
                  num_dims);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, name,
                  " is not on the device of kv_caches");
}

randkv::CacheTensor describe(const Tensor& cache) {
  STD_TORCH_CHECK(cache.dim() == 4, "kv_caches have ", cache.dim(), " dimensions, not 4");
  randkv::CacheTensor result = {};
  for (int i = 0; i < 4; ++i) {
    result.sizes[i] = cache.size(i);
    result.strides[i] = cache.stride(i);
  }
  result.element_bytes = static_cast<int64_t>(cache.element_size());
  STD_TORCH_CHECK(is_supported(cache.scalar_type()), "kv_caches have dtype ", cache.scalar_type(),
                  "; bfloat16, float16, float32 and fp8 (or uint8) can be compacted");
  return result;
}

void compact(std::vector<Tensor> kv_caches, Tensor rounds, Tensor block_ids, Tensor layers,
             Tensor layout, int64_t first_kv_head, int64_t manager_block_size,
             Tensor counters) {
  STD_TORCH_CHECK(!kv_caches.empty() && kv_caches.size() <= randkv::kMaxLayers, "kv_caches are ",
                  kv_caches.size(), " tensors; 1 to ", randkv::kMaxLayers, " can be compacted");
  const Tensor& first = kv_caches[0];
  const int32_t device = first.get_device_index();
  const randkv::CacheTensor shape = describe(first);
  randkv::CompactParams params = {};
  params.num_layers = static_cast<int32_t>(kv_caches.size());
  for (size_t i = 0; i < kv_caches.size(); ++i) {
    const Tensor& cache = kv_caches[i];
    const randkv::CacheTensor other = describe(cache);
    bool is_same = cache.scalar_type() == first.scalar_type();
    for (int d = 0; d < 4; ++d) {
      is_same &= other.sizes[d] == shape.sizes[d] && other.strides[d] == shape.strides[d];
    }
    STD_TORCH_CHECK(is_same, "kv_caches[", i,
                    "] differs from kv_caches[0] in shape, strides or dtype");
    STD_TORCH_CHECK(cache.is_cuda() && cache.get_device_index() == device, "kv_caches[", i,
                    "] is not on the CUDA device of kv_caches[0]");
    params.caches[i] = static_cast<uint8_t*>(cache.data_ptr());
  }
  check_tensor(rounds, "rounds", ScalarType::Int, 2, device);
  STD_TORCH_CHECK(rounds.size(1) == 8, "rounds has rows of ", rounds.size(1), " entries, not 8");
  check_tensor(block_ids, "block_ids", ScalarType::Int, 1, device);
  check_tensor(layers, "layers", ScalarType::Int, 1, device);
  STD_TORCH_CHECK(layers.numel() == params.num_layers, "layers has ", layers.numel(),
                  " entries for ", params.num_layers, " kv_caches");
  check_tensor(counters, "counters", ScalarType::Long, 1, device);
  STD_TORCH_CHECK(counters.numel() == randkv::kNumCounters, "counters has ", counters.numel(),
                  " entries, not ", static_cast<int>(randkv::kNumCounters));
  STD_TORCH_CHECK(layout.is_cpu() && layout.is_contiguous() &&
                      layout.scalar_type() == ScalarType::Long,
                  "layout is not a contiguous int64 tensor on the CPU");
  const std::string error =
      set_layout(params, shape, static_cast<const int64_t*>(layout.data_ptr()), layout.numel(),
                 first_kv_head, manager_block_size);
  STD_TORCH_CHECK(error.empty(), error);
  const int64_t items_per_round = int64_t{params.num_layers} * params.num_kv_heads;
  STD_TORCH_CHECK(rounds.size(0) <= randkv::kMaxItems / items_per_round,
                  "rounds has ", rounds.size(0), " rows, more than can be numbered");
  params.num_rounds = static_cast<int32_t>(rounds.size(0));
  params.rounds = static_cast<const randkv::Round*>(rounds.data_ptr());
  params.block_ids = static_cast<const int32_t*>(block_ids.data_ptr());
  params.num_block_ids = block_ids.numel();
  params.layers = static_cast<const int32_t*>(layers.data_ptr());
  params.counters = static_cast<int64_t*>(counters.data_ptr());

  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const std::string launch_error = randkv::launch_compact(params, device, stream);
  STD_TORCH_CHECK(launch_error.empty(), "CUDA: ", launch_error);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(randkv, CUDA, m) { m.impl("compact", TORCH_BOX(&compact)); }
