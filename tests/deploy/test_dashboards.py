# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from randkv.metrics import METRICS
from tests.deploy.dashboard_queries import DASHBOARDS, REPOSITORY, panels, queries
from tests.deploy.metric_names import of_vllm, ours
from tests.needs import skip_or_fail

CHECK = Path(__file__).parent / "grafana"
BUILD = REPOSITORY / "build" / "grafana" / "check"
DATA_SOURCE = {"type": "prometheus", "uid": "randkv-prometheus"}
OF_OTHERS = {"up", "process_start_time_seconds"}
"""From Prometheus and its client."""

dashboards = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
each_panel = pytest.mark.parametrize(
    "panel",
    [
        pytest.param(panel, id=f"{path.stem}-{panel['id']}")
        for path in DASHBOARDS
        for panel in panels(path)
    ],
)


def test_there_are_two() -> None:
    assert [path.stem for path in DASHBOARDS] == ["randkv", "serving"]


def test_what_is_committed_is_what_the_code_makes() -> None:
    command = [sys.executable, "deploy/grafana/dashboards.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def check() -> Path:
    """The type check with what it needs beside it."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        skip_or_fail("node and npm are not installed")
    BUILD.mkdir(parents=True, exist_ok=True)
    lock = BUILD / "package-lock.json"
    wanted = (CHECK / lock.name).read_bytes()
    is_installed = lock.exists() and lock.read_bytes() == wanted and (BUILD / "done").exists()
    for source in CHECK.iterdir():
        if source.is_file():
            shutil.copy(source, BUILD)
    if not is_installed:
        (BUILD / "done").unlink(missing_ok=True)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=BUILD, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            skip_or_fail(f"npm could not install @grafana/schema: {done.stderr[-2000:]}")
        (BUILD / "done").touch()
    return BUILD / "check.mjs"


def type_errors(check: Path, *paths: Path) -> str:
    """Empty when there are none."""
    command = ["node", check.name, *map(str, paths)]
    done = subprocess.run(command, cwd=check.parent, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(done.stderr), done
    return done.stderr


def test_grafana_takes_the_dashboards(check: Path) -> None:
    assert type_errors(check, *DASHBOARDS) == ""


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("title",), 3, "Type 'number' is not assignable to type 'string'"),
        (("fieldConfig", "defaults", "custom", "lineInterpolation"), "wavy", "wavy"),
        (("options", "legend", "colour"), "blue", "colour"),
        (("targets", 0, "range"), "yes", "Type 'string' is not assignable to type 'true'"),
    ],
    ids=["title", "enumeration", "option", "query"],
)
def test_grafana_does_not_take_broken_ones(
    check: Path, tmp_path: Path, place: tuple[Any, ...], value: object, complaint: str
) -> None:
    content = json.loads(DASHBOARDS[0].read_text())
    part = next(panel for panel in content["panels"] if panel["type"] == "timeseries")
    *parents, key = place
    for parent in parents:
        part = part[parent]
    part[key] = value
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(content))
    assert complaint in type_errors(check, broken)


@dashboards
def test_panels_have_their_own_ids_and_places(path: Path) -> None:
    content = json.loads(path.read_text())
    ids = [panel["id"] for panel in content["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in content["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)


@dashboards
def test_dashboards_link_to_each_other(path: Path) -> None:
    content = json.loads(path.read_text())
    others = {json.loads(other.read_text())["uid"] for other in DASHBOARDS if other != path}
    assert {link["url"] for link in content["links"]} == {f"/d/{uid}" for uid in others}
    assert all(link["includeVars"] and link["keepTime"] for link in content["links"])


@dashboards
def test_variables_choose_models_and_servers(path: Path) -> None:
    variables = {v["name"]: v for v in json.loads(path.read_text())["templating"]["list"]}
    assert list(variables) == ["model_name", "instance"]
    for variable in variables.values():
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["datasource"] == DATA_SOURCE


@each_panel
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert re.fullmatch(r"[A-Z].*[a-z0-9]\.", panel["description"])
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"]


@each_panel
def test_a_query_has_a_legend_and_follows_the_variables(panel: dict[str, Any]) -> None:
    assert panel["datasource"] == DATA_SOURCE
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all(legends)
    assert len(legends) == len(set(legends))
    for target in panel["targets"]:
        assert target["datasource"] == DATA_SOURCE
        assert 'model_name=~"$model_name"' in target["expr"]
        selectors = re.findall(r"\{[^{}]*\}", target["expr"])
        assert selectors
        assert all('instance=~"$instance"' in selector for selector in selectors)


def test_every_metric_is_one_that_servers_have() -> None:
    asked = {
        name for query in queries() for name in re.findall(r"([a-z_][\w:]*)(?=\{)", query.expr)
    }
    assert asked <= ours() | of_vllm() | OF_OTHERS
    assert asked >= OF_OTHERS


def test_every_metric_of_the_policy_is_shown() -> None:
    text = " ".join(query.expr for query in queries())
    assert [metric.name for metric in METRICS if metric.name not in text] == []


def test_filled_queries_have_no_variables() -> None:
    assert len(queries()) > 60
    assert not [query for query in queries() if "$" in query.expr]


def test_one_version_of_the_sdk_is_pinned() -> None:
    lines = (REPOSITORY / "deploy" / "grafana" / "requirements.txt").read_text().splitlines()
    pin = lines[-1]
    assert pin in (REPOSITORY / "deploy" / "local" / "dev.txt").read_text().splitlines()
    assert f'"{pin}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_types_are_those_of_the_grafana_that_runs() -> None:
    version = json.loads((CHECK / "package.json").read_text())["dependencies"]["@grafana/schema"]
    image = f"GRAFANA_IMAGE=grafana/grafana:{version}"
    assert image in (REPOSITORY / ".env.example").read_text().splitlines()
