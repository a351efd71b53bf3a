// SPDX-License-Identifier: Apache-2.0
// Where the bytes of a slot lie in a KV cache tensor, and how to copy one. Free of torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace randkv {

// The key, or the value, of one slot: pieces of `piece_bytes` at the offsets `pieces`.
class SlotPart {
 public:
  // slot_offsets [block_size] and dim_offsets [head_size] in elements of `element_bytes`.
  // `is_aligned`: what they are counted from is a multiple of four bytes, for every head.
  SlotPart(const int64_t* slot_offsets, int64_t block_size, const int64_t* dim_offsets,
           int64_t head_size, int64_t element_bytes, bool is_aligned) {
    for (int64_t slot = 0; slot < block_size; ++slot) {
      slots_.push_back(slot_offsets[slot] * element_bytes);
    }
    // Elements that lie next to each other move together.
    int64_t run = head_size;
    for (int64_t dim = 1, length = 1; dim <= head_size; ++dim, ++length) {
      if (dim == head_size || dim_offsets[dim] != dim_offsets[dim - 1] + 1) {
        while (length % run != 0 || head_size % run != 0) --run;
        length = 0;
      }
    }
    for (int64_t dim = 0; dim < head_size; dim += run) {
      pieces_.push_back(dim_offsets[dim] * element_bytes);
    }
    piece_bytes_ = run * element_bytes;
    is_interleaved_ = is_aligned && are_interleaved();
  }

  // How many moves ahead memory is fetched: some 64 cache lines, whatever one move touches.
  size_t lookahead() const {
    if (!is_interleaved_ && pieces_.size() > 1) return 1;
    const int64_t bytes = is_interleaved_ ? static_cast<int64_t>(4 * pieces_.size()) : piece_bytes_;
    return static_cast<size_t>(bytes < 4096 ? 4096 / bytes : 1);
  }

  int64_t slot(int64_t offset) const { return slots_[static_cast<size_t>(offset)]; }

  // From `source` to `hole`, the addresses of two slots' parts. `next_source` and `next_hole`,
  // those of the move `lookahead` later, are brought into the cache meanwhile.
  void copy(const char* source, char* hole, const char* next_source, const char* next_hole) const {
    if (is_interleaved_) return copy_interleaved(source, hole, next_source, next_hole);
    switch (piece_bytes_) {
      case 1: return copy_pieces<1>(source, hole, next_source, next_hole);
      case 2: return copy_pieces<2>(source, hole, next_source, next_hole);
      case 4: return copy_pieces<4>(source, hole, next_source, next_hole);
      case 8: return copy_pieces<8>(source, hole, next_source, next_hole);
      default:
        for (const int64_t piece : pieces_) {
          fetch(next_source + piece, next_hole + piece, piece_bytes_);
          std::memcpy(hole + piece, source + piece, static_cast<size_t>(piece_bytes_));
        }
    }
  }

 private:
  // Whether neighbouring slots share words of four bytes that hold nothing else: then no other
  // head, which another thread may be at, has a byte in them.
  bool are_interleaved() const {
    if (piece_bytes_ != 1 && piece_bytes_ != 2) return false;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (pieces_[i] != static_cast<int64_t>(4 * i)) return false;
    }
    const auto slots_per_word = static_cast<size_t>(4 / piece_bytes_);
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      const size_t first = slot - slot % slots_per_word;
      const auto offset = static_cast<int64_t>(slot - first) * piece_bytes_;
      if (slots_[first] % 4 != 0 || slots_[slot] != slots_[first] + offset) return false;
    }
    return slots_.size() % slots_per_word == 0;
  }

  // Start to bring `bytes` of both into the cache.
  static void fetch(const char* source, const char* hole, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(source + i, 0);
      __builtin_prefetch(hole + i, 1);
    }
  }

  template <int Bytes>
  void copy_pieces(const char* source, char* hole, const char* next_source,
                   const char* next_hole) const {
    for (const int64_t piece : pieces_) {
      fetch(next_source + piece, next_hole + piece, Bytes);
      std::memcpy(hole + piece, source + piece, Bytes);
    }
  }

  // Slots that share words of four bytes: the part of each word that is this slot's is replaced.
  void copy_interleaved(const char* source, char* hole, const char* next_source,
                        const char* next_hole) const {
    fetch(next_source, next_hole, static_cast<int64_t>(4 * pieces_.size()));
    const auto source_shift = reinterpret_cast<uintptr_t>(source) % 4 * 8;
    const auto hole_shift = reinterpret_cast<uintptr_t>(hole) % 4 * 8;
    const auto* from = reinterpret_cast<const uint32_t*>(source - source_shift / 8);
    auto* to = reinterpret_cast<uint32_t*>(hole - hole_shift / 8);
    const uint32_t mask = (uint32_t{1} << 8 * piece_bytes_) - 1;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      to[i] = (to[i] & ~(mask << hole_shift)) | ((from[i] >> source_shift & mask) << hole_shift);
    }
  }

  std::vector<int64_t> slots_;
  std::vector<int64_t> pieces_;
  int64_t piece_bytes_ = 0;
  bool is_interleaved_ = false;
};

struct Layout {
  int64_t block_size, num_kv_heads, head_size;  // slots; heads; elements
  int64_t block_stride, head_stride;            // bytes
  SlotPart key, value;

  // `numbers` is the operator's `layout`, see schema.h. `is_aligned`: caches start at multiples of
  // four bytes.
  Layout(const int64_t* numbers, int64_t element_bytes, bool is_aligned)
      : block_size(numbers[0]),
        num_kv_heads(numbers[1]),
        head_size(numbers[2]),
        block_stride(numbers[3] * element_bytes),
        head_stride(numbers[4] * element_bytes),
        key(numbers + 5, block_size, numbers + 5 + 2 * block_size, head_size, element_bytes,
            is_aligned && block_stride % 4 == 0 && head_stride % 4 == 0),
        value(numbers + 5 + block_size, block_size, numbers + 5 + 2 * block_size + head_size,
              head_size, element_bytes,
              is_aligned && block_stride % 4 == 0 && head_stride % 4 == 0) {}
};

}  // namespace randkv
