from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autospec.errors import InputError
from autospec.proposers.settings import LOOKUP_DEFAULTS
from autospec.tune.budget import Budget, parse_budget, parse_loads
from autospec.tune.final import PLAIN, UNTUNED, bounds, interval, judge
from autospec.tune.recorded import read_recorded, write_recorded
from autospec.tune.search import REPLICATES, Trial, next_point, noise_variance, standing
from autospec.tune.space import Point, Value, make_space
from autospec.tune.state import Round, State, load_state, save_state, state_path, trace_path
from autospec.tune.tuner import TuneOptions, fingerprint
from tests.tune.made_traces import made_requests

SPACE = make_space(LOOKUP_DEFAULTS, (1, 4), with_confidence=False)


def trial(point: Point, score: float, seed: int = 0) -> Trial:
    return Trial(point, seed, "ok", (score, score), 0.1)


def quality(point: Point) -> float:
    """A made-up objective: best where suffix walks far and ngram matches are short."""
    values = dict(zip((each.name for each in SPACE.dimensions), point, strict=True))
    walk = math.log2(values["suffix.max_walk"] / 8) / 5
    return 0.5 * walk - 0.2 * abs(values["ngram.min_match"] - 1)


def test_the_search_finds_better_points_than_the_default() -> None:
    trials: list[Trial] = []
    for number in range(14):
        point = next_point(SPACE, trials, [], seed=0)
        noise = 0.01 * ((number * 7) % 5 - 2)
        trials.append(trial(point, quality(point) + noise, number))
    best = standing(trials)[0][0]
    assert quality(best) > quality(SPACE.default) + 0.1
    assert [t.point for t in trials[:REPLICATES]] == [SPACE.default] * REPLICATES


def test_the_next_point_depends_on_what_is_known_alone() -> None:
    known = [trial(SPACE.default, 0.1 * n, n) for n in range(REPLICATES)]
    assert next_point(SPACE, known, [], 3) == next_point(SPACE, known, [], 3)


def test_an_older_profiles_settings_come_first() -> None:
    known = [trial(SPACE.default, 0.0, n) for n in range(REPLICATES)]
    values: list[Value] = list(SPACE.default)
    values[0] = 4
    assert next_point(SPACE, known, [tuple(values)], 0) == tuple(values)


def test_trials_that_failed_are_survived_and_never_best() -> None:
    known = [trial(SPACE.default, 0.1, n) for n in range(REPLICATES)]
    values: list[Value] = list(SPACE.default)
    for number, status in enumerate(("nan", "failed", "timeout")):
        values[0] = (1, 3, 4)[number]
        known.append(Trial(tuple(values), 0, status, (), 0.0, "why"))  # type: ignore[arg-type]
    for _ in range(9):
        known.append(trial(next_point(SPACE, known, [], 0), 0.0))
    assert standing(known)[0][0] == SPACE.default
    assert {point for point, _, _ in standing(known)}.isdisjoint({known[REPLICATES].point})


def test_noise_is_that_of_repeated_points() -> None:
    assert noise_variance([trial(SPACE.default, 0.1)]) == 0.0
    known = [trial(SPACE.default, score) for score in (0.1, 0.2, 0.3)]
    assert noise_variance(known) == pytest.approx(0.01)


def test_luck_in_one_trial_does_not_lead() -> None:
    lucky: Point = (3, *SPACE.default[1:])
    known = [trial(SPACE.default, score) for score in (0.30, 0.34, 0.38, 0.34)]
    assert standing([*known, trial(lucky, 0.35)])[0][0] == SPACE.default


# The final ---------------------------------------------------------------------------------------


def rounds(tuned: float, spread: float, count: int = 5, plain: float = 1.0) -> list[Round]:
    """Goodputs at two loads; the untuned settings have 2, the finalist ``tuned`` more or less."""
    return [
        Round(
            n,
            {
                PLAIN: [plain, plain],
                UNTUNED: [2.0, 2.0],
                "finalist 1": [tuned + spread * (n % 2 - 0.5)] * 2,
            },
        )
        for n in range(count)
    ]


def test_what_wins_outside_the_noise_is_kept() -> None:
    verdict = judge(rounds(2.4, 0.1), ["finalist 1"])
    assert verdict.kept
    assert verdict.arm == "finalist 1"


