from __future__ import annotations

import importlib.util

import pytest

from autospec.errors import MissingDependency
from autospec.policy.bayes import Bayes, BayesOptions
from autospec.policy.trials import Trials, next_point
from tests.policy.steps import outcome, policy_of, view


def test_a_window_is_added_to_its_point() -> None:
    trials = Trials(point=("draft", 2))
    for tokens, seconds, point in ((6.0, 2.0, ("draft", 2)), (8.0, 2.0, ("suffix", 3))):
        trials.point = point
        trials.window_tokens, trials.window_seconds = tokens, seconds
        trials.end_window()
    assert trials.best() == ("suffix", 3)
    trials.window_tokens, trials.window_seconds = 2.0, 2.0
    trials.end_window()
    # (8 + 2) / (2 + 2) = 2.5 is less than 3
    assert trials.rates() == [3.0, 2.5]
    assert trials.best() == ("draft", 2)
    assert trials.windows == 3


def test_the_process_asks_near_the_best() -> None:
    trials = Trials()
    for k in (0, 2, 4, 6, 8, 10, 12):
        trials.points.append(("draft", k))
        trials.tokens.append(100.0 - (k - 7.0) ** 2)
        trials.seconds.append(1.0)
    trials.windows = 7
    name, k = next_point(("draft",), 12, trials, seed=1)
    assert name == "draft"
    assert 5 <= k <= 9
    assert next_point(("draft",), 12, trials, seed=1) == (name, k)


def test_windows_start_plain_and_end_with_the_best_point() -> None:
    options = BayesOptions(proposers=("draft",), max_k=6, window_steps=4, trials=8)
    policy = policy_of(Bayes, options)
    ks = []
    for _ in range(4 * 14):
        decision = policy.decide(view(2))
        k = int(decision.k[0])
        ks.append(k)
        policy.learn(outcome(decision, [k, k], seconds=1.0 + 0.1 * k**2))
    assert ks[:4] == [0] * 4
    assert all(len(set(ks[at : at + 4])) == 1 for at in range(0, len(ks), 4))
    # 2 (1 + k) / (1 + k^2 / 10) is largest at 2 and 3 (4.29, 4.21)
    tried = set(ks)
    best = max(tried, key=lambda k: (1 + k) / (1 + 0.1 * k**2))
    assert len(tried) >= 4
    assert best in (2, 3)
    assert set(ks[-16:]) == {best}


def test_without_scikit_optimize_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "autospec-llm\[tune\]"'):
        policy_of(Bayes, BayesOptions())
