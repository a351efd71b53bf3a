# SPDX-License-Identifier: Apache-2.0
"""API keys: from the command line, the environment and a file that may change."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("vllm.randkv.server")

_SECONDS_BETWEEN_LOOKS = 1.0


class ApiKeys:
    """Set of keys. Without any, every request is let in.

    Args:
        keys: Keys that stay.
        path: File with one key a line; empty lines and lines that begin with ``#`` are skipped.
            Looked at again when it changes. One that cannot be read, or that has lost all its
            keys, leaves the keys as they were.
    """

    def __init__(self, keys: Iterable[str] = (), path: Path | None = None) -> None:
        self._fixed = frozenset(_digest(key) for key in keys if key)
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._from_file: frozenset[bytes] = frozenset()
        if path is not None:
            self._from_file = _read(path)
            self._stamp = _stamp(path)
            if not self._from_file:
                raise ValueError(f"--api-keys-file {path} holds no key: one key a line expected")

    def __bool__(self) -> bool:
        return bool(self._fixed or self._from_file)

    def admits(self, authorization: str | None) -> bool:
        """Whether the value of an ``Authorization`` header carries one of the keys.

        ``Bearer KEY``, or ``Basic`` with the key as the password, which is what a browser sends.
        """
        self._reload()
        if not self:
            return True
        key = _key_of(authorization or "")
        if key is None:
            return False
        digest, found = _digest(key), False
        for known in self._fixed | self._from_file:
            found |= hmac.compare_digest(digest, known)
        return found

    def _reload(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            keys = _read(self._path)
        except (OSError, UnicodeDecodeError) as error:
            logger.error("API keys stay as they were: %s", error)
            return
        self._stamp = stamp
        if keys:
            self._from_file = keys
            logger.info("API keys read again from %s: %d", self._path, len(keys))
        else:
            logger.error("API keys stay as they were: %s holds no key", self._path)


def _digest(key: str) -> bytes:
    """Of one length for every key, so that comparing says nothing about it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _read(path: Path) -> frozenset[bytes]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return frozenset(_digest(line) for line in lines if line and not line.startswith("#"))


def _key_of(authorization: str) -> str | None:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None
