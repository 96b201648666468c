"""What one proposer with one k for every request is expected to bring at a batch size.

Goodput is expected tokens over expected seconds of a step (renewal-reward theorem). Whether a
lookup has a draft is taken as independent between requests, so the number of requests that draft
is binomial and the step time is averaged over it: a step in which nobody drafts costs a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, lgamma, log, sqrt

import numpy as np

from autospec.allocation.gains import throughput_gains
from autospec.cost.shapes import paid_tokens
from autospec.cost.step_cost import StepCost, StepLoad
from autospec.records import Float64Array, ProposerInfo

_DEVIATIONS = 6.0  # of the binomial that are averaged over


@dataclass(frozen=True, slots=True)
class Rates:
    """Per step of a request, when k is always j + 1: the share of steps with a draft
    (``drafting`` [k]), and the mean of draft tokens verified (``drafted`` [k]) and accepted
    (``accepted`` [k])."""

    drafting: Float64Array  # [k]
    drafted: Float64Array  # [k]
    accepted: Float64Array  # [k]

    @property
    def max_k(self) -> int:
        """The longest draft that is known of."""
        return len(self.accepted)


@dataclass(frozen=True, slots=True)
class Choice:
    """A proposer and k (None and 0: plain) with the goodput expected of it, in tokens/s."""

    proposer: str | None
    k: int
    goodput: float


def rates_of_model(hazards: Float64Array) -> Rates:
    """Rates of a proposer that drafts in every step, from its hazards by position [k]."""
    gains = np.zeros((1, 1, len(hazards)), dtype=np.float32)
    limits = np.array([[len(hazards)]], dtype=np.int16)
    throughput_gains(hazards[None, None].astype(np.float32), limits, np.ones(1), np.ones(1), gains)
    ones = np.ones(len(hazards))
    return Rates(ones, np.cumsum(ones), np.cumsum(gains[0, 0].astype(np.float64)))


def mixed(parts: Mapping[str, Rates], tokens: Mapping[str, float]) -> Rates:
    """Rates of a mix of workloads by their output tokens, up to the k that is known of all.

    A workload that accepts more takes fewer steps for its tokens.
    """
    depth = min(rates.max_k for rates in parts.values())
    steps, drafting, drafted, accepted = np.zeros((4, depth))
    for name, rates in parts.items():
        own = tokens[name] / (1.0 + rates.accepted[:depth])
        steps += own
        drafting += own * rates.drafting[:depth]
        drafted += own * rates.drafted[:depth]
        accepted += own * rates.accepted[:depth]
    return Rates(drafting / steps, drafted / steps, accepted / steps)


def binomial(n: int, share: float) -> tuple[int, Float64Array]:
    """The smallest number worth looking at, and the probabilities from it on."""
    if share <= 0.0:
        return 0, np.ones(1)
    if share >= 1.0:
        return n, np.ones(1)
    spread = _DEVIATIONS * sqrt(n * share * (1.0 - share)) + 1.0
    first, last = max(0, int(n * share - spread)), min(n, int(n * share + spread) + 1)
    known = lgamma(n + 1)
    chances = np.array(
        [
            exp(
                known
                - lgamma(m + 1)
                - lgamma(n - m + 1)
                + m * log(share)
                + (n - m) * log(1.0 - share)
            )
            for m in range(first, last + 1)
        ]
    )
    return first, chances / chances.sum()


class Expectation:
    """Expected goodput on one engine, from its learned step cost.

    ``context_tokens`` is the mean context of a request. ``rates`` are by proposer; those that it
    leaves out are not considered.
    """

    def __init__(
        self,
        cost: StepCost,
        proposers: tuple[ProposerInfo, ...],
        rates: Mapping[str, Rates],
        context_tokens: float,
    ) -> None:
        self.rates = dict(rates)
        self._cost = cost
        self._proposers = proposers
        self._index = {info.name: p for p, info in enumerate(proposers)}
        self._context = context_tokens

    def plain_goodput(self, requests: int) -> float:
        """Tokens per second of plain decoding."""
        return requests / self._seconds(requests, 0, 0, None)

    def goodput(self, requests: int, proposer: str, k: int) -> float:
        """Tokens per second when everybody has ``proposer`` draft up to ``k`` tokens."""
        if k == 0:
            return self.plain_goodput(requests)
        rates = self.rates[proposer]
        share = float(rates.drafting[k - 1])
        length = float(rates.drafted[k - 1]) / share if share > 0.0 else 0.0
        first, chances = binomial(requests, share)
        seconds = sum(
            float(chance) * self._seconds(requests, m, round(m * length), (proposer, k))
            for m, chance in enumerate(chances, start=first)
        )
        return requests * (1.0 + float(rates.accepted[k - 1])) / seconds

    def goodputs(self, requests: int, proposer: str, most_k: int) -> Float64Array:
        """Of every k from 0 to ``most_k`` [k + 1]."""
        return np.array([self.goodput(requests, proposer, k) for k in range(most_k + 1)])

    def best(self, requests: int, most_k: int, tolerance: float = 0.0) -> Choice:
        """The choice of most goodput; within ``tolerance`` of it, the one with the smallest k."""
        plain = self.plain_goodput(requests)
        choices = [Choice(None, 0, plain)]
        for name, rates in self.rates.items():
            depth = min(most_k, rates.max_k, self._proposers[self._index[name]].max_k)
            found = self.goodputs(requests, name, depth)
            choices += [Choice(name, k, float(found[k])) for k in range(1, depth + 1)]
        top = max(choice.goodput for choice in choices)
        near = [choice for choice in choices if choice.goodput >= (1.0 - tolerance) * top]
        return min(near, key=lambda choice: (choice.k, -choice.goodput))

    def _seconds(
        self, requests: int, drafting: int, verified: int, choice: tuple[str, int] | None
    ) -> float:
        """A step in which ``drafting`` requests verify ``verified`` draft tokens in all."""
        depth, draft_tokens, catch_up = np.zeros((3, len(self._proposers)))
        longest = 0
        if choice is not None and drafting > 0:
            name, k = choice
            longest = k
            p = self._index[name]
            if self._proposers[p].kind != "lookup":
                depth[p] = k
                draft_tokens[p] = drafting * k
        engine = self._cost.engine
        tokens = paid_tokens(engine.shape, self._cost.captured, requests, verified, longest)
        return self._cost.predict(
            StepLoad(
                tokens,
                requests,
                round(self._context * requests),
                verified > 0,
                depth,
                draft_tokens,
                catch_up,
            )
        )
