# SPDX-License-Identifier: Apache-2.0
"""The Prometheus files: valid, tested by promtool, and about metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.metric_names import of_vllm, ours
from tests.needs import skip_or_fail

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
INSIDE = "/etc/prometheus"  # where the files are in the container

_NOT_NAMES = re.compile(
    r'"[^"]*"|\[[^]]*\]|\{[^}]*\}|(?<![\w:])\d[\w.]*'
    r"|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"
)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*(?![\w:]|\s*\()")
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "sum", "max", "min", "avg"}


def promtool(*arguments: str | Path) -> None:
    """Run promtool; a test fails with its words if it fails."""
    if shutil.which("promtool") is None:
        skip_or_fail("promtool is missing: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in load(path)["groups"]:
            yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in rules() if "record" in rule}


def names(expression: str) -> set[str]:
    """The metrics that a PromQL expression selects."""
    return set(_NAME.findall(_NOT_NAMES.sub(" ", expression))) - _KEYWORDS


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    """With a file of targets and without one, which is what docker compose starts with."""
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "prometheus.yml"
    config.write_text(config.read_text().replace(INSIDE, str(tmp_path)))
    promtool("check", "config", config)
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "more.yml").write_text("- targets: ['server-1:9400']\n")
    promtool("check", "config", config)


def test_the_configuration_scrapes_the_server_and_talks_to_nothing_else() -> None:
    config = load(PROMETHEUS / "prometheus.yml")
    assert config.keys() == {"global", "rule_files", "scrape_configs"}
    assert config["global"] == {"scrape_interval": "5s", "evaluation_interval": "15s"}
    assert config["rule_files"] == [f"{INSIDE}/rules/*.yml"]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {"randkv", "prometheus"}
    assert jobs["randkv"]["static_configs"] == [{"targets": ["server:9400"]}]
    assert jobs["randkv"]["file_sd_configs"] == [{"files": [f"{INSIDE}/targets/*.yml"]}]


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_are_valid(path: Path) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", path)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_tests_say(path: Path) -> None:
    promtool("test", "rules", path)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tested_both_ways(name: str) -> None:
    groups = [group for path in TESTS for group in load(path)["tests"]]
    tested = [test for group in groups for test in group.get("alert_rule_test", ())]
    mine = [bool(test["exp_alerts"]) for test in tested if test["alertname"] == name]
    assert True in mine
    assert False in mine
    assert {test["alertname"] for test in tested} <= ALERTS.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_is_tested(name: str) -> None:
    assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", name)
    groups = [group for path in TESTS for group in load(path)["tests"]]
    tested = [test for group in groups for test in group.get("promql_expr_test", ())]
    assert any(name in names(test["expr"]) and test["exp_samples"] for test in tested)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    annotations = alert["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook"}
    assert annotations["runbook"] == f"deploy/README.md#{name.lower()}"  # GitHub's anchor
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {name}\n\n(.+?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"no section ### {name} in deploy/README.md"
    assert len(section[1].split()) >= 30


def test_every_alert_of_the_runbook_exists() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (RandKV\w+)$", text, re.MULTILINE)) == ALERTS.keys()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_metrics_that_exist(rule: dict[str, Any]) -> None:
    known = {"up", *RECORDED} | ours() | of_vllm()
    found = names(rule["expr"])
    assert found
    assert found <= known, f"unknown: {sorted(found - known)}"


def test_names_are_found_in_expressions() -> None:
    expression = """
        sum without (a) (rate(m_total{b="c{d"}[5m] offset 1m)) > on (e) group_left (f) 0.5 * up
        unless histogram_quantile(0.9, x:y:z5m) == bool 1e3 or time() < n_bucket
    """
    assert names(expression) == {"m_total", "up", "x:y:z5m", "n_bucket"}
