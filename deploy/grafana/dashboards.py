# SPDX-License-Identifier: Apache-2.0
"""Write deploy/grafana/dashboards/*.json; with ``--check``, only say whether they are current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import policy
import serving
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    GridPos,
    Panel,
    RowPanel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from panels import DATA_SOURCE
from promql import of_servers

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {"randkv": policy, "serving": serving}
WIDTH = 24


def to_json(module: ModuleType) -> str:
    """The dashboard that `module` describes, as Grafana reads it."""
    built = (
        dashboard.Dashboard(module.TITLE)
        .uid(module.UID)
        .description(module.DESCRIPTION)
        .tags(["randkv"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .variables([_variable("model_name", "Model"), _variable("instance", "Server")])
        .annotation(_restarts())
        .links([_link(other) for other in DASHBOARDS.values() if other is not module])
        .build()
    )
    built.panels = _placed(module)
    content = json.loads(json.dumps(built, cls=JSONEncoder))
    for part in (*content["links"], *content["annotations"]["list"]):
        del part["placement"]  # the SDK knows one value only, which hides them in a menu
    for variable in content["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):  # of another kind of variable
            del variable[key]
    return json.dumps(content, indent=2) + "\n"


def _placed(module: ModuleType) -> list[Panel | RowPanel]:
    """Panels from left to right and from top to bottom, a row panel above each titled group."""
    placed: list[Panel | RowPanel] = []
    y = 0
    for title, panels in module.panels().items():
        if title:
            position = GridPos(x=0, y=y, w=WIDTH, h=1)
            placed.append(RowPanel(id_val=len(placed) + 1, title=title, grid_pos=position))
            y += 1
        x = height = 0
        for panel in (builder.build() for builder in panels):
            size = panel.grid_pos
            if x + size.w > WIDTH:
                x, y = 0, y + height
            panel.id_val = len(placed) + 1
            panel.grid_pos = GridPos(x=x, y=y, w=size.w, h=size.h)
            placed.append(panel)
            x, height = x + size.w, size.h
        y += height
    return placed


def _variable(label: str, shown: str) -> dashboard.QueryVariable:
    chosen_before = '{model_name=~"$model_name"}' if label == "instance" else ""
    return (
        dashboard.QueryVariable(label)
        .label(shown)
        .datasource(DATA_SOURCE)
        .query(f"label_values(randkv_build_info{chosen_before}, {label})")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _restarts() -> dashboard.AnnotationQuery:
    """A mark where a server's process started, wherever in the range it was first scraped."""
    started = of_servers('process_start_time_seconds{instance=~"$instance"}')
    return (
        dashboard.AnnotationQuery()
        .name("Starts")
        .datasource(DATA_SOURCE)
        .enable(True)
        .icon_color("purple")
        .expr(f"1000 * {started}")
        .use_value_for_time(True)
        .title_format("{{instance}} started")
    )


def _link(other: ModuleType) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(other.TITLE)
        .type(DashboardLinkType.LINK)
        .url(f"/d/{other.UID}")
        .icon("dashboard")
        .tooltip(other.DESCRIPTION)
        .include_vars(True)
        .keep_time(True)
    )


def main(arguments: list[str]) -> int:
    """Exit status: 1 when ``--check`` finds a difference."""
    stale = []
    for name, module in DASHBOARDS.items():
        path, wanted = FOLDER / f"{name}.json", to_json(module)
        if arguments != ["--check"]:
            path.write_text(wanted)
        elif not path.exists() or path.read_text() != wanted:
            stale.append(path.name)
    if stale:
        sys.stderr.write(f"not what deploy/grafana makes: {', '.join(stale)}. Run {__file__}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
