// SPDX-License-Identifier: Apache-2.0
// Random rounds through the kernel on the shim, against the same done slot by slot. For sanitizers:
// `compact_driver SEED CASES` exits with 1 at the first difference.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "../philox.h"
#include "../shim/compact_shim.h"

namespace {

using randkv::CompactParams;
using randkv::Round;

struct Case {
  std::mt19937_64 random;
  CompactParams params = {};
  std::vector<Round> rounds;
  std::vector<int32_t> block_ids, layers;
  std::vector<std::unique_ptr<uint8_t[]>> caches;  // each exactly as large as its strides span
  size_t cache_bytes = 0;
  int64_t counters[randkv::kNumCounters] = {};

  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  }
};

void add_round(Case& c, int64_t& num_ids, int slots_per_id, bool is_small) {
  const int buffer = static_cast<int>(c.draw(0, is_small ? 20 : 512));
  const int budget = static_cast<int>(c.draw(1, is_small ? 60 : 3000));
  const int prompt = static_cast<int>(c.draw(0, budget));
  const int new_len = budget + buffer;
  const int most = is_small ? std::max(buffer, 1) : 1200;  // so more than are listed at once
  const int old_len = new_len + static_cast<int>(c.draw(0, most));
  c.rounds.push_back({static_cast<uint32_t>(c.random()), static_cast<uint32_t>(c.random()),
                      static_cast<uint32_t>(c.draw(0, 100)), prompt, old_len - buffer, old_len,
                      new_len, static_cast<int32_t>(num_ids)});
  num_ids += (old_len + slots_per_id - 1) / slots_per_id;
}

Case make_case(uint64_t seed, bool is_small) {
  Case c;
  c.random.seed(seed);
  CompactParams& p = c.params;
  p.num_layers = static_cast<int32_t>(c.draw(1, 3));
  p.num_kv_heads = static_cast<int32_t>(c.draw(1, 3));
  p.first_kv_head = static_cast<int32_t>(c.draw(0, 5));
  p.block_size = static_cast<int32_t>(8 * c.draw(1, 4));
  p.blocks_per_id = static_cast<int32_t>(c.draw(1, 2));
  const int64_t element_bytes = int64_t{1} << c.draw(0, 2);
  p.slot_bytes = static_cast<int32_t>(2 * c.draw(1, 24) * element_bytes);
  if (c.draw(0, 1)) p.slot_bytes = 64;
  int64_t num_ids = 0;
  for (int64_t i = c.draw(1, 3); i > 0; --i) {
    add_round(c, num_ids, p.block_size * p.blocks_per_id, is_small);
  }
  std::vector<int32_t> free_ids(num_ids + 2);
  for (size_t i = 0; i < free_ids.size(); ++i) free_ids[i] = static_cast<int32_t>(i);
  std::shuffle(free_ids.begin(), free_ids.end(), c.random);
  c.block_ids.assign(free_ids.begin(), free_ids.begin() + num_ids);
  p.num_blocks = static_cast<int64_t>(free_ids.size()) * p.blocks_per_id;
  if (c.draw(0, 3) == 0) {  // ids of no block, and rounds that are none
    const int32_t bad[] = {-1, static_cast<int32_t>(free_ids.size()), INT32_MAX, INT32_MIN};
    c.block_ids[c.draw(0, num_ids - 1)] = bad[c.draw(0, 3)];
    c.block_ids.resize(c.draw(1, num_ids));
    c.block_ids.shrink_to_fit();  // so that AddressSanitizer sees what lies beyond
    Round& round = c.rounds[c.draw(0, static_cast<int64_t>(c.rounds.size()) - 1)];
    if (c.draw(0, 1)) round.new_len = round.first_slot - 1;
  }
  p.num_rounds = static_cast<int32_t>(c.rounds.size());
  const bool is_nhd = c.draw(0, 1);
  p.head_stride = int64_t{p.slot_bytes} * (is_nhd ? 1 : p.block_size);
  p.slot_stride = int64_t{p.slot_bytes} * (is_nhd ? p.num_kv_heads : 1);
  p.block_stride = int64_t{p.slot_bytes} * p.block_size * p.num_kv_heads;
  c.cache_bytes = static_cast<size_t>(p.num_blocks * p.block_stride);
  for (int i = 0; i < p.num_layers; ++i) {
    c.layers.push_back(static_cast<int32_t>(c.draw(0, 99)));
    c.caches.push_back(std::make_unique<uint8_t[]>(c.cache_bytes));
    for (size_t at = 0; at < c.cache_bytes; at += 4) {
      const auto word = static_cast<uint32_t>(c.random());
      std::memcpy(&c.caches[i][at], &word, std::min<size_t>(4, c.cache_bytes - at));
    }
    p.caches[i] = c.caches[i].get();
  }
  p.rounds = c.rounds.data();
  p.block_ids = c.block_ids.data();
  p.num_block_ids = static_cast<int64_t>(c.block_ids.size());
  p.layers = c.layers.data();
  p.counters = c.counters;
  return c;
}

