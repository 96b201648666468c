from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autospec.errors import ProfileError
from autospec.expectation import Rates, binomial, mixed, rates_of_model
from autospec.outlook import outlook
from tests.export.made_profiles import (
    FIXED,
    PER_DEPTH,
    PER_TOKEN,
    rates,
    served_profile,
    tuned_profile,
)


def seconds(tokens: int, depth: int = 0) -> float:
    return FIXED + PER_TOKEN * tokens + PER_DEPTH * depth


def test_a_model_that_always_drafts() -> None:
    view = outlook(tuned_profile({"chat": {"eagle3": rates(1.0, 0.5, 6)}}))
    assert view.expectation.plain_goodput(4) == pytest.approx(4 / seconds(4), rel=0.02)
    expected = 4 * (1 + 0.5 + 0.25) / seconds(4 * 3, depth=2)
    assert view.expectation.goodput(4, "eagle3", 2) == pytest.approx(expected, rel=0.02)


def test_a_lookup_pays_only_in_steps_in_which_it_drafts() -> None:
    view = outlook(tuned_profile({"chat": {"ngram": rates(0.25, 0.8, 8)}}))
    tokens = 1 + 0.25 * (0.8 + 0.64)
    expected = tokens / (0.75 * seconds(1) + 0.25 * seconds(3))
    assert view.expectation.goodput(1, "ngram", 2) == pytest.approx(expected, rel=0.02)


def test_the_best_choice_fades_out_with_the_batch() -> None:
    view = outlook(tuned_profile({"chat": {"eagle3": rates(1.0, 0.7, 6)}}))
    ks = [view.expectation.best(n, 6).k for n in (1, 8, 32, 100)]
    assert ks == sorted(ks, reverse=True)
    assert ks[0] >= 3
    assert ks[-1] <= 1


def test_ties_go_to_the_smaller_k() -> None:
    view = outlook(tuned_profile({"chat": {"eagle3": rates(1.0, 0.7, 6)}}))
    exact = view.expectation.best(1, 6)
    near = view.expectation.best(1, 6, tolerance=0.05)
    assert near.k < exact.k
    assert near.goodput >= 0.95 * exact.goodput


def test_workloads_are_told_apart_and_mixed() -> None:
    profile = tuned_profile(
        {"code": {"ngram": rates(0.8, 0.9, 8)}, "chat": {"ngram": rates(0.1, 0.2, 8)}}
    )
    best = {
        name: outlook(profile, name).expectation.best(4, 8).k for name in ("code", "chat", None)
    }
    assert best["code"] > best["chat"]
    both = outlook(profile).expectation.rates["ngram"]
    code, chat = 1 / 1.72, 1 / 1.02  # steps per token at k = 1
    share = (0.8 * code + 0.1 * chat) / (code + chat)
    assert both.drafting[0] == pytest.approx(share)


def test_an_unknown_workload_is_named_with_those_there_are() -> None:
    profile = tuned_profile({"code": {"ngram": rates(0.8, 0.9, 8)}})
    with pytest.raises(ProfileError, match="no workload 'poetry'; it has code"):
        outlook(profile, "poetry")


def test_a_served_profile_judges_models_and_says_what_lookups_lack() -> None:
    view = outlook(served_profile(["eagle3", "ngram"], 0.6))
    assert set(view.expectation.rates) == {"eagle3"}
    assert view.expectation.rates["eagle3"].accepted[:2] == pytest.approx([0.6, 0.96], rel=1e-3)
    assert "autospec tune" in view.left_out["ngram"]
    with pytest.raises(ProfileError, match="ngram: how often it has a draft is not known"):
        outlook(served_profile(["ngram"], 0.6))


def test_a_profile_without_step_cost_is_refused() -> None:
    profile = tuned_profile({"code": {"ngram": rates(0.8, 0.9, 8)}})
    with pytest.raises(ProfileError, match="no step cost"):
        outlook(replace(profile, cost={}))


def test_what_was_seen_bounds_what_is_judged() -> None:
    view = outlook(tuned_profile({"chat": {"eagle3": rates(1.0, 0.5, 6)}}))
    assert view.most_load == 32
    # The largest steps had 32 x 8 tokens, believed half as far again.
    assert 256 < view.most_tokens <= 1.5 * 256
    assert view.most_k(1, "eagle3") == 6
    assert view.most_k(100, "eagle3") <= 2
    assert view.most_k(1000, "eagle3") == 0


def test_binomial_is_the_binomial() -> None:
    first, chances = binomial(5, 0.3)
    assert first == 0
    expected = [0.16807, 0.36015, 0.3087, 0.1323, 0.02835, 0.00243]
    assert chances == pytest.approx(expected, abs=1e-5)
    for share, only in ((0.0, 0), (1.0, 7)):
        first, chances = binomial(7, share)
        assert (first, chances.tolist()) == (only, [1.0])
    first, chances = binomial(512, 0.5)
    assert first + float(np.arange(len(chances)) @ chances) == pytest.approx(256.0)


def test_rates_of_a_model_add_up_survivals() -> None:
    found = rates_of_model(np.array([0.9, 0.5]))
    assert found.drafting.tolist() == [1.0, 1.0]
    assert found.drafted.tolist() == [1.0, 2.0]
    assert found.accepted == pytest.approx([0.9, 1.35], rel=1e-6)


def test_mixed_counts_steps_and_takes_the_common_depth() -> None:
    fast = Rates(np.ones(3), np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    slow = Rates(np.zeros(2), np.zeros(2), np.zeros(2))
    both = mixed({"a": fast, "b": slow}, {"a": 2.0, "b": 2.0})
    # k = 1: the fast workload takes 1 step for its two tokens, the slow one 2.
    assert both.drafting[0] == pytest.approx(1 / 3)
    # Tokens over steps of the whole mix: 4 / 3 at k = 1, 4 / (2/3 + 2) at k = 2.
    assert 1 + both.accepted == pytest.approx([4 / 3, 1.5])
