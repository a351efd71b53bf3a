// SPDX-License-Identifier: Apache-2.0
// A small model of CUDA's execution on a CPU, to run a kernel's source in tests.
//
// Two engines implement it, one linked at a time:
//   cuda_shim_fibers.cpp   the threads of a block are fibers of one thread; a seed picks the
//                          schedule; barriers that can never be passed are reported
//   cuda_shim_threads.cpp  every CUDA thread is a thread, all blocks at once: for ThreadSanitizer
// Shared memory is garbage when a block starts. Only what the kernel uses is modelled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define RANDKV_SHARED(type, name) type& name = *static_cast<type*>(::shim::shared_memory())

#define threadIdx (::shim::current().thread_index)
#define blockIdx (::shim::current().block_index)
#define gridDim (::shim::current().grid_size)
#define __syncthreads() ::shim::sync_block(__LINE__)
#define __shfl_up_sync(lanes, value, distance) ::shim::shuffle_up(lanes, value, distance, __LINE__)

namespace shim {

struct Dim {
  unsigned x;
};

struct Indices {
  Dim thread_index, block_index, grid_size;
};

struct Launch {
  unsigned grid_size;
  unsigned block_size;  // threads, a multiple of 32
  size_t shared_bytes;
  uint64_t seed;  // of the schedule and of the garbage
};

// Run `kernel` once per thread of every block; returns what went wrong, or "".
std::string launch(const Launch& launch, const std::function<void()>& kernel);

// For the kernel's threads:
const Indices& current();
void* shared_memory();
void sync_block(int line);
uint32_t shuffle_up(unsigned lanes, uint32_t value, int distance, int line);
void at_atomic();  // a point where another thread may go first

inline void fill_with_garbage(void* memory, size_t bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    static_cast<uint8_t*>(memory)[i] = static_cast<uint8_t>(seed >> 56);
  }
}

}  // namespace shim

template <typename Number>
Number atomicAdd(Number* address, Number number) {
  shim::at_atomic();
  return __atomic_fetch_add(address, number, __ATOMIC_RELAXED);
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }

inline int min(int a, int b) { return a < b ? a : b; }
