"""Runs of a closed loop, computed by hand: tokens and seconds follow from traces and cost file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autospec.config import Settings
from autospec.errors import InputError
from autospec.policy.base import PolicyOptions
from autospec.policy.lookup_first import LookupFirstOptions
from autospec.policy.off import OffOptions
from autospec.policy.static import StaticOptions
from autospec.replay.fixed_arms import tabulate
from autospec.replay.hindsight import replay_bare, replay_plain
from autospec.replay.run import (
    ClosedLoop,
    make_controller,
    make_engine,
    replay_closed,
    run_closed,
    shuffled,
)
from autospec.replay.trace import TraceRequest
from tests.replay.made_runs import (
    APPENDED,
    DEPTH,
    FIRST,
    LOOKUPS_AND_MODEL,
    Watch,
    cost_file,
    model_seconds,
    random_requests,
    request,
    step_seconds,
)

SECOND = request("b", [1, 2, 3, 4, 5], [6, 7, 8], [4, 0, 0])


def test_plain_closed_loop_by_hand() -> None:
    result = replay_plain([FIRST, SECOND], cost_file(), 1)
    contexts = [3, 4, 5, 6, 7, 8, 5, 6, 7]
    assert (result.tokens, result.steps) == (9, 9)
    assert result.seconds == pytest.approx(sum(step_seconds(1, c) for c in contexts))
    assert result.tokens_per_second == pytest.approx(9 / result.seconds)


def test_speculation_follows_the_record() -> None:
    engine = make_engine([FIRST], cost_file(), 1)
    watch = Watch(StaticOptions(proposer="model", k=2), engine)
    result = run_closed(engine, watch, [FIRST], 1)
    # position 0: two of two, bonus; position 3: one of two; position 5: no room for a draft
    assert [r.accepted.tolist() for r in watch.results] == [[2], [1], [0]]
    assert [r.committed.tolist() for r in watch.results] == [[3], [2], [1]]
    assert [r.verified.tolist() for r in watch.results] == [[2], [2], [0]]
    assert [b.room.tolist() for b in watch.batches if b.room is not None] == [[5], [2], [0]]
    expected = [
        step_seconds(3, 3) + model_seconds(2, 3),
        step_seconds(3, 6) + model_seconds(2, 6),
        step_seconds(1, 8),
    ]
    assert [r.step_seconds for r in watch.results] == pytest.approx(expected)
    assert [float(r.draft_seconds[0]) for r in watch.results if r.draft_seconds is not None] == (
        pytest.approx([model_seconds(2, 3), model_seconds(2, 6), 0.0])
    )
    assert (result.tokens, result.steps) == (6, 3)
    assert result.seconds == pytest.approx(sum(expected))


def test_a_batch_drafts_to_its_deepest_request() -> None:
    engine = make_engine([FIRST, SECOND], cost_file(), 2)
    watch = Watch(StaticOptions(proposer="model", k=4), engine)
    loop = ClosedLoop(engine, watch, [FIRST, SECOND], 2)
    assert loop.step()
    # SECOND has room for two draft tokens of its three, FIRST for all four
    assert watch.results[0].verified.tolist() == [4, 2]
    assert watch.results[0].accepted.tolist() == [2, 2]
    assert watch.results[0].committed.tolist() == [3, 3]
    assert watch.results[0].step_seconds == pytest.approx(
        step_seconds(2 + 6, 3 + 5) + model_seconds(4, 3 + 5)
    )
    assert [done.id for done in engine.finished] == ["b"]


def test_lookups_offer_match_and_cost_a_share_of_the_forward() -> None:
    cost = cost_file(ngram={"kind": "lookup", "step_fraction": 0.1, "max_k": 3})
    repeated = request("a", [7, 8, 9, 5, 6, 7], [8, 9, 5, 6, 1])
    engine = make_engine([repeated], cost, 1)
    watch = Watch(StaticOptions(proposer="ngram", k=2), engine)
    run_closed(engine, watch, [repeated], 1)
    first = watch.batches[0]
    assert first.offer_lengths is not None
    assert first.last_tokens is not None
    assert first.last_tokens.tolist() == [7]
    for batch, result in zip(watch.batches, watch.results, strict=True):
        assert batch.offer_lengths is not None
        assert result.matched is not None
        verify = step_seconds(1 + int(result.verified[0]), int(batch.context_tokens[0]))
        assert result.step_seconds == pytest.approx(1.1 * verify)
        # of an offer that is right as far as it goes, as much is known as was committed
        assert result.matched[0, 0] <= min(batch.offer_lengths[0, 0], result.committed[0])
        assert result.matched[0, 0] >= result.accepted[0]
    assert sum(int(result.accepted[0]) for result in watch.results) > 0


def test_lookups_that_nobody_wants_are_free() -> None:
    cost = cost_file(ngram={"kind": "lookup", "step_fraction": 0.1, "max_k": 3})
    engine = make_engine([FIRST], cost, 1)
    watch = Watch(OffOptions(), engine)
    result = run_closed(engine, watch, [FIRST], 1)
    assert result.seconds == pytest.approx(sum(step_seconds(1, c) for c in range(3, 9)))
    assert all(r.matched is not None and r.matched.tolist() == [[-1]] for r in watch.results)


def test_a_lookup_goes_on_from_a_models_draft() -> None:
    # At position 0 the model is right about 1, 2; the prompt then says 3, 4, 9, the output 3, 4, 5.
    # At position 5 the model is wrong at once, and what follows is lost.
    asked = request("a", [1, 2, 3, 4, 9, 9, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [2] + [0] * 8)
    engine = make_engine([asked], cost_file(**APPENDED), 1)
    watch = Watch(StaticOptions(proposer="both", k=5), engine)
    run_closed(engine, watch, [asked], 1)
    drafted, confidence = watch.drafted[0]
    assert drafted.tolist() == [5]
    assert np.isnan(confidence[0, :2]).all()
    assert (confidence[0, 2:5] > 0.0).all()
    first, second = watch.results[:2]
    assert (int(first.verified[0]), int(first.accepted[0]), int(first.committed[0])) == (5, 4, 5)
    assert (int(second.accepted[0]), int(second.committed[0])) == (0, 1)
    forward = step_seconds(1 + 5, 7)
    assert first.draft_seconds is not None
    assert first.draft_seconds.tolist() == pytest.approx([0.0, 0.0, 2 * DEPTH + 0.1 * forward])
    assert first.step_seconds == pytest.approx(1.1 * forward + 2 * DEPTH)


def test_the_controller_cuts_what_is_appended_by_its_confidence() -> None:
    rng = np.random.default_rng(0)
    passage = rng.integers(100, 200, 40).tolist()
    outputs = [passage[at : at + 30] for at in (0, 5, 10)]
    asked = [request(str(i), passage, output, [2] * 30) for i, output in enumerate(outputs)]
    engine = make_engine(asked, cost_file(**APPENDED), 1)
    settings = Settings.model_validate({"version": 1, "proposers": ["both"]})
    result = run_closed(engine, make_controller(engine, settings), asked, 1)
    # the model's two alone would make it three tokens a step
    assert result.tokens / result.steps > 4.0


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"head": "nobody"}, "nobody"),
        ({"head": "suffix"}, "suffix"),
        ({"head_k": 6}, "max_k 6 must be above head_k 6"),
    ],
)
def test_a_cost_file_names_what_is_wrong_with_an_appended_lookup(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        cost_file(**{**APPENDED, "both": {**APPENDED["both"], **changes}})
    with pytest.raises(ValueError, match="needs the lookup 'suffix'"):
        cost_file(model=APPENDED["model"], both=APPENDED["both"])


@pytest.mark.parametrize(
    "shape,captured,tokens", [("packed", (), 8), ("padded", (), 10), ("stepped", (4, 16), 16)]
)
def test_shapes_pay_for_different_tokens(
    shape: str, captured: tuple[int, ...], tokens: int
) -> None:
    engine = make_engine([FIRST, SECOND], cost_file(shape, captured), 2)
    watch = Watch(StaticOptions(proposer="model", k=4), engine)
    ClosedLoop(engine, watch, [FIRST, SECOND], 2).step()
    expected = step_seconds(tokens, 8) + model_seconds(4, 8)
    assert watch.results[0].step_seconds == pytest.approx(expected)


def test_the_tail_below_half_of_the_concurrency_is_dropped() -> None:
    long = request("long", [1], [1] * 20, [0] * 20)
    short = [request(f"s{i}", [1], [1] * 2, [0] * 2) for i in range(3)]
    result = replay_plain([long, *short], cost_file(), 4)
    assert (result.steps, result.tokens) == (2, 8)  # one of four is left, and not waited for
    assert replay_plain([long, *short], cost_file(), 1).tokens == 26


def test_lowered_concurrency_keeps_the_oldest_running() -> None:
    requests = random_requests(4)
    engine = make_engine(requests, cost_file(), 4)
    watch = Watch(OffOptions(), engine)
    loop = ClosedLoop(engine, watch, requests, 4)
    loop.step()
    loop.concurrency = 1
    loop.step()
    loop.concurrency = 4
    loop.step()
    assert [len(batch.handles) for batch in watch.batches] == [4, 1, 4]
    assert watch.batches[1].handles.tolist() == watch.batches[0].handles[:1].tolist()


def test_requests_are_shuffled_by_the_seed_alone() -> None:
    requests = random_requests(8)
    names = [each.id for each in shuffled(requests, None, 0)]
    assert sorted(names) == [each.id for each in requests]
    assert names == [each.id for each in shuffled(requests, None, 0)]
    assert names[:3] == [each.id for each in shuffled(requests, 3, 0)]
    assert names != [each.id for each in shuffled(requests, None, 1)]
    assert names == ["4", "1", "5", "2", "0", "3", "7", "6"]  # as random.Random(0) has it


def test_an_engine_needs_requests_and_slots() -> None:
    with pytest.raises(InputError, match="no requests"):
        make_engine([], cost_file(), 1)
    with pytest.raises(InputError, match="found 0 and"):
        make_engine([FIRST], cost_file(), 0)


def test_models_without_a_record_in_every_request_are_left_out() -> None:
    bare = request("bare", [1], [2, 3])
    assert [info.name for info in make_engine([FIRST], cost_file(), 1).proposers] == ["model"]
    assert make_engine([FIRST, bare], cost_file(), 1).proposers == []


def test_a_model_that_cannot_draft_changes_nothing_for_the_others() -> None:
    bare = [
        TraceRequest(each.id, "chat", each.prompt_token_ids, each.output_token_ids, {})
        for each in random_requests(4)
    ]
    alone = {"suffix": APPENDED["suffix"]}
    for lone, beside in ((alone, {**alone, "model": APPENDED["model"]}), (alone, APPENDED)):
        runs = [
            replay_closed(bare, cost_file(**parts), Settings(version=1), 2)[0]
            for parts in (lone, beside)
        ]
        assert (runs[0].tokens, runs[0].seconds) == (runs[1].tokens, runs[1].seconds)
        tables = [tabulate(bare, cost_file(**parts), "suffix") for parts in (lone, beside)]
        np.testing.assert_array_equal(tables[0].drafted, tables[1].drafted)


@pytest.mark.parametrize(
    "options",
    [
        OffOptions(),
        StaticOptions(proposer="suffix", k=3),
        LookupFirstOptions(lookup="suffix", model="model", min_confidence=0.5, model_k=2),
    ],
)
def test_a_bare_policy_decides_as_under_the_controller(options: PolicyOptions) -> None:
    requests, cost = random_requests(6), cost_file(**LOOKUPS_AND_MODEL)
    settings = Settings(version=1, policy=options, max_k=64)
    served, _ = replay_closed(requests, cost, settings, 3)
    bare = replay_bare(requests, cost, options, 3)
    assert (served.tokens, served.steps) == (bare.tokens, bare.steps)
    assert served.seconds == bare.seconds
    assert served.decision_seconds_mean > 0.0
    assert bare.decision_seconds_mean == 0.0


def test_the_default_policy_replays_alike_and_learns() -> None:
    requests, cost = random_requests(12), cost_file(**LOOKUPS_AND_MODEL)
    settings = Settings(version=1)
    first, controller = replay_closed(requests, cost, settings, 4, policy="default")
    second, _ = replay_closed(requests, cost, settings, 4)
    assert (first.seconds, first.tokens) == (second.seconds, second.tokens)
    assert controller.cost.is_known
    assert first.policy == "default"
