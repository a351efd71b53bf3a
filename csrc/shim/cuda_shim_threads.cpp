// SPDX-License-Identifier: Apache-2.0
// Every CUDA thread is a thread; all blocks of the grid run at once. Made for ThreadSanitizer: two
// accesses without a barrier in between are a data race here as there.
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_shim.h"

namespace shim {
namespace {

class Barrier {
 public:
  explicit Barrier(unsigned size) : size_(size) {}

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t arrival = num_passed_;
    if (++num_waiting_ == size_) {
      num_waiting_ = 0;
      ++num_passed_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return num_passed_ != arrival; });
    }
  }

 private:
  const unsigned size_;
  unsigned num_waiting_ = 0;
  uint64_t num_passed_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

struct Warp {
  Barrier barrier{32};
  uint32_t posted[32];
};

struct Block {
  explicit Block(const Launch& launch)
      : barrier(launch.block_size),
        warps(launch.block_size / 32),
        shared(std::malloc(launch.shared_bytes), std::free) {}

  Barrier barrier;
  std::vector<Warp> warps;
  std::unique_ptr<void, void (*)(void*)> shared;
};

thread_local Indices indices;
thread_local Block* block;

}  // namespace

std::string launch(const Launch& launch, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < launch.grid_size; ++index) {
    blocks.push_back(std::make_unique<Block>(launch));
    fill_with_garbage(blocks.back()->shared.get(), launch.shared_bytes, launch.seed + index);
    for (unsigned thread = 0; thread < launch.block_size; ++thread) {
      threads.emplace_back([&launch, &kernel, index, thread, own = blocks.back().get()] {
        indices = {{thread}, {index}, {launch.grid_size}};
        block = own;
        kernel();
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  return "";
}

const Indices& current() { return indices; }

void* shared_memory() { return block->shared.get(); }

void sync_block(int) { block->barrier.wait(); }

uint32_t shuffle_up(unsigned, uint32_t value, int distance, int) {
  const unsigned lane = indices.thread_index.x % 32;
  Warp& warp = block->warps[indices.thread_index.x / 32];
  warp.posted[lane] = value;
  warp.barrier.wait();
  const uint32_t other =
      lane < static_cast<unsigned>(distance) ? value : warp.posted[lane - distance];
  warp.barrier.wait();
  return other;
}

void at_atomic() {}

}  // namespace shim
