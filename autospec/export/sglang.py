"""SGLang: ``--speculative-*`` flags, and the adaptive JSON keyed by batch size.

Rules, as read in its sources (``adaptive_spec_params.py`` and ``adaptive_step_router.py`` in
``srt/speculative``, and ``server_args.py``): the JSON's keys are lower bounds of the batch size, as
text; each entry has ``candidate_steps``, a list of whole numbers from 0 on, of which
``--speculative-num-steps`` must be one; only EAGLE and EAGLE3 with ``--speculative-eagle-topk 1``
adapt; draft tokens are steps + 1. Entries by batch size came with pull request 24055 (0.5.13), zero
steps with 23994.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from autospec.export.plan import Plan, Rendered, Wish, common_notes, make_plan, requirement
from autospec.export.versions import parse_version
from autospec.outlook import Outlook

OLDEST = "0.5.0"
BY_BATCH_SIZE = Version("0.5.13")
ALGORITHMS: Mapping[str, str] = {
    "ngram": "NGRAM",
    "suffix": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
}
_ADAPTIVE = {"EAGLE", "EAGLE3"}
FILE_NAME = "sglang-adaptive.json"


def export(outlook: Outlook, wish: Wish) -> Rendered:
    """Flags for ``sglang.launch_server``, with a file where they adapt. Raises ExportError."""
    version = parse_version(wish.version, "SGLang", OLDEST, "0.5.23")
    plan = make_plan(outlook, wish, "SGLang", ALGORITHMS)
    algorithm = ALGORITHMS[plan.proposer]
    adapts = algorithm in _ADAPTIVE and (version is None or version >= BY_BATCH_SIZE)
    notes = list(common_notes(plan))
    k = plan.max_k if adapts else plan.one_k(outlook)
    if not adapts:
        why = (
            f"SGLang before {BY_BATCH_SIZE} does not adapt by batch size"
            if algorithm in _ADAPTIVE
            else f"SGLang's {algorithm} has one k for all batch sizes"
        )
        notes.append(f"{why}: it is meant for up to {plan.last_drafting} running requests")
    flags = ["--speculative-algorithm", algorithm]
    if algorithm == "NGRAM":
        flags += ["--speculative-num-draft-tokens", str(k + 1)]
        flags += ["--speculative-ngram-max-bfs-breadth", "1"]
        if plan.settings is not None and plan.settings.max_match is not None:
            flags += ["--speculative-ngram-max-trie-depth", str(plan.settings.max_match)]
        return Rendered(tuple(flags), notes=tuple(notes))
    if algorithm != "NEXTN":
        flags += ["--speculative-draft-model-path", requirement(wish, "SGLang", plan.proposer)]
    flags += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", str(k + 1)]
    if not adapts:
        return Rendered(tuple(flags), notes=tuple(notes))
    flags += ["--speculative-adaptive", "--speculative-adaptive-config", FILE_NAME]
    text = json.dumps(adaptive_config(plan), indent=2) + "\n"
    return Rendered(tuple(flags), FILE_NAME, text, tuple(notes))


def adaptive_config(plan: Plan) -> dict[str, Any]:
    """One number of steps per band, so that the learned schedule is obeyed as it is."""
    return {str(band.first): {"candidate_steps": [band.k]} for band in plan.bands}
