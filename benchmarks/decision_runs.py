"""The runs behind decisions.py: each a function of plain values, made in a process of its own."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.config import Settings, load_settings
from autospec.controller import Controller
from autospec.policy.goodput import GoodputOptions
from autospec.policy.lookup_first import LookupFirstOptions
from autospec.policy.off import OffOptions
from autospec.policy.static import StaticOptions
from autospec.profile.file import load_profile
from autospec.profile.learned import Profile
from autospec.records import (
    BatchState,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Plan,
    Request,
    StepResult,
)
from autospec.replay.arrivals import Arrival, at_rate, read_arrivals
from autospec.replay.cost_file import (
    AppendedSeconds,
    CostFile,
    ModelSeconds,
    StepSeconds,
    read_cost_file,
)
from autospec.replay.fixed_arms import arm_name, fixed_arms, replay_fixed, tabulate
from autospec.replay.hindsight import (
    BarePolicy,
    replay_bare,
    replay_clairvoyant,
    replay_plain,
)
from autospec.replay.run import (
    MAX_RUNNING,
    ClosedLoop,
    ReplayResult,
    make_controller,
    make_engine,
    replay_closed,
    replay_open,
    run_open,
    shuffled,
)
from autospec.replay.trace import TraceRequest, read_traces

DEFAULT = "adaptive"
IN_HINDSIGHT = ("best_fixed", "lookup_first", "clairvoyant", "open_fixed", "slo_fixed")
WORKLOADS = ("chat", "code-edit", "math", "summarize")
MIX = "mix"
SEED = 0
APPENDED = "suffix_after(eagle3)"
_HEAD_K = 2  # of eagle3's tokens before it

_LIMITS = {1: 150, 8: 400}  # requests of a closed loop; all of them at higher concurrency
_GRID = {
    "min_confidence": tuple(round(0.45 + 0.05 * i, 2) for i in range(10)),
    "lookup_k": (2, 4, 6, 8, 10, 12, 16, 20),
    "model_k": (0, 1, 2, 3, 4, 5, 6, 8),
}
_APPENDED_K = (3, 4, 6, 8, 10, 14, 18)
_STRONGER: Mapping[str, Mapping[str, Any]] = {
    "ema": {
        "tiers": [
            {"min_requests": 1, "candidate_steps": [1, 3, 5]},
            {"min_requests": 16, "candidate_steps": [2, 3]},
            {"min_requests": 64, "candidate_steps": [1, 2]},
        ]
    },
    "gate": {"draft_len_schedule": {16: 3, 64: 3, 256: 2}},
    "heuristic": {"k": 3, "max_k": 3},
    "bayes": {"window_steps": 50, "trials": 12, "max_k": 5},
}
"""Options nearer to what is best here than the shipped defaults are."""
_RERUN = 4  # of the grid's best ones; one at concurrency 1, where the tables are exact
_SHIFT = ("code-edit", "math", "chat")
_SHIFT_BLOCK = 100
_SHIFT_SETTLING = 30
_SWING = (1, 128)
_SWING_STEPS = 200
_BAD_REQUESTS = 200
_OVERLOAD_STEPS = 600
_WARM_WINDOW_TOKENS = 100
_FIXED_LADDER = (1, 2, 4, 8, 14, 20)


@dataclass(frozen=True, slots=True)
class _Traces:
    requests: Mapping[str, tuple[TraceRequest, ...]]
    cost: CostFile
    given: CostFile  # as the file has it: nothing appended
    arrivals: tuple[Arrival, ...]
    settings: Settings


_traces: _Traces


def open_traces(folder: Path, arrivals: Path | None, policy: str) -> None:
    """Read everything once per process."""
    global _traces
    requests = {name: read_traces([folder / f"{name}.jsonl"]) for name in WORKLOADS}
    requests[MIX] = tuple(each for name in WORKLOADS for each in requests[name])
    given = read_cost_file(folder / "cost.yaml")
    appended = AppendedSeconds(kind="appended", head="eagle3", head_k=_HEAD_K)
    _traces = _Traces(
        requests,
        given.model_copy(update={"proposers": {**given.proposers, APPENDED: appended}}),
        given,
        () if arrivals is None else read_arrivals(arrivals),
        load_settings(policy),
    )


def run(spec: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Make the run that a spec names."""
    name, arguments = spec
    found: dict[str, Any] = _RUNS[name](*arguments)
    return found


