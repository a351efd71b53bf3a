# SPDX-License-Identifier: Apache-2.0
"""Write the hash of every pinned package into a requirements file, for pip's hash checking.

``python deploy/lock.py deploy/local/cpu.txt`` looks up each ``name==version`` of the file as pip
would install it here (Linux, x86-64, Python 3.11), and rewrites the line with the SHA-256 of the
wheel. With ``--resolve`` the file is first extended by everything that its packages depend on.
Comments stay where they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)")


def what_pip_picks(requirements: Iterable[Path], *options: str) -> list[dict[str, Any]]:
    """Pip's report on each wheel that it would install; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), *options]
        for file in requirements:
            command += ["-r", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def wheels(pins: list[str], *options: str) -> dict[str, tuple[str, str, str]]:
    """By normalised name: name, version and SHA-256 of the wheels that pip picks for `pins`."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text("\n".join(pins) + "\n")
        found = what_pip_picks([requirements], *options)
    return {
        normalised(item["metadata"]["name"]): (
            item["metadata"]["name"],
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in found
    }


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(text: str, *, resolve: bool) -> str:
    """`text` of a requirements file, every pin with its hash."""
    pins = [match[0] for line in text.splitlines() if (match := PIN.match(line))]
    found = wheels(pins, *([] if resolve else ["--no-deps"]))
    lines = []
    for line in text.splitlines():
        if not (match := PIN.match(line)):
            lines.append(line)
            continue
        _, version, digest = found.pop(normalised(match[1]))
        if version != match[2]:
            raise SystemExit(f"{match[0]}: pip picks {version}; unset its find-links")
        lines.append(f"{match[1]}=={version} --hash=sha256:{digest}")
    lines += [
        f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in
        (found[key] for key in sorted(found))
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--resolve", action="store_true", help="add what the packages depend on")
    given = parser.parse_args()
    for file in given.files:
        file.write_text(locked(file.read_text(), resolve=given.resolve))
        sys.stdout.write(f"{file}: {file.read_text().count('--hash')} hashes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
