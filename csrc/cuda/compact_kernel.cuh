// SPDX-License-Identifier: Apache-2.0
// The compaction kernel: one block of threads per (round, layer, KV head). Free of torch.
//
// The same source is compiled for GPUs by nvcc and, with RANDKV_SHIM, for a CPU on top of
// shim/cuda_shim.h, where it runs under sanitizers and random schedules.
#pragma once

#include <cstdint>

#include "../philox.h"
#include "compact_params.h"
#if defined(RANDKV_SHIM)
#include "../shim/cuda_shim.h"
#else
#define RANDKV_SHARED(type, name) __shared__ type name
#endif

namespace randkv {

constexpr int kWarps = kThreads / 32;
constexpr int kMaxLen = 1 << 30;     // slots of a request: keeps slot arithmetic within 32 bits
constexpr int kCachedGroups = 1024;  // groups of 4 slots whose priorities stay in shared memory
constexpr int kWindow = 512;         // moves listed at once; a head with more is scanned again
constexpr int kUnroll = 2;           // loads in flight per thread while copying
constexpr unsigned kAllLanes = 0xffffffffu;

struct alignas(16) Vector16 {
  uint32_t word[4];
};

struct CompactShared {
  Vector16 priorities[kCachedGroups];  // entry i is only touched by thread i % kThreads
  int64_t holes[kWindow];              // slots, then byte offsets in the layer's cache
  int64_t sources[kWindow];
  uint32_t histogram[kThreads];
  uint32_t warp_sums[2][kWarps];
  Round round;
  uint32_t digit, num_left, num_equal;
  uint64_t num_evicted, num_moves, num_refused;  // only touched by thread 0
  uint32_t num_skipped;                          // moves with a bad block
};

// A candidate is evicted if its priority >> shift is below `leading`, or equals it and it is one of
// the first `num_equal` such slots.
struct Threshold {
  uint32_t leading;
  int shift;
  uint32_t num_equal;
  bool has_ties;  // more slots than `num_equal` have these leading bits
};

template <typename Vector>
class Compaction {
 public:
  __device__ Compaction(const CompactParams& params, CompactShared& shared)
      : params_(params), shared_(shared), thread_(static_cast<int>(threadIdx.x)) {}

  __device__ void run() {
    if (thread_ == 0) {
      shared_.num_evicted = shared_.num_moves = shared_.num_refused = 0;
      shared_.num_skipped = 0;
    }
    const int num_heads = params_.num_kv_heads;
    const int num_items = params_.num_rounds * params_.num_layers * num_heads;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
      const int layer = item / num_heads % params_.num_layers;
      head_ = item % num_heads;
      __syncthreads();  // counts are zero; the last item's round is no longer read
      if (thread_ == 0) shared_.round = params_.rounds[item / num_heads / params_.num_layers];
      __syncthreads();
      layer_id_ = static_cast<uint32_t>(params_.layers[layer]);
      if (!is_valid(shared_.round)) {
        if (thread_ == 0) ++shared_.num_refused;
        continue;
      }
      if (shared_.round.old_len == shared_.round.new_len) continue;
      const Threshold threshold = find_threshold();
      int first_move = 0, num_holes;
      do {
        num_holes = list_moves(threshold, first_move);
        const int num_listed = min(num_holes - first_move, kWindow);
        __syncthreads();  // slots are listed
        locate(num_listed);
        __syncthreads();  // offsets are listed
        copy(params_.caches[layer], num_listed);
        first_move += kWindow;
      } while (first_move < num_holes);
      if (thread_ == 0) {
        shared_.num_evicted += static_cast<uint64_t>(shared_.round.old_len - shared_.round.new_len);
        shared_.num_moves += static_cast<uint64_t>(num_holes);
      }
    }
    if (thread_ == 0) {
      count(kEvictedPairs, shared_.num_evicted);
      count(kCopiedPairs, shared_.num_moves - shared_.num_skipped);
      count(kBadBlocks, shared_.num_refused + shared_.num_skipped);
    }
  }

 private:
  __device__ static bool is_valid(const Round& round) {
    return 0 <= round.first_slot && round.first_slot <= round.stop_slot &&
           round.stop_slot <= round.old_len && round.old_len <= kMaxLen &&
           round.first_slot <= round.new_len && round.new_len <= round.old_len &&
           round.old_len - round.new_len <= round.stop_slot - round.first_slot;
  }