def chosen(workload: str, half: str) -> tuple[TraceRequest, ...]:
    """All requests, or those of even or odd lines of their files, in file order."""
    if half == "all":
        return _traces.requests[workload]
    names = WORKLOADS if workload == MIX else (workload,)
    first = 1 if half == "even" else 0  # lines count from 1
    return tuple(each for name in names for each in _traces.requests[name][first::2])


def cost_of(name: str) -> CostFile:
    """The traces' cost file with ``suffix_after(eagle3)``, or a variant; ``given`` is the file."""
    cost = _traces.cost
    if name == "given":
        return _traces.given
    if name == "padded":
        return cost.model_copy(update={"shape": "padded"})
    factor = {"base": 1, "token x4": 4, "token x10": 10, "token x100": 100}[name]
    token = cost.step.per_token_seconds * factor
    step = StepSeconds(**{**cost.step.model_dump(), "per_token_seconds": token})
    return cost.model_copy(update={"step": step})


def policy_settings(policy: str) -> Settings:
    """Settings of the policy under test, or of ``name[+][:proposer]`` as a rival.

    With ``+`` it has the options of ``_STRONGER``.
    """
    if policy == DEFAULT:
        return _traces.settings
    name, _, proposer = policy.partition(":")
    options: dict[str, Any] = {"name": name.rstrip("+")}
    if proposer:
        options["proposer"] = proposer
    if name.endswith("+"):
        options.update(_STRONGER[name.rstrip("+")])
    return Settings.model_validate({"version": 1, "max_k": 64, "policy": options})


@cache
def _requests(workload: str, half: str, concurrency: int) -> tuple[TraceRequest, ...]:
    return shuffled(chosen(workload, half), _LIMITS.get(concurrency), SEED)


def closed(policy: str, workload: str, half: str, concurrency: int, cost: str) -> dict[str, Any]:
    """One policy in the closed loop."""
    requests = _requests(workload, half, concurrency)
    if policy == "plain":
        result = replay_plain(requests, cost_of(cost), concurrency)
    else:
        result, _ = replay_closed(requests, cost_of(cost), policy_settings(policy), concurrency)
    return {
        "speed": result.tokens_per_second,
        "steps": result.steps,
        "decision_us": result.decision_seconds_mean * 1e6,
        "decision_us_p99": result.decision_seconds_p99 * 1e6,
    }


def best_fixed(workload: str, half: str, concurrency: int) -> dict[str, Any]:
    """Every (proposer, k)."""
    requests = _requests(workload, half, concurrency)
    speeds = {
        arm_name(result.arm): result.tokens_per_second
        for proposer in dict.fromkeys(arm.proposer for arm in fixed_arms(requests, _traces.cost))
        if proposer is not None
        for result in replay_fixed(requests, _traces.cost, proposer, concurrency)
    }
    best = max(speeds, key=speeds.__getitem__)
    return {"arm": best, "speed": speeds[best], "arms": speeds}


