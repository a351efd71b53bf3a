# SPDX-License-Identifier: Apache-2.0
"""What the dashboards ask Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "grafana" / "dashboards"
DASHBOARDS = tuple(sorted(FOLDER.glob("*.json")))


class Asked(NamedTuple):
    """One query as Prometheus gets it. `where` names dashboard, panel and legend."""

    where: str
    expr: str


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    """Panels that draw something; rows do not."""
    yield from (p for p in json.loads(dashboard.read_text())["panels"] if p["type"] != "row")


def queries(window: str = "1m", model_name: str = ".+", instance: str = ".+") -> list[Asked]:
    """Every query of every panel, and of the annotations, with the variables filled in.

    Args:
        window: Of rates; Grafana takes at least four scrape intervals.
        model_name: Regular expression.
        instance: Regular expression.
    """
    found = []
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                where = f"{path.stem}: {panel['title']}: {target['legendFormat']}"
                found.append(Asked(where, target["expr"]))
        for marks in json.loads(path.read_text())["annotations"]["list"]:
            found.append(Asked(f"{path.stem}: marks: {marks['name']}", marks["expr"]))
    values = {"$__rate_interval": window, "$model_name": model_name, "$instance": instance}
    return [Asked(where, _filled(expr, values)) for where, expr in found]


def _filled(expr: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr
