// SPDX-License-Identifier: Apache-2.0
// Blocks run one after another; the threads of a block are fibers that switch at barriers,
// shuffles and, now and then, atomics.
#include <ucontext.h>

#include <bitset>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_shim.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 64 << 10;

// Which runnable thread goes next. All but kShuffled run a thread until it waits.
enum Schedule { kAscending, kDescending, kShuffled, kLateWarp, kNumSchedules };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  void* sanitizer_stack = nullptr;
  Indices indices;
  uint32_t posted = 0;  // for its warp's shuffle
};

struct Barrier {
  unsigned num_waiting = 0;
  int line = 0;
};

// Everything of the one block that runs.
struct Block {
  const Launch* launch = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::vector<Fiber> fibers;
  std::bitset<kMaxThreads> runnable;
  unsigned running = 0;
  unsigned num_exited = 0;
  Barrier block_barrier;
  Barrier warp_barriers[kMaxThreads / 32];
  uint32_t shuffled[kMaxThreads];  // what the lanes posted, once all have
  void* shared = nullptr;
  uint64_t random = 0;
  Schedule schedule = kAscending;
  unsigned late_warp = 0;
  std::string error;
  ucontext_t host;
  void* host_sanitizer_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
};

Block block;

unsigned random_below(unsigned bound) {
  block.random = block.random * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((block.random >> 33) % bound);
}

void enter(ucontext_t* from, void** from_sanitizer_stack, ucontext_t* to, const void* stack,
           size_t stack_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(from_sanitizer_stack, stack, stack_bytes);
#else
  (void)from_sanitizer_stack, (void)stack, (void)stack_bytes;
#endif
  swapcontext(from, to);
}

void entered([[maybe_unused]] void* sanitizer_stack) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack;
  size_t stack_bytes;
  __sanitizer_finish_switch_fiber(sanitizer_stack, &stack, &stack_bytes);
  if (block.host_stack == nullptr) {  // the first switch away from the host tells its stack
    block.host_stack = stack;
    block.host_stack_bytes = stack_bytes;
  }
#endif
}

void switch_to_fiber(ucontext_t* from, void** from_sanitizer_stack, unsigned thread) {
  block.running = thread;
  Fiber& fiber = block.fibers[thread];
  enter(from, from_sanitizer_stack, &fiber.context, fiber.stack.get(), kStackBytes);
}

void switch_to_host(Fiber& from, bool for_good) {
  enter(&from.context, for_good ? nullptr : &from.sanitizer_stack, &block.host, block.host_stack,
        block.host_stack_bytes);
}

// The runnable thread at or after `first`, wrapping around. Some thread is runnable.
unsigned runnable_from(unsigned first) {
  while (!block.runnable[first]) first = (first + 1) % block.launch->block_size;
  return first;
}

unsigned next_thread() {
  const unsigned block_size = block.launch->block_size;
  switch (block.schedule) {
    case kAscending:
      return static_cast<unsigned>(block.runnable._Find_first());
    case kDescending: {
      unsigned thread = block_size - 1;
      while (!block.runnable[thread]) --thread;
      return thread;
    }
    case kLateWarp: {
      const unsigned first = (block.late_warp + 1) * 32 % block_size;
      return runnable_from(first);
    }
    default:
      return runnable_from(random_below(block_size));
  }
}

std::string describe_deadlock() {
  std::string text = "deadlock: ";
  if (block.num_exited > 0) text += std::to_string(block.num_exited) + " threads have exited; ";
  const Barrier& barrier = block.block_barrier;
  if (barrier.num_waiting > 0) {
    text += std::to_string(barrier.num_waiting) + " wait for their block at line " +
            std::to_string(barrier.line) + "; ";
  }
  for (unsigned warp = 0; warp < block.launch->block_size / 32; ++warp) {
    if (block.warp_barriers[warp].num_waiting > 0) {
      text += std::to_string(block.warp_barriers[warp].num_waiting) + " wait for warp " +
              std::to_string(warp) + " at line " + std::to_string(block.warp_barriers[warp].line) +
              "; ";
    }
  }
  return text;
}