def lookup_first(
    workload: str, half: str, concurrency: int, model: str = "eagle3"
) -> dict[str, Any]:
    """The whole grid on tables made one request at a time, then its best ones really run.

    The tables differ from a run only in which requests have ended before and so are in the
    suffix lookup's cache.
    """
    requests = _requests(workload, half, concurrency)
    cost = _traces.cost
    lookup, drafts = (tabulate(requests, cost, name) for name in ("suffix", model))
    prompts = np.array([len(each.prompt_token_ids) for each in requests], dtype=np.int32)
    outputs = np.array([len(each.output_token_ids) for each in requests], dtype=np.int32)
    step, part = cost.step, cost.proposers[model]
    fixed = step.fixed_seconds + step.overhead_seconds
    prices = np.array(
        [
            *(fixed, step.per_token_seconds, step.per_context_token_seconds),
            cost.charge(cost.proposers["suffix"])[0],
            *cost.charge(part),
        ]
    )
    grid = dict(_GRID)
    by_depth = isinstance(part, ModelSeconds)
    if not by_depth:
        grid["model_k"] = _APPENDED_K
    rough: dict[tuple[float, int, int], float] = {}
    for least, lookup_k, model_k in itertools.product(*grid.values()):
        rough[least, lookup_k, model_k] = hybrid_tokens_per_second(
            lookup.drafted, lookup.correct, lookup.confidence >= least, lookup_k,
            drafts.drafted, drafts.correct, model_k, by_depth,
            prompts, outputs, concurrency, prices,
        )  # fmt: skip
    reruns = 1 if concurrency == 1 and by_depth else _RERUN
    speeds = {}
    for least, lookup_k, model_k in sorted(rough, key=rough.__getitem__)[-reruns:]:
        options = LookupFirstOptions(
            model=model, min_confidence=least, lookup_k=lookup_k, model_k=model_k
        )
        result = replay_bare(requests, cost, options, concurrency)
        speeds[f"{least:g}, {lookup_k}, {model_k}"] = result.tokens_per_second
    best = max(speeds, key=speeds.__getitem__)
    return {"options": best, "speed": speeds[best]}


@compiled
def hybrid_tokens_per_second(
    looked_up: Int16Array,
    right: Int16Array,
    sure: NDArray[np.bool_],
    lookup_k: int,
    drafted: Int16Array,
    accepted: Int16Array,
    model_k: int,
    by_depth: bool,
    prompts: Int32Array,
    outputs: Int32Array,
    concurrency: int,
    prices: Float64Array,
) -> float:
    """``lookup_first`` on tables [requests, positions], on a packed engine.

    ``prices`` are seconds per step, token and context token, the lookup's share of the forward, and
    the model's share, seconds per forward and per forward and context token.
    """
    running = np.empty(concurrency, dtype=np.int64)
    done = np.zeros(prompts.shape[0], dtype=np.int64)
    n, begun, tokens = 0, 0, 0
    seconds = 0.0
    while True:
        while n < concurrency and begun < prompts.shape[0]:
            running[n] = begun
            n += 1
            begun += 1
        if begun == prompts.shape[0] and n < max(1.0, concurrency / 2):
            return tokens / seconds
        context, drafting_context, depth, paid = 0, 0, 0, 0
        left_over = 0
        for i in range(n):
            r = running[i]
            at = done[r]
            room = outputs[r] - at - 1
            context += prompts[r] + at
            if looked_up[r, at] > 0 and room > 0 and sure[r, at]:
                verify = min(lookup_k, min(int(looked_up[r, at]), room))
                kept = min(verify, int(right[r, at]))
            else:
                verify = min(model_k, min(int(drafted[r, at]), room))
                kept = min(verify, int(accepted[r, at]))
                if verify > 0:
                    drafting_context += prompts[r] + at
                    depth = max(depth, verify if by_depth else 1)
            paid += 1 + verify
            done[r] += kept + 1
            tokens += kept + 1
            if done[r] < outputs[r]:
                running[left_over] = r
                left_over += 1
        n = left_over
        forward = prices[0] + prices[1] * paid + prices[2] * context
        seconds += forward * (1.0 + prices[3] + (prices[4] if depth > 0 else 0.0))
        seconds += depth * (prices[5] + prices[6] * drafting_context)


def clairvoyant(workload: str, half: str, concurrency: int) -> dict[str, Any]:
    """What knowing every accepted length would bring."""
    requests = _requests(workload, half, concurrency)
    rate = 2.0 * replay_plain(requests, _traces.cost, concurrency).tokens_per_second
    result = replay_clairvoyant(requests, _traces.cost, concurrency, rate=rate)
    return {"speed": result.tokens_per_second}