def test_what_wins_inside_the_noise_is_not() -> None:
    verdict = judge(rounds(2.05, 1.0), ["finalist 1"])
    assert not verdict.kept
    assert verdict.arm == UNTUNED
    assert "finalist 1" in verdict.gains


def test_what_loses_to_plain_is_not_kept_either() -> None:
    assert not judge(rounds(2.4, 0.1, plain=3.0), ["finalist 1"]).kept


def test_an_interval_is_students() -> None:
    # scipy.stats.t.interval(0.95, 4, loc, scale) of (1, 2, 3, 4, 5): 3 +- 1.9632
    found = bounds([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == pytest.approx((3.0, 3.0 - 1.963243, 3.0 + 1.963243), abs=1e-5)
    assert bounds([1.0]) is None
    ratio = interval(rounds(2.4, 0.0), "finalist 1", UNTUNED, 1)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.rounds) == (1.2, 1.2, 1.2, 5)


def test_a_round_in_which_an_arm_failed_does_not_count() -> None:
    found = rounds(2.4, 0.1)
    found[0].goodputs["finalist 1"][0] = None
    assert interval(found, "finalist 1", PLAIN) is not None
    ratio = interval(found, "finalist 1", PLAIN)
    assert ratio is not None
    assert ratio.rounds == 4


# State and budget --------------------------------------------------------------------------------


def test_a_state_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    state = State("f", 3.5, [trial(SPACE.default, 0.25, 1)], [(1.0, 2)], rounds(2.0, 0.1, 2))
    state.cost = {"weight": [1.0, 2.0]}
    state.trials.append(Trial(SPACE.default, 2, "nan", (), 0.1, "scores (nan,)"))
    save_state(path, state)
    assert load_state(path, "f") == state
    assert load_state(path, "another run") == State("another run")
    assert not list(tmp_path.glob("*.tmp"))


def test_recorded_requests_of_another_run_are_not_taken(tmp_path: Path) -> None:
    out, mine, other = tmp_path / "p.json", State("mine"), State("other")
    assert read_recorded(out, mine) is None
    write_recorded(out, mine, made_requests(2))
    kept = read_recorded(out, mine)
    assert kept is not None
    assert [each.id for each in kept] == [each.id for each in made_requests(2)]
    assert read_recorded(out, other) is None
    write_recorded(out, other, made_requests(4))
    assert read_recorded(out, mine) is None  # another run has written over it
    save_state(state_path(out), other)
    trace_path(out).write_text(trace_path(out).read_text()[:-1])  # cut off in the middle
    assert read_recorded(out, load_state(state_path(out), "other")) is None


def test_whatever_changes_the_figures_makes_another_run(tmp_path: Path) -> None:
    cost, policy = tmp_path / "cost.yaml", tmp_path / "policy.yaml"
    cost.write_text("shape: packed")
    policy.write_text("version: 1")
    options = TuneOptions(tmp_path / "p.json", cost=cost, policy=str(policy))
    seen = {fingerprint(options, "digest")}
    for change in ({"loads": (2,)}, {"dtype": "float32"}, {"max_tokens": 9}, {"seed": 1}):
        seen.add(fingerprint(replace(options, **change), "digest"))
    cost.write_text("shape: padded")
    seen.add(fingerprint(options, "digest"))
    policy.write_text("version: 1\nmax_k: 3")
    seen.add(fingerprint(options, "digest"))
    assert len(seen) == 7
    assert fingerprint(replace(options, budget=5.0, trials=9), "digest") in seen


def test_a_file_that_is_no_state_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is no state of autospec tune"):
        load_state(path, "f")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="no state to resume from"):
        load_state(path, "f")


def test_budgets_are_read_and_counted_over_runs() -> None:
    assert [parse_budget(text) for text in ("90", "90s", "15m", "1.5h")] == [90, 90, 900, 5400]
    for wrong in ("", "m", "-5s", "0", "1d"):
        with pytest.raises(InputError, match="--budget"):
            parse_budget(wrong)
    now = [10.0]
    budget = Budget(100.0, spent=30.0, clock=lambda: now[0])
    now[0] = 25.0
    assert (budget.spent, budget.left, budget.left_until(0.6)) == (45.0, 55.0, 15.0)


def test_loads_are_read() -> None:
    assert parse_loads("16, 1,4") == (1, 4, 16)
    with pytest.raises(InputError, match="'0' is not a number of requests from 1 to 1024"):
        parse_loads("1,0")
