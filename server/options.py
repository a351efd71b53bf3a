# SPDX-License-Identifier: Apache-2.0
"""The command line: every option of ``vllm serve``, the front end's own, and their defaults."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

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

DEFAULTS: dict[str, Any] = {
    "model": None,
    "host": "127.0.0.1",
    "kv_cache_policy": "randkv",
    "shutdown_timeout": 30,
    "allowed_origins": [],
    "disable_uvicorn_access_log": True,
    "uvicorn_log_level": "warning",
}
"""Where this server's defaults differ from those of ``vllm serve``."""

FRONT_END = "server.front_end.FrontEnd"


def parse_arguments(arguments: list[str]) -> Namespace:
    """Options of ``vllm serve`` and the front end's, with this project's defaults."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="python -m server"))
    _add_front_end(parser)
    parser.set_defaults(**DEFAULTS)
    parsed: Namespace = parser.parse_args(arguments)
    if parsed.model is None and parsed.model_tag is None:
        if not (DEFAULT_MODEL / "prepared.json").is_file():
            parser.error(f"the default model is not in {DEFAULT_MODEL}: run make setup")
        parser.set_defaults(**DEFAULT_MODEL_OPTIONS)
        parsed = parser.parse_args(arguments)
    parsed.model = parsed.model or parsed.model_tag
    for name in ("api_keys_file", "metrics_token_file"):
        path = getattr(parsed, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name.replace('_', '-')} has value {path}: expected a file")
    if parsed.metrics_port is not None and (parsed.metrics_port == parsed.port):
        parser.error(f"--metrics-port has value {parsed.metrics_port}: --port has the same")
    validate_parsed_serve_args(parsed)
    # With "auto" the first structured request chooses the back end of the whole engine: what only
    # another one supports then fails in the engine, or comes out unconstrained.
    if parsed.structured_outputs_config.backend == "auto":
        parsed.structured_outputs_config.backend = "xgrammar"
    # vLLM's own check guards only some paths; keys are the front end's affair.
    parsed.front_end_keys, parsed.api_key = parsed.api_key or [], None
    # The last middleware is the outermost.
    parsed.middleware = [*parsed.middleware, FRONT_END]
    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer from 1")
    return int(text)


def _add_front_end(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Front end", "What this server adds to vllm serve.")
    add = group.add_argument
    add(
        "--api-keys-file",
        type=Path,
        help="File with one API key a line; read again when it changes. Adds to --api-key and to "
        "the environment variables VLLM_API_KEY and RANDKV_API_KEYS (separated by commas).",
    )
    add(
        "--metrics-token-file",
        type=Path,
        help="File with the token that /metrics asks for when there are API keys; also the "
        "environment variable RANDKV_METRICS_TOKEN.",
    )
    add(
        "--metrics-port",
        type=_positive,
        help="Serve /metrics on this port, without a token, and no longer on --port.",
    )
    add("--metrics-host", default="127.0.0.1", help="Where --metrics-port listens.")
    add(
        "--open-readiness",
        action="store_true",
        help="Answer /ready and /health without an API key, as probes often must.",
    )
    add(
        "--allow-route",
        action="append",
        default=[],
        metavar="PATH",
        help="Also serve this path of vLLM's, guarded by the API keys, without kv_cache in its "
        "answers. May be repeated.",
    )
    add(
        "--max-inflight-requests",
        type=_positive,
        default=1024,
        help="Requests for generation at a time, of one API server process; 429 beyond.",
    )
    add("--max-body-bytes", type=_positive, default=8 * 2**20, help="413 beyond.")
    add("--max-header-bytes", type=_positive, default=32 * 2**10, help="431 beyond.")
    add(
        "--max-choices",
        type=_positive,
        default=128,
        help="Samples that one request may ask for, prompts times n.",
    )
    add("--max-stop-strings", type=_positive, default=16, help="Stop strings of one request.")
    add(
        "--max-output-tokens",
        type=_positive,
        help="Most output tokens that one request may ask for, and gets when it asks for none. "
        "Unset: what the model's context leaves.",
    )
    add(
        "--no-access-log",
        action="store_true",
        help="No JSON line a request on standard output.",
    )
