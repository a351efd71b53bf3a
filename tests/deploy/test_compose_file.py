# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml as compose reads it, without a daemon; and what `make env` prepares."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.images import REPOSITORY, compose_command, run

EXAMPLE = (REPOSITORY / ".env.example").read_text()
VARIABLES = re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE)


def compose(env: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = ["--env-file", str(env), "--project-directory", str(REPOSITORY)]
    return run(*compose_command(), *files, *arguments, check=False)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose(REPOSITORY / ".env.example", "--profile", "*", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("name", VARIABLES)
def test_a_missing_variable_stops_with_its_name(name: str, tmp_path: Path) -> None:
    env = tmp_path / "env"
    env.write_text(re.sub(rf"^{name}=.*\n", "", EXAMPLE, flags=re.MULTILINE))
    done = compose(env, "config", "--quiet")
    assert done.returncode != 0
    assert f"required variable {name} is missing a value: see .env.example" in done.stderr


def test_every_variable_is_explained_and_used() -> None:
    used = set(re.findall(r"\$\{(\w+)", (REPOSITORY / "docker-compose.yml").read_text()))
    assert used == set(VARIABLES)
    for paragraph in EXAMPLE.split("\n\n"):
        lines = paragraph.strip().splitlines()
        if any("=" in line and not line.startswith("#") for line in lines):
            assert lines[0].startswith("#") or "IMAGE" in lines[0], paragraph


@pytest.mark.parametrize(
    ("options", "server"), [((), "server"), (("--profile", "cpu"), "server-cpu")]
)
def test_one_server_is_started(options: tuple[str, ...], server: str) -> None:
    done = compose(REPOSITORY / ".env.example", *options, "config", "--services")
    assert set(done.stdout.split()) == {server, "prometheus", "grafana"}


def test_every_service_is_hardened(services: dict[str, Any]) -> None:
    assert services.keys() == {"server", "server-cpu", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}, name
        assert re.search(r":v?\d", service["image"]), name


def test_a_secret_is_given_to_one_service_only(services: dict[str, Any]) -> None:
    given = {
        name: {secret["source"] for secret in service.get("secrets", [])}
        for name, service in services.items()
    }
    keys = {"hf_token", "api_keys"}
    assert given == {
        "server": keys,
        "server-cpu": keys,
        "prometheus": set(),
        "grafana": {"grafana_admin_password"},
    }


def test_grafana_lets_nobody_in_unknown_and_finds_its_files(services: dict[str, Any]) -> None:
    grafana = services["grafana"]
    environment = grafana["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
    secret = environment["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert secret == "/run/secrets/grafana_admin_password"
    assert not [name for name in environment if name.endswith("PASSWORD")]
    mounts = {volume["target"]: Path(volume["source"]) for volume in grafana["volumes"]}
    provisioning = mounts["/etc/grafana/provisioning"]
    for kind in ("datasources", "dashboards"):
        assert list((provisioning / kind).glob("*.yml")), kind
    dashboards = mounts["/var/lib/grafana/dashboards"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (dashboards / home.name).is_file()
    assert grafana["depends_on"]["prometheus"]["condition"] == "service_healthy"


def test_the_gpu_server_gets_what_env_says(services: dict[str, Any]) -> None:
    server = services["server"]
    (devices,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "--model=Qwen/Qwen3-4B" in server["command"]
    assert "--tensor-parallel-size=1" in server["command"]
    assert [v["target"] for v in server["volumes"]] == ["/home/randkv/.cache"]
    assert server["stop_grace_period"] == "1m0s"


def test_make_env_prepares_what_is_missing_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for name in ("deploy/env.sh", ".env.example"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    script = [str(tmp_path / "deploy/env.sh")]
    first = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert "Made .env" in first
    assert (tmp_path / ".env").read_text() == EXAMPLE
    secrets = tmp_path / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    password = (secrets / "grafana_admin_password").read_text()
    assert len(password.strip()) == 24
    for file in secrets.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    (tmp_path / ".env").write_text("MODEL=mine\n")
    assert subprocess.run(script, check=True, capture_output=True, text=True).stdout == ""
    assert (tmp_path / ".env").read_text() == "MODEL=mine\n"
    assert (secrets / "grafana_admin_password").read_text() == password
