// SPDX-License-Identifier: Apache-2.0
// Copies sources into holes, for one (request, layer, KV head). Free of torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../round.h"
#include "layout.h"

namespace randkv {

// Copies of one (round, layer, KV head); keeps its scratch space from one to the next.
class Mover {
 public:
  Mover(const Layout& layout, int64_t manager_block_size)
      : layout_(layout), manager_block_size_(manager_block_size) {}

  // Returns how many slots moved. `head` is where the KV head starts in the layer's cache.
  int64_t move(const Round& round, const int32_t* block_ids, char* head,
               const std::vector<int32_t>& evicted) {
    // Holes from the front; sources from new_len on, slots there that are not evicted.
    auto above = std::lower_bound(evicted.begin(), evicted.end(), round.new_len);
    const auto num_moves = static_cast<size_t>(above - evicted.begin());
    sources_.clear();
    holes_.clear();
    for (int32_t source = round.new_len; sources_.size() < num_moves; ++source) {
      if (above != evicted.end() && *above == source) {
        ++above;
        continue;
      }
      sources_.push_back(locate(block_ids, head, source));
      holes_.push_back(locate(block_ids, head, evicted[holes_.size()]));
    }
    copy(layout_.key);
    copy(layout_.value);
    return static_cast<int64_t>(num_moves);
  }

 private:
  struct Place {
    char* block;
    int64_t offset;  // slot within it
  };

  Place locate(const int32_t* block_ids, char* head, int64_t slot) const {
    const int64_t offset = slot % manager_block_size_;
    const int64_t block = block_ids[slot / manager_block_size_] *
                              (manager_block_size_ / layout_.block_size) +
                          offset / layout_.block_size;
    return {head + block * layout_.block_stride, offset % layout_.block_size};
  }

  void copy(const SlotPart& part) const {
    const auto address = [&](const Place& place) { return place.block + part.slot(place.offset); };
    const size_t lookahead = part.lookahead();
    for (size_t i = 0; i < holes_.size(); ++i) {
      const size_t next = std::min(i + lookahead, holes_.size() - 1);
      part.copy(address(sources_[i]), address(holes_[i]), address(sources_[next]),
                address(holes_[next]));
    }
  }

  const Layout& layout_;
  const int64_t manager_block_size_;
  std::vector<Place> sources_, holes_;
};

}  // namespace randkv
