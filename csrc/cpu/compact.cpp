// SPDX-License-Identifier: Apache-2.0
// randkv::compact on CPUs, and the operator's schema. Torch's stable ABI: one build serves torch
// 2.11 and later.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <vector>

#include "../round.h"
#include "../schema.h"
#include "layout.h"
#include "mover.h"
#include "selection.h"

namespace randkv {
namespace {

// Fewer than this are not worth waking a thread for: a head takes some ten microseconds.
constexpr int64_t kHeadsPerThread = 64;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_tensor(const Tensor& tensor, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype,
                  "randkv::compact: ", name, " must be contiguous, on the CPU, and of dtype ",
                  dtype == ScalarType::Int ? "int32" : "int64");
}

void check_rounds(const Round* rounds, int64_t num_rounds, const int32_t* block_ids,
                  int64_t num_ids, int64_t manager_block_size, int64_t num_blocks) {
  for (int64_t i = 0; i < num_rounds; ++i) {
    const Round& round = rounds[i];
    const int64_t num_evict = int64_t{round.old_len} - round.new_len;
    STD_TORCH_CHECK(0 <= round.first_slot && round.first_slot <= round.stop_slot &&
                        round.stop_slot <= round.old_len && round.new_len >= 0 && num_evict >= 0 &&
                        num_evict <= round.stop_slot - round.first_slot,
                    "randkv::compact: round ", i, " evicts ", num_evict, " of the slots [",
                    round.first_slot, ", ", round.stop_slot, ") of ", round.old_len);
    const int64_t num_used = (round.old_len + manager_block_size - 1) / manager_block_size;
    STD_TORCH_CHECK(0 <= round.first_block && round.first_block + num_used <= num_ids,
                    "randkv::compact: round ", i, " needs ", num_used, " block ids from ",
                    round.first_block, " on, but there are ", num_ids);
    for (int64_t j = 0; j < num_used; ++j) {
      const int32_t id = block_ids[round.first_block + j];
      STD_TORCH_CHECK(0 <= id && id < num_blocks, "randkv::compact: round ", i, " has block id ",
                      id, ", but the KV cache has ", num_blocks, " blocks");
    }
  }
}

void compact(std::vector<Tensor> kv_caches, Tensor rounds, Tensor block_ids, Tensor layers,
             Tensor layout, int64_t first_kv_head, int64_t manager_block_size,
             Tensor counters) {
  check_tensor(rounds, "rounds", ScalarType::Int);
  check_tensor(block_ids, "block_ids", ScalarType::Int);
  check_tensor(layers, "layers", ScalarType::Int);
  check_tensor(layout, "layout", ScalarType::Long);
  check_tensor(counters, "counters", ScalarType::Long);
  STD_TORCH_CHECK(rounds.dim() == 2 && rounds.size(1) == 8, "randkv::compact: rounds must be ",
                  "[rounds, 8]");
  STD_TORCH_CHECK(counters.numel() == kNumCounters, "randkv::compact: counters must be [",
                  int{kNumCounters}, "]");
  const int64_t num_layers = static_cast<int64_t>(kv_caches.size());
  STD_TORCH_CHECK(num_layers > 0 && layers.numel() == num_layers, "randkv::compact: ", num_layers,
                  " KV caches, but ", layers.numel(), " layers");
  STD_TORCH_CHECK(layout.numel() >= 5, "randkv::compact: layout is too short");
  const auto* numbers = static_cast<const int64_t*>(layout.data_ptr());
  STD_TORCH_CHECK(numbers[0] > 0 && numbers[1] > 0 && numbers[2] > 0 &&
                      layout.numel() == 5 + 2 * numbers[0] + 2 * numbers[2],
                  "randkv::compact: layout of ", layout.numel(), " numbers does not fit block size ",
                  numbers[0], " and head size ", numbers[2]);
  const Tensor& first = kv_caches[0];
  for (const Tensor& cache : kv_caches) {
    STD_TORCH_CHECK(cache.is_cpu() && cache.element_size() == first.element_size() &&
                        cache.numel() == first.numel() && cache.dim() == 4 &&
                        cache.size(0) == first.size(0),
                    "randkv::compact: every KV cache must be on the CPU, of one shape and dtype");
  }
  std::vector<char*> caches;
  bool is_aligned = true;
  for (Tensor& cache : kv_caches) {
    caches.push_back(static_cast<char*>(cache.mutable_data_ptr()));
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(caches.back()) % 4 == 0;
  }
  const Layout slots(numbers, static_cast<int64_t>(first.element_size()), is_aligned);
  STD_TORCH_CHECK(first.size(1) == slots.num_kv_heads && first.size(2) == slots.block_size &&
                      first.size(3) == 2 * slots.head_size,
                  "randkv::compact: the layout is not that of the KV caches");
  STD_TORCH_CHECK(manager_block_size > 0 && manager_block_size % slots.block_size == 0,
                  "randkv::compact: manager_block_size ", manager_block_size,
                  " is not a multiple of block size ", slots.block_size);
  const auto* plans = static_cast<const Round*>(rounds.data_ptr());
  const auto* ids = static_cast<const int32_t*>(block_ids.data_ptr());
  const auto* layer_indices = static_cast<const int32_t*>(layers.data_ptr());
  check_rounds(plans, rounds.size(0), ids, block_ids.numel(), manager_block_size,
               first.size(0) / (manager_block_size / slots.block_size));

  std::atomic<int64_t> num_evicted{0}, num_copied{0};
  const int64_t num_heads = slots.num_kv_heads;
  torch::stable::parallel_for(
      0, rounds.size(0) * num_layers * num_heads, kHeadsPerThread, [&](int64_t begin, int64_t end) {
        Selector selector;
        Mover mover(slots, manager_block_size);
        int64_t evicted = 0, copied = 0;
        for (int64_t item = begin; item < end; ++item) {
          const Round& round = plans[item / num_heads / num_layers];
          const int64_t layer = item / num_heads % num_layers, head = item % num_heads;
          const std::vector<int32_t>& gone = selector.evicted_slots(
              round, static_cast<uint32_t>(layer_indices[layer]),
              static_cast<uint32_t>(first_kv_head + head));
          evicted += static_cast<int64_t>(gone.size());
          copied += mover.move(round, ids + round.first_block,
                               caches[static_cast<size_t>(layer)] + head * slots.head_stride, gone);
        }
        num_evicted += evicted;
        num_copied += copied;
      });
  auto* counts = static_cast<int64_t*>(counters.mutable_data_ptr());
  counts[kEvictedPairs] += num_evicted;
  counts[kCopiedPairs] += num_copied;
}

}  // namespace
}  // namespace randkv

STABLE_TORCH_LIBRARY(randkv, library) { library.def(RANDKV_COMPACT_SCHEMA); }

STABLE_TORCH_LIBRARY_IMPL(randkv, CPU, library) {
  library.impl("compact", TORCH_BOX(&randkv::compact));
}
