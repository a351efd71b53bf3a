// SPDX-License-Identifier: Apache-2.0
// What the operator reads and counts, the same on every device. Free of torch.
#pragma once

#include <cstdint>

namespace randkv {

// One row of the operator's `rounds`, int32 [rounds, 8]: one compaction of one request.
//
//   slots   0 ...... first_slot | first_slot .. stop_slot | stop_slot .. old_len
//           prompt, kept        | candidates              | newest, kept
//
// Per (layer, KV head) the old_len - new_len candidates with the smallest (priority, slot) are
// evicted; the i-th kept slot at or above new_len is copied to the i-th evicted slot below it.
struct Round {
  uint32_t key0, key1;   // Philox key of the request
  uint32_t round_index;  // rounds of this request before this one
  int32_t first_slot;    // prompt length
  int32_t stop_slot;     // old_len - buffer_size
  int32_t old_len;       // physical length before, slots
  int32_t new_len;       // physical length after, slots
  int32_t first_block;   // where the request's block ids start in the operator's `block_ids`
};
static_assert(sizeof(Round) == 32, "one row of int32 [rounds, 8]");

// Entries of the operator's `counters`, int64 [3]; the operator adds to them. Bad blocks are moves
// that the CUDA kernel left out, their blocks not being ones of the cache, and rows that are no
// rounds; the CPU kernel refuses both before it moves anything.
enum Counter { kEvictedPairs = 0, kCopiedPairs = 1, kBadBlocks = 2, kNumCounters = 3 };

}  // namespace randkv