// Let another thread run; returns when this one has its turn again.
void yield() {
  Fiber& self = block.fibers[block.running];
  if (block.error.empty() && block.runnable.none()) block.error = describe_deadlock();
  if (!block.error.empty()) {
    switch_to_host(self, false);  // for ever: the launch has failed
  }
  const unsigned next = next_thread();
  if (next == block.running) return;
  switch_to_fiber(&self.context, &self.sanitizer_stack, next);
  entered(self.sanitizer_stack);
}

// Wait for the threads [first, first + size) to arrive at this barrier.
void wait_at(Barrier& barrier, unsigned first, unsigned size, int line) {
  if (barrier.num_waiting > 0 && barrier.line != line) {
    block.error = "threads of one block wait at different barriers: lines " +
                  std::to_string(barrier.line) + " and " + std::to_string(line);
  }
  barrier.line = line;
  if (++barrier.num_waiting == size) {
    barrier.num_waiting = 0;
    for (unsigned thread = first; thread < first + size; ++thread) block.runnable.set(thread);
    if (size == 32) {
      for (unsigned i = first; i < first + size; ++i) block.shuffled[i] = block.fibers[i].posted;
    }
  } else {
    block.runnable.reset(block.running);
  }
  yield();
}

void run_thread() {
  entered(nullptr);
  (*block.kernel)();
  Fiber& self = block.fibers[block.running];
  block.runnable.reset(block.running);
  ++block.num_exited;
  if (block.runnable.any() && block.error.empty()) {
    switch_to_fiber(&self.context, nullptr, next_thread());
  }
  if (block.num_exited < block.launch->block_size && block.error.empty()) {
    block.error = describe_deadlock();
  }
  switch_to_host(self, true);
}

void prepare(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

void run_block(unsigned index) {
  const unsigned block_size = block.launch->block_size;
  block.schedule = static_cast<Schedule>(random_below(kNumSchedules));
  block.late_warp = random_below(block_size / 32);
  block.num_exited = 0;
  block.runnable.reset();
  for (unsigned thread = 0; thread < block_size; ++thread) {
    block.fibers[thread].indices = {{thread}, {index}, {block.launch->grid_size}};
    prepare(block.fibers[thread]);
    block.runnable.set(thread);
  }
  switch_to_fiber(&block.host, &block.host_sanitizer_stack, next_thread());
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block.host_sanitizer_stack, nullptr, nullptr);
#endif
}

}  // namespace

std::string launch(const Launch& launch, const std::function<void()>& kernel) {
  if (launch.block_size == 0 || launch.block_size > kMaxThreads || launch.block_size % 32 != 0) {
    return "a block of " + std::to_string(launch.block_size) + " threads";
  }
  static std::vector<Fiber> fibers;
  if (fibers.size() < launch.block_size) fibers = std::vector<Fiber>(launch.block_size);
  block = {};
  block.launch = &launch;
  block.kernel = &kernel;
  block.fibers.swap(fibers);
  block.random = launch.seed * 0x9E3779B97F4A7C15u + 1;
  for (unsigned index = 0; index < launch.grid_size && block.error.empty(); ++index) {
    // Exactly as large as asked for, so that AddressSanitizer sees what lies beyond.
    block.shared = std::malloc(launch.shared_bytes);
    fill_with_garbage(block.shared, launch.shared_bytes, launch.seed + index);
    run_block(index);
    std::free(block.shared);
  }
  block.fibers.swap(fibers);
  return block.error;
}

const Indices& current() { return block.fibers[block.running].indices; }

void* shared_memory() { return block.shared; }

void sync_block(int line) { wait_at(block.block_barrier, 0, block.launch->block_size, line); }

uint32_t shuffle_up(unsigned lanes, uint32_t value, int distance, int line) {
  const unsigned self = block.running, lane = self % 32;
  if (lanes != 0xffffffffu) block.error = "a shuffle among some lanes only is not modelled";
  block.fibers[self].posted = value;
  wait_at(block.warp_barriers[self / 32], self - lane, 32, line);
  return lane < static_cast<unsigned>(distance) ? value : block.shuffled[self - distance];
}

void at_atomic() {
  if (block.schedule == kShuffled && random_below(16) == 0) yield();
}

}  // namespace shim
