#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Arguments are those of `python -m server`; later ones win over these.
set -eu
# Secrets come as files: what is in the environment can be read with `docker inspect`.
if [ -s /run/secrets/hf_token ]; then export HF_TOKEN_PATH=/run/secrets/hf_token; fi
if [ -s /run/secrets/api_keys ]; then
    RANDKV_API_KEYS=$(cat /run/secrets/api_keys)
    export RANDKV_API_KEYS
fi
# Triton looks for its compiled module in its cache, which is empty in a new volume.
if [ -d /opt/randkv/triton-cache ]; then
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.cache/triton}"
    mkdir -p "$TRITON_CACHE_DIR"
    cp -r /opt/randkv/triton-cache/. "$TRITON_CACHE_DIR"
fi
exec python -m server --host=0.0.0.0 --metrics-host=0.0.0.0 --metrics-port=9400 --open-readiness "$@"
