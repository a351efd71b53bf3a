# SPDX-License-Identifier: Apache-2.0
"""Stored results that do not match their schema."""

from __future__ import annotations

from pydantic import ValidationError


def reasons(error: ValidationError) -> str:
    """What was refused for, field by field, without the values."""
    return "; ".join(
        ": ".join([".".join(map(str, found["loc"])), found["msg"]])
        if found["loc"]
        else found["msg"]
        for found in error.errors()
    )
