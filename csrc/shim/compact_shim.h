// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "../cuda/compact_launch.h"

namespace randkv {

// Run the kernel on the CPU; returns what went wrong, or "".
std::string launch_on_shim(const CompactParams& params, unsigned grid_size, uint64_t seed);

}  // namespace randkv
