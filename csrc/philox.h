// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, the generator of selection contract v1.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RANDKV_HOST_DEVICE __host__ __device__
#else
#define RANDKV_HOST_DEVICE
#endif

namespace randkv {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

// Words of counter (c0, c1, c2, c3) under key (k0, k1). Priorities of slots 4*c0 .. 4*c0 + 3 when
// the rest of the counter is (round_index, layer, kv_head).
RANDKV_HOST_DEVICE inline PhiloxWords philox4x32_10(uint32_t k0, uint32_t k1, uint32_t c0,
                                                    uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c0;
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace randkv
