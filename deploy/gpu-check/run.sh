#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check and measure the CUDA compactor on this machine: a GPU, Python with PyTorch 2.11 to 2.13, no
# network. Packages that this Python lacks are taken from wheels/ at the top of the repository.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

if compgen -G 'wheels/*.whl' >/dev/null; then
    site=build/gpu-check/site
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" wheels/*.whl
    export PYTHONPATH="$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -c 'import numpy, pytest, torch' \
    || { echo "error: $python needs numpy, pytest and torch: put their wheels into wheels/" >&2; exit 2; }
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || { echo "error: no NVIDIA GPU that $("$python" -c 'import torch; print("torch", torch.__version__)') can use" >&2; exit 2; }

lib=randkv/compactor/lib
for name in cpu cuda; do
    if [ -f "$lib/librandkv_$name.so" ]; then
        echo "library: $lib/librandkv_$name.so, as it was carried here"
    else
        echo "library: building $lib/librandkv_$name.so"
        make -C csrc "$name" PYTHON="$(command -v "$python")" NVCC_HOME="${NVCC_HOME:-${CUDA_HOME:-/usr/local/cuda}}"
    fi
done

echo "tests on the GPU, against the planner and PyTorch:"
"$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q tests/op/test_gpu.py

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "compute-sanitizer $tool:"
        timeout 90 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m benchmarks.gpu_check --small || {
            code=$?
            [ $code -ne 9 ] || exit 9
            echo "compute-sanitizer $tool could not run here (exit status $code)"
        }
    done
else
    echo "compute-sanitizer: not on this machine"
fi

"$python" -m benchmarks.gpu_check
