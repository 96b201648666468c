from __future__ import annotations

import numpy as np
import pytest

from autospec.profile.tuned import ProposerSettings
from autospec.proposers.settings import LOOKUP_DEFAULTS
from autospec.replay.cost_file import CostFile
from autospec.replay.fixed_arms import replay_fixed
from autospec.replay.trace import TraceRequest
from autospec.tune.rates import measure_rates
from tests.tune.made_traces import made_requests


def test_a_walk_jumps_over_what_was_accepted() -> None:
    request = TraceRequest(
        "r",
        "chat",
        np.arange(3, dtype=np.int32),
        np.arange(10, 18, dtype=np.int32),
        {"draft": np.array([0, 2, 9, 9, 1, 0, 0, 0], dtype=np.int16)},
    )
    settings = {"draft": ProposerSettings(kind="sequential", max_k=2)}
    found, _ = measure_rates([request], settings)
    rates = found["chat"].proposers["draft"]
    # k = 1: positions 0 (0 right), 1 (1), 3 (1), 5 (0), 6 (0), 7 (no room): 8 tokens in 6 steps
    assert rates.accepted[0] == pytest.approx(2 / 6, abs=1e-5)
    assert rates.drafted[0] == pytest.approx(5 / 6, abs=1e-5)
    assert rates.drafting[0] == pytest.approx(5 / 6, abs=1e-5)
    # k = 2: positions 0 (0), 1 (2), 4 (1), 6 (0 of 1), 7 (no room): 8 tokens in 5 steps
    assert rates.accepted[1] == pytest.approx(3 / 5, abs=1e-5)
    assert found["chat"].tokens == 8
    assert found["chat"].context_tokens == pytest.approx(7.0)


def test_rates_are_those_of_the_replayed_closed_loop() -> None:
    requests = made_requests(6)
    cost = CostFile.model_validate(
        {
            "shape": "packed",
            "step": {"fixed_seconds": 1.0, "per_token_seconds": 0.0},
            "proposers": {"ngram": {"kind": "lookup", "max_k": 4}},
        }
    )
    settings = {"ngram": LOOKUP_DEFAULTS["ngram"].model_copy(update={"max_k": 4})}
    found, seconds = measure_rates(requests, settings)
    for result in replay_fixed(requests, cost, "ngram", 1):
        k = result.arm.k
        steps = sum(
            part.tokens / (1 + part.proposers["ngram"].accepted[k - 1]) for part in found.values()
        )
        assert result.tokens / result.steps == pytest.approx(result.tokens / steps, rel=1e-3)
    assert seconds["ngram"] > 0.0
    assert found["copy"].proposers["ngram"].accepted[3] > 2.5
    assert found["new"].proposers["ngram"].accepted[3] < 0.2


def test_an_unsure_model_stops() -> None:
    requests = made_requests(4)
    sure = {each.id: np.full((40, 4), 0.9, dtype=np.float32) for each in requests}
    for rows in sure.values():
        rows[:, 2:] = 0.1
    settings = {"draft": ProposerSettings(kind="sequential", max_k=4, min_confidence=0.5)}
    found, _ = measure_rates(requests, settings, {"draft": sure})
    rates = found["copy"].proposers["draft"]
    assert max(rates.drafted) <= 2.0
    assert rates.accepted[3] == rates.accepted[1]
