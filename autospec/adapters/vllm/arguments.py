"""vLLM's arguments that put AutoSpec in charge, so that nobody has to know the hooks' names."""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from autospec.adapters.vllm.graphs import candidate_ks, naming_table
from autospec.adapters.vllm.modes import LOOKUP_METHODS, PARALLEL_METHODS
from autospec.adapters.vllm.options import KEY, parse_options
from autospec.config import load_settings
from autospec.errors import ConfigError, ProfileError
from autospec.profile.file import load_profile

SCHEDULER_CLS = "autospec.adapters.vllm.AutoSpecScheduler"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
DEFAULT_K = 8

Arguments = TypeVar("Arguments")


def configure(
    engine_args: Arguments,
    *,
    policy: str | Path = "default",
    profile: str | Path | None = None,
    journal: str | Path | None = None,
    lookups: Sequence[str] | None = None,
    combine: bool = False,
    ks: Sequence[int] | None = None,
) -> Arguments:
    """A copy of vLLM's arguments with AutoSpec in it.

    ``engine_args`` is vLLM's EngineArgs or AsyncEngineArgs, or the keyword arguments of ``LLM`` as
    a dict. ``profile`` is loaded at start and saved to; ``lookups`` are AutoSpec's own proposers
    (``ngram``, ``suffix``; both by default). Without a ``speculative_config`` they draft alone, as
    many tokens as a tuned profile says.
    ``combine`` lets them compete with the configured drafter where vLLM would plan one step ahead:
    it asks for synchronous scheduling and, in the environment, for model runner V1. ``ks`` are the
    k values to capture CUDA graphs for. The scheduler turns asynchronous where vLLM schedules so.
    Raises ConfigError for anything that does not fit.
    """
    given: dict[str, Any] = (
        dict(engine_args) if isinstance(engine_args, Mapping) else vars(engine_args)
    )
    changed = engine_changes(
        given,
        policy=policy,
        profile=profile,
        journal=journal,
        lookups=lookups,
        combine=combine,
        ks=ks,
    )
    if combine:
        os.environ[RUNNER_VARIABLE] = "0"
    if isinstance(engine_args, Mapping):
        return {**engine_args, **changed}  # type: ignore[return-value]
    configured = copy.copy(engine_args)
    for name, value in changed.items():
        setattr(configured, name, value)
    return configured


def engine_changes(
    given: Mapping[str, Any],
    *,
    policy: str | Path = "default",
    profile: str | Path | None = None,
    journal: str | Path | None = None,
    lookups: Sequence[str] | None = None,
    combine: bool = False,
    ks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The arguments that ``configure`` sets, by name. Raises ConfigError."""
    load_settings(str(policy))
    if given.get("data_parallel_size", 1) not in (None, 1):
        raise ConfigError(
            f"data_parallel_size is {given['data_parallel_size']}; AutoSpec needs 1: every "
            "data-parallel rank has a scheduler of its own. Run one server a replica"
        )
    scheduler = given.get("scheduler_cls")
    if scheduler not in (None, SCHEDULER_CLS):
        raise ConfigError(
            f"scheduler_cls is already {scheduler!r}; AutoSpec's scheduler cannot be combined with "
            "another one: leave it out"
        )
    speculative = given.get("speculative_config")
    if speculative is None:
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": _lookups_k(profile),
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    speculative = dict(speculative)
    method = speculative.get("method")
    options: dict[str, Any] = {"policy": str(policy)}
    if profile is not None:
        options["profile"] = str(profile)
    if journal is not None:
        options["journal"] = str(journal)
    if lookups is not None:
        options["lookups"] = list(lookups)
    additional = dict(given.get("additional_config") or {})
    additional[KEY] = {**additional.get(KEY, {}), **options}
    parse_options(additional)
    most = speculative.get("num_speculative_tokens")
    captures = not given.get("enforce_eager") and not combine and method not in LOOKUP_METHODS
    if captures and most is not None and method not in PARALLEL_METHODS:
        table = speculative.get("num_speculative_tokens_per_batch_size")
        if table is None or ks is not None:
            requests = given.get("max_num_seqs") or len(candidate_ks(int(most)))
            speculative["num_speculative_tokens_per_batch_size"] = naming_table(
                candidate_ks(int(most)) if ks is None else ks, int(requests)
            )
    changed: dict[str, Any] = {
        "scheduler_cls": SCHEDULER_CLS,
        "speculative_config": speculative,
        "additional_config": additional,
    }
    if combine:
        changed["async_scheduling"] = False
    return changed


def _lookups_k(profile: str | Path | None) -> int:
    """As many draft tokens as the lookups of a tuned profile may use."""
    try:
        tuned = None if profile is None else load_profile(Path(profile).expanduser()).tuned
    except ProfileError:  # not there yet, or told of when the engine starts
        tuned = None
    if tuned is None:
        return DEFAULT_K
    found = [each.max_k for each in tuned.proposers.values() if each.kind == "lookup"]
    return max(found, default=DEFAULT_K)


def command_line(changed: Mapping[str, Any]) -> str:
    """The same as shell words for ``vllm serve`` or the OpenAI API server."""
    words: list[str] = []
    for name, value in changed.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            words.append(option.replace("--", "--no-", 1))
        else:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            words += [option, shlex.quote(text)]
    return " ".join(words)
