# SPDX-License-Identifier: Apache-2.0
"""``python -m server``: vLLM's OpenAI server with the policy on, in one process with its app.

Takes every option of ``vllm serve``. Without ``--model`` it serves the embedded default model.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from pathlib import Path

from randkv import patching
from randkv.errors import RandKVPatchError

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_MODEL = REPOSITORY / "models" / "smollm2-135m-instruct"
DEFAULT_MODEL_OPTIONS = {
    "model": str(DEFAULT_MODEL),
    "served_model_name": ["smollm2-135m-instruct"],
    "kv_cache_memory_bytes": 2**30,
    # vLLM's CPU worker refuses to start unless this share of the memory is free.
    "gpu_memory_utilization": 0.3,
    # Compiling takes more than a minute, at every start.
    "enforce_eager": True,
}
"""What the embedded model is served with where the command line says nothing else."""


def parse_arguments(arguments: list[str]) -> Namespace:
    """Options of ``vllm serve``, with this project's defaults where none is given."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="python -m server"))
    parser.set_defaults(model=None, host="127.0.0.1", kv_cache_policy="randkv")
    parsed: Namespace = parser.parse_args(arguments)
    if parsed.model is None and parsed.model_tag is None:
        if not (DEFAULT_MODEL / "prepared.json").is_file():
            parser.error(f"the default model is not in {DEFAULT_MODEL}: run make setup")
        parser.set_defaults(**DEFAULT_MODEL_OPTIONS)
        parsed = parser.parse_args(arguments)
    parsed.model = parsed.model or parsed.model_tag
    validate_parsed_serve_args(parsed)
    return parsed


async def announce(parsed: Namespace) -> None:
    """Wait until the server answers, then say how to talk to it."""
    host = "127.0.0.1" if parsed.host in (None, "", "0.0.0.0", "::") else parsed.host
    while not await _is_healthy(host, parsed.port):
        await asyncio.sleep(0.2)
    name = (parsed.served_model_name or [parsed.model])[0]
    question = '"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0'
    body = f'{{"model": "{name}", {question}}}'
    text = (
        f"\nReady: {name} with kv_cache_policy {parsed.kv_cache_policy}.\n"
        "Try, in another terminal:\n\n"
        f"curl http://{host}:{parsed.port}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'\n\n"
        'Stop with Ctrl-C. Options: make serve ARGS="--help".\n'
    )
    os.write(1, text.encode())  # vLLM puts its process name before what sys.stdout gets


async def _is_healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await asyncio.wait_for(reader.readline(), timeout=10)
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


async def serve(parsed: Namespace) -> None:
    from vllm.entrypoints.openai.api_server import run_server

    announcement = asyncio.create_task(announce(parsed))
    try:
        await run_server(parsed)
    finally:
        announcement.cancel()


def main() -> int:
    try:
        patching.check()
    except RandKVPatchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent anywhere unless asked for
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    uvloop.run(serve(parse_arguments(sys.argv[1:])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