# Things that a fixed choice cannot do -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a run was before a step."""

    started: int
    seconds: float
    tokens: int


def _drive(
    requests: Sequence[TraceRequest],
    concurrency: int,
    settings: Settings | None = None,
    profile: Profile | None = None,
    cost: CostFile | None = None,
    later: tuple[int, CostFile] | None = None,
) -> list[Mark]:
    """A closed loop, marked before each step; ``later`` exchanges the cost once so many started."""
    engine = make_engine(requests, cost or _traces.cost, concurrency)
    controller = make_controller(engine, settings or _traces.settings, profile)
    loop = ClosedLoop(engine, controller, requests, concurrency)
    marks = []
    while True:
        marks.append(Mark(len(requests) - loop.waiting, engine.seconds, engine.tokens))
        if later is not None and marks[-1].started >= later[0]:
            engine.cost = later[1]
        if not loop.step():
            return marks


def _speed_between(marks: Sequence[Mark], first: int, last: int) -> float:
    """Tokens per second from the start of request ``first`` to that of ``last``, from 1."""
    begin = next(mark for mark in marks if mark.started >= first)
    end = next((mark for mark in marks if mark.started >= last), marks[-1])
    return (end.tokens - begin.tokens) / (end.seconds - begin.seconds)


def shift(half: str, concurrency: int) -> dict[str, Any]:
    """Blocks of one workload after the other, each against a run on it alone."""
    size = _SHIFT_BLOCK
    blocks = {name: shuffled(chosen(name, half), size, SEED) for name in _SHIFT}
    size = min(len(block) for block in blocks.values())
    blocks = {name: block[:size] for name, block in blocks.items()}
    together = _drive([each for block in blocks.values() for each in block], concurrency)
    found = {}
    for b, (name, block) in enumerate(blocks.items()):
        alone = _drive(block, concurrency)
        window = (_SHIFT_SETTLING, size)
        shifted = tuple(b * size + each for each in window)
        found[name] = _speed_between(together, *shifted) / _speed_between(alone, *window)
    return {"blocks": found}


def timeline(concurrency: int) -> dict[str, Any]:
    """Mean k and the share of each proposer in every step of the shift."""
    blocks = [shuffled(chosen(name, "all"), _SHIFT_BLOCK, SEED) for name in _SHIFT]
    requests = [each for block in blocks for each in block]
    engine = make_engine(requests, _traces.cost, concurrency)
    tap = Tap(make_controller(engine, _traces.settings))
    loop = ClosedLoop(engine, tap, requests, concurrency)
    k: list[float] = []
    shares: dict[str, list[float]] = {info.name: [] for info in engine.proposers}
    begins: list[int] = []
    while loop.step():
        assert tap.plan_made is not None
        if len(begins) < len(_SHIFT) and loop.waiting < len(requests) - _SHIFT_BLOCK * len(begins):
            begins.append(len(k))
        k.append(float(tap.plan_made.k.mean()))
        for p, values in enumerate(shares.values()):
            values.append(float((tap.plan_made.proposer == p).mean()))
    return {"k": k, "shares": shares, "begins": begins, "blocks": list(_SHIFT)}


def never_accepted(half: str, concurrency: int) -> dict[str, Any]:
    """A proposer that is always wrong, against the run without it."""
    requests = shuffled(chosen(MIX, half), _BAD_REQUESTS, SEED)
    wrong = [
        replace(
            each,
            accepted={**each.accepted, "bad": np.zeros(len(each.output_token_ids), dtype=np.int16)},
        )
        for each in requests
    ]
    cost = _traces.cost
    model = cost.proposers["eagle3"]
    with_bad = cost.model_copy(update={"proposers": {**cost.proposers, "bad": model}})
    speeds = [
        _speed_between(_drive(each, concurrency, cost=price), 1, len(requests))
        for each, price in ((wrong, with_bad), (requests, cost))
    ]
    return {"ratio": speeds[0] / speeds[1]}


