# SPDX-License-Identifier: Apache-2.0
"""The engine side: the only place that imports vllm. The patch calls `randkv.vllm.hooks`."""
