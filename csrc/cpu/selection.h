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
#include "avx512.h"

// The priorities vectorise; the library picks the widest version that the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define RANDKV_CLONES \
  __attribute__((target_clones("arch=x86-64-v3", "default"), flatten))
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

// Into `below`: which of priorities[0] .. priorities[n - 1] are at most `last`, ascending. Returns
// how many.
static size_t collect(const uint32_t* priorities, size_t n, uint32_t last, uint32_t* below) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    below[count] = static_cast<uint32_t>(i);
    count += priorities[i] <= last;
  }
  return count;
}

// Finds evicted slots; keeps its scratch space from one head to the next.
class Selector {
 public:
  explicit Selector(bool use_avx512 = avx512::is_supported()) {
#if defined(RANDKV_AVX512)
    if (use_avx512) {
      compute_priorities_ = avx512::compute_priorities;
      collect_ = avx512::collect;
    }
#else
    static_cast<void>(use_avx512);
#endif
  }

  // The evicted slots, ascending: the old_len - new_len candidates with the smallest
  // (priority, slot). Valid until the next call.
  const std::vector<int32_t>& evicted_slots(const Round& round, uint32_t layer, uint32_t kv_head) {
    const auto num_evict = static_cast<size_t>(round.old_len - round.new_len);
    const auto num_candidates = static_cast<size_t>(round.stop_slot - round.first_slot);
    evicted_.clear();
    if (num_evict == 0) return evicted_;
    const uint32_t first_group = static_cast<uint32_t>(round.first_slot) / 4;
    const uint32_t stop_group = (static_cast<uint32_t>(round.stop_slot) + 3) / 4;
    priorities_.resize(4 * ((stop_group - first_group + kLanes - 1) / kLanes * kLanes));
    for (size_t i = 0; i < priorities_.size(); i += 4 * kLanes) {
      compute_priorities_(round, layer, kv_head, first_group + static_cast<uint32_t>(i / 4),
                          priorities_.data() + i);
    }
    const uint32_t* priorities = priorities_.data() + round.first_slot % 4;

    // Few are evicted: those below a bound that, almost always, some more than num_evict are
    // under. Where it is not so, every candidate is looked at.
    const double wanted = double(num_evict) + 4 * std::sqrt(double(num_evict)) + 4;
    const double bound = wanted / double(num_candidates) * 4294967296.0;
    const auto collect_up_to = [&](uint32_t last) {
      below_.resize(num_candidates + 16);
      below_.resize(collect_(priorities, num_candidates, last, below_.data()));
    };
    collect_up_to(bound < 4294967295.0 ? static_cast<uint32_t>(bound) : UINT32_MAX);
    if (below_.size() < num_evict) collect_up_to(UINT32_MAX);

    // (priority, candidate) as one number: candidates are ordered as slots are.
    const auto key = [&](uint32_t i) { return uint64_t{priorities[i]} << 32 | i; };
    keys_.resize(below_.size());
    std::transform(below_.begin(), below_.end(), keys_.begin(), key);
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(num_evict - 1);
    std::nth_element(keys_.begin(), last, keys_.end());
    evicted_.resize(below_.size());
    size_t count = 0;
    for (const uint32_t i : below_) {
      evicted_[count] = round.first_slot + static_cast<int32_t>(i);
      count += key(i) <= *last;
    }
    evicted_.resize(count);
    return evicted_;
  }

 private:
  decltype(&compute_priorities) compute_priorities_ = compute_priorities;
  decltype(&collect) collect_ = collect;
  std::vector<uint32_t> priorities_, below_;
  std::vector<uint64_t> keys_;
  std::vector<int32_t> evicted_;
};

}  // namespace randkv
