// SPDX-License-Identifier: Apache-2.0
// Launches the kernel. Free of torch, so that nvcc is done in seconds.
#include "compact_kernel.cuh"

#include <cuda_runtime.h>

#include "compact_launch.h"

namespace randkv {

std::string launch_compact(const CompactParams& params, int device, void* stream) {
  int num_processors = 0;
  cudaError_t error = cudaSetDevice(device);  // this library has a CUDA runtime of its own
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const unsigned grid = num_thread_blocks(params, num_processors);
  if (grid == 0) return "";
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (vector_bytes(params)) {
    case 16:
      compact_kernel<Vector16><<<grid, kThreads, 0, cuda_stream>>>(params);
      break;
    case 4:
      compact_kernel<uint32_t><<<grid, kThreads, 0, cuda_stream>>>(params);
      break;
    default:
      compact_kernel<uint8_t><<<grid, kThreads, 0, cuda_stream>>>(params);
  }
  error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace randkv
