"""From what a profile says to one proposer and its k by batch size, whatever the engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autospec.errors import ExportError
from autospec.export.schedule import MOST_BANDS, Band, fit_bands
from autospec.outlook import Outlook
from autospec.profile.tuned import ProposerSettings
from autospec.records import Float64Array

_PER_OCTAVE = 8  # batch sizes that are looked at


@dataclass(frozen=True, slots=True)
class Wish:
    """What the exporter's user asked for. ``draft_model`` is the path or name of the model that
    drafts; None where the engine can do without. ``version`` None is the newest that is known."""

    version: str | None = None
    proposer: str | None = None
    draft_model: str | None = None
    max_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The proposer, its k by batch size, and the mean of log2 of the speedup that is expected.

    The last band has k = 0 and holds for all larger batches.
    """

    proposer: str
    settings: ProposerSettings | None
    bands: tuple[Band, ...]
    gain: float
    most_load: int
    expected: tuple[float, ...]  # speedup at the first batch size of each band

    @property
    def max_k(self) -> int:
        """The largest k of any band."""
        return max(band.k for band in self.bands)

    @property
    def last_drafting(self) -> int:
        """The largest batch size in which somebody drafts."""
        return max(band.last for band in self.bands if band.k > 0)

    def one_k(self, outlook: Outlook) -> int:
        """For an engine without a schedule: one k for all the batch sizes where drafting pays."""
        sizes = _sizes(self.last_drafting)
        goodputs = _goodputs(outlook, self.proposer, sizes)
        return fit_bands(sizes, goodputs[:, 1:], most_bands=1)[0].k + 1


@dataclass(frozen=True, slots=True)
class Rendered:
    """An engine's configuration: command-line ``flags``, a file where it takes one, and what a
    person should know of it."""

    flags: tuple[str, ...]
    file_name: str | None = None
    file_text: str | None = None
    notes: tuple[str, ...] = ()


def make_plan(
    outlook: Outlook,
    wish: Wish,
    engine: str,
    supported: Collection[str],
    *,
    falling: bool = False,
) -> Plan:
    """The proposer of most gain among those that the engine has, and its fitted bands.

    The bands end with one that is off: beyond what the profile can judge nobody drafts.
    Raises ExportError when there is none, or when plain decoding is best at every batch size.
    """
    rates = outlook.expectation.rates
    names = [name for name in sorted(rates) if name in supported]
    if wish.proposer is not None:
        if wish.proposer not in rates:
            reason = outlook.left_out.get(wish.proposer, "the profile does not know it")
            raise ExportError(f"--proposer {wish.proposer}: {reason}; it has {', '.join(rates)}")
        if wish.proposer not in supported:
            raise ExportError(
                f"--proposer {wish.proposer}: {engine} has none such; it takes "
                f"{', '.join(sorted(supported))}"
            )
        names = [wish.proposer]
    if not names:
        raise ExportError(
            f"{engine} has none of the profile's proposers ({', '.join(sorted(rates))}); it takes "
            f"{', '.join(sorted(supported))}"
        )
    most = min(wish.max_batch or outlook.most_requests, outlook.most_requests)
    plans = [_plan(outlook, name, most, falling) for name in names]
    best = max(plans, key=lambda plan: plan.gain)
    if best.max_k == 0:
        raise ExportError(
            f"plain decoding is expected to be best at every batch size from 1 to {most}, with "
            f"any of {', '.join(names)}: there is nothing to export"
        )
    return best


def _plan(outlook: Outlook, proposer: str, most: int, falling: bool) -> Plan:
    sizes = _sizes(most)
    goodputs = _goodputs(outlook, proposer, sizes)
    bands = fit_bands(sizes, goodputs, falling=falling, most_bands=MOST_BANDS)
    speedups = goodputs / goodputs[:, :1]
    chosen = np.array([next(band.k for band in bands if size <= band.last) for size in sizes])
    log_speedup = np.log2(speedups[np.arange(len(sizes)), chosen])
    edges = np.log2(np.array(sizes, dtype=np.float64) + 1.0)
    weights = np.diff(edges, prepend=0.0) / edges[-1]
    expected = tuple(float(speedups[_index(sizes, band.first), band.k]) for band in bands)
    if bands[-1].k > 0:
        bands = (*bands, Band(most + 1, most + 1, 0))
        expected = (*expected, 1.0)
    return Plan(
        proposer,
        outlook.settings.get(proposer),
        bands,
        float(log_speedup @ weights),
        outlook.most_load,
        expected,
    )


def _index(sizes: list[int], size: int) -> int:
    return next(index for index, each in enumerate(sizes) if each >= size)


def _sizes(most: int) -> list[int]:
    """1, 2, 3, ... and from two octaves on ``_PER_OCTAVE`` an octave, up to ``most``."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // _PER_OCTAVE)
    return [*sizes, most]


def _goodputs(outlook: Outlook, proposer: str, sizes: list[int]) -> Float64Array:
    """Of every k at every size [size, k + 1]; NaN beyond what the profile can judge."""
    depth = max(outlook.most_k(size, proposer) for size in sizes)
    table = np.full((len(sizes), depth + 1), np.nan)
    for row, size in enumerate(sizes):
        most = outlook.most_k(size, proposer)
        table[row, : most + 1] = outlook.expectation.goodputs(size, proposer, most)
    return table


def requirement(wish: Wish, engine: str, proposer: str) -> str:
    """The model that drafts; raises ExportError where it was not named."""
    if wish.draft_model is None:
        raise ExportError(
            f"{engine} needs the model that drafts for {proposer!r}, which a profile does not "
            "hold: give its path or name with --draft-model"
        )
    return wish.draft_model


def common_notes(plan: Plan) -> tuple[str, ...]:
    """How the bands came about, in words."""
    notes = []
    for band, speedup in zip(plan.bands, plan.expected, strict=True):
        if band.k == 0 and band is plan.bands[-1]:
            notes.append(f"{band.first} running requests and more: nobody drafts")
            continue
        what = f"k = {band.k}, {speedup:.2f}x expected at {band.first}" if band.k else "nobody"
        notes.append(f"{band.first} to {band.last} running requests: {what}")
    if plan.last_drafting > plan.most_load:
        notes.append(
            f"learned at up to {plan.most_load} running requests; for larger batches the step "
            "cost is carried on"
        )
    return tuple(notes)
