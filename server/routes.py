# SPDX-License-Identifier: Apache-2.0
"""The front end's own routes, beside vLLM's."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from randkv.config import MAX_REQUEST_KEY_LEN, MAX_SEED, MAX_TOKENS, EnginePolicy, RandKVConfig
from randkv.errors import RandKVConfigError
from randkv.retention import MAX_COMPUTED_TOKENS, retention_map
from randkv.retention_picture import to_png, to_svg
from server.refusal import error_body

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from server.service import Service

router = APIRouter()
_PAGE = Path(__file__).with_name("playground") / "index.html"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_one_map_at_a_time = CapacityLimiter(1)


class Format(StrEnum):
    """Of the retention map."""

    JSON = "json"
    SVG = "svg"
    PNG = "png"


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """The playground: one static page."""
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)


@router.get("/live", response_class=Response)
async def live() -> Response:
    """Liveness: this process answers."""
    return Response(status_code=200)


@router.get("/ready", responses={503: {"description": "Draining, or the engine is dead."}})
async def ready(request: Request) -> JSONResponse:
    """Readiness: new requests are taken, and the engine lives."""
    is_ready = _service(request).is_ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/v1/kv_cache/policy")
async def policy(request: Request) -> JSONResponse:
    """The default policy, what a request may ask for, and what both mean in memory."""
    service = _service(request)
    return JSONResponse(describe(service.policy, service.engine_client.vllm_config))


@router.get("/v1/kv_cache/retention", responses={400: {"description": "A bad argument."}})
async def retention(
    request: Request,
    request_key: Annotated[str, Query(min_length=1, max_length=MAX_REQUEST_KEY_LEN)],
    prompt_tokens: Annotated[int, Query(ge=1, le=MAX_COMPUTED_TOKENS)],
    computed_tokens: Annotated[
        int, Query(ge=1, le=MAX_COMPUTED_TOKENS, description="Prompt and generated tokens.")
    ],
    budget: Annotated[int | None, Query(ge=1, le=MAX_TOKENS)] = None,
    buffer_size: Annotated[int | None, Query(ge=0, le=MAX_TOKENS)] = None,
    seed: Annotated[int | None, Query(ge=0, le=MAX_SEED)] = None,
    layer: Annotated[int, Query(ge=0)] = 0,
    format: Annotated[Format, Query(description="Default: JSON.")] = Format.JSON,
) -> Response:
    """Which positions each KV head of a layer holds: a pure function of the request's key.

    Budget, buffer size and seed are the server's defaults where they are not given.
    """
    service = _service(request)
    config = service.engine_client.vllm_config
    default = (service.policy.default if service.policy else None) or RandKVConfig()
    num_layers = config.model_config.get_total_num_hidden_layers()
    try:
        if layer >= num_layers:
            raise RandKVConfigError("layer", layer, f"an integer from 0 to {num_layers - 1}")
        make = partial(
            retention_map,
            RandKVConfig(
                default.budget if budget is None else budget,
                default.buffer_size if buffer_size is None else buffer_size,
                default.seed if seed is None else seed,
            ),
            request_key=request_key,
            prompt_tokens=prompt_tokens,
            computed_tokens=computed_tokens,
            layer=layer,
            num_kv_heads=config.model_config.get_total_num_kv_heads(),
        )
        return await to_thread.run_sync(_render, make, format, limiter=_one_map_at_a_time)
    except RandKVConfigError as error:
        param = error.field.removeprefix("kv_cache_policy.")
        return JSONResponse(error_body(400, str(error), param), 400)


def _render(make: partial[Any], format_: Format) -> Response:
    found = make()
    if format_ is Format.SVG:
        return Response(to_svg(found), media_type="image/svg+xml")
    if format_ is Format.PNG:
        return Response(to_png(found), media_type="image/png")
    return JSONResponse(found.to_dict())


def describe(engine_policy: EnginePolicy | None, vllm_config: VllmConfig) -> dict[str, Any]:
    """The body of ``GET /v1/kv_cache/policy``."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache = vllm_config.model_config, vllm_config.cache_config
    num_layers, num_kv_heads = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    bytes_per_token = 2 * num_layers * num_kv_heads * model.get_head_size() * dtype.itemsize
    num_engines = vllm_config.parallel_config.data_parallel_size
    # One block of each engine is vLLM's null block.
    num_blocks = (cache.num_gpu_blocks or 0) - num_engines
    default = engine_policy.default if engine_policy else None
    bound = None
    if default is not None:
        tokens = min(default.max_physical_len, model.max_model_len)
        blocks = -(-tokens // cache.block_size)
        bound = {
            "tokens": tokens,
            "blocks": blocks,
            "bytes": blocks * cache.block_size * bytes_per_token,
        }
    dense_blocks = -(-model.max_model_len // cache.block_size)
    return {
        "default": default.to_dict() if default else {"type": "dense"},
        "limits": engine_policy.limits.to_dict() if engine_policy else None,
        "model": {
            "name": model.served_model_name,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_size": model.get_head_size(),
            "kv_cache_dtype": str(dtype).removeprefix("torch."),
        },
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "num_blocks": num_blocks,
        "bytes_per_token": bytes_per_token,
        "bound": bound,
        "requests_that_fit": num_blocks // bound["blocks"] if bound else None,
        "dense_requests_that_fit": num_blocks // dense_blocks,
    }
