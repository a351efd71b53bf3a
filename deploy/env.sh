#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What docker-compose.yml reads: .env, and a file for each secret. Nothing that is there is touched.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -e .env ]; then
    cp .env.example .env
    echo "Made .env: which model, policy, GPUs, ports."
fi
# The folder keeps others out; the files can be read by the containers' users.
[ -d secrets ] || install -d -m 700 secrets
for name in hf_token api_keys; do
    [ -e "secrets/$name" ] || install -m 644 /dev/null "secrets/$name"
done
if [ ! -e secrets/grafana_admin_password ]; then
    head -c 18 /dev/urandom | base64 > secrets/grafana_admin_password
    chmod 644 secrets/grafana_admin_password
    echo "Made secrets/: Grafana's password is in secrets/grafana_admin_password."
fi
