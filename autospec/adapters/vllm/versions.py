"""Which vLLM was tested, and whether the installed one still has what AutoSpec hooks into."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass
from importlib import import_module

from autospec.errors import EngineError, MissingDependency

log = logging.getLogger("autospec")

TESTED = ((0, 32), (0, 32))
"""First and last tested (major, minor), both included."""

TESTED_TEXT = "0.32"


@dataclass(frozen=True, slots=True)
class Hook:
    """An attribute of vLLM that AutoSpec overrides or reads, and parameters it must have."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    text: str | None = None  # must occur in its source

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


SCHEDULER_HOOKS = (
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("throttle_prefills",),
         "self.dynamic_sd_lookup"),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output",
         ("scheduler_output", "model_runner_output")),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.get_grammar_bitmask", ("scheduler_output",)),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids", ("draft_token_ids",),
         "spec_token_ids"),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._update_after_schedule",
         ("scheduler_output",)),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._update_request_as_session",
         ("session", "update")),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("request",)),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts"),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.shutdown"),
    Hook("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule",
         ("scheduler_output",), "num_output_placeholders"),
    Hook("vllm.v1.structured_output", "StructuredOutputManager.validate_tokens", ("request",)),
)  # fmt: skip

WORKER_HOOKS = (
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",),
         "_update_states"),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ("grammar_output",),
         "propose_draft_token_ids"),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.propose_draft_token_ids",
         ("scheduler_output", "sampled_token_ids", "hidden_states", "sample_hidden_states",
          "aux_hidden_states", "spec_decode_metadata", "common_attn_metadata"),
         "num_spec_tokens_to_schedule"),
    Hook("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer.propose",
         ("num_speculative_tokens", "target_token_ids", "target_positions",
          "target_hidden_states", "next_token_ids", "token_indices_to_sample",
          "common_attn_metadata", "sampling_metadata")),
    Hook("vllm.v1.attention.backend", "CommonAttentionMetadata",
         ("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor",
          "slot_mapping")),
)  # fmt: skip


def installed_version() -> str:
    """The installed vLLM's version. Raises MissingDependency."""
    try:
        version = import_module("vllm.version").__version__
    except ImportError:
        raise MissingDependency(
            'the vLLM adapter needs vLLM: pip install "autospec-llm[vllm]"'
        ) from None
    return str(version)


def is_tested(version: str) -> bool:
    """Whether a version such as 0.32.1+cpu lies in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return False
    return TESTED[0] <= (int(found[1]), int(found[2])) <= TESTED[1]


def missing_hooks(hooks: tuple[Hook, ...]) -> list[str]:
    """What of ``hooks`` the installed vLLM lacks, each in a few words."""
    return [complaint for hook in hooks if (complaint := _complaint(hook)) is not None]


def check_version() -> str:
    """Warn about a vLLM that was not tested; returns its version. Raises MissingDependency."""
    version = installed_version()
    if not is_tested(version):
        log.warning(
            "AutoSpec was tested with vLLM %s, not with %s; it will try, and say so if a hook "
            "is missing",
            TESTED_TEXT,
            version,
        )
    return version


def require_hooks(hooks: tuple[Hook, ...]) -> None:
    """Raise EngineError that names every missing hook and the versions that have them."""
    missing = missing_hooks(hooks)
    if missing:
        raise EngineError(
            f"vLLM {installed_version()} lacks what AutoSpec hooks into: {'; '.join(missing)}. "
            f"Versions that work: {TESTED_TEXT}. Install one of them, or start vLLM without "
            "--scheduler-cls"
        )


def _complaint(hook: Hook) -> str | None:
    try:
        found: object = import_module(hook.module)
    except ImportError as error:
        return f"{hook.module} ({error})"
    for part in hook.name.split("."):
        if not hasattr(found, part):
            return f"{hook.path} (not there)"
        found = getattr(found, part)
    if callable(found):
        found = getattr(found, "autospec_original", inspect.unwrap(found))
    if hook.parameters and callable(found):
        has = inspect.signature(found).parameters
        lacking = [name for name in hook.parameters if name not in has]
        if lacking:
            return f"{hook.path} (no parameter {', '.join(lacking)})"
    if hook.text is not None and callable(found):
        try:
            if hook.text not in inspect.getsource(found):
                return f"{hook.path} (no longer uses {hook.text})"
        except (OSError, TypeError):
            return None
    return None
