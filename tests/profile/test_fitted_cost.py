"""What a profile says of step times, against the times that were put in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autospec.cli.app import app
from autospec.cost.step_cost import StepCost, StepLoad
from autospec.errors import ProfileError
from autospec.profile.file import save_profile
from autospec.profile.fitted_cost import cost_fit, load_times
from autospec.profile.learned import Identity, Profile
from autospec.records import EngineInfo, ProposerInfo

ENGINE = EngineInfo("llama", "made", "1", "cpu", "float32")
PROPOSERS = (ProposerInfo("suffix", "lookup", 8), ProposerInfo("eagle", "sequential", 4))
FIXED, TOKEN, DEPTH = 0.02, 0.001, 0.004


def made_profile(steps: int = 400) -> Profile:
    """Plain steps and drafts of the model, of 1 and of 4 requests."""
    cost, rng = StepCost(PROPOSERS, ENGINE), np.random.default_rng(0)
    for step in range(steps):
        requests, k = (1, 4)[step % 2], int(rng.integers(0, 5))
        tokens = requests * (1 + k)
        drafting = np.array([0.0, DEPTH * k])
        load = StepLoad(
            tokens, requests, 100 * requests, k > 0,
            np.array([0.0, k]), np.array([0.0, k * requests]), np.zeros(2),
        )  # fmt: skip
        cost.observe(load, FIXED + TOKEN * tokens + float(drafting.sum()), drafting)
    return Profile(
        Identity.of(ENGINE, PROPOSERS), "acceptance/1", "cost/1",
        {}, {"step": cost.take_fresh()}, (), 1.8e9,
    )  # fmt: skip


def test_times_by_load_are_those_that_steps_took() -> None:
    fit = cost_fit("p.json", made_profile())
    assert fit is not None
    one, four = load_times(fit)
    assert (one.requests, four.requests) == (1, 4)
    assert one.steps == pytest.approx(200, abs=10)
    for each in (one, four):
        n = each.requests
        assert each.plain_seconds == pytest.approx(FIXED + TOKEN * n, rel=0.05)
        wanted = (TOKEN * n, 4 * TOKEN * n)
        assert each.verifying_seconds == pytest.approx(wanted, rel=0.2, abs=0.0005)
        assert each.drafting_seconds["eagle"] == pytest.approx((DEPTH, 4 * DEPTH), rel=0.2)
        assert list(each.drafting_seconds) == ["eagle"]


def test_profile_show_tells_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path, other = tmp_path / "p.json", tmp_path / "q.json"
    save_profile(path, made_profile())
    shown = CliRunner().invoke(app, ["profile", "show", str(path)]).stdout
    assert "plain step" in shown
    assert "verifying 1 / 4 each" in shown
    assert "drafting 1 / 4 each, eagle" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("│ 4 ")]
    assert row.count(" ms") == 5
    assert "gram" not in shown
    save_profile(other, made_profile(100))
    differing = CliRunner().invoke(app, ["profile", "diff", str(path), str(other)]).stdout
    assert "4 running: steps counted" in differing


def test_a_cost_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for cost, said in (
        ({}, "step cost: too few steps were counted"),
        ({"step": {"gram": np.eye(2)}}, "step cost: cannot be shown: "),
    ):
        save_profile(path, replace(made_profile(4), cost=cost))
        assert said in CliRunner().invoke(app, ["profile", "show", str(path)]).stdout
    with pytest.raises(ProfileError, match="p: cost_layout is cost/0, this AutoSpec reads cost/1"):
        cost_fit("p", replace(made_profile(4), cost_layout="cost/0"))
