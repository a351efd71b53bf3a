// SPDX-License-Identifier: Apache-2.0
// What the kernel is given. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#include "../round.h"

namespace randkv {

constexpr int kThreads = 256;                 // of a block of threads
constexpr int kThreadBlocksPerProcessor = 4;  // so 64 registers per thread, of which none spills
constexpr int kMaxLayers = 256;
constexpr int kMaxItems = 1 << 30;            // (round, layer, KV head) of one launch

struct CompactParams {
  uint8_t* caches[kMaxLayers];  // each [num_blocks, num_kv_heads, block_size], strided, of slots
  const Round* rounds;          // [num_rounds]
  const int32_t* block_ids;     // [num_block_ids]
  const int32_t* layers;        // [num_layers], global indices
  int64_t* counters;            // [kNumCounters]
  int64_t num_block_ids, num_blocks;
  int64_t block_stride, head_stride, slot_stride;  // bytes
  int32_t num_rounds, num_layers, num_kv_heads;
  int32_t first_kv_head;  // global index
  int32_t slot_bytes;     // one slot of one head: its key, then its value
  int32_t block_size;
  int32_t blocks_per_id;  // blocks of the caches in one block id
};

}  // namespace randkv
