# SPDX-License-Identifier: Apache-2.0
"""What a test needs and a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip, except in .ci/run, where what is missing was to be installed."""
    if os.environ.get("RANDKV_NO_SKIPS"):
        pytest.fail(f"RANDKV_NO_SKIPS is set, but {reason}")
    pytest.skip(reason)
