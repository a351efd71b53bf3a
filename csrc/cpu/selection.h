// SPDX-License-Identifier: Apache-2.0
// Selection contract v1 for one (request, layer, KV head). Free of torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../philox.h"
#include "../round.h"

// The priorities vectorise; the library picks the widest version that the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define RANDKV_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define RANDKV_CLONES
#endif

namespace randkv {

// Groups of four slots whose priorities are computed together.
constexpr int kLanes = 16;

// Priorities of slots 4 * first_group .. 4 * (first_group + kLanes) - 1 into `out`.
RANDKV_CLONES static void compute_priorities(const Round& round, uint32_t layer, uint32_t kv_head,
                                             uint32_t first_group, uint32_t* out) {
  PhiloxWords words[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    words[lane] = philox4x32_10(round.key0, round.key1, first_group + lane, round.round_index,
                                layer, kv_head);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int word = 0; word < 4; ++word) out[4 * lane + word] = words[lane].word[word];
  }
}

// Finds the evicted slots of one head after the other, in steps: computing is done while memory
// that is being moved is on its way. Keeps its scratch space.
class Selector {
 public:
  void begin(const Round& round, uint32_t layer, uint32_t kv_head) {
    round_ = &round;
    layer_ = layer;
    kv_head_ = kv_head;
    num_evict_ = static_cast<size_t>(round.old_len - round.new_len);
    first_group_ = static_cast<uint32_t>(round.first_slot) / 4;
    const int64_t stop_group = (static_cast<int64_t>(round.stop_slot) + 3) / 4;
    const auto num_groups = static_cast<size_t>(num_evict_ == 0 ? 0 : stop_group - first_group_);
    num_chunks_ = (num_groups + kLanes - 1) / kLanes;
    priorities_.resize(4 * kLanes * num_chunks_);
    below_.resize(priorities_.size());
    chunk_ = num_below_ = 0;
    // Few are evicted: those below a bound that, almost always, some more than num_evict are
    // under. Where it is not so, every candidate is looked at.
    const double wanted = double(num_evict_) + 6 * std::sqrt(double(num_evict_)) + 8;
    const double bound = wanted / double(round.stop_slot - round.first_slot) * 4294967296.0;
    limit_ = bound < 4294967296.0 ? static_cast<uint64_t>(bound) : uint64_t{1} << 32;
  }

  // Compute some priorities, unless all are.
  void advance() {
    if (chunk_ == num_chunks_) return;
    const size_t first = 4 * kLanes * chunk_++;
    compute_priorities(*round_, layer_, kv_head_, first_group_ + static_cast<uint32_t>(first / 4),
                       priorities_.data() + first);
    collect(first, first + 4 * kLanes);
  }

  // The evicted slots, ascending: the old_len - new_len candidates with the smallest
  // (priority, slot). Valid until the next call of finish().
  const std::vector<int32_t>& finish() {
    while (chunk_ < num_chunks_) advance();
    evicted_.clear();
    if (num_evict_ == 0) return evicted_;
    if (num_below_ < num_evict_) {
      limit_ = uint64_t{1} << 32;
      num_below_ = 0;
      collect(0, priorities_.size());
    }
    // (priority, slot) as one number.
    keys_.clear();
    for (size_t i = 0; i < num_below_; ++i) keys_.push_back(key(below_[i]));
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(num_evict_ - 1);
    std::nth_element(keys_.begin(), last, keys_.end());
    for (size_t i = 0; i < num_below_; ++i) {
      if (key(below_[i]) <= *last) {
        evicted_.push_back(static_cast<int32_t>(4 * first_group_ + below_[i]));
      }
    }
    return evicted_;
  }

 private:
  uint64_t key(uint32_t index) const { return uint64_t{priorities_[index]} << 32 | index; }

  // Append to below_ the candidates in [first, stop) with a priority under limit_. Indices count
  // from slot 4 * first_group_.
  void collect(size_t first, size_t stop) {
    const auto first_candidate = static_cast<size_t>(round_->first_slot % 4);
    const size_t num_slots =
        first_candidate + static_cast<size_t>(round_->stop_slot - round_->first_slot);
    first = std::max(first, first_candidate);
    stop = std::min(stop, num_slots);
    uint32_t* below = below_.data();
    size_t count = num_below_;
    for (size_t i = first; i < stop; ++i) {
      below[count] = static_cast<uint32_t>(i);
      count += priorities_[i] < limit_;
    }
    num_below_ = count;
  }

  const Round* round_ = nullptr;
  uint32_t layer_ = 0, kv_head_ = 0, first_group_ = 0;
  size_t num_evict_ = 0, num_chunks_ = 0, chunk_ = 0, num_below_ = 0;
  uint64_t limit_ = 0;
  std::vector<uint32_t> priorities_, below_;
  std::vector<uint64_t> keys_;
  std::vector<int32_t> evicted_;
};

}  // namespace randkv