def ten_times(half: str, concurrency: int) -> dict[str, Any]:
    """EAGLE costs ten times as much from the middle on, against a second half without it."""
    requests = shuffled(chosen(MIX, half), _BAD_REQUESTS, SEED)
    middle, last = len(requests) // 2, len(requests)
    cost = _traces.cost
    model = cost.proposers["eagle3"]
    assert isinstance(model, ModelSeconds)
    dear = model.model_copy(
        update={
            "per_depth_seconds": 10.0 * model.per_depth_seconds,
            "per_context_token_seconds": 10.0 * model.per_context_token_seconds,
        }
    )
    later = cost.model_copy(update={"proposers": {**cost.proposers, "eagle3": dear}})
    changed = _drive(requests, concurrency, later=(middle, later))
    names = tuple(name for name in cost.proposers if name not in ("eagle3", APPENDED))
    allowed = _traces.settings.proposers
    if allowed is not None:
        names = tuple(name for name in names if name in allowed)
    without = _drive(
        requests, concurrency, _traces.settings.model_copy(update={"proposers": names})
    )
    ratio = _speed_between(changed, middle, last) / _speed_between(without, middle, last)
    return {"ratio": ratio}


class Tap:
    """Notes what a controller decides."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.plan_made: Plan | None = None

    def start(self, request: Request) -> int:
        """Passed on."""
        return self._controller.start(request)

    def finish(self, handle: int) -> None:
        """Passed on."""
        self._controller.finish(handle)

    def wants_offers(self) -> NDArray[np.bool_]:
        """Passed on."""
        return self._controller.wants_offers()

    def plan(self, batch: BatchState) -> Plan:
        """Passed on and kept."""
        self.plan_made = self._controller.plan(batch)
        return self.plan_made

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        """Passed on and kept."""
        self.plan_made = self._controller.trim(plan, drafted, confidence)
        return self.plan_made

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Passed on."""
        self._controller.observe(plan, result)


def swing(half: str) -> dict[str, Any]:
    """Concurrency 1 and 128 in turn, against the two closed loops weighted by time."""
    requests = shuffled(chosen(MIX, half), None, SEED)
    high = max(_SWING)
    engine = make_engine(requests, _traces.cost, high)
    tap = Tap(make_controller(engine, _traces.settings))
    loop = ClosedLoop(engine, tap, requests, high)
    models = ~engine.lookup
    seconds, tokens = dict.fromkeys(_SWING, 0.0), dict.fromkeys(_SWING, 0)
    switches, steps = Counter[int](), Counter[int]()
    before: dict[int, NDArray[np.bool_]] = {}
    phase, swings = 0, 0
    while loop.waiting:
        load = _SWING[phase % 2]
        loop.concurrency = load
        for _ in range(_SWING_STEPS):
            mark = engine.seconds, engine.tokens
            if not loop.waiting or not loop.step():
                break
            seconds[load] += engine.seconds - mark[0]
            tokens[load] += engine.tokens - mark[1]
            steps[load] += 1
            plan = tap.plan_made
            if plan is None or plan.mode == "probe":
                continue
            used = np.isin(np.arange(len(models)), plan.proposer) & models
            if load in before and bool((used != before[load]).any()):
                switches[load] += 1
            before[load] = used
        phase += 1
        swings += 1
    speeds = {b: closed(DEFAULT, MIX, half, b, "base")["speed"] for b in _SWING}
    ratios = {b: tokens[b] / seconds[b] / speeds[b] for b in _SWING}
    expected = sum(seconds[b] * speeds[b] for b in _SWING)
    return {
        "ratio": sum(tokens.values()) / expected,
        "swings": swings,
        **{f"ratio_{b}": ratios[b] for b in _SWING},
        **{f"switches_{b}": 100.0 * switches[b] / steps[b] for b in _SWING},
    }