  __device__ void count(Counter counter, uint64_t number) {
    if (number == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(params_.counters + counter),
              static_cast<unsigned long long>(number));
  }

  // Sum of `number` over the threads before this one; `total` is that of all. Calls alternate
  // between two buffers, so that one barrier per call is enough.
  __device__ uint32_t sum_before(uint32_t number, uint32_t& total) {
    const int lane = thread_ % 32, warp = thread_ / 32;
    uint32_t (&warp_sums)[kWarps] = shared_.warp_sums[sum_buffer_];
    sum_buffer_ ^= 1;
    uint32_t sum = number;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
    total = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += warp_sums[i];
      total += warp_sums[i];
    }
    return before + sum - number;
  }

  // Priorities of slots 4 * group .. 4 * group + 3. Each thread asks for the same groups in every
  // pass, so the stored ones need no barrier.
  __device__ Vector16 priorities(int group, bool is_first_pass) {
    const int index = group - shared_.round.first_slot / 4;
    if (!is_first_pass && index < kCachedGroups) return shared_.priorities[index];
    const Round& round = shared_.round;
    const PhiloxWords words =
        philox4x32_10(round.key0, round.key1, static_cast<uint32_t>(group), round.round_index,
                      layer_id_, static_cast<uint32_t>(params_.first_kv_head + head_));
    const Vector16 result = {{words.word[0], words.word[1], words.word[2], words.word[3]}};
    if (is_first_pass && index < kCachedGroups) shared_.priorities[index] = result;
    return result;
  }

  // Radix selection, 8 bits a pass from the top; ends as soon as the slots with equal leading bits
  // are all evicted, for 2,000 candidates mostly in the second pass.
  __device__ Threshold find_threshold() {
    static_assert(kThreads == 256, "one thread per value of 8 bits");
    const int first = shared_.round.first_slot, stop = shared_.round.stop_slot;
    uint32_t leading = 0;
    uint32_t num_left = static_cast<uint32_t>(shared_.round.old_len - shared_.round.new_len);
    for (int shift = 24;; shift -= 8) {
      shared_.histogram[thread_] = 0;
      __syncthreads();
      for (int group = first / 4 + thread_; 4 * group < stop; group += kThreads) {
        const Vector16 priority = priorities(group, shift == 24);
        for (int i = 0; i < 4; ++i) {
          const int slot = 4 * group + i;
          const bool is_equal = (uint64_t{priority.word[i]} >> (shift + 8)) == leading;
          if (first <= slot && slot < stop && is_equal) {
            atomicAdd(&shared_.histogram[priority.word[i] >> shift & 255], 1u);
          }
        }
      }
      __syncthreads();
      const uint32_t num_equal = shared_.histogram[thread_];
      uint32_t total;
      const uint32_t num_below = sum_before(num_equal, total);
      if (num_below < num_left && num_left - num_below <= num_equal) {  // in one thread
        shared_.digit = static_cast<uint32_t>(thread_);
        shared_.num_left = num_left - num_below;
        shared_.num_equal = num_equal;
      }
      __syncthreads();
      leading = leading << 8 | shared_.digit;
      num_left = shared_.num_left;
      const bool has_ties = num_left < shared_.num_equal;
      if (!has_ties || shift == 0) return {leading, shift, num_left, has_ties};
    }
  }

  // List moves [first_move, first_move + kWindow): the i-th hole and the i-th source, both
  // ascending. Returns the number of all holes, which is that of all sources.
  //
  //   slots   first_slot ... new_len ... old_len
  //           evicted: holes | kept: sources
  //
  // The lists are written behind the barrier of a sum, when no thread copies any more.
  __device__ int list_moves(const Threshold& threshold, int first_move) {
    const int first = shared_.round.first_slot, stop = shared_.round.stop_slot;
    int num_holes = 0, num_sources = 0;
    uint32_t num_equal = 0;
    for (int start = first / 4; 4 * start < shared_.round.old_len; start += kThreads) {
      const int group = start + thread_;
      uint32_t is_evicted = 0, is_equal = 0;  // bit i: slot 4 * group + i
      if (4 * group < stop) {
        const Vector16 priority = priorities(group, false);
        for (int i = 0; i < 4; ++i) {
          const int slot = 4 * group + i;
          if (slot < first || slot >= stop) continue;
          const uint32_t leading = priority.word[i] >> threshold.shift;
          if (leading < threshold.leading) is_evicted |= 1u << i;
          if (leading == threshold.leading) is_equal |= 1u << i;
        }
      }
      if (threshold.has_ties) {
        uint32_t total;
        uint32_t rank = num_equal + sum_before(__popc(is_equal), total);
        num_equal += total;
        for (int i = 0; i < 4; ++i) {
          if ((is_equal >> i & 1) && rank++ >= threshold.num_equal) is_equal &= ~(1u << i);
        }
      }
      is_evicted |= is_equal;
      uint32_t is_hole = 0, is_source = 0;
      for (int i = 0; i < 4; ++i) {
        const int slot = 4 * group + i;
        const uint32_t bit = 1u << i;
        if (slot < shared_.round.new_len) {
          is_hole |= is_evicted & bit;
        } else if (slot < shared_.round.old_len) {
          is_source |= ~is_evicted & bit;
        }
      }
      uint32_t total;
      const uint32_t before = sum_before(__popc(is_hole) | __popc(is_source) << 16, total);
      int hole = num_holes + static_cast<int>(before & 0xffff) - first_move;
      int source = num_sources + static_cast<int>(before >> 16) - first_move;
      for (int i = 0; i < 4; ++i) {
        const int slot = 4 * group + i;
        if (is_hole >> i & 1) {
          if (0 <= hole && hole < kWindow) shared_.holes[hole] = slot;
          ++hole;
        }
        if (is_source >> i & 1) {
          if (0 <= source && source < kWindow) shared_.sources[source] = slot;
          ++source;
        }
      }
      num_holes += static_cast<int>(total & 0xffff);
      num_sources += static_cast<int>(total >> 16);
    }
    return num_holes;
  }

  // Byte offset of a slot in a layer's cache, or -1 if its block is not one of the cache.
  __device__ int64_t slot_offset(int slot) {
    const int slots_per_id = params_.block_size * params_.blocks_per_id;
    const int64_t index = int64_t{shared_.round.first_block} + slot / slots_per_id;
    if (index < 0 || index >= params_.num_block_ids) return -1;
    const int rest = slot % slots_per_id;
    const int64_t block_id = params_.block_ids[index];
    const int64_t block = block_id * params_.blocks_per_id + rest / params_.block_size;
    if (block_id < 0 || block >= params_.num_blocks) return -1;
    return block * params_.block_stride + head_ * params_.head_stride +
           rest % params_.block_size * params_.slot_stride;
  }

  // Turn the listed slots into byte offsets; a move with a bad block gets hole -1.
  __device__ void locate(int num_listed) {
    for (int i = thread_; i < num_listed; i += kThreads) {
      const int64_t source = slot_offset(static_cast<int>(shared_.sources[i]));
      int64_t hole = slot_offset(static_cast<int>(shared_.holes[i]));
      if (source < 0 || hole < 0) {
        hole = -1;
        atomicAdd(&shared_.num_skipped, 1u);
      }
      shared_.sources[i] = source;
      shared_.holes[i] = hole;
    }
  }

  // Copy the listed moves; consecutive threads take consecutive vectors of a slot.
  __device__ void copy(uint8_t* cache, int num_listed) {
    constexpr int kBytes = static_cast<int>(sizeof(Vector));
    const int vectors = params_.slot_bytes / kBytes;  // of one slot
    int move = thread_ / vectors, vector = thread_ % vectors;
    while (move < num_listed) {
      Vector loaded[kUnroll];
      int64_t target[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        target[i] = -1;
        if (move < num_listed && shared_.holes[move] >= 0) {
          target[i] = shared_.holes[move] + vector * kBytes;
          const uint8_t* source = cache + shared_.sources[move] + vector * kBytes;
          loaded[i] = *reinterpret_cast<const Vector*>(source);
        }
        move += kThreads / vectors;
        vector += kThreads % vectors;
        if (vector >= vectors) {
          vector -= vectors;
          ++move;
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (target[i] >= 0) *reinterpret_cast<Vector*>(cache + target[i]) = loaded[i];
      }
    }
  }

  const CompactParams& params_;
  CompactShared& shared_;
  const int thread_;
  int sum_buffer_ = 0;
  int head_ = 0;           // of this rank
  uint32_t layer_id_ = 0;  // global index
};

// Reads params; adds to params.counters; writes the holes of params.caches. Any grid will do.
template <typename Vector>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    compact_kernel(const __grid_constant__ CompactParams params) {
  RANDKV_SHARED(CompactShared, shared);
  Compaction<Vector>(params, shared).run();
}

}  // namespace randkv
