"""Hand-computed runs: every step's tokens and seconds follow from the traces and the cost file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autospec import cli
from autospec.config import Settings
from autospec.cost_file import CostFile
from autospec.errors import InputError
from autospec.fixed_arms import arm_name, fixed_arms, replay_fixed
from autospec.hindsight import (
    BarePolicy,
    Clairvoyant,
    ClairvoyantEngine,
    replay_bare,
    replay_clairvoyant,
    replay_plain,
)
from autospec.latency import Finished, Percentiles, summarize_latency
from autospec.policy.base import PolicyOptions
from autospec.policy.lookup_first import LookupFirstOptions
from autospec.policy.off import OffOptions
from autospec.policy.static import StaticOptions
from autospec.records import BatchState, Plan, Request, StepResult
from autospec.replay import (
    ClosedLoop,
    make_controller,
    make_engine,
    replay_closed,
    replay_open,
    run_closed,
    run_open,
    shuffled,
)
from autospec.replay_engine import ReplayEngine
from autospec.trace import TraceRequest

FIXED, OVERHEAD, TOKEN, CONTEXT, DEPTH, DRAFT_CONTEXT = 1.0, 0.5, 0.01, 0.001, 0.1, 0.0001


def cost_file(shape: str = "packed", captured: Sequence[int] = (), **proposers: Any) -> CostFile:
    model = {
        "kind": "sequential",
        "per_depth_seconds": DEPTH,
        "per_context_token_seconds": DRAFT_CONTEXT,
        "max_k": 4,
    }
    return CostFile.model_validate(
        {
            "shape": shape,
            "captured_sizes": list(captured),
            "step": {
                "fixed_seconds": FIXED,
                "overhead_seconds": OVERHEAD,
                "per_token_seconds": TOKEN,
                "per_context_token_seconds": CONTEXT,
            },
            "proposers": proposers or {"model": model},
        }
    )


def request(
    name: str, prompt: Sequence[int], output: Sequence[int], accepted: Sequence[int] | None = None
) -> TraceRequest:
    return TraceRequest(
        name,
        "chat",
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        {} if accepted is None else {"model": np.array(accepted, dtype=np.int16)},
    )


# Six output tokens; drafts at positions 0..5 would have this many tokens accepted.
FIRST = request("a", [1, 2, 3], [4, 5, 6, 7, 8, 9], [2, 0, 0, 1, 0, 0])
SECOND = request("b", [1, 2, 3, 4, 5], [6, 7, 8], [4, 0, 0])


def step_seconds(tokens: int, cached: int) -> float:
    return FIXED + OVERHEAD + TOKEN * tokens + CONTEXT * cached


def model_seconds(depth: int, context: int) -> float:
    return depth * (DEPTH + DRAFT_CONTEXT * context)


def random_requests(count: int, seed: int = 0, tokens: int = 40) -> tuple[TraceRequest, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        request(
            str(i),
            rng.integers(0, 4, 12).tolist(),
            rng.integers(0, 4, tokens).tolist(),
            rng.integers(0, 5, tokens).tolist(),
        )
        for i in range(count)
    )


LOOKUPS_AND_MODEL: dict[str, Any] = {
    "model": {"kind": "sequential", "per_depth_seconds": 0.05, "max_k": 4},
    "ngram": {"kind": "lookup", "step_fraction": 0.01, "max_k": 5},
    "suffix": {"kind": "lookup", "step_fraction": 0.01, "max_k": 6},
}


class Watch:
    """Obeys a bare policy and keeps what the engine reported."""

    def __init__(self, options: PolicyOptions, engine: ReplayEngine) -> None:
        self._inner = BarePolicy(options, engine)
        self.batches: list[BatchState] = []
        self.results: list[StepResult] = []
        self.drafted: list[tuple[NDArray[np.int16], NDArray[np.float32]]] = []
        self.requests: list[Request] = []

    def start(self, request: Request) -> int:
        self.requests.append(request)
        return self._inner.start(request)

    def finish(self, handle: int) -> None:
        self._inner.finish(handle)

    def wants_offers(self) -> NDArray[np.bool_]:
        return self._inner.wants_offers()

    def plan(self, batch: BatchState) -> Plan:
        self.batches.append(batch)
        return self._inner.plan(batch)

    def trim(self, plan: Plan, drafted: NDArray[np.int16], confidence: NDArray[np.float32]) -> Plan:
        self.drafted.append((drafted, confidence))
        return self._inner.trim(plan, drafted, confidence)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.results.append(result)


# Closed loop ------------------------------------------------------------------------------------


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


APPENDED: dict[str, Any] = {
    "model": {"kind": "sequential", "per_depth_seconds": DEPTH, "max_k": 4},
    "suffix": {"kind": "lookup", "step_fraction": 0.1, "max_k": 6},
    "both": {"kind": "appended", "head": "model", "head_k": 2, "max_k": 6},
}


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


# Policies and the controller --------------------------------------------------------------------


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


# Hindsight --------------------------------------------------------------------------------------


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


# Open loop --------------------------------------------------------------------------------------


def open_run(
    requests: Sequence[TraceRequest], arrivals: Sequence[float], slots: int, prefill: int
) -> tuple[ReplayEngine, Watch, Any]:
    engine = make_engine(requests, cost_file(), slots, prefill_tokens=prefill)
    watch = Watch(OffOptions(), engine)
    result = run_open(engine, watch, requests, arrivals, slots, rate=1.0, tpot_target_seconds=1.51)
    return engine, watch, result


def test_open_loop_by_hand() -> None:
    one = request("one", [1, 2, 3], [4, 5], [0, 0])
    engine, watch, result = open_run([one], [10.0], 1, 2)
    # two prompt tokens, then the last one with the first output token, then one decoding step
    chunks = [step_seconds(2, 0), step_seconds(1, 2)]
    decode = step_seconds(1, 4)
    done = engine.finished[0]
    assert done.arrival == 10.0
    assert done.first_token == pytest.approx(10.0 + sum(chunks))
    assert done.end == pytest.approx(10.0 + sum(chunks) + decode)
    assert result.seconds == pytest.approx(done.end)
    assert result.latency.ttft.p50 == pytest.approx(sum(chunks))
    assert result.latency.tpot.p99 == pytest.approx(decode)
    assert result.latency.end_to_end.p95 == pytest.approx(sum(chunks) + decode)
    assert result.latency.target_share == 0.0  # 1.514 s for the one token after the first
    assert (result.tokens, len(watch.batches)) == (2, 1)
    assert watch.requests[0].tpot_target_seconds == 1.51


def test_prompts_are_read_beside_decoding() -> None:
    early = request("early", [1], [2, 3, 4, 5], [0] * 4)
    late = request("late", [1, 2, 3], [4], [0])
    engine, watch, _ = open_run([early, late], [0.0, 0.1], 2, 2)
    # step 1 reads early's prompt; late comes meanwhile, reads 2 tokens, then 1 and ends at once
    assert [batch.prefill_tokens for batch in watch.batches] == [2, 1, 0]
    assert [r.prefill_tokens for r in watch.results] == [2, 1, 0]
    assert [r.step_seconds for r in watch.results] == pytest.approx(
        [step_seconds(1 + 2, 2 + 0), step_seconds(1 + 1, 3 + 2), step_seconds(1, 4)]
    )
    assert [done.id for done in engine.finished] == ["late", "early"]
    assert engine.finished[0].first_token == engine.finished[0].end
    assert engine.finished[0].tpot is None


def test_requests_queue_for_a_slot_and_nothing_idles() -> None:
    requests = [request(str(i), [1], [2, 3], [0, 0]) for i in range(3)]
    engine, watch, result = open_run(requests, [0.0, 0.0, 100.0], 1, 8)
    assert [batch.waiting_requests for batch in watch.batches] == [1, 0, 0]
    each = step_seconds(1, 0) + step_seconds(1, 2)
    assert [done.end for done in engine.finished] == pytest.approx([each, 2 * each, 100.0 + each])
    assert result.latency.end_to_end.p50 == pytest.approx(each)


def test_the_controller_serves_the_open_loop() -> None:
    requests = random_requests(6)
    result, controller = replay_open(
        requests,
        [float(i) for i in range(6)],
        1.0,
        cost_file(**LOOKUPS_AND_MODEL),
        Settings(version=1),
        max_running=2,
        tpot_target_seconds=0.5,
    )
    assert result.tokens == 6 * 40
    assert result.rate == 1.0
    assert controller.cost.is_known


def test_latency_summary() -> None:
    found = summarize_latency(
        [Finished("a", 3, 0.0, 1.0, 3.0), Finished("b", 1, 0.0, 2.0, 2.0)], 0.9
    )
    assert found.ttft == Percentiles(1.5, 1.95, 1.99)
    assert found.tpot == Percentiles(1.0, 1.0, 1.0)
    assert found.target_share == 0.5  # one token has no pace to miss
    assert summarize_latency([]).tpot == Percentiles(0.0, 0.0, 0.0)


# The command ------------------------------------------------------------------------------------

TRACE = [
    {
        "id": str(i),
        "workload": "chat",
        "prompt_token_ids": [1, 2, 3, 1, 2],
        "output_token_ids": [3, 1, 2, 3, 1, 2, 9, 9],
        "accepted": {"model": [2, 1, 0, 3, 2, 1, 0, 0]},
    }
    for i in range(4)
]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("trace.jsonl", "cost.yaml", "arrivals.csv", "out")}
    paths["trace.jsonl"].write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    cost = cost_file(**LOOKUPS_AND_MODEL).model_dump(mode="json")
    paths["cost.yaml"].write_text(json.dumps(cost))
    paths["arrivals.csv"].write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:4{i}.5,10,4\n" for i in range(4))
    )
    return paths


def command(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], *arguments: str | Path) -> int:
    fixed = ["replay", files["trace.jsonl"], "--cost", files["cost.yaml"], "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["autospec", *map(str, [*fixed, *arguments])])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_command_writes_every_figure(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policy", "default", "--policy", "off", "--concurrency", "1,2"]
    assert command(monkeypatch, files, *arguments, "--json", files["out"]) == 0
    report = json.loads(files["out"].read_text())
    assert [(row["policy"], row["concurrency"]) for row in report["results"]] == [
        ("default", 1),
        ("off", 1),
        ("default", 2),
        ("off", 2),
    ]
    row = report["results"][1]
    assert row["speedup_vs_plain"] == 1.0
    assert row["rate"] is None
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert (row["requests"], row["tokens"]) == (4, 32)
    for key in ("decision_seconds_mean", "decision_seconds_p99"):
        assert row[key] > 0.0
    assert set(report["best_fixed"]) == set(report["clairvoyant"]) == {"1", "2"}
    best = report["best_fixed"]["1"]
    assert best["arm"].split(":")[0] in LOOKUPS_AND_MODEL
    assert report["clairvoyant"]["1"]["speedup_vs_plain"] >= best["speedup_vs_plain"] > 1.0
    out = capsys.readouterr().out
    assert best["arm"] in out
    assert "default" in out


def test_command_runs_the_open_loop(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rate", "0.5,2", "--tpot-target-ms", "900", "--json", str(files["out"])]
    assert command(monkeypatch, files, "--arrivals", files["arrivals.csv"], *arguments) == 0
    report = json.loads(files["out"].read_text())
    assert [row["rate"] for row in report["results"]] == [0.5, 2.0]
    for row in report["results"]:
        for key in ("ttft_seconds", "tpot_seconds", "end_to_end_seconds"):
            assert 0.0 < row[key]["p50"] <= row[key]["p95"] <= row[key]["p99"]
        assert 0.0 <= row["tpot_target_share"] <= 1.0
        assert row["tokens"] == 32
    assert report["best_fixed"] == {}
    assert "0.5 requests/s" in capsys.readouterr().out


def test_command_starts_from_a_profile(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], tmp_path: Path
) -> None:
    profile = tmp_path / "p.json"
    once = ["--concurrency", "2", "--no-hindsight", "--json", str(files["out"])]
    assert command(monkeypatch, files, *once, "--save-profile", profile) == 0
    assert command(monkeypatch, files, *once, "--profile", profile) == 0
    assert json.loads(files["out"].read_text())["settings"]["profile"] == "p.json"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--concurrency", "1,x"], "--concurrency: 'x' is not a number of requests"),
        (["--rate", "0"], "--rate: '0' is not a positive number"),
        (["--rate", "-2"], "--rate: '-2' is not a positive number"),
        (["--rate", "2"], "--arrivals and --rate belong together"),
        (["--policy", "defualt"], "did you mean 'default'?"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at/all.json cannot be written"),
        (["--profile", "/nowhere.json"], "/nowhere.json"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_command_refuses_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert command(monkeypatch, files, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_command_names_the_line_of_a_broken_trace(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with files["trace.jsonl"].open("a") as file:
        file.write('{"id": "x"}\n')
    assert command(monkeypatch, files) == 2
    assert "trace.jsonl:5: " in capsys.readouterr().err
