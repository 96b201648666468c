"""When to try what is not in use: a clock per arm, with exponential back-off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import by_reference, compiled_brief
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import Float64Array, Int64Array

PLAIN = -1
DRAFTS = -2
SEVERAL = -3
"""The arms that are plain decoding, drafts of anybody and several draft tokens in one step; the
others are the numbers of model proposers."""

SEVERAL_TOKENS = 4
"""The fewest that several draft tokens are."""

DEAR = 1.25
"""Plain steps that one with a single draft token must seem to take to be tried beside others."""

CHEAP = 0.9
"""Share of the expected time below which a probe is repeated at once, until it is believed."""

_NOTHING = -4
_FAR_OCTAVES = 2
_MOST_DRAFTS_PRICE = 1.0  # a few tokens can cost more only in a passing trouble
_MOST_REPEATS = 32
_MOST_SEVERAL = 8  # or one for each request
_USUAL_RATE = 1.0 / 64.0
_POSTPONED_STEPS = 4
_MOST_SHARE = 0.01  # of the time that probes of one arm may take in the long run


class ClockArrays(NamedTuple):
    """Steps since each arm was in use, and how many must pass before it is tried: ``wait`` by the
    back-off, ``rest`` by its price. An arm of ``arms`` is a model, the last two are DRAFTS and
    SEVERAL; plain decoding has a clock for each octave. ``home`` is the octave that the arms' waits
    belong to. ``triable`` are arms that may ever draft, ``used`` those that do in the step.
    ``asks`` says that drafts are to be tried in the next, ``repeats`` how often they were at once,
    ``streak`` how often several, one step after the other. ``usual`` is the number of draft tokens
    in a step of the policy, lately.
    """

    first: float
    backoff: float
    most: float
    arms: Int64Array  # [a]
    idle: Int64Array  # [a]
    wait: Float64Array  # [a]
    rest: Float64Array  # [a]
    plain_idle: Int64Array  # [octave]
    plain_wait: Float64Array  # [octave]
    home: Int64Array  # [1]
    triable: NDArray[np.bool_]  # [a]
    used: NDArray[np.bool_]  # [a]
    asks: NDArray[np.bool_]  # [1]
    repeats: Int64Array  # [1]
    streak: Int64Array  # [1]
    usual: Float64Array  # [1]


class ProbeClocks:
    """Steps since each arm was last in use, and how long to wait before trying it.

    After a probe an arm waits ``backoff`` times longer for the next, up to ``max_steps``; a model
    that the policy uses by itself starts again at ``first_steps``, and so do all models when the
    load has moved by two octaves: what did not pay there may pay here. A dear arm waits for as long
    as keeps its probes' share of the time small. Plain decoding has a clock for each octave of
    load, since its cost differs there. Drafts of whomever have one too: a time in which all steps
    were slow may have made those with drafts look dear, or those with a few of them, so that only
    steps with many were tried again: one draft token alone tells. So have several draft tokens in
    one step, twice as many as usual: where those with many were slow, few that are known to be
    cheap tell nothing of more.
    Kernels note the steps.
    """

    def __init__(
        self,
        models: Sequence[int],
        first_steps: int,
        backoff: float,
        max_steps: int,
        *,
        lookup_k: int = SEVERAL_TOKENS,
    ) -> None:
        first, arms = float(first_steps), (*models, DRAFTS, SEVERAL)
        triable = np.ones(len(arms), dtype=np.bool_)
        triable[-2:] = lookup_k > 0, lookup_k >= SEVERAL_TOKENS
        self.arrays = ClockArrays(
            first,
            backoff,
            float(max_steps),
            np.array(arms, dtype=np.int64),
            np.zeros(len(arms), dtype=np.int64),
            np.full(len(arms), first),
            np.zeros(len(arms)),
            np.zeros(NUM_OCTAVES, dtype=np.int64),
            np.full(NUM_OCTAVES, first),
            np.zeros(1, dtype=np.int64),
            triable,
            np.zeros(len(arms), dtype=np.bool_),
            np.zeros(1, dtype=np.bool_),
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros(1),
        )
        self.reference = by_reference(self.arrays)

    @property
    def ask(self) -> bool:
        """Whether the next step tries drafts, so that lookups should offer some."""
        return bool(self.arrays.asks[0])

    @property
    def streak(self) -> int:
        """Probes of several tokens up to now, one step after the other, all of them cheap."""
        return int(self.arrays.streak[0])

    def several(self, requests: int) -> int:
        """How many draft tokens a step has that tells what many cost."""
        return int(several(self.reference, requests))

    def due(self, requests: int, available: Sequence[int] | None = None) -> int | None:
        """The arm to try in this step, None for no probe. ``available`` are those of models, DRAFTS
        and SEVERAL that may draft now; without it, those that ever may."""
        may_draft = self.arrays.triable
        if available is not None:
            may_draft = np.isin(self.arrays.arms, available)
        arm = int(due_arm(self.reference, octave_of(requests), may_draft))
        return None if arm == _NOTHING else arm

    def postpone(self, arm: int) -> None:
        """If it is due, look at it again in a few steps: it cannot be tried now."""
        arrays = self.arrays
        a = int(np.flatnonzero(arrays.arms == arm)[0])
        due = int(max(arrays.wait[a], arrays.rest[a]))
        arrays.idle[a] = min(int(arrays.idle[a]), due - _POSTPONED_STEPS)


@compiled_brief
def several(clocks: ClockArrays, requests: int) -> int:
    """Draft tokens of a step from which on it tells what many cost: twice the usual number."""
    most = max(_MOST_SEVERAL, requests)
    return int(min(max(SEVERAL_TOKENS, 2.0 * clocks.usual[0]), most))


@compiled_brief
def due_arm(clocks: ClockArrays, octave: int, may_draft: NDArray[np.bool_]) -> int:
    """The arm to try; _NOTHING for no probe."""
    if clocks.plain_idle[octave] >= clocks.plain_wait[octave]:
        return PLAIN
    for a in range(clocks.arms.shape[0]):
        if may_draft[a] and _is_due(clocks, a):
            return int(clocks.arms[a])
    return _NOTHING


@compiled_brief
def may_probe(clocks: ClockArrays, octave: int) -> bool:
    """Whether an arm is due."""
    return due_arm(clocks, octave, clocks.triable) != _NOTHING


@compiled_brief
def note_arms(
    clocks: ClockArrays, octave: int, draft_tokens: int, is_probe: bool, price: float
) -> None:
    """A step was planned in which ``clocks.used`` draft so many tokens together.

    ``price`` is what a probe takes beyond a plain step, in plain steps.
    """
    arms, idle, wait, rest = clocks.arms, clocks.idle, clocks.wait, clocks.rest
    plain_idle, plain_wait = clocks.plain_idle, clocks.plain_wait
    if abs(octave - clocks.home[0]) >= _FAR_OCTAVES:
        clocks.home[0] = octave
        wait[:] = clocks.first
        rest[:] = 0.0  # prices of another load
    if draft_tokens == 0:
        plain_idle[octave] = 0
        if is_probe:
            plain_wait[octave] = min(clocks.most, plain_wait[octave] * clocks.backoff)
    else:
        plain_idle[octave] += 1
    for a in range(idle.shape[0]):
        if not clocks.used[a]:
            idle[a] += 1
            continue
        idle[a] = 0
        if is_probe:
            counted = price if arms[a] >= 0 else min(price, _MOST_DRAFTS_PRICE)
            wait[a] = min(clocks.most, max(wait[a], rest[a]) * clocks.backoff)
            rest[a] = min(clocks.most, counted / _MOST_SHARE)
        else:
            wait[a] = clocks.first
            rest[a] = 0.0
            if arms[a] < 0:
                clocks.repeats[0] = 0
    if not is_probe:
        clocks.streak[0] = 0
        clocks.usual[0] += _USUAL_RATE * (draft_tokens - clocks.usual[0])
    _set_asks(clocks)


@compiled_brief
def repeat_probe(clocks: ClockArrays, octave: int, depth: Float64Array, draft_tokens: int) -> None:
    """A probe took far less than was expected: do it again at once.

    It was of the models that drafted to a ``depth`` [p], or else of so many tokens of lookups, of
    plain decoding if there were none. Not for ever: what is never believed is not to take the
    policy's place.
    """
    if clocks.repeats[0] >= _MOST_REPEATS:
        return
    clocks.repeats[0] += 1
    last = clocks.arms.shape[0] - 1
    has_models = False
    for a in range(last - 1):
        if depth[clocks.arms[a]] > 0.0:
            has_models = True
            _ask_again(clocks, a)
    if draft_tokens == 0:
        look_at_plain(clocks, octave)
    elif not has_models:
        _ask_again(clocks, last if draft_tokens > 1 else last - 1)
        clocks.streak[0] += draft_tokens > 1
    _set_asks(clocks)


@compiled_brief
def restart_clocks(clocks: ClockArrays) -> None:
    """Something changed: look again soon."""
    clocks.wait[:] = clocks.first
    clocks.plain_wait[:] = clocks.first
    _set_asks(clocks)


@compiled_brief
def look_at_plain(clocks: ClockArrays, octave: int) -> None:
    """Plain decoding is to be tried in the next step."""
    clocks.plain_idle[octave] = int(clocks.most)
    clocks.plain_wait[octave] = clocks.first


@compiled_brief
def _ask_again(clocks: ClockArrays, a: int) -> None:
    """Arm ``a`` is to be tried in the next step."""
    clocks.idle[a] = int(clocks.most)
    clocks.wait[a] = clocks.first
    clocks.rest[a] = 0.0


@compiled_brief
def _is_due(clocks: ClockArrays, a: int) -> bool:
    """Whether arm ``a`` has waited for long enough."""
    return bool(clocks.idle[a] >= max(clocks.wait[a], clocks.rest[a]))


@compiled_brief
def _set_asks(clocks: ClockArrays) -> None:
    last = clocks.arms.shape[0] - 1
    clocks.asks[0] = False
    for a in range(last - 1, last + 1):
        if clocks.triable[a] and _is_due(clocks, a):
            clocks.asks[0] = True
