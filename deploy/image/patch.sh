#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install this package without its code, and patch the installed vLLM, which then has PATCH_DIGEST.
set -eu
pip install --no-cache-dir --no-deps --no-build-isolation --editable .
python -m randkv.patching apply
python -m randkv.patching check --digest "$PATCH_DIGEST"
