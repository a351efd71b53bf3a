// SPDX-License-Identifier: Apache-2.0
// The operator's schema. Registered by the CPU library alone; the CUDA library adds a kernel to it.
#pragma once

// kv_caches          one tensor per layer, of one shape, strides, dtype and device; holes only are
//                    written
// rounds             int32 [rounds, 8], rows of randkv::Round, on the caches' device
// block_ids          int32 [ids], each request's block ids in slot order before its round, on the
//                    caches' device
// layers             int32 [layers], global index of each cache's layer, on the caches' device
// layout             int64 [5 + 2 * block_size + 2 * head_size], on the CPU, in elements:
//                    block_size, num_kv_heads, head_size, block_stride, head_stride, then the
//                    offsets of each slot's key, each slot's value, each key element, each value
//                    element within a (block, KV head)
// first_kv_head      global index of this rank's first KV head
// manager_block_size slots of one block id, a multiple of block_size
// counters           int64 [3], on the caches' device, entries of randkv::Counter; added to
#define RANDKV_COMPACT_SCHEMA                                                                      \
  "compact(Tensor(a!)[] kv_caches, Tensor rounds, Tensor block_ids, Tensor layers, "               \
  "Tensor layout, int first_kv_head, int manager_block_size, Tensor(b!) counters) -> ()"
