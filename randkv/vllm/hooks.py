# SPDX-License-Identifier: Apache-2.0
"""The functions that the patched vLLM calls. Import-light: vLLM imports this while it loads.

Each hook is named after the place it is called from. With ``kv_cache_policy`` unset, every hook
returns None or its argument unchanged, and vLLM takes the path it always took.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from randkv.config import EnginePolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.executor import Executor

    from randkv.vllm.report import KVCacheReport
    from randkv.vllm.scheduler import RequestState, SchedulerPolicy
    from randkv.vllm.worker import WorkerPolicy


def engine_policy(vllm_config: VllmConfig) -> EnginePolicy | None:
    """The engine's policy, once `verify_config` has parsed it; None when off."""
    policy: EnginePolicy | None = vllm_config.cache_config.kv_cache_policy
    return policy


def verify_config(vllm_config: VllmConfig) -> None:
    """Called when the engine's configuration is complete: parse the policy, check what it needs.

    Mutates ``cache_config.kv_cache_policy``: from what the user gave to an `EnginePolicy`.

    Raises:
        RandKVConfigError: Bad policy, limits or compactor.
        RandKVCompactorError: The native compactor cannot be loaded.
        RandKVPatchError: vLLM is not patched, or only in part.
        RandKVUnsupportedError: Lists every reason the policy cannot run.
    """
    cache_config = vllm_config.cache_config
    if not isinstance(cache_config.kv_cache_policy, EnginePolicy):
        cache_config.kv_cache_policy = EnginePolicy.parse(
            cache_config.kv_cache_policy, cache_config.kv_cache_policy_limits
        )
    if cache_config.kv_cache_policy is None:
        return
    from randkv import compactor, patching
    from randkv.vllm.support import refuse_unsupported

    patching.check()
    refuse_unsupported(vllm_config)
    compactor.check(cache_config.kv_cache_compactor, vllm_config.device_config.device_type)


def engine_process_started(vllm_config: VllmConfig) -> None:
    """Called first in an engine process: it will not outlive the process that started it."""
    if engine_policy(vllm_config) is not None:
        from randkv.vllm.process import end_with_parent

        end_with_parent()


def max_physical_len(vllm_config: VllmConfig, max_model_len: int) -> int:
    """The most tokens one request can hold in the KV cache, for the start-up memory check."""
    policy = engine_policy(vllm_config)
    bound = None if policy is None else policy.max_physical_len
    if bound is None:
        return max_model_len
    # One block of the pool is vLLM's null block, which no request can have.
    return min(max_model_len, bound + vllm_config.cache_config.block_size)


def resolve_request(
    vllm_config: VllmConfig, request: EngineCoreRequest, resumable: bool
) -> EngineCoreRequest:
    """Validate a new request's override and put the resolved policy into its ``extra_args``.

    Raises:
        RequestPolicyError: Names the field; fails this request alone.
    """
    from randkv.vllm.requests import resolve

    resolve(engine_policy(vllm_config), request, resumable)
    return request


def refuse_beam_search(vllm_config: VllmConfig) -> None:
    """Raises RequestPolicyError when beams would be decoded under the policy."""
    policy = engine_policy(vllm_config)
    if policy is not None and policy.default is not None:
        from randkv.vllm.requests import beam_search_error

        raise beam_search_error()


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Sampling parameters of sample `index` of a request with ``n > 1``: its own request key."""
    from randkv.vllm.requests import child_params as with_child_key

    return with_child_key(params, index)


def scheduler_policy(
    vllm_config: VllmConfig, kv_cache_manager: KVCacheManager
) -> SchedulerPolicy | None:
    if engine_policy(vllm_config) is None:
        return None
    from randkv.vllm.scheduler import SchedulerPolicy

    return SchedulerPolicy(kv_cache_manager)


def connect_ranks(scheduler: SchedulerInterface, executor: Executor) -> None:
    """Called once both exist: the scheduler's policy can ask every rank for its counts.

    It has to where a step's output does not say it all: with several ranks, and on a device that
    carries out a step's rounds after the host has moved on.
    """
    policy = getattr(scheduler, "kv_cache_policy", None)
    config = executor.vllm_config
    if policy is not None and (
        config.parallel_config.world_size > 1 or config.device_config.device_type != "cpu"
    ):
        from randkv.vllm.ranks import RankCounts

        policy.ranks = RankCounts(partial(executor.collective_rpc, non_block=True))


def request_state(params: SamplingParams | None) -> RequestState | None:
    """Engine-side state of a new request; None when its engine has no policy."""
    extra_args = None if params is None else params.extra_args
    policy = (extra_args or {}).get("kv_cache_policy")
    if policy is None:
        return None
    from randkv.vllm.scheduler import RequestState

    return RequestState.from_dict(policy)


def worker_policy(vllm_config: VllmConfig) -> WorkerPolicy | None:
    """The policy of whichever model runner vLLM has picked."""
    if engine_policy(vllm_config) is None:
        return None
    if vllm_config.use_v2_model_runner:
        from randkv.vllm.runner_v2 import RunnerV2Policy

        return RunnerV2Policy()
    from randkv.vllm.runner_v1 import RunnerV1Policy

    return RunnerV1Policy()


def merged_report(outputs: Sequence[CompletionOutput]) -> KVCacheReport | None:
    """``RequestOutput.kv_cache``: the report of the only sample, or the sum over samples.

    Counts the samples that finished in this output: in a stream of a request with ``n > 1`` each
    sample's last output carries its own report.
    """
    reports: list[Any] = [output.kv_cache for output in outputs if output.kv_cache is not None]
    if len(reports) < 2:
        return reports[0] if reports else None
    from randkv.vllm.report import merge

    return merge(reports)
