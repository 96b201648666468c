"""A Gaussian process over proposer and k for each band of load, updated every few hundred steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain, uniform
from autospec.policy.trials import Point, Trials, next_point, require_skopt
from autospec.records import ProposerInfo


class BayesOptions(PolicyOptions):
    """After ``trials`` windows of ``window_steps`` a band keeps to the best it has seen."""

    name: Literal["bayes"] = "bayes"
    proposers: Annotated[
        tuple[str, ...] | None, Field(min_length=1, description="who may draft; null for all")
    ] = None
    max_k: Annotated[int, Field(ge=1, le=64)] = 6
    window_steps: Annotated[int, Field(ge=1, description="steps that a point is tried")] = 200
    trials: Annotated[int, Field(ge=1, le=200, description="windows that explore")] = 12


class Bayes(Policy[BayesOptions]):
    """Bayesian optimization (scikit-optimize, ask/tell) as offline tuners do it, while serving.

    Every octave of running requests has its own. Each window's tokens over seconds are told and
    the next point is asked for in a thread; the window that starts meanwhile runs what was asked
    for before. k = 0 is plain decoding. Raises MissingDependency without scikit-optimize.
    """

    def __init__(
        self, options: BayesOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        require_skopt()
        chosen = options.proposers
        self._names = tuple(i.name for i in proposers if chosen is None or i.name in chosen)
        self._seed = int(rng.integers(2**31))
        self._bands: dict[int, Trials] = {}
        self._asked: dict[int, Future[Point]] = {}
        self._thread = ThreadPoolExecutor(1, "autospec-bayes")

    def decide(self, view: View) -> Decision:
        """The band's point for everybody."""
        if view.requests == 0 or not self._names:
            return plain(view.requests)
        band = self._band(view.requests)
        name, k = band.point
        return uniform(view, self.index_of(name), k)._replace(arm=band.windows)

    def learn(self, outcome: Outcome) -> None:
        """Add the step to its window; at the window's end, on to the next point."""
        seconds, tokens = outcome.step_seconds, float(outcome.committed.sum())
        usable = math.isfinite(seconds) and seconds > 0.0 and tokens > 0.0
        if not usable or outcome.has_prefill or not self._names:
            return
        band = self._band(outcome.requests)
        if outcome.arm != band.windows:
            return  # of a window that has ended
        band.window_steps += 1
        band.window_tokens += tokens
        band.window_seconds += seconds
        if band.window_steps >= self.options.window_steps:
            band.end_window()
            octave = _octave(outcome.requests)
            asked = self._asked.pop(octave, None)
            band.point = band.best() if asked is None else asked.result()
            self._ask(octave)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The lookups that some band uses now."""
        used = {band.point[0] for band in self._bands.values() if band.point[1] > 0}
        is_used = np.array([info.name in used for info in self.proposers], dtype=np.bool_)
        return np.logical_and(self.lookup, is_used)

    def _band(self, requests: int) -> Trials:
        octave = _octave(requests)
        if octave not in self._bands:
            self._bands[octave] = Trials(point=(self._names[0], 0))
            self._ask(octave)
        return self._bands[octave]

    def _ask(self, octave: int) -> None:
        band = self._bands[octave]
        if band.windows < self.options.trials:
            known = deepcopy(band)
            self._asked[octave] = self._thread.submit(
                next_point, self._names, self.options.max_k, known, self._seed + octave
            )

    def state(self) -> Mapping[str, Any]:
        """Everything told so far; what is being asked for follows from it."""
        return {"seed": self._seed, "bands": [[o, asdict(b)] for o, b in self._bands.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._seed, self._bands, self._asked = state["seed"], {}, {}
        for octave, saved in state["bands"]:
            points = [(str(name), int(k)) for name, k in saved["points"]]
            point = (str(saved["point"][0]), int(saved["point"][1]))
            self._bands[octave] = Trials(**{**saved, "points": points, "point": point})
            self._ask(octave)


def _octave(requests: int) -> int:
    return (requests - 1).bit_length()
