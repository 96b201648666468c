"""What was tried at one load, and what a Gaussian process would try next."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass, field

from autospec.errors import MissingDependency

Point = tuple[str, int]  # a proposer's name and k


@dataclass(slots=True)
class Trials:
    """Points with the tokens and seconds each had in all, and the window under way."""

    points: list[Point] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    windows: int = 0
    point: Point = ("", 0)
    window_steps: int = 0
    window_tokens: float = 0.0
    window_seconds: float = 0.0

    def rates(self) -> list[float]:
        """Tokens per second of each point."""
        return [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]

    def best(self) -> Point:
        """The point with the highest rate."""
        rates = self.rates()
        return self.points[rates.index(max(rates))]

    def end_window(self) -> None:
        """Add the window to its point."""
        if self.point not in self.points:
            self.points.append(self.point)
            self.tokens.append(0.0)
            self.seconds.append(0.0)
        at = self.points.index(self.point)
        self.tokens[at] += self.window_tokens
        self.seconds[at] += self.window_seconds
        self.windows += 1
        self.window_steps, self.window_tokens, self.window_seconds = 0, 0.0, 0.0


def require_skopt() -> None:
    """Raises MissingDependency without scikit-optimize."""
    if importlib.util.find_spec("skopt") is None:
        raise MissingDependency(
            "policy bayes needs scikit-optimize, which is not installed; "
            'do: pip install "autospec-llm[tune]"'
        )


def next_point(names: tuple[str, ...], max_k: int, trials: Trials, seed: int) -> Point:
    """The point of most expected improvement, by ask/tell; it depends on the arguments alone."""
    from skopt import Optimizer
    from skopt.space import Categorical, Integer

    warnings.filterwarnings("ignore", module=r"(skopt|sklearn)\.")  # fits that stop early
    optimizer = Optimizer(
        [Categorical(names), Integer(0, max_k)],
        base_estimator="GP",
        n_initial_points=2 * len(names) + 1,
        acq_func="EI",
        acq_optimizer="sampling",
        random_state=seed + trials.windows,
    )
    if trials.points:
        rates = trials.rates()
        optimizer.tell([list(p) for p in trials.points], [-rate / max(rates) for rate in rates])
    name, k = optimizer.ask()
    return str(name), int(k)
