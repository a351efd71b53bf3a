# SPDX-License-Identifier: Apache-2.0
"""``python -m server``: vLLM's OpenAI server, with the policy on and this front end around it.

Takes every option of ``vllm serve``. Without ``--model`` it serves the embedded default model.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace

from randkv import compactor, patching
from randkv.errors import RandKVCompactorError, RandKVPatchError
from server.options import parse_arguments
from server.record import write_line


def announce(parsed: Namespace) -> None:
    """Wait until the server answers, then say how to talk to it."""
    scheme = "https" if parsed.ssl_certfile else "http"
    url = f"{scheme}://{_reachable(parsed.host)}:{parsed.port}"
    metrics = url
    if parsed.metrics_port is not None:
        metrics = f"http://{_reachable(parsed.metrics_host)}:{parsed.metrics_port}"
    while not _is_live(url):
        time.sleep(0.2)
    name = (parsed.served_model_name or [parsed.model])[0]
    question = '"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0'
    body = f'{{"model": "{name}", {question}}}'
    text = (
        f"\nReady: {name} with kv_cache_policy {parsed.kv_cache_policy}.\n"
        "Try, in another terminal:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'\n\n"
        f"or open {url}/ in a browser. Metrics: {metrics}/metrics\n"
        'Stop with Ctrl-C. Options: python -m server --help, or make serve ARGS="--help".'
    )
    write_line(text)


def _reachable(host: str | None) -> str:
    """`host`, as a URL has it, from this machine."""
    if host in (None, "", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _is_live(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/live", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError as error:
        # A certificate that this machine does not trust is an answer too.
        return "CERTIFICATE_VERIFY_FAILED" in str(error)
    except OSError:
        return False


def main() -> int:
    try:
        patching.check()
    except RandKVPatchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent anywhere unless asked for
    # Huge pages where the system grants them: rounds touch a little of much memory.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform

    cli_env_setup()
    if current_platform.is_unspecified():
        sys.stderr.write(
            "error: vLLM sees no device that it was built for. With its build for NVIDIA GPUs: is "
            "there a GPU (nvidia-smi), and is it given to this container (docker run --gpus all, "
            "with the NVIDIA container toolkit)? Without one: the image for CPUs, or make serve.\n"
        )
        return 1
    parsed = parse_arguments(sys.argv[1:])
    try:
        compactor.check(parsed.kv_cache_compactor, current_platform.device_type)
    except RandKVCompactorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not parsed.headless and not parsed.uds:
        threading.Thread(target=announce, args=(parsed,), daemon=True).start()
    ServeSubcommand.cmd(parsed)
    return 1 if getattr(parsed, "engine_is_dead", False) else 0


if __name__ == "__main__":
    raise SystemExit(main())
