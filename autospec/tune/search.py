"""Which point to try next: a Gaussian process by ask/tell, with the noise that replicates show."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from autospec.errors import MissingDependency
from autospec.tune.space import Dimension, Point, Space, Value

REPLICATES = 3
"""How often the untuned settings are tried before the search begins: they tell the noise."""

_INITIAL = 8  # points around the untuned settings before the process is asked
_INITIAL_SHARE = 0.3  # of the dimensions that differ in them
_LEADERS = 3  # points whose neighbors are considered
_NEAR = 200  # neighbors in all
_NEAR_SHARE = 0.2  # of the dimensions that differ in them
_REPEAT_EVERY = 6  # trials after which the best so far is tried anew
_PENALTY = 0.2  # of a trial that failed, below the worst that did not


@dataclass(frozen=True, slots=True)
class Trial:
    """A point tried. ``scores`` are log speedups over plain by load; none unless ``status`` is ok.

    ``seed`` is that of the requests' order.
    """

    point: Point
    seed: int
    status: Literal["ok", "nan", "failed", "timeout"]
    scores: tuple[float, ...] = ()
    seconds: float = 0.0
    error: str | None = None

    @property
    def score(self) -> float | None:
        """Mean log speedup over the loads; None of one that failed."""
        return mean(self.scores) if self.status == "ok" else None


def noise_variance(trials: Sequence[Trial]) -> float:
    """Variance of one trial's score, pooled over the points that were tried more than once."""
    total, degrees = 0.0, 0
    for point in {trial.point for trial in trials}:
        scores = [t.score for t in trials if t.point == point and t.score is not None]
        if len(scores) > 1:
            center = mean(scores)
            total += sum((score - center) ** 2 for score in scores)
            degrees += len(scores) - 1
    return total / degrees if degrees else 0.0


def standing(trials: Sequence[Trial]) -> list[tuple[Point, float, int]]:
    """Points with their mean score and how often it was taken, best lower bound first.

    A score is taken down by its standard error, so that luck in one trial does not win.
    """
    deviation = math.sqrt(noise_variance(trials))
    found = []
    for point in dict.fromkeys(trial.point for trial in trials):
        scores = [t.score for t in trials if t.point == point and t.score is not None]
        if scores:
            found.append((point, mean(scores), len(scores)))
    return sorted(found, key=lambda each: each[1] - deviation / math.sqrt(each[2]), reverse=True)


def next_point(space: Space, trials: Sequence[Trial], first: Sequence[Point], seed: int) -> Point:
    """The point of the next trial; it depends on the arguments alone.

    The untuned settings some times over, then ``first``, then points that differ from the untuned
    ones in some dimensions, then those of most expected improvement, near the best so far or
    anywhere; the best so far is repeated now and then.
    """
    done = len(trials)
    if done < REPLICATES:
        return space.default
    tried = {trial.point for trial in trials}
    for point in first:
        if point not in tried:
            return point
    if done % _REPEAT_EVERY == 0 and done > REPLICATES + _INITIAL:
        return standing(trials)[0][0]
    rng = random.Random(seed * 1000 + done)
    if done < REPLICATES + len(first) + _INITIAL:
        return changed(space, space.default, rng, _INITIAL_SHARE)
    leaders = [point for point, _, _ in standing(trials)[:_LEADERS]] or [space.default]
    near = [changed(space, rng.choice(leaders), rng, _NEAR_SHARE) for _ in range(_NEAR)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fits that stop early, points asked for twice
        return _most_improvement(_optimizer(space, trials, seed), near)


def changed(space: Space, point: Point, rng: random.Random, share: float) -> Point:
    """A point with a share of its dimensions, one at the least, drawn anew."""
    values = list(point)
    chosen = [index for index in range(len(values)) if rng.random() < share]
    for index in chosen or [rng.randrange(len(values))]:
        values[index] = _drawn(space.dimensions[index], rng)
    return tuple(values)


def _drawn(dimension: Dimension, rng: random.Random) -> Value:
    if dimension.kind == "choice":
        return rng.choice(dimension.choices)
    low, high = dimension.low, dimension.high
    if dimension.kind == "real":
        return rng.uniform(low, high)
    if dimension.by_ratio:
        return min(int(high), int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
    return rng.randint(int(low), int(high))


def _most_improvement(optimizer: Any, near: Sequence[Point]) -> Point:
    """Of the points near the best and the one that the optimizer found anywhere."""
    from skopt.acquisition import gaussian_ei

    anywhere = optimizer.ask()
    points = [*near, tuple(_value(each) for each in anywhere)]
    encoded = optimizer.space.transform([list(point) for point in points])
    improvement = gaussian_ei(encoded, optimizer.models[-1], y_opt=min(optimizer.yi))
    return points[int(improvement.argmax())]


def _optimizer(space: Space, trials: Sequence[Trial], seed: int) -> Any:
    from skopt import Optimizer
    from skopt.utils import cook_estimator, normalize_dimensions

    dimensions = [_dimension(each) for each in space.dimensions]
    scores = [trial.score for trial in trials if trial.score is not None]
    worst = min(scores, default=0.0) - _PENALTY
    values = [-(worst if trial.score is None else trial.score) for trial in trials]
    center = mean(values)
    spread = mean((value - center) ** 2 for value in values)
    alpha = max(1e-6, noise_variance(trials) / spread) if spread > 0.0 else 1e-2
    estimator = cook_estimator(
        "GP", space=normalize_dimensions(dimensions), random_state=seed, alpha=min(alpha, 1.0)
    )
    optimizer = Optimizer(
        dimensions,
        base_estimator=estimator,
        n_initial_points=1,
        acq_func="EI",
        acq_optimizer="sampling",
        random_state=seed + len(trials),
    )
    if trials:
        optimizer.tell([list(trial.point) for trial in trials], values)
    return optimizer


def _dimension(dimension: Dimension) -> Any:
    try:
        from skopt.space import Categorical, Integer, Real
    except ModuleNotFoundError:
        raise MissingDependency(
            "autospec tune needs scikit-optimize, which is not installed; "
            "do: pip install 'autospec-llm[tune]'"
        ) from None
    prior = "log-uniform" if dimension.by_ratio else "uniform"
    if dimension.kind == "choice":
        return Categorical(dimension.choices)
    if dimension.kind == "real":
        return Real(dimension.low, dimension.high, prior=prior)
    return Integer(int(dimension.low), int(dimension.high), prior=prior)


def _value(value: Any) -> Value:
    return float(value) if isinstance(value, float) else int(value)
