// SPDX-License-Identifier: Apache-2.0
// The host's side of the kernel: checks and launch parameters. Free of torch and of CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "compact_params.h"

namespace randkv {

// One layer's cache, as its tensor is: [num_blocks, num_kv_heads, block_size, 2 * head_size].
struct CacheTensor {
  int64_t sizes[4];
  int64_t strides[4];  // elements
  int64_t element_bytes;
};

// Fill what `params` says about the caches' shape; returns why it cannot be done, or "".
//
// `layout` is the operator's and must say what the tensor's strides say: key, then value of a slot,
// element next to element.
inline std::string set_layout(CompactParams& params, const CacheTensor& cache,
                              const int64_t* layout, int64_t num_layout, int64_t first_kv_head,
                              int64_t manager_block_size) {
  const auto [num_blocks, num_kv_heads, block_size, pair_size] = cache.sizes;
  const auto [block_stride, head_stride, slot_stride, element_stride] = cache.strides;
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (num_kv_heads < 1 || block_size < 1 || pair_size < 2 || pair_size % 2 != 0) {
    return "kv_caches must be [num_blocks, num_kv_heads, block_size, 2 * head_size], not [" +
           text(num_blocks) + ", " + text(num_kv_heads) + ", " + text(block_size) + ", " +
           text(pair_size) + "]";
  }
  const int64_t head_size = pair_size / 2;
  if (element_stride != 1 || slot_stride < pair_size || head_stride < 0 || block_stride < 0) {
    return "kv_caches must have the elements of a slot side by side; strides are [" +
           text(block_stride) + ", " + text(head_stride) + ", " + text(slot_stride) + ", " +
           text(element_stride) + "]";
  }
  constexpr int64_t kMax = 1 << 30;
  if (num_kv_heads > kMax || block_size > kMax || pair_size * cache.element_bytes > kMax) {
    return "kv_caches has more heads, or larger slots or blocks, than can be addressed";
  }
  if (manager_block_size < block_size || manager_block_size > kMax ||
      manager_block_size % block_size != 0) {
    return "manager_block_size is " + text(manager_block_size) + ", not a multiple of block_size " +
           text(block_size);
  }
  if (first_kv_head < 0 || first_kv_head > kMax) {
    return "first_kv_head is " + text(first_kv_head);
  }
  if (num_layout != 5 + 2 * block_size + 2 * head_size) {
    return "layout has " + text(num_layout) +
           " entries, not 5 + 2 * block_size + 2 * head_size = " +
           text(5 + 2 * block_size + 2 * head_size);
  }
  const int64_t expected[5] = {block_size, num_kv_heads, head_size, block_stride, head_stride};
  for (int i = 0; i < 5; ++i) {
    if (layout[i] != expected[i]) {
      return "layout[" + text(i) + "] is " + text(layout[i]) + ", but kv_caches says " +
             text(expected[i]);
    }
  }
  const int64_t* key_slots = layout + 5;
  const int64_t* value_slots = key_slots + block_size;
  const int64_t* key_elements = value_slots + block_size;
  const int64_t* value_elements = key_elements + head_size;
  bool is_strided = true;
  for (int64_t i = 0; i < block_size; ++i) {
    is_strided &= key_slots[i] == i * slot_stride && value_slots[i] == i * slot_stride;
  }
  for (int64_t i = 0; i < head_size; ++i) {
    is_strided &= key_elements[i] == i && value_elements[i] == head_size + i;
  }
  if (!is_strided) {
    return "layout is not that of the strides of kv_caches; on GPUs no other is known";
  }
  params.num_blocks = num_blocks;
  params.block_stride = block_stride * cache.element_bytes;
  params.head_stride = head_stride * cache.element_bytes;
  params.slot_stride = slot_stride * cache.element_bytes;
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.first_kv_head = static_cast<int32_t>(first_kv_head);
  params.slot_bytes = static_cast<int32_t>(pair_size * cache.element_bytes);
  params.block_size = static_cast<int32_t>(block_size);
  params.blocks_per_id = static_cast<int32_t>(manager_block_size / block_size);
  return "";
}

// The widest of 16, 4 and 1 bytes that all addresses of slots are multiples of.
inline int vector_bytes(const CompactParams& params) {
  uint64_t bits = static_cast<uint64_t>(params.block_stride | params.head_stride |
                                        params.slot_stride | params.slot_bytes);
  for (int layer = 0; layer < params.num_layers; ++layer) {
    bits |= reinterpret_cast<uintptr_t>(params.caches[layer]);
  }
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

// Blocks of threads to launch: each takes items in turn, so that counters are added to seldom.
inline unsigned num_thread_blocks(const CompactParams& params, int num_processors) {
  const int64_t items = int64_t{params.num_rounds} * params.num_layers * params.num_kv_heads;
  const int64_t most = int64_t{kThreadBlocksPerProcessor} * num_processors;
  return static_cast<unsigned>(items < most ? items : most);
}

// Launch on a CUDA stream of `device`, which becomes the current one; returns the error, or "".
// Waits for nothing.
std::string launch_compact(const CompactParams& params, int device, void* stream);

}  // namespace randkv
