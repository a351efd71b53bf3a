# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format dashboards dashboards-picture bench bench-overhead bench-compactor bench-quality gpu-check env image-cpu image-gpu clean
python := .venv/bin/python
ARGS ?=

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

setup: ## Prepare .venv/, the patched vLLM in it, and the default model (once)
	@./deploy/local/setup.sh

serve: setup ## Serve the default model; more options with ARGS="--port 9000 ..."
	@$(python) -m server $(ARGS)

test: setup ## Run every test that this machine can run
	@$(python) -m pytest $(ARGS)
	@echo "Next: make lint, or make serve and talk to it."

lint: setup ## Check formatting, style and types
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@$(python) -m mypy
	@$(python) -m randkv.patching check
	@.venv/bin/hadolint Dockerfile tests/deploy/prometheus.Dockerfile

format: setup ## Format the code
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

dashboards: setup ## Write the Grafana dashboards again, after a change to deploy/grafana/
	@$(python) deploy/grafana/dashboards.py

dashboards-picture: ## Draw the dashboards from a live Prometheus: URL=http://127.0.0.1:9090
	@python3 deploy/grafana/draw/draw.py $(URL) $(ARGS)

bench: setup ## Serve with the full cache and with the policy, in pairs, and report; small
	@$(python) -m benchmarks.serving run --quick $(ARGS)

bench-overhead: setup ## Measure the share of compaction, and what patch and front end cost
	@$(python) -m benchmarks.compaction
	@$(python) -m benchmarks.policy_off
	@$(python) -m benchmarks.short_outputs
	@$(python) -m benchmarks.front_end

bench-compactor: setup ## Time the native compactor against the PyTorch one on a CPU thread
	@$(python) -m benchmarks.compactor $(ARGS)

bench-quality: setup ## Measure what the policy costs in quality (ARGS=--quick: a few minutes)
	@$(python) -m benchmarks.quality $(ARGS)

gpu-check: ## On a machine with an NVIDIA GPU, no network needed: check and time the CUDA compactor
	@./deploy/gpu-check/run.sh

image-cpu: env ## Build the image with the default model in it, for machines without a GPU
	@./deploy/image/build.sh cpu $(ARGS)
	@echo "Next: docker compose --profile cpu up"

image-gpu: env ## Build the image for NVIDIA GPUs (4 GB to download)
	@./deploy/image/build.sh gpu $(ARGS)
	@echo "Next: look through .env, then docker compose up"

env: ## Make .env and secrets/ for docker compose, where they are missing
	@./deploy/env.sh

clean: ## Remove .venv/ and models/
	rm -rf .venv models build randkv/compactor/lib
