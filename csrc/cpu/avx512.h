// SPDX-License-Identifier: Apache-2.0
// What selection does for every candidate, 16 at a time, on processors with AVX-512. The same
// results as the portable loops of selection.h, in two thirds of the time: GCC vectorises neither
// 32 by 32 to 64 bit multiplication nor compaction well. Free of torch.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define RANDKV_AVX512 __attribute__((target("avx512f")))

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 says it of its own header
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstddef>
#include <cstdint>

#include "../philox.h"
#include "../round.h"

namespace randkv::avx512 {

inline bool is_supported() { return __builtin_cpu_supports("avx512f"); }

RANDKV_AVX512 inline __m512i everywhere(uint32_t word) {
  return _mm512_set1_epi32(static_cast<int>(word));
}

// High and low words of a constant (in every 64 bits) times each word.
struct Products {
  __m512i high, low;
};

RANDKV_AVX512 inline Products multiply(__m512i words, __m512i constant) {
  const __m512i even = _mm512_mul_epu32(words, constant);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), constant);
  return {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd),
          _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))};
}

// Priorities of slots 4 * first_group .. 4 * first_group + 63 into `out`; see philox.h.
RANDKV_AVX512 inline void compute_priorities(const Round& round, uint32_t layer, uint32_t kv_head,
                                             uint32_t first_group, uint32_t* out) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i c0 = _mm512_add_epi32(everywhere(first_group), lanes);
  __m512i c1 = everywhere(round.round_index);
  __m512i c2 = everywhere(layer), c3 = everywhere(kv_head);
  uint32_t k0 = round.key0, k1 = round.key1;
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const Products product0 = multiply(c0, _mm512_set1_epi64(kPhiloxMultiplier0));
    const Products product1 = multiply(c2, _mm512_set1_epi64(kPhiloxMultiplier1));
    c0 = _mm512_xor_si512(_mm512_xor_si512(product1.high, c1), everywhere(k0));
    c2 = _mm512_xor_si512(_mm512_xor_si512(product0.high, c3), everywhere(k1));
    c1 = product1.low;
    c3 = product0.low;
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  // Lane by lane, the four words of each: transposed 4 x 4 within 128 bits, then the 128 bits.
  const __m512i low01 = _mm512_unpacklo_epi32(c0, c1), high01 = _mm512_unpackhi_epi32(c0, c1);
  const __m512i low23 = _mm512_unpacklo_epi32(c2, c3), high23 = _mm512_unpackhi_epi32(c2, c3);
  const __m512i row0 = _mm512_unpacklo_epi64(low01, low23);  // lanes 0, 4, 8, 12
  const __m512i row1 = _mm512_unpackhi_epi64(low01, low23);  // lanes 1, 5, 9, 13
  const __m512i row2 = _mm512_unpacklo_epi64(high01, high23);
  const __m512i row3 = _mm512_unpackhi_epi64(high01, high23);
  const __m512i front01 = _mm512_shuffle_i32x4(row0, row1, 0x44);  // lanes 0, 4, 1, 5
  const __m512i front23 = _mm512_shuffle_i32x4(row2, row3, 0x44);  // lanes 2, 6, 3, 7
  const __m512i back01 = _mm512_shuffle_i32x4(row0, row1, 0xEE);
  const __m512i back23 = _mm512_shuffle_i32x4(row2, row3, 0xEE);
  _mm512_storeu_si512(out, _mm512_shuffle_i32x4(front01, front23, 0x88));
  _mm512_storeu_si512(out + 16, _mm512_shuffle_i32x4(front01, front23, 0xDD));
  _mm512_storeu_si512(out + 32, _mm512_shuffle_i32x4(back01, back23, 0x88));
  _mm512_storeu_si512(out + 48, _mm512_shuffle_i32x4(back01, back23, 0xDD));
}

// Into `below`, with room for n + 16: which of priorities[0] .. priorities[n - 1] are at most
// `last`, ascending. Returns how many.
RANDKV_AVX512 inline size_t collect(const uint32_t* priorities, size_t n, uint32_t last,
                                    uint32_t* below) {
  const __m512i bound = everywhere(last);
  __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 16) {
    const __mmask16 present = n - i < 16 ? static_cast<__mmask16>((1u << (n - i)) - 1) : 0xFFFF;
    const __mmask16 is_below = _mm512_mask_cmple_epu32_mask(
        present, _mm512_maskz_loadu_epi32(present, priorities + i), bound);
    _mm512_storeu_si512(below + count, _mm512_maskz_compress_epi32(is_below, index));
    count += static_cast<size_t>(__builtin_popcount(is_below));
    index = _mm512_add_epi32(index, everywhere(16));
  }
  return count;
}

}  // namespace randkv::avx512

#else

namespace randkv::avx512 {
inline bool is_supported() { return false; }
}  // namespace randkv::avx512

#endif
