"""A drafter that was off drafts afterwards what it would have drafted without the pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autospec.adapters.vllm import steering as steering_module
from autospec.adapters.vllm.pilot import Pilot
from autospec.policy.base import Decision, View
from autospec.records import NO_PROPOSER
from tests.adapters.vllm_engines import (
    MOST_K,
    decide_with,
    engine,
    fixed_decisions,
    generate,
    prompts,
    scheduler_of,
    steering_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts(5, seed=3)
TOKENS = 60

Drafts = dict[tuple[str, int], list[int]]  # by request and number of tokens before the draft


def recorded(scheduler: Any) -> Drafts:
    """The draft tokens of every later step."""
    found: Drafts = {}
    update = scheduler.update_from_output

    def recording(output: Any, result: Any) -> Any:
        for request_id, tokens in output.scheduled_spec_decode_tokens.items():
            request = scheduler.requests[request_id]  # vLLM appends to the names it was given
            found[request_id.split("-")[0], request.num_tokens] = list(tokens)
        return update(output, result)

    scheduler.update_from_output = recording
    return found


def on_and_off(pilot: Pilot, is_on: Callable[[int], bool]) -> None:
    """The model drafts in the steps that ``is_on`` names, else nobody does."""
    steps = 0

    def decide(view: View) -> Decision:
        nonlocal steps
        steps += 1
        k = MOST_K if is_on(steps) else 0
        return Decision(
            np.full(view.requests, pilot.model if k else NO_PROPOSER, dtype=np.int16),
            np.full(view.requests, k, dtype=np.int16),
        )

    decide_with(pilot, decide)


@pytest.mark.parametrize("method, least", [("draft_model", 6), ("eagle", 40), ("eagle3", 40)])
def test_pauses_leave_no_trace_in_drafts(method: str, least: int) -> None:
    with engine(method, alone=True) as llm:
        always = recorded(scheduler_of(llm))
        plain = generate(llm, TEXTS, TOKENS)
    with engine(method) as llm:
        paused = recorded(scheduler_of(llm))
        on_and_off(steering_of(llm).pilot, lambda step: step % 13 < 4)
        assert generate(llm, TEXTS, TOKENS) == plain
    shared = always.keys() & paused.keys()
    assert len(shared) >= least
    same = sum(always[each][: len(paused[each])] == paused[each] for each in shared)
    assert same == len(shared)


def acceptance(drafted: Drafts, outputs: dict[int, list[int]]) -> float:
    right = total = 0
    for (request_id, count), tokens in drafted.items():
        index = int(request_id.removeprefix("r"))
        place = count - len(TEXTS[index])
        truth = outputs[index][place : place + len(tokens)]
        total += len(truth)
        for mine, theirs in zip(tokens, truth, strict=False):
            if mine != theirs:
                break
            right += 1
    return right / total


def test_acceptance_after_a_pause_is_what_it_was_before() -> None:
    with engine("draft_model") as llm:
        drafted = recorded(scheduler_of(llm))
        on_and_off(steering_of(llm).pilot, lambda step: step <= 8 or step > 24)
        early: Drafts = {}

        def look(step: int) -> None:
            if step == 16:  # in the pause
                early.update(drafted)

        outputs = generate(llm, TEXTS, 100, between=look)
    late = {each: tokens for each, tokens in drafted.items() if each not in early}
    assert min(len(early), len(late)) >= 35
    before, after = acceptance(early, outputs), acceptance(late, outputs)
    assert before > 0.5
    assert after == pytest.approx(before, abs=0.15)


def test_a_cache_that_is_not_worth_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering_module, "_MOST_BEHIND", 8)
    with engine("draft_model") as llm:
        steering = steering_of(llm)
        fixed_decisions(steering.pilot, NO_PROPOSER, 0)
        behind: list[int] = []
        cold: list[bool] = []

        def look(_: int) -> None:
            for tracked in steering.pilot.requests.values():
                behind.append(tracked.behind)
                cold.append(tracked.cold)

        plain = generate(llm, TEXTS, 40, between=look)
        assert max(behind) <= 8 + 1 + max(map(len, TEXTS))
        assert not any(cold)  # the cost model knows nothing against it yet
        monkeypatch.setattr(steering_module, "_WARM_SHARE", -1.0)
        assert generate(llm, TEXTS, 40, between=look) == plain
        assert any(cold)
        on_and_off(steering.pilot, lambda _: True)
        assert generate(llm, TEXTS, 40) == plain
