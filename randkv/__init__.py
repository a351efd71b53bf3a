# SPDX-License-Identifier: Apache-2.0
"""RandKV: bounded KV caches for reasoning models in vLLM, exact and checkable."""

from randkv.config import RandKVConfig
from randkv.errors import RandKVConfigError, RandKVError

__all__ = ["RandKVConfig", "RandKVConfigError", "RandKVError"]
__version__ = "0.1.0"