def off_and_back(half: str, concurrency: int, drafting: str) -> dict[str, Any]:
    """Steps until something is drafted again after an overload in which nothing paid.

    ``drafting`` is ``all``, or ``models`` to leave the lookups out.
    """
    requests = shuffled(chosen(MIX, half), None, SEED)
    engine = make_engine(requests, cost_of("token x100"), 128)
    settings = _traces.settings
    if drafting == "models":
        names = tuple(info.name for info in engine.proposers if info.kind != "lookup")
        settings = settings.model_copy(update={"proposers": names})
    tap = Tap(make_controller(engine, settings))
    loop = ClosedLoop(engine, tap, requests, 128)
    shares = []
    for _ in range(_OVERLOAD_STEPS):
        if loop.waiting < 128 or not loop.step():
            break
        assert tap.plan_made is not None
        shares.append(float((tap.plan_made.k > 0).mean()))
    loop.concurrency = concurrency
    steps = 0
    while loop.step():
        steps += 1
        assert tap.plan_made is not None
        if tap.plan_made.mode == "speculate":
            break
    return {"steps": steps, "before": float(np.mean(shares[-100:])), "overload": len(shares)}


def warm(half: str, workload: str, concurrency: int) -> dict[str, Any]:
    """Cold, warm with a profile of the other half, and settled by having served the same before."""
    other = "odd" if half == "even" else "even"
    requests = _requests(workload, half, concurrency)
    profiles = {
        "warm": _learned(_requests(workload, other, concurrency), concurrency),
        "settled": _learned(requests, concurrency),
    }
    runs = {"cold": _drive(requests, concurrency)}
    for name, profile in profiles.items():
        runs[name] = _drive(requests, concurrency, profile=profile)
    curves = {name: _window_speeds(marks) for name, marks in runs.items()}
    shortest = min(map(len, curves.values()))
    ratios = {
        name: np.array(curves[name][:shortest]) / np.array(curves["settled"][:shortest])
        for name in ("cold", "warm")
    }
    found: dict[str, Any] = {"window": _WARM_WINDOW_TOKENS}
    for name, ratio in ratios.items():
        reached = np.flatnonzero(ratio >= 0.95)
        found[name] = int(reached[0] if len(reached) else shortest) * _WARM_WINDOW_TOKENS
        found[f"{name}_start"] = float(ratio[0])
        found[f"{name}_curve"] = [round(float(value), 4) for value in ratio[:20]]
    return found


def warm_speed(half: str, workload: str, concurrency: int) -> dict[str, Any]:
    """Many requests that begin at once, with a profile of the other half and without."""
    other = "odd" if half == "even" else "even"
    requests = _requests(workload, half, concurrency)
    profile = _learned(_requests(workload, other, concurrency), concurrency)
    marks = [_drive(requests, concurrency, profile=each)[-1] for each in (profile, None)]
    warm, cold = (mark.tokens / mark.seconds for mark in marks)
    return {"ratio": warm / cold}


def _learned(requests: Sequence[TraceRequest], concurrency: int) -> Profile:
    """What a run leaves behind."""
    import tempfile

    _, controller = replay_closed(requests, _traces.cost, _traces.settings, concurrency)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        controller.save(path)
        return load_profile(path)


def _window_speeds(marks: Sequence[Mark]) -> list[float]:
    """Tokens per second of consecutive windows of as many tokens."""
    tokens = np.array([mark.tokens for mark in marks], dtype=np.float64)
    seconds = np.array([mark.seconds for mark in marks])
    bounds = np.arange(0.0, tokens[-1], _WARM_WINDOW_TOKENS)
    times = np.interp(bounds, tokens, seconds)
    return [float(each) for each in _WARM_WINDOW_TOKENS / np.diff(times)]


# Open loop ----------------------------------------------------------------------------------------


