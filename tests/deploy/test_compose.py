# SPDX-License-Identifier: Apache-2.0
"""The compose project, started for real: the server with the default model, and Prometheus.

Where Grafana's image can be had its container is started too; elsewhere test_compose_file.py looks
at its configuration. The tests are in the order of a deployment's life.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from tests.deploy import dashboard_queries
from tests.deploy.images import (
    REPOSITORY,
    build,
    can_be_had,
    compose_command,
    daemon,
    default_of,
    prometheus_image,
    run,
)

KEY = "a-key-of-the-test"
TOKEN = "hf_a-token-of-the-test"
SECONDS_TO_HEALTHY = 120  # on two cores
SCRAPE_SECONDS = 5
RANDKV = {"type": "randkv", "budget": 64, "buffer_size": 16}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Deployment:
    """A compose project of its own name, ports and secrets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
        self.url = f"http://127.0.0.1:{self.ports['PORT']}"
        self.prometheus_url = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}"
        self.with_grafana = can_be_had(default_of("GRAFANA_IMAGE"))
        settings = {name: str(port) for name, port in self.ports.items()}
        settings |= {"PROMETHEUS_IMAGE": prometheus_image()}
        settings |= {"SHM_SIZE": "1gb", "MEMORY_LIMIT": "8g"}
        for name, text in [
            ("HF_TOKEN_FILE", TOKEN),
            ("API_KEYS_FILE", KEY),
            ("GRAFANA_ADMIN_PASSWORD_FILE", "a-password-of-the-test"),
        ]:
            settings[name] = str(folder / name.lower())
            Path(settings[name]).write_text(text + "\n")
            Path(settings[name]).chmod(0o644)
        lines = (REPOSITORY / ".env.example").read_text().splitlines()
        names = [line.partition("=")[0] for line in lines]
        assert settings.keys() <= set(names)
        env = [
            f"{n}={settings[n]}" if n in settings else line
            for n, line in zip(names, lines, strict=True)
        ]
        (folder / "env").write_text("\n".join(env) + "\n")
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    @property
    def command(self) -> list[str]:
        file = ["--env-file", str(self.folder / "env"), "--project-directory", str(REPOSITORY)]
        return [*compose_command(), "--project-name", "randkv-test", *file, "--profile", "cpu"]

    def compose(self, *arguments: str) -> str:
        return run(*self.command, *arguments).stdout

    def container(self, service: str) -> Any:
        identity = self.compose("ps", "--all", "--quiet", service).strip()
        return daemon().containers.get(identity)

    def up(self) -> None:
        services = ["server-cpu", "prometheus", *(["grafana"] if self.with_grafana else [])]
        self.compose("up", "--detach", "--no-build", *services)

    def wait_until_healthy(self, service: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (health := self.container(service).attrs["State"]["Health"])["Status"] != "healthy":
            assert time.monotonic() < deadline, (health, self.compose("logs", "--tail=40", service))
            time.sleep(1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Instant query, answered by Prometheus."""
        parameters = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.prometheus_url}/api/v1/query?{parameters}") as answer:
            body = json.load(answer)
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def value(self, expression: str) -> float:
        """Of an expression that gives one sample, or none (0)."""
        result = self.query(expression)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else 0.0

    def wait_for_value(self, expression: str, expected: float, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while (value := self.value(expression)) < expected and time.monotonic() < deadline:
            time.sleep(1)
        assert value == expected, expression

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=20):
                return True
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return False
            raise

    def chat(self, policy: Any, seed: int | None, max_tokens: int = 160) -> Any:
        """The `kv_cache` of an answer that may not end before `max_tokens`."""
        answer = self.client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=max_tokens,
            seed=seed,
            extra_body={"kv_cache_policy": policy, "ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens
        return answer.kv_cache  # type: ignore[attr-defined]

    def get(self, path: str, **headers: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    daemon()
    build("cpu")
    given = Deployment(tmp_path_factory.mktemp("deployment"))
    began = time.monotonic()
    try:
        given.up()
        given.wait_until_healthy("server-cpu", SECONDS_TO_HEALTHY - (time.monotonic() - began))
        given.wait_until_healthy("prometheus", 60)
        yield given
    finally:
        subprocess.run(
            [*given.command, "down", "--volumes", "--timeout=5"], check=False, cwd=REPOSITORY
        )


PAIRS = "sum(randkv_evicted_token_head_pairs_total)"


def test_evicted_pairs_grow_by_what_the_answers_report(deployment: Deployment) -> None:
    """Seen through Prometheus, to the pair; nothing for the full cache."""
    assert deployment.value(PAIRS) == 0
    model = deployment.get("/v1/kv_cache/policy", Authorization=f"Bearer {KEY}")["model"]
    heads = model["num_layers"] * model["num_kv_heads"]
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda seed: deployment.chat(RANDKV, seed), range(8)))
        dense = list(pool.map(lambda seed: deployment.chat("dense", seed), range(4)))
    assert all(report["policy"] == "randkv" and report["rounds"] > 2 for report in reports)
    assert all(report["policy"] == "dense" and report["evicted_tokens"] == 0 for report in dense)
    expected = heads * sum(report["evicted_tokens"] for report in reports)
    assert expected > 0
    deployment.wait_for_value(PAIRS, expected)
    time.sleep(2 * SCRAPE_SECONDS)
    assert deployment.value(PAIRS) == expected
    # One copied pair per evicted pair, but for the moves that the first round of a request saves.
    copied = deployment.value("sum(randkv_copied_token_head_pairs_total)")
    assert 0.9 * expected < copied <= expected
    rounds = deployment.value('sum(randkv_compaction_rounds_total{replay="false"})')
    assert rounds == sum(report["rounds"] for report in reports)
    by_policy = deployment.query('sum by (policy) (randkv_requests_total{outcome="length"})')
    assert {r["metric"]["policy"]: float(r["value"][1]) for r in by_policy}.items() >= {
        ("randkv", 8.0),
        ("dense", 4.0),
    }


def test_sampling_without_a_seed_needs_no_compiler(deployment: Deployment) -> None:
    """VLLM takes another way there, which torch compiles unless it is told not to."""
    assert deployment.chat(RANDKV, None, max_tokens=20)["evicted_tokens"] == 0


def test_a_key_is_asked_for_and_probes_need_none(deployment: Deployment) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        deployment.get("/v1/models")
    assert refused.value.code == 401
    for path in ("/live", "/ready"):
        with urllib.request.urlopen(deployment.url + path) as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as absent:
        urllib.request.urlopen(deployment.url + "/metrics")
    assert absent.value.code in (401, 404)


def test_every_query_of_the_dashboards_returns_data(deployment: Deployment) -> None:
    """After a load that has every kind of request in it."""
    for seed in range(3):
        deployment.chat(RANDKV, 100 + seed, max_tokens=100)
        deployment.chat("dense", 100 + seed, max_tokens=40)
        with pytest.raises(Exception, match="budget"):
            deployment.chat({"type": "randkv", "budget": 1}, seed)
        time.sleep(SCRAPE_SECONDS)
    asked = [query for query in dashboard_queries.queries() if ": marks: " not in query.where]
    assert len(asked) > 40
    assert not [query.where for query in asked if not deployment.query(query.expr)]


def test_prometheus_loaded_every_rule(deployment: Deployment) -> None:
    with urllib.request.urlopen(f"{deployment.prometheus_url}/api/v1/rules") as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["type"] for rule in rules} == {"alerting", "recording"}
    assert all(rule["health"] in ("ok", "unknown") for rule in rules)
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert deployment.value('up{job="randkv"}') == 1


def test_limits_are_in_force(deployment: Deployment) -> None:
    """As the daemon has them, and as the process sees them."""
    server, prometheus = deployment.container("server-cpu"), deployment.container("prometheus")
    for container in (server, prometheus):
        host = container.attrs["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Memory"] > 0
        assert host["PidsLimit"] > 0
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        for published in container.ports.values():
            assert {port["HostIp"] for port in published or []} <= {"127.0.0.1"}
    assert server.attrs["HostConfig"]["ShmSize"] == 2**30
    status = inside(server, "/proc/1/status").splitlines()
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    assert fields["Name"] == "tini"
    assert set(fields["Uid"].split()) == {"10001"}
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    code, output = server.exec_run(["touch", "/opt/randkv/here"])
    assert code != 0
    assert b"Read-only file system" in output


def test_secrets_are_only_where_they_belong(deployment: Deployment) -> None:
    server, prometheus = deployment.container("server-cpu"), deployment.container("prometheus")
    for container in (server, prometheus):
        told = json.dumps(container.attrs)
        assert KEY not in told
        assert TOKEN not in told
    assert inside(server, "/run/secrets/hf_token").strip() == TOKEN
    assert prometheus.exec_run(["ls", "/run/secrets"])[0] != 0


def inside(container: Any, path: str) -> str:
    """Text of a file in the container."""
    code, output = container.exec_run(["cat", path])
    assert code == 0, output
    text: str = output.decode()
    return text


KILL_THE_ENGINE = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    if (entry / "cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
        os.kill(int(entry.name), signal.SIGKILL)
        print("killed", entry.name)
"""


def test_a_dead_engine_brings_the_container_back(deployment: Deployment) -> None:
    server = deployment.container("server-cpu")
    started = server.attrs["State"]["StartedAt"]
    code, output = server.exec_run(["python", "-c", KILL_THE_ENGINE])
    assert code == 0
    assert output.count(b"killed") == 1
    deadline = time.monotonic() + 30
    while server.attrs["State"]["StartedAt"] == started or not server.attrs["State"]["Running"]:
        assert time.monotonic() < deadline, server.attrs["State"]
        time.sleep(0.5)
        server.reload()
    assert server.attrs["RestartCount"] == 1
    deployment.wait_until_healthy("server-cpu", SECONDS_TO_HEALTHY)
    assert deployment.chat(RANDKV, 1)["rounds"] > 2
    # Prometheus saw the end and the new start, and the dashboards mark it.
    deployment.wait_for_value("changes(process_start_time_seconds{job='randkv'}[10m])", 1)
    marks = [query for query in dashboard_queries.queries("10m") if ": marks: " in query.where]
    assert marks
    assert not [query.where for query in marks if not deployment.query(query.expr)]


def test_stopping_drains(deployment: Deployment) -> None:
    """A stream that runs is finished, nothing new is let in, and the exit status is 0.

    The drain has 30 s, and a busy machine needs 0.1 s per token.
    """
    stream = deployment.client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    stopping = threading.Thread(target=deployment.compose, args=("stop", "server-cpu"))
    stopping.start()
    deadline = time.monotonic() + 20
    while deployment.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(InternalServerError, match="shutting down"):
        deployment.chat("dense", 1)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    stopping.join()
    assert reasons[-1] == "length"
    assert len(reasons) > 100
    state = deployment.container("server-cpu").attrs["State"]
    assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 0, False)
