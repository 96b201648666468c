"""Equal courses give equal weights, interrupted or not; they end when they no longer help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autospec.errors import InputError
from autospec.training.fit import Course, Report, batch_units, fit, learning_rate, settled
from autospec.training.recording import Recording
from autospec.training.trainee import conditional, survival

torch.set_num_threads(1)

COURSE = Course(100, 0.02, 0.01, seed=3, patience=9)
NOTHING = (
    Recording(torch.zeros(0), torch.zeros(0), torch.zeros(0), np.zeros(1, dtype=np.int64)),
    torch.zeros(0),
)


class Line:
    """Learns to tell on which side of a line points are."""

    batch_units = 8
    num_units = 50

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._points = torch.randn(50, 3, generator=generator)
        self._sides = (self._points[:, 0] > 0.3).float()
        self.module = torch.nn.Linear(3, 1)
        with torch.no_grad():
            self.module.weight.fill_(-0.1)
            self.module.bias.zero_()
        self.seen: list[list[int]] = []

    def loss(self, units: torch.Tensor) -> torch.Tensor:
        self.seen.append(units.tolist())
        logits = self.module(self._points[units])[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        return loss(logits, self._sides[units])

    def hits(self, recording: Recording, choices: torch.Tensor) -> torch.Tensor:
        right = (self.module(self._points)[:, 0] > 0) == (self._sides > 0)
        return torch.stack([right, torch.zeros_like(right)], dim=1)

    def save(self, folder: Path, training: Mapping[str, Any]) -> None:
        raise NotImplementedError


def weights(line: Line) -> list[float]:
    return [*line.module.weight.detach().flatten().tolist(), float(line.module.bias.detach())]


def test_an_interrupted_course_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = Line()
    progress = fit(whole, COURSE, NOTHING, tmp_path / "whole.safetensors", lambda report: None)
    assert progress.step == progress.steps == 100
    assert [step for step, _ in progress.checks] == [0, 40, 80, 100]
    assert progress.checks[-1][1][0] > progress.checks[0][1][0] + 0.2

    class Stop(Exception):
        pass

    for stop_at, error in ((51, KeyboardInterrupt), (97, Stop), (97, None)):
        parts = Line()

        def report(told: Report, stop_at: int = stop_at, error: Any = error) -> None:
            if error is not None and told.step == stop_at:
                raise error

        file = tmp_path / "parts.safetensors"
        if error is None:
            again = fit(parts, COURSE, NOTHING, file, report)
            assert again.checks == progress.checks
            assert parts.seen == whole.seen[80:]  # the steps since the last check are repeated
            assert weights(parts) == weights(whole)
        else:
            with pytest.raises(error):
                fit(parts, COURSE, NOTHING, file, report)


def test_without_progress_the_rate_falls_and_then_it_ends(tmp_path: Path) -> None:
    """A rate so high that weights jump about: first it is lowered, later given up."""
    line = Line()
    course = replace(COURSE, steps=100_000, patience=2, learning_rate=3.0)
    progress = fit(line, course, NOTHING, tmp_path / "state.safetensors", lambda report: None)
    assert progress.turned_step > 0
    assert progress.steps is not None
    assert progress.step <= progress.steps < 100_000
    assert progress.best_step < progress.step
    assert survival(line.hits(*NOTHING))[0] == progress.best


def test_time_settles_a_course_like_its_number_of_steps(tmp_path: Path) -> None:
    timed, fixed = Line(), Line()
    left = iter([False] * 69 + [True])
    course = replace(COURSE, steps=None)
    file = tmp_path / "timed.safetensors"
    progress = fit(timed, course, NOTHING, file, lambda report: None, lambda: next(left))
    assert progress.step == progress.steps == settled(70) == 100
    fit(fixed, COURSE, NOTHING, tmp_path / "fixed.safetensors", lambda report: None)
    assert weights(timed) == weights(fixed)


def test_batches_go_through_everything_once_an_epoch() -> None:
    line = Line()
    first = [batch_units(COURSE, line, step).tolist() for step in range(12)]
    for epoch in (first[:6], first[6:]):
        assert len({unit for batch in epoch for unit in batch}) == 48
    assert first[:6] != first[6:]
    other = [batch_units(replace(COURSE, seed=4), line, step).tolist() for step in range(6)]
    assert other != first[:6]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    course = replace(COURSE, learning_rate=1.0)
    rates = [learning_rate(course, step, 1000) for step in range(1000)]
    assert rates[0] < 0.03
    assert set(rates[60:700]) == {1.0}
    assert rates[700:] == sorted(rates[700:], reverse=True)
    assert 0.02 < rates[-1] < 0.04
    assert rates[:700] == [learning_rate(course, step, None) for step in range(700)]


def test_a_state_of_another_course_or_none_at_all(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    fit(Line(), replace(COURSE, steps=2), NOTHING, file, lambda report: None)
    with pytest.raises(InputError, match="was begun with steps 2, now it is 100; go on with the"):
        fit(Line(), COURSE, NOTHING, file, lambda report: None)
    file.write_bytes(b"x" * 50)
    with pytest.raises(InputError, match=r"state\.safetensors: is not a readable training state"):
        fit(Line(), COURSE, NOTHING, file, lambda report: None)


def test_acceptance_by_position() -> None:
    hits = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    survived = survival(hits)
    assert survived == (0.75, 0.5, 0.25)
    assert conditional(survived) == pytest.approx((0.75, 2 / 3, 0.5))
    assert conditional((0.0, 0.0)) == (0.0, 0.0)