@cache
def _capacity(half: str) -> float:
    """Requests per second of plain decoding while all slots are taken, prefill included."""
    requests = _requests(MIX, half, MAX_RUNNING)
    engine = make_engine(requests, _traces.cost, MAX_RUNNING)
    decider = BarePolicy(OffOptions(), engine)
    waiting = deque(requests)
    while waiting:
        while waiting and engine.has_room:
            engine.start(waiting.popleft(), decider, arrival=0.0)
        engine.step(decider, len(waiting))
    mean_tokens = sum(len(each.output_token_ids) for each in requests) / len(requests)
    return engine.tokens / engine.seconds / mean_tokens


def _figures(result: ReplayResult) -> dict[str, Any]:
    assert result.latency is not None
    return {
        "p50": result.latency.end_to_end.p50,
        "p99": result.latency.end_to_end.p99,
        "tpot": result.latency.tpot.p50,
        "share": result.latency.target_share,
        "speed": result.tokens_per_second,
    }


def _open(
    half: str, share: float, arm: StaticOptions | OffOptions | None, target_ms: float | None
) -> dict[str, Any]:
    requests = _requests(MIX, half, MAX_RUNNING)
    rate = share * _capacity(half)
    arrivals = at_rate(_traces.arrivals, len(requests), rate)
    target = None if target_ms is None else target_ms / 1000.0
    if arm is None:
        settings = _traces.settings
        if target is not None:
            settings = settings.model_copy(update={"policy": GoodputOptions(objective="slo")})
        result, _ = replay_open(
            requests, arrivals, rate, _traces.cost, settings, tpot_target_seconds=target
        )
        return _figures(result)
    engine = make_engine(requests, _traces.cost, MAX_RUNNING)
    decider = BarePolicy(arm, engine)
    result = run_open(
        engine, decider, requests, arrivals, MAX_RUNNING, rate=rate, tpot_target_seconds=target
    )
    return _figures(result)


def open_adaptive(half: str, share: float) -> dict[str, Any]:
    """The policy at a share of plain's capacity."""
    return _open(half, share, None, None)


def open_fixed(half: str, share: float) -> dict[str, Any]:
    """The static arm with the lowest p99 from arrival to end."""
    return _best_arm(half, share, None, lambda found: (-found["p99"],))


def slo_adaptive(half: str, share: float, target_ms: float) -> dict[str, Any]:
    """The ``slo`` objective under a target for time per output token."""
    return _open(half, share, None, target_ms)


def slo_fixed(half: str, share: float, target_ms: float) -> dict[str, Any]:
    """The static arm with which most requests meet the target, of those the fastest."""
    return _best_arm(half, share, target_ms, lambda found: (found["share"], found["speed"]))


def _best_arm(
    half: str,
    share: float,
    target_ms: float | None,
    worth: Callable[[dict[str, Any]], tuple[float, ...]],
) -> dict[str, Any]:
    """Per proposer a ladder of k, then all between its best one's neighbors on the ladder."""
    arms = {arm_name(arm): arm for arm in fixed_arms(chosen(MIX, half), _traces.cost)}
    found = {"plain": _open(half, share, OffOptions(), target_ms)}
    for proposer in _traces.cost.proposers:
        ladder = [k for k in _FIXED_LADDER if f"{proposer}:{k}" in arms]

        def try_out(ks: Sequence[int], proposer: str = proposer) -> None:
            for name in (f"{proposer}:{k}" for k in ks):
                if name not in found:
                    found[name] = _open(half, share, arms[name], target_ms)

        try_out(ladder)
        best = max(ladder, key=lambda k: worth(found[f"{proposer}:{k}"]))
        place = ladder.index(best)
        least, most = ladder[max(0, place - 1)], ladder[min(len(ladder) - 1, place + 1)]
        try_out(range(least, most + 1))
    name = max(found, key=lambda arm: worth(found[arm]))
    return {"arm": name, **found[name]}


_RUNS: Mapping[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        closed,
        best_fixed,
        lookup_first,
        clairvoyant,
        shift,
        timeline,
        never_accepted,
        ten_times,
        swing,
        off_and_back,
        warm,
        warm_speed,
        open_adaptive,
        open_fixed,
        slo_adaptive,
        slo_fixed,
    )
}
