"""What a step costs, learned online from served steps.

A regression finds the coefficients; here are its priors, what is saved of it, and predictions.
Steps that also prefill are never charged to speculation: they teach what prefill takes, and what
decoding takes only where hardly any other step comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference
from autospec.cost.coefficients import (
    ACTIVE,
    CATCH_UP,
    CONTEXT,
    DEPTH,
    FIXED,
    KNOTS,
    NUM_DRAFT,
    NUM_VERIFY,
    REQUESTS,
    SLOPES,
    SPECULATING,
    TOKENS,
    drafting_seconds,
    forward_seconds,
)
from autospec.cost.mixed_steps import MixedSteps, learn_beside_prefill
from autospec.cost.regression import (
    LEAST_SECONDS,
    MEMORY_STEPS,
    MOST_SECONDS,
    NOISE,
    CostArrays,
    learn_seconds,
    set_pace,
    solve_coefficients,
)
from autospec.cost.shapes import SHAPES, paid_tokens
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import EngineInfo, Float64Array, ProposerInfo

LAYOUT = "cost/1"
_SURPRISE = 4.5  # the running sum of outliers' signs; 5 would be outliers for ever
_REFERENCE_STEPS = 15
_MIXED_STEPS = 32


class StepLoad(NamedTuple):
    """What one step carried: the regressors of its time.

    ``tokens`` is what the engine pays for (see ``paid_tokens``); ``depth``, ``draft_tokens`` and
    ``catch_up_tokens`` are [p], zero for lookups.
    """

    tokens: int
    requests: int
    context_tokens: int
    speculating: bool
    depth: Float64Array
    draft_tokens: Float64Array
    catch_up_tokens: Float64Array


class StepCost:
    """The step-time model of one engine: observe steps, read coefficients.

    Until the first step was observed ``is_known`` is False and predictions mean nothing. With
    ``follows_jumps`` a sudden, lasting change of times makes it forget what it knew.
    """

    def __init__(
        self,
        proposers: Sequence[ProposerInfo],
        engine: EngineInfo,
        *,
        follows_jumps: bool = True,
    ) -> None:
        self.engine = engine
        self.captured = np.array(engine.captured_sizes, dtype=np.int32)
        self.models = sorted(
            (p for p, info in enumerate(proposers) if info.kind != "lookup"),
            key=lambda p: proposers[p].name,  # saved statistics must not depend on the order
        )
        self._by_depth = [proposers[p].kind == "sequential" for p in self.models]
        size = NUM_VERIFY + NUM_DRAFT * len(self.models)
        self._num_cells = cells = 2 * NUM_OCTAVES + len(self.models)
        health = np.zeros((1 + len(self.models), 3))
        health[:, 0] = NOISE
        self.arrays = CostArrays(
            np.array(self.models, dtype=np.int64),
            self.captured,
            SHAPES[engine.shape],
            _SURPRISE if follows_jumps else math.inf,
            np.zeros(size),
            health,
            np.zeros(cells),
            np.zeros((cells, size, size)),
            np.zeros((cells, size)),
            np.zeros((size, size)),
            np.zeros(size),
            np.zeros((cells, size, size)),
            np.zeros((cells, size)),
            np.zeros(cells),
            np.zeros((size, size)),
            np.zeros(size),
            np.zeros(2),
            np.zeros(size),
            np.zeros(size),
            np.zeros((len(proposers), NUM_DRAFT)),
        )
        self.reference = by_reference(self.arrays)
        """All of it for kernels."""
        self.beta = self.arrays.beta
        self.prefill_token_seconds = 0.0
        self.is_known = False
        self._mixed = MixedSteps(size)
        self._first_mixed_steps = 0
        self._fastest_mixed = math.inf
        self._reference_step = np.zeros(4)
        self._first_steps: list[tuple[float, float, float]] = []
        self._is_early = True
        self.has_jumped = False
        """Whether all steps have changed since something was saved, which is outdated then."""
        self.most_tokens = 0.0
        """The most that the engine has taken in one step; infinite where a profile knows it."""
        self.no_times: Float64Array = np.zeros(len(proposers))
        """Those of drafting, where they are not told apart from the step's."""

    def observe(
        self,
        load: StepLoad,
        step_seconds: float,
        draft_seconds: Float64Array | None,
        prefill_tokens: int = 0,
    ) -> None:
        """Learn from one step. Times that are not finite and positive are ignored."""
        if not LEAST_SECONDS < step_seconds < MOST_SECONDS:
            return
        if prefill_tokens > 0:
            self._note_tokens(load.tokens + prefill_tokens)
            self._observe_prefill(load, step_seconds, draft_seconds, prefill_tokens)
            return
        if self._is_early and self._set_scale(load, step_seconds):
            self._note_tokens(load.tokens)
            return
        is_told_apart = draft_seconds is not None
        if draft_seconds is None or min(draft_seconds.tolist(), default=0.0) < 0.0:
            draft_seconds, is_told_apart = self.no_times, False
        surprised = learn_seconds(
            self.reference, load.tokens, load.requests, load.context_tokens, load.speculating,
            load.depth, load.draft_tokens, load.catch_up_tokens, step_seconds, draft_seconds,
            is_told_apart, octave_of(load.requests), False,
        )  # fmt: skip
        self.learned(load.tokens, load.context_tokens, step_seconds, surprised)

    @property
    def is_settled(self) -> bool:
        """Whether ``learn_seconds`` and ``learned`` do for a step that does not prefill."""
        return not self._is_early

    def learned(
        self, tokens: int, context_tokens: int, step_seconds: float, surprised: bool
    ) -> None:
        """A kernel has called ``learn_seconds`` with these, and this is what it returned."""
        self._note_tokens(tokens)
        if surprised:
            self.has_jumped = True
            self._reference_step[:] = (step_seconds, tokens, context_tokens, 1.0)
            self._mixed.forget(self.reference)
            self._set_prior(step_seconds, tokens, context_tokens)

    def _note_tokens(self, tokens: int) -> None:
        """The engine takes as many; a step that prefills shows it as well."""
        if tokens > self.most_tokens:
            self.most_tokens = float(tokens)

    @property
    def learns_beside_prefill(self) -> bool:
        """Whether steps that also prefill teach what decoding costs: they are almost all."""
        return self._mixed.are_all

    def verify_seconds(
        self, tokens: int, requests: int, context_tokens: int, speculating: bool
    ) -> float:
        """Predicted seconds of a target forward over ``tokens`` paid tokens."""
        return forward_seconds(self.beta, tokens, requests, context_tokens, speculating, KNOTS)

    def plain_seconds(self, requests: int, context_tokens: int) -> float:
        """Predicted seconds of a plain decoding step."""
        tokens = paid_tokens(self.engine.shape, self.captured, requests, 0, 0)
        return self.verify_seconds(tokens, requests, context_tokens, speculating=False)

    @property
    def draft_coefficients(self) -> Float64Array:
        """[p, 4]: seconds per step in use, per depth, per drafted and per caught-up token."""
        return self.arrays.draft

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a whole step, drafting included."""
        return forward_seconds(
            self.beta, load.tokens, load.requests, load.context_tokens, load.speculating, KNOTS
        ) + self.drafting_seconds(load.depth, load.draft_tokens, load.catch_up_tokens)

    def drafting_seconds(
        self, depth: Float64Array, draft_tokens: Float64Array, catch_up_tokens: Float64Array
    ) -> float:
        """Predicted seconds of a step's drafting, all models together; each [p]."""
        return float(
            drafting_seconds(self.beta, self.arrays.models, depth, draft_tokens, catch_up_tokens)
        )

    def load(self, statistics: Mapping[str, Float64Array]) -> None:
        """Start from saved statistics, the form ``take_fresh`` returns; their weight is bounded."""
        arrays = self.arrays
        for cell in range(self._num_cells):
            weight = float(statistics["weight"][cell])
            fade = min(1.0, MEMORY_STEPS / weight) if weight > 0 else 1.0
            arrays.cell_gram[cell] = statistics["gram"][cell] * fade
            arrays.cell_moment[cell] = statistics["moment"][cell] * fade
        arrays.gram[:] = arrays.cell_gram.sum(axis=0)
        arrays.moment[:] = arrays.cell_moment.sum(axis=0)
        seconds, tokens, context, count = statistics["reference"]
        if count > 0:
            self.most_tokens = math.inf
            self._is_early = False
            self._set_prior(seconds / count, tokens / count, context / count)
            self._settle(500)

    def take_fresh(self) -> Mapping[str, Float64Array]:
        """Additive statistics since the last call.

        gram [cell, f, f], moment [cell, f], weight [cell], and the reference step [seconds, tokens,
        context, count] that scales the priors.
        """
        taken = {}
        for name, array in self._fresh().items():
            taken[name] = array.copy()
            array[:] = 0.0
        self.has_jumped = False
        return taken

    def return_fresh(self, statistics: Mapping[str, Float64Array], has_jumped: bool) -> None:
        """Take back statistics that could not be saved."""
        self.has_jumped |= has_jumped
        for name, array in self._fresh().items():
            array += statistics[name]

    def _fresh(self) -> Mapping[str, Float64Array]:
        return {
            "gram": self.arrays.fresh_gram,
            "moment": self.arrays.fresh_moment,
            "weight": self.arrays.fresh_weight,
            "reference": self._reference_step,
        }

    def _set_scale(self, load: StepLoad, step_seconds: float) -> bool:
        """Scale the priors to the median of the first steps; the very first does nothing else.

        (An absurd first time would otherwise outweigh whatever follows.) True for the first.
        """
        steps = self._first_steps
        steps.append((step_seconds, float(load.tokens), float(load.context_tokens)))
        median = sorted(steps)[len(steps) // 2]
        self._reference_step[:] = (*median, 1.0)
        self._is_early = len(steps) < _REFERENCE_STEPS
        self._set_prior(*median)
        return len(steps) == 1

    def _observe_prefill(
        self,
        load: StepLoad,
        step_seconds: float,
        draft_seconds: Float64Array | None,
        prefill_tokens: int,
    ) -> None:
        """Learn what prefill takes and, where hardly any other step comes, what decoding takes."""
        if not self.is_known:
            # An engine that prefills in every step: start from priors, at its fastest step.
            self._first_mixed_steps += 1
            self._fastest_mixed = min(self._fastest_mixed, step_seconds)
            if self._first_mixed_steps >= _MIXED_STEPS:
                self._set_prior(self._fastest_mixed, load.tokens, load.context_tokens)
            return
        mixed = self._mixed
        learn_beside_prefill(
            self.reference, mixed.reference, load.tokens, load.requests, load.context_tokens,
            load.speculating, load.depth, load.draft_tokens, load.catch_up_tokens, step_seconds,
            self.no_times if draft_seconds is None else draft_seconds, prefill_tokens,
        )  # fmt: skip
        self.prefill_token_seconds = mixed.prefill_token_seconds

    def _set_prior(self, seconds: float, tokens: float, context: float) -> None:
        """Priors relative to a first step: most of it is fixed, a token costs some per cent."""
        precision = self.arrays.precision
        precision[:] = 0.0
        self.arrays.target[:] = 0.0
        per_token = seconds / max(tokens, 1.0)
        self._prior(FIXED, 0.8 * seconds, 0.8 * seconds)
        self._prior(SLOPES, 0.1 * per_token, 0.3 * per_token)
        for s in range(SLOPES, CONTEXT - 1):
            stiffness = NOISE**2 / (0.1 * per_token) ** 2
            precision[s, s] += stiffness
            precision[s + 1, s + 1] += stiffness
            precision[s, s + 1] -= stiffness
            precision[s + 1, s] -= stiffness
        self._prior(CONTEXT, 0.0, 0.2 * seconds / max(context, 1.0))
        self._prior(REQUESTS, 0.0, 0.1 * per_token)
        self._prior(SPECULATING, 0.0, 0.1 * seconds)
        for m, by_depth in enumerate(self._by_depth):
            start = NUM_VERIFY + NUM_DRAFT * m
            self._prior(start + ACTIVE, (0.02 if by_depth else 0.1) * seconds, 0.2 * seconds)
            # A parallel one drafts all in one forward: no price by depth unless seen clearly.
            mean, deviation = (0.1, 0.2) if by_depth else (0.0, 0.001)
            self._prior(start + DEPTH, mean * seconds, deviation * seconds)
            self._prior(start + TOKENS, 0.0, 0.02 * seconds)
            self._prior(start + CATCH_UP, 0.0, 0.01 * seconds)
        self.is_known = True
        self._settle(200)

    def _settle(self, sweeps: int) -> None:
        """Find the coefficients anew."""
        arrays = self.arrays
        solve_coefficients(
            arrays.gram, arrays.moment, arrays.precision, arrays.target, arrays.steady, sweeps
        )
        set_pace(self.reference)

    def _prior(self, feature: int, mean: float, deviation: float) -> None:
        precision = NOISE**2 / deviation**2
        self.arrays.precision[feature, feature] += precision
        self.arrays.target[feature] += precision * mean
