"""TensorRT-LLM: ``speculative_config`` of the YAML for ``trtllm-serve --config``.

Rules, as read in ``tensorrt_llm/llmapi/llm_args.py``. ``draft_len_schedule`` maps batch sizes to
draft lengths. Before pull request 10860 (first in 1.3.0rc8) its keys are lower bounds, 1 must be
one of them and have ``max_draft_len``. Since then they are upper bounds, the smallest key must have
``max_draft_len``, and batches above the largest key do not speculate. No length may exceed
``max_draft_len``. ``max_concurrency`` switches speculation off above it; the two exclude each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from packaging.version import Version

from autospec.errors import ExportError
from autospec.export.plan import Plan, Rendered, Wish, common_notes, make_plan, requirement
from autospec.export.versions import parse_version
from autospec.outlook import Outlook

OLDEST = "1.2.0"
UPPER_BOUNDS = Version("1.3.0rc8")
DECODING_TYPES: Mapping[str, str] = {
    "ngram": "NGram",
    "suffix": "SA",
    "draft_model": "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
}
FILE_NAME = "tensorrt-llm.yaml"


def export(outlook: Outlook, wish: Wish) -> Rendered:
    """The YAML and the flag that names it. Raises ExportError."""
    version = parse_version(wish.version, "TensorRT-LLM", OLDEST, "1.3.0rc8")
    is_new = version is None or version >= UPPER_BOUNDS
    supported = {name: kind for name, kind in DECODING_TYPES.items() if is_new or name != "suffix"}
    plan = make_plan(outlook, wish, "TensorRT-LLM", supported, falling=True)
    config = speculative_config(plan, wish, upper_bounds=is_new)
    text = yaml.safe_dump({"speculative_config": config}, sort_keys=False)
    notes = [*common_notes(plan)]
    if version is None:
        notes.append(f"for {UPPER_BOUNDS} and later; older ones need --engine-version")
    return Rendered(("--config", FILE_NAME), FILE_NAME, text, tuple(notes))


def speculative_config(plan: Plan, wish: Wish, *, upper_bounds: bool) -> dict[str, Any]:
    """The keys of the engine's ``DecodingBaseConfig`` and its subclass."""
    kind = DECODING_TYPES[plan.proposer]
    config: dict[str, Any] = {"decoding_type": kind, "max_draft_len": plan.max_k}
    if kind in {"Draft_Target", "Eagle3"}:
        config["speculative_model"] = requirement(wish, "TensorRT-LLM", plan.proposer)
    if kind == "NGram":
        if plan.settings is not None:
            if plan.settings.max_match is None:
                raise ExportError(
                    "the profile does not hold ngram's match lengths, which TensorRT-LLM needs"
                )
            config["max_matching_ngram_size"] = plan.settings.max_match
        # AutoSpec looks up in the request itself and takes the newest match.
        config["is_use_oldest"] = False
        config["is_public_pool"] = False
    drafting = [band for band in plan.bands if band.k > 0]
    if len(drafting) == 1:
        config["max_concurrency"] = drafting[0].last
    elif upper_bounds:
        config["draft_len_schedule"] = {band.last: band.k for band in drafting}
    else:
        config["draft_len_schedule"] = {band.first: band.k for band in plan.bands}
    return config
