# SPDX-License-Identifier: Apache-2.0
"""What the front end costs: it against vLLM's own server, in pairs.

``python -m benchmarks.front_end`` serves one engine through two apps of one process, vLLM's own and
the one with this front end around it, and drives them in turn with vLLM's benchmark client. Every
request streams, under the policy. Printed are the ratio of output tokens/s and the difference of
the median time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import client, spread
from server.options import FRONT_END
from tests.engine.models import make_small_chat_model
from tests.server.process import free_port

POLICY = '{"type": "randkv", "budget": 128, "buffer_size": 32}'


def serve(model: str, ports: list[int]) -> None:
    """Both apps on one engine, until killed: vLLM's own on the first port."""
    import uvicorn
    from vllm.entrypoints.launcher import NoSignalServer
    from vllm.entrypoints.openai.api_server import (
        build_app,
        build_async_engine_client,
        init_app_state,
    )

    from server.options import parse_arguments

    arguments = [
        *("--model", model, "--served-model-name", "m", "--enforce-eager", "--dtype", "float32"),
        *("--kv-cache-policy", POLICY, "--max-model-len", "4096", "--no-access-log"),
        *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2**28)),
    ]
    parsed = parse_arguments(arguments)

    async def run() -> None:
        async with build_async_engine_client(parsed) as engine:
            tasks = await engine.get_supported_tasks()
            servers = []
            for port, middleware in zip(ports, ([], [FRONT_END]), strict=True):
                args = copy.copy(parsed)
                args.middleware = middleware
                app = build_app(args, tasks, engine.model_config)
                await init_app_state(engine, app.state, args, tasks)
                config = uvicorn.Config(app, port=port, log_level="warning", access_log=False)
                app.state.server = NoSignalServer(config)
                servers.append(app.state.server)
            await asyncio.gather(*(server.serve() for server in servers))

    asyncio.run(run())


def wait_for(port: int) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10)
        except OSError:
            time.sleep(0.5)
        else:
            return


def drive(model: str, port: int, num_prompts: int, concurrency: int) -> dict[str, Any]:
    """One run of vLLM's benchmark client."""
    options = client.options(
        *(f"http://127.0.0.1:{port}", "m", model, 0),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "32"),
        *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)),
    )
    return client.drive(options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--num-prompts", type=int, default=24, help="requests of one run")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--model", help="directory; default: a small random model")
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.model, arguments.serve)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or str(make_small_chat_model(Path(directory)))
        multiprocess = Path(directory) / "prometheus"
        multiprocess.mkdir()
        ports = [free_port(), free_port()]
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.front_end", "--model", model),
                *("--serve", *map(str, ports)),
            ],
            stdout=subprocess.DEVNULL,
            # So that both apps have vLLM's HTTP metrics: a registry each.
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(multiprocess)},
        )
        ratios: list[float] = []
        more: list[float] = []
        try:
            for port in ports:
                wait_for(port)
                drive(model, port, arguments.num_prompts, arguments.concurrency)
            for i in range(arguments.pairs):
                found = {}
                for port in ports if i % 2 else reversed(ports):
                    found[port] = drive(model, port, arguments.num_prompts, arguments.concurrency)
                    assert found[port]["failed"] == 0
                own, ours = (found[port] for port in ports)
                sys.stderr.write(f"\rpair {i + 1}/{arguments.pairs}")
                ratios.append(ours["output_throughput"] / own["output_throughput"])
                more.append(ours["median_ttft_ms"] - own["median_ttft_ms"])
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted: figures of the pairs so far\n")
        finally:
            server.kill()  # its engine ends with it
            server.wait()
    speed, delay = (
        spread.median_and_quartiles(values) if values else "no pair" for values in (ratios, more)
    )
    sys.stdout.write(
        f"{len(more)} pairs, {arguments.num_prompts} requests each, "
        f"{arguments.concurrency} at a time, model {arguments.model or 'small, random'}\n"
        f"output tokens/s, front end over vLLM's own server: {speed}\n"
        f"median time to first token, front end minus vLLM's own, ms: {delay}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
