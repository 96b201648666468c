"""vLLM: ``--speculative-config``, with ``num_speculative_tokens_per_batch_size``.

Rules, as read in vLLM 0.32: ``vllm/config/speculative.py`` and
``vllm/v1/spec_decode/dynamic/utils.py``. Entries are (first, last, tokens), both batch sizes
included; they must not overlap and the first must start at 1; the last entry's number holds for
all larger batches; no number may exceed ``num_speculative_tokens``. Suffix and Medusa drafts must
have the configured length, so they take no table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autospec.errors import ExportError
from autospec.export.plan import Plan, Rendered, Wish, common_notes, make_plan, requirement
from autospec.export.versions import parse_version
from autospec.outlook import Outlook

OLDEST = "0.32"
METHODS: Mapping[str, str] = {
    "ngram": "ngram",
    "suffix": "suffix",
    "draft_model": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "mtp": "mtp",
}
_WITHOUT_MODEL = {"ngram", "suffix", "mtp"}
_FIXED_LENGTH = {"suffix", "medusa"}


def export(outlook: Outlook, wish: Wish) -> Rendered:
    """The flag for ``vllm serve``. Raises ExportError."""
    parse_version(wish.version, "vLLM", OLDEST, "0.32.0")
    plan = make_plan(outlook, wish, "vLLM", METHODS)
    config, notes = speculative_config(plan, outlook, wish)
    return Rendered(
        ("--speculative-config", json.dumps(config)), notes=(*common_notes(plan), *notes)
    )


def speculative_config(
    plan: Plan, outlook: Outlook, wish: Wish
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of ``SpeculativeConfig``, and what to know about them."""
    method = METHODS[plan.proposer]
    notes: list[str] = []
    config: dict[str, Any] = {"method": method}
    if method not in _WITHOUT_MODEL:
        config["model"] = requirement(wish, "vLLM", plan.proposer)
    if method in _FIXED_LENGTH:
        config["num_speculative_tokens"] = plan.one_k(outlook)
        notes.append(
            f"vLLM's {method} has one k and cannot be switched off by batch size: it is meant for "
            f"up to {plan.last_drafting} running requests (--max-num-seqs)"
        )
    else:
        config["num_speculative_tokens"] = plan.max_k
        config["num_speculative_tokens_per_batch_size"] = [
            [band.first, band.last, band.k] for band in plan.bands
        ]
    if method == "ngram" and plan.settings is not None:
        if plan.settings.min_match is None or plan.settings.max_match is None:
            raise ExportError("the profile does not hold ngram's match lengths, which vLLM needs")
        config["prompt_lookup_min"] = plan.settings.min_match
        config["prompt_lookup_max"] = plan.settings.max_match
    if method == "suffix" and plan.settings is not None:
        if plan.settings.max_match is not None:
            depth = plan.settings.max_match + config["num_speculative_tokens"]
            config["suffix_decoding_max_tree_depth"] = depth
        if plan.settings.cache_tokens == 0:
            config["suffix_decoding_max_cached_requests"] = 0
    return config, tuple(notes)
