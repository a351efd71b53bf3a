// SPDX-License-Identifier: Apache-2.0
// The parts of the CPU operator one at a time, and the plainest copy, for benchmarks/compactor.py
// and tests/op/test_native.py.
#include <cstring>
#include <vector>

#include "../cpu/layout.h"
#include "../cpu/mover.h"
#include "../cpu/selection.h"

using randkv::Layout;
using randkv::Round;

namespace {

// Calls f(layer, head, the head's evicted slots) for each.
template <class F>
void for_each_head(int32_t num_layers, int64_t num_kv_heads, const int32_t* evicted,
                   int32_t num_evict, const F& f) {
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      f(layer, head, evicted + (layer * num_kv_heads + head) * num_evict);
    }
  }
}

}  // namespace

extern "C" {

// evicted: [num_layers, num_kv_heads, old_len - new_len]
void randkv_select(const Round* round, int32_t num_layers, int32_t num_kv_heads, int32_t* evicted,
                   bool is_portable) {
  randkv::Selector selector(!is_portable && randkv::avx512::is_supported());
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      for (const int32_t slot : selector.evicted_slots(*round, layer, head)) *evicted++ = slot;
    }
  }
}

void randkv_move(const Round* round, int32_t num_layers, char* const* caches,
                 const int32_t* block_ids, const int64_t* numbers, int64_t element_bytes,
                 int64_t manager_block_size, const int32_t* evicted) {
  const Layout layout(numbers, element_bytes, true);
  randkv::Mover mover(layout, manager_block_size);
  const int32_t num_evict = round->old_len - round->new_len;
  std::vector<int32_t> slots(num_evict);
  for_each_head(num_layers, layout.num_kv_heads, evicted, num_evict,
                [&](int32_t layer, int64_t head, const int32_t* first) {
                  slots.assign(first, first + num_evict);
                  mover.move(*round, block_ids, caches[layer] + head * layout.head_stride, slots);
                });
}

// Element by element from slot new_len + i to the i-th of `evicted`, all of them below new_len.
void randkv_copy_elements(const Round* round, int32_t num_layers, char* const* caches,
                          const int32_t* block_ids, const int64_t* numbers, int64_t element_bytes,
                          const int32_t* evicted) {
  const int64_t block_size = numbers[0], num_kv_heads = numbers[1], head_size = numbers[2];
  const int64_t* slot_offsets[2] = {numbers + 5, numbers + 5 + block_size};
  const int64_t* dim_offsets[2] = {numbers + 5 + 2 * block_size,
                                   numbers + 5 + 2 * block_size + head_size};
  const int32_t num_evict = round->old_len - round->new_len;
  for_each_head(
      num_layers, num_kv_heads, evicted, num_evict,
      [&](int32_t layer, int64_t head, const int32_t* holes) {
        char* start = caches[layer] + head * numbers[4] * element_bytes;
        for (int part = 0; part < 2; ++part) {
          const auto address = [&](int64_t slot) {
            return start + (block_ids[slot / block_size] * numbers[3] +
                            slot_offsets[part][slot % block_size]) *
                               element_bytes;
          };
          for (int32_t i = 0; i < num_evict; ++i) {
            const char* source = address(round->new_len + i);
            char* hole = address(holes[i]);
            const int64_t* dims = dim_offsets[part];
            if (element_bytes == 2) {
              for (int64_t dim = 0; dim < head_size; ++dim) {
                std::memcpy(hole + 2 * dims[dim], source + 2 * dims[dim], 2);
              }
            } else {
              for (int64_t dim = 0; dim < head_size; ++dim) {
                const int64_t offset = element_bytes * dims[dim];
                std::memcpy(hole + offset, source + offset, element_bytes);
              }
            }
          }
        }
      });
}

}  // extern "C"