uint32_t priority(const Case& c, const Round& round, int layer, int head, int slot) {
  return randkv::philox4x32_10(round.key0, round.key1, slot / 4, round.round_index,
                               c.layers[layer], c.params.first_kv_head + head)
      .word[slot % 4];
}

// Start of a slot in a layer's cache, or -1.
int64_t offset_of(const Case& c, const Round& round, int head, int slot) {
  const CompactParams& p = c.params;
  const int slots_per_id = p.block_size * p.blocks_per_id;
  const int64_t index = round.first_block + slot / slots_per_id;
  if (index < 0 || index >= p.num_block_ids) return -1;
  const int64_t id = c.block_ids[index];
  if (id < 0 || id >= p.num_blocks / p.blocks_per_id) return -1;
  const int in_id = slot % slots_per_id;
  const int64_t block = id * p.blocks_per_id + in_id / p.block_size;
  return block * p.block_stride + head * p.head_stride + in_id % p.block_size * p.slot_stride;
}

void compact_slot_by_slot(const Case& c, int layer, int head, const Round& round,
                          std::vector<uint8_t>& cache, int64_t* counters) {
  if (round.new_len < round.first_slot) {
    ++counters[randkv::kBadBlocks];
    return;
  }
  std::vector<std::pair<uint32_t, int>> order;
  for (int slot = round.first_slot; slot < round.stop_slot; ++slot) {
    order.emplace_back(priority(c, round, layer, head, slot), slot);
  }
  std::sort(order.begin(), order.end());
  std::vector<bool> is_evicted(round.old_len);
  for (int i = 0; i < round.old_len - round.new_len; ++i) is_evicted[order[i].second] = true;
  int source = round.new_len;
  for (int hole = 0; hole < round.new_len; ++hole) {
    if (!is_evicted[hole]) continue;
    while (is_evicted[source]) ++source;
    const int64_t from = offset_of(c, round, head, source++), to = offset_of(c, round, head, hole);
    if (from < 0 || to < 0) {
      ++counters[randkv::kBadBlocks];
      continue;
    }
    std::memcpy(&cache[to], &cache[from], c.params.slot_bytes);
    ++counters[randkv::kCopiedPairs];
  }
  counters[randkv::kEvictedPairs] += round.old_len - round.new_len;
}

bool check(uint64_t seed, bool is_small) {
  Case c = make_case(seed, is_small);
  std::vector<std::vector<uint8_t>> expected;
  int64_t counters[randkv::kNumCounters] = {};
  for (int layer = 0; layer < c.params.num_layers; ++layer) {
    expected.emplace_back(c.params.caches[layer], c.params.caches[layer] + c.cache_bytes);
    for (const Round& round : c.rounds) {
      for (int head = 0; head < c.params.num_kv_heads; ++head) {
        compact_slot_by_slot(c, layer, head, round, expected[layer], counters);
      }
    }
  }
  const auto grid_size = static_cast<unsigned>(c.draw(1, 2));
  const std::string error = randkv::launch_on_shim(c.params, grid_size, seed);
  if (!error.empty()) {
    std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(seed), error.c_str());
    return false;
  }
  for (int layer = 0; layer < c.params.num_layers; ++layer) {
    const uint8_t* cache = c.params.caches[layer];
    const auto [found, wanted] =
        std::mismatch(cache, cache + c.cache_bytes, expected[layer].begin());
    if (found != cache + c.cache_bytes) {
      std::fprintf(stderr, "case %llu: layer %d differs at byte %td: %d, expected %d\n",
                   static_cast<unsigned long long>(seed), layer, found - cache, *found, *wanted);
      return false;
    }
  }
  for (int i = 0; i < randkv::kNumCounters; ++i) {
    if (counters[i] != c.counters[i]) {
      std::fprintf(stderr, "case %llu: counter %d is %lld, expected %lld\n",
                   static_cast<unsigned long long>(seed), i, static_cast<long long>(c.counters[i]),
                   static_cast<long long>(counters[i]));
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s SEED CASES\n", argv[0]);
    return 2;
  }
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t num_cases = std::strtoull(argv[2], nullptr, 10);
  for (uint64_t seed = first; seed < first + num_cases; ++seed) {
    if (!check(seed, seed % 4 != 0)) return 1;
  }
  std::printf("%llu cases agree\n", static_cast<unsigned long long>(num_cases));
  return 0;
}
