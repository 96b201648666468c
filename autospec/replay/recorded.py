"""Models of a cost file that can be replayed: those that every request has a record of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autospec.errors import InputError
from autospec.replay.cost_file import AppendedSeconds, CostFile, LookupSeconds
from autospec.replay.trace import TraceRequest


def recorded_part(cost: CostFile, requests: Sequence[TraceRequest]) -> CostFile:
    """The cost file without models that some request has no record of, and what goes on from them.

    What never drafts must not say how the others do.
    """
    kept = {}
    for name, part in cost.proposers.items():
        model = part.head if isinstance(part, AppendedSeconds) else name
        if isinstance(part, LookupSeconds) or all(model in each.accepted for each in requests):
            kept[name] = part
    return cost.model_copy(update={"proposers": kept})


def check_recorded(path: Path, cost: CostFile, requests: Sequence[TraceRequest]) -> None:
    """Raise InputError that names every model of the cost file that requests lack a record of."""
    mistakes = []
    known = sorted({name for each in requests for name in each.accepted})
    for name, part in cost.proposers.items():
        if isinstance(part, LookupSeconds | AppendedSeconds):
            continue
        bare = [each.id for each in requests if name not in each.accepted]
        if bare:
            mistakes.append(
                f"{path}: proposers.{name}: {len(bare)} of {len(requests)} requests have no "
                f"accepted.{name} in their traces, such as {bare[0]!r}; recorded there: "
                f"{', '.join(known) or 'no model'}. Record it (autospec record --draft FOLDER or "
                f"--head FOLDER), or take {name} and what goes on from it out of the cost file"
            )
    if mistakes:
        raise InputError("\n".join(mistakes))
