"""What a fixed choice and a clairvoyant would have reached, against the runs themselves."""

from __future__ import annotations

import pytest

from autospec.config import Settings
from autospec.replay.fixed_arms import arm_name, fixed_arms, replay_fixed
from autospec.replay.hindsight import (
    Clairvoyant,
    ClairvoyantEngine,
    replay_bare,
    replay_clairvoyant,
    replay_plain,
)
from autospec.replay.run import replay_closed, run_closed
from tests.replay.made_runs import (
    APPENDED,
    FIRST,
    LOOKUPS_AND_MODEL,
    cost_file,
    model_seconds,
    random_requests,
    step_seconds,
)


def test_every_fixed_arm_is_listed() -> None:
    arms = fixed_arms([FIRST], cost_file(**LOOKUPS_AND_MODEL))
    assert len(arms) == 4 + 5 + 6
    assert arm_name(arms[0]) == "model:1"


@pytest.mark.parametrize("shape,captured", [("packed", ()), ("padded", ()), ("stepped", (4, 16))])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("proposer", ["model", "ngram", "suffix"])
def test_every_k_at_once_is_as_one_by_one(
    shape: str, captured: tuple[int, ...], concurrency: int, proposer: str
) -> None:
    requests = random_requests(7, tokens=24)
    cost = cost_file(shape, captured, **LOOKUPS_AND_MODEL)
    results = list(replay_fixed(requests, cost, proposer, concurrency))
    assert [result.arm.k for result in results] == list(range(1, len(results) + 1))
    assert len({result.steps for result in results}) > 1
    for result in results:
        alone = replay_bare(requests, cost, result.arm, concurrency)
        assert (result.tokens, result.steps) == (alone.tokens, alone.steps)
        assert result.seconds == pytest.approx(alone.seconds, rel=1e-12)


def test_the_best_k_of_an_appended_lookup_are_really_run() -> None:
    requests = random_requests(7, tokens=24)
    cost = cost_file(**APPENDED)
    arms = [arm for arm in fixed_arms(requests, cost) if arm.proposer == "both"]
    assert [arm.k for arm in arms] == [3, 4, 5, 6]
    alone = {arm.k: replay_bare(requests, cost, arm, 1).tokens_per_second for arm in arms}
    found = {r.arm.k: r.tokens_per_second for r in replay_fixed(requests, cost, "both", 1)}
    assert len(found) == 3
    assert max(found.values()) == pytest.approx(max(alone.values()))
    for k, speed in found.items():
        assert speed == pytest.approx(alone[k])


def test_clairvoyant_by_hand() -> None:
    # position 0: two accepted tokens for two depths; then 3: one for one; 5: no room
    cost = cost_file()
    result = replay_clairvoyant([FIRST], cost, 1, rate=1.0)
    expected = [
        step_seconds(3, 3) + model_seconds(2, 3),
        step_seconds(2, 6) + model_seconds(1, 6),
        step_seconds(1, 8),
    ]
    assert (result.tokens, result.steps) == (6, 3)
    assert result.seconds == pytest.approx(sum(expected))


def test_clairvoyant_leaves_what_does_not_pay() -> None:
    engine = ClairvoyantEngine([FIRST], cost_file(), 1)
    dear = Clairvoyant(engine, rate=1000.0)  # a tenth of a second is worth a hundred tokens
    result = run_closed(engine, dear, [FIRST], 1)
    assert result.steps == 6


@pytest.mark.parametrize(
    "shape,captured", [("packed", ()), ("padded", ()), ("stepped", (4, 8, 16))]
)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_clairvoyant_beats_every_policy(
    shape: str, captured: tuple[int, ...], concurrency: int
) -> None:
    requests = random_requests(8, tokens=24)
    cost = cost_file(shape, captured, **LOOKUPS_AND_MODEL)
    plain = replay_plain(requests, cost, concurrency).tokens_per_second
    best = replay_clairvoyant(requests, cost, concurrency, rate=plain).tokens_per_second
    others = [
        replay_bare(requests, cost, arm, concurrency).tokens_per_second
        for arm in fixed_arms(requests, cost)
    ]
    default, _ = replay_closed(requests, cost, Settings(version=1), concurrency)
    assert best >= max(plain, default.tokens_per_second, *others)
