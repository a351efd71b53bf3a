# SPDX-License-Identifier: Apache-2.0
"""Stored results that do not match their schema."""

from __future__ import annotations

from pydantic import ValidationError

MAX_SHOWN = 3


def reasons(error: ValidationError) -> str:
    """The first few things that were refused, without the values."""
    every = []
    for found in error.errors():
        where = ".".join(map(str, found["loc"]))
        every.append(f"{where}: {found['msg']}" if where else found["msg"])
    if len(every) > MAX_SHOWN:
        every[MAX_SHOWN:] = [f"and {len(every) - MAX_SHOWN} more"]
    return "; ".join(every)
