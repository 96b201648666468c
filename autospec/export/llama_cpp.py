"""llama.cpp: ``llama-server``'s flags for drafting. It has one k, whatever the batch.

Build b8955 (pull request 22397) renamed the flags; the old ones now end the start with an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from autospec.export.plan import Plan, Rendered, Wish, common_notes, make_plan, requirement
from autospec.export.versions import parse_build
from autospec.outlook import Outlook

OLDEST_BUILD = 7900
RENAMED_BUILD = 8955
TYPES: Mapping[str, str] = {
    "ngram": "ngram-simple",
    "suffix": "ngram-simple",
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
}
_OLD_TYPES = {"ngram", "suffix", "draft_model"}


def export(outlook: Outlook, wish: Wish) -> Rendered:
    """Flags for ``llama-server``. Raises ExportError."""
    build = parse_build(wish.version, OLDEST_BUILD)
    is_new = build is None or build >= RENAMED_BUILD
    supported = {name: kind for name, kind in TYPES.items() if is_new or name in _OLD_TYPES}
    plan = make_plan(outlook, wish, "llama.cpp", supported)
    notes = [
        "llama.cpp has one k, whatever the batch: it is meant for up to "
        f"{plan.last_drafting} slots in use (-np)"
    ]
    k = plan.one_k(outlook)
    flags = _new_flags(plan, k, wish) if is_new else _old_flags(plan, k, wish)
    if build is None:
        notes.append(f"for build b{RENAMED_BUILD} and later; older ones need --engine-version")
    return Rendered(flags, notes=(*common_notes(plan), *notes))


def _new_flags(plan: Plan, k: int, wish: Wish) -> tuple[str, ...]:
    kind = TYPES[plan.proposer]
    flags = ["--spec-type", kind]
    if kind == "ngram-simple":
        if plan.settings is not None and plan.settings.min_match is not None:
            flags += ["--spec-ngram-simple-size-n", str(plan.settings.min_match)]
        return (*flags, "--spec-ngram-simple-size-m", str(k))
    if kind != "draft-mtp":
        flags += ["--spec-draft-model", requirement(wish, "llama.cpp", plan.proposer)]
    flags += ["--spec-draft-n-max", str(k), "--spec-draft-n-min", "0"]
    return (*flags, *_confidence("--spec-draft-p-min", plan))


def _old_flags(plan: Plan, k: int, wish: Wish) -> tuple[str, ...]:
    flags = ["--draft-max", str(k), "--draft-min", "0"]
    if TYPES[plan.proposer] == "ngram-simple":
        flags += ["--spec-type", "ngram-simple", "--spec-ngram-size-m", str(k)]
        if plan.settings is not None and plan.settings.min_match is not None:
            flags += ["--spec-ngram-size-n", str(plan.settings.min_match)]
        return tuple(flags)
    flags += ["--model-draft", requirement(wish, "llama.cpp", plan.proposer)]
    return (*flags, *_confidence("--draft-p-min", plan))


def _confidence(flag: str, plan: Plan) -> tuple[str, ...]:
    """Where a draft stops: its default differs between builds, so it is always said."""
    stop = 0.0 if plan.settings is None else plan.settings.min_confidence or 0.0
    return (flag, f"{stop:g}")
