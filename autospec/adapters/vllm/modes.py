"""When the plan of a step can be made, read from vLLM's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autospec.errors import EngineError
from autospec.records import EngineInfo, ProposerInfo

log = logging.getLogger("autospec")

LOOKUP_METHODS = ("ngram", "suffix")
"""Methods whose work AutoSpec's own proposers do, in the scheduler's process."""

STATELESS_METHODS = ("custom_class", "medusa")
"""Methods that keep nothing between steps: they can draft later as well as at once."""

PARALLEL_METHODS = ("custom_class", "medusa", "dflash", "dspark", "ngram_gpu", "mlp_speculator")
FIXED_DEPTH_METHODS = ("medusa", "suffix")
"""Methods that insist on drafting ``num_speculative_tokens`` (model runner V1)."""


class Mode(Enum):
    """NOW: plan just before the step, draft after the plan. AHEAD: plan one step earlier."""

    NOW = "now"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Drafting:
    """How the configured method takes part. ``model`` is None if only AutoSpec's lookups draft."""

    mode: Mode
    reason: str
    model: ProposerInfo | None
    fixed_depth: bool


def drafting_of(vllm_config: Any, model_max_k: int | None) -> Drafting:
    """What the configuration allows. Raises EngineError where AutoSpec cannot work at all."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise EngineError(
            "AutoSpecScheduler needs speculative decoding to be on: give --speculative-config, at "
            'least \'{"method": "ngram", "num_speculative_tokens": 8}\' (AutoSpec then drafts with '
            "its own n-gram and suffix lookups), or let `autospec vllm-args` write it"
        )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        raise EngineError(
            f"data_parallel_size is {parallel.data_parallel_size}; AutoSpec needs 1. Each "
            "data-parallel rank has a scheduler of its own, they would choose different numbers of "
            "draft tokens, and ranks that wait for each other would hang. Run one server a replica "
            "and balance between them; tensor and pipeline parallelism work"
        )
    method = str(speculative.method)
    most = int(vllm_config.num_speculative_tokens)
    depth = most if model_max_k is None else min(most, model_max_k)
    is_parallel = method in PARALLEL_METHODS or bool(speculative.parallel_drafting)
    reason = _why_ahead(vllm_config, method)
    fixed = method in FIXED_DEPTH_METHODS
    if not reason and method in LOOKUP_METHODS:
        return Drafting(Mode.NOW, "", None, fixed)
    model = ProposerInfo(
        method,
        "parallel" if is_parallel or method in LOOKUP_METHODS else "sequential",
        depth,
        needs_state=method not in (*STATELESS_METHODS, *LOOKUP_METHODS, "ngram_gpu"),
    )
    return Drafting(Mode.AHEAD if reason else Mode.NOW, reason, model, fixed)


def _why_ahead(vllm_config: Any, method: str) -> str:
    """Why drafts cannot wait for the plan; empty where they can."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    if vllm_config.scheduler_config.async_scheduling:
        return "asynchronous scheduling"
    if vllm_config.use_v2_model_runner:
        return "model runner V2"
    if method in LOOKUP_METHODS:
        return ""
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if method in STATELESS_METHODS:
        return ""
    known = method in ("draft_model", "eagle", "eagle3", "mtp") or method.endswith("_mtp")
    if not known or speculative.parallel_drafting:
        return f"method {method}"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if model.is_multimodal_model or model.uses_mrope:
        return "a multimodal target"
    return ""


def engine_of(vllm_config: Any, version: str) -> EngineInfo:
    """The engine as profiles know it."""
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    sizes = tuple(sorted(int(size) for size in compilation.cudagraph_capture_sizes or ()))
    mode = compilation.cudagraph_mode
    captures = bool(sizes) and not model.enforce_eager and mode is not None and mode.value != 0
    return EngineInfo(
        target=str(model.model),
        engine="vllm",
        version=version,
        device=_device_of(vllm_config),
        dtype=str(model.dtype).removeprefix("torch."),
        shape="stepped" if captures else "packed",
        captured_sizes=sizes if captures else (),
    )


def _device_of(vllm_config: Any) -> str:
    """What step times belong to: the device's own name, and how many of them take a step."""
    name = str(vllm_config.device_config.device_type)
    count = int(vllm_config.parallel_config.world_size)
    if name != "cpu":
        from vllm.platforms import current_platform

        try:
            name = str(current_platform.get_device_name())
        except Exception as error:  # a platform that does not tell: profiles are less exact then
            log.warning("profiles go by the device %r: its name is not told (%s)", name, error)
    return name if count == 1 else f"{name} x{count}"
