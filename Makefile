# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format bench bench-compactor gpu-check image-cpu image-gpu clean
python := .venv/bin/python
ARGS ?=

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

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

format: setup ## Format the code
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench: setup ## Measure the share of compaction, and what patch and front end cost
	@$(python) -m benchmarks.compaction
	@$(python) -m benchmarks.policy_off
	@$(python) -m benchmarks.front_end

bench-compactor: setup ## Time the native compactor against the PyTorch one on a CPU thread
	@$(python) -m benchmarks.compactor $(ARGS)

gpu-check: ## On a machine with an NVIDIA GPU, no network needed: check and time the CUDA compactor
	@./deploy/gpu-check/run.sh

image-cpu: ## Build the image with the default model in it, for machines without a GPU
	@./deploy/image/build.sh cpu $(ARGS)
	@echo "Next: cp .env.example .env, set GRAFANA_ADMIN_PASSWORD in it, and docker compose --profile cpu up"

image-gpu: ## Build the image for NVIDIA GPUs (4 GB to download)
	@./deploy/image/build.sh gpu $(ARGS)
	@echo "Next: cp .env.example .env, set MODEL and GRAFANA_ADMIN_PASSWORD in it, and docker compose up"

clean: ## Remove .venv/ and models/
	rm -rf .venv models build randkv/compactor/lib
