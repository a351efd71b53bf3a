#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build a target of the Dockerfile: build.sh gpu|cpu|STAGE [OPTION OF docker build...]
# DOCKER is the client, of any version with BuildKit.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$1; shift
docker=${DOCKER:-docker}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
case $target in
    gpu) tag=randkv-serving:$version ;;
    cpu) tag=randkv-serving:$version-cpu ;;
    *) tag=randkv-stage:$target ;;
esac

# torch for CPUs is not on PyPI. Where pip is set to find it, the wheel goes along; else the build
# takes it from PyTorch's own index.
if ! ls wheels/torch-* > /dev/null 2>&1; then
    python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --dest wheels -r deploy/local/torch.txt 2> /dev/null \
        || echo "torch for CPUs: from PyTorch's index"
fi
DOCKER_BUILDKIT=1 "$docker" build --target "$target" --tag "$tag" "$@" .
echo "Built $tag."
