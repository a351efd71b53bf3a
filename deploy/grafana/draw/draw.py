# SPDX-License-Identifier: Apache-2.0
"""Draw both dashboards with Grafana's own components, from a live Prometheus.

``draw.py URL`` runs every panel's queries and writes docs/images/dashboard-{randkv,serving}.png.
Needs npm, node and Chromium; what npm installs (half a GB) goes to build/grafana/draw/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
DASHBOARDS = HERE.parent / "dashboards"
BUILD = REPOSITORY / "build" / "grafana" / "draw"
SCRAPE_SECONDS = 5
MAX_POINTS = 500
WIDTH = 1600
CELL_HEIGHT, GAP, HEADER_HEIGHT = 30, 8, 48
"""Pixels, as in draw.tsx."""

PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="draw.css">
<div id="root"></div><script id="input" type="application/json">{}</script>
<script src="draw.js"></script>
"""


def installed() -> None:
    """Bundle draw.tsx into BUILD, with what it needs installed there."""
    BUILD.mkdir(parents=True, exist_ok=True)
    lock = HERE / "package-lock.json"
    marker = BUILD / "installed"
    is_current = marker.exists() and marker.read_bytes() == lock.read_bytes()
    for source in (lock, HERE / "package.json", HERE / "draw.tsx"):
        shutil.copy(source, BUILD)
    if not is_current:
        marker.unlink(missing_ok=True)
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
        shutil.copy(lock, marker)
    fonts = (f"--loader:.{kind}=empty" for kind in ("woff", "ttf"))
    run(
        *("node_modules/.bin/esbuild", "draw.tsx", "--bundle", "--outfile=draw.js", "--minify"),
        *("--jsx=automatic", "--loader:.svg=dataurl", "--loader:.woff2=dataurl", *fonts),
        *('--define:process.env.NODE_ENV="production"', "--log-level=error"),
    )


def run(*command: str) -> None:
    """In BUILD; what a command says is shown when it fails."""
    done = subprocess.run(command, cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def answer(url: str, path: str, **parameters: object) -> Any:
    """Result of a query to the HTTP API of the Prometheus at `url`."""
    with urlopen(f"{url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as response:
        return json.load(response)["data"]["result"]


def results(url: str, dashboard: dict[str, Any], start: float, end: float) -> dict[str, Any]:
    """What draw.tsx reads."""
    step = max(SCRAPE_SECONDS, SCRAPE_SECONDS * round((end - start) / MAX_POINTS / SCRAPE_SECONDS))
    window = max(step + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)  # as Grafana's $__rate_interval
    values = {"$__rate_interval": f"{window}s", "$model_name": ".+", "$instance": ".+"}
    found: dict[int, dict[str, Any]] = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for name, value in values.items():
                expr = expr.replace(name, value)
            if target["instant"]:
                series = answer(url, "query", query=expr, time=end)
            else:
                series = answer(url, "query_range", query=expr, start=start, end=end, step=step)
            found.setdefault(panel["id"], {})[target["refId"]] = series
    return {"dashboard": dashboard, "from": start, "to": end, "step": step, "results": found}


def draw(content: dict[str, Any], picture: Path) -> None:
    """Screenshot of the page that shows `content`."""
    page = BUILD / f"{picture.stem}.html"
    page.write_text(PAGE.format(json.dumps(content).replace("</", "<\\/")))
    places = [panel["gridPos"] for panel in content["dashboard"]["panels"]]
    rows = max(place["y"] + place["h"] for place in places)
    height = HEADER_HEIGHT + rows * (CELL_HEIGHT + GAP)
    chromium = shutil.which("chromium") or "chromium"
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    run(
        *(chromium, "--headless", "--disable-gpu", "--hide-scrollbars", *as_root),
        *(f"--window-size={WIDTH},{height}", "--virtual-time-budget=10000"),
        *(f"--screenshot={picture}", page.as_uri()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--end", type=float, default=time.time(), help="Unix time; default: now")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images")
    args = parser.parse_args()
    if not answer(args.url, "query", query="count(randkv_build_info)", time=args.end):
        parser.error(f"{args.url} has no randkv_build_info at that time: is a server scraped?")
    installed()
    args.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text())
        content = results(args.url, dashboard, args.end - 60 * args.minutes, args.end)
        draw(content, args.output.resolve() / f"dashboard-{path.stem}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
