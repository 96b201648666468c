"""What AutoSpec chooses inside vLLM, on a simulated clock and a drafter of known acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from autospec.adapters.vllm.drafting import DraftDesk
from autospec.adapters.vllm.modes import engine_of
from autospec.adapters.vllm.orders import ORDER, DraftReport
from autospec.adapters.vllm.pilot import Pilot
from autospec.adapters.vllm.steering import Steering
from tests.adapters.vllm_engines import (
    engine,
    fixed_decisions,
    generate,
    prompts,
    samples,
    scheduler_of,
    steering_of,
)
from tests.adapters.vllm_replay_drafter import ReplayDrafter

pytestmark = pytest.mark.filterwarnings("ignore")

MOST_K = 8
TOKENS = 160
BASE, PER_TOKEN, PER_DEPTH, PER_DRAFT = 0.020, 0.001, 0.0005, 0.00002


@dataclass
class SimulatedEngine:
    """A vLLM whose steps take what a formula says; ``steps`` are (running, k counts, seconds)."""

    llm: Any
    now: float = 0.0
    tokens: int = 0
    steps: list[tuple[int, Counter[int], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler = scheduler_of(self.llm)
        self.steering: Steering = steering_of(self.llm)
        self.steering.clock = lambda: self.now
        update = scheduler.update_from_output

        def simulated(output: Any, result: Any) -> Any:
            order = getattr(output, ORDER)
            drafts = output.scheduled_spec_decode_tokens
            depth = max(order.draft.values(), default=0)
            seconds = (
                BASE
                + PER_TOKEN * output.total_num_scheduled_tokens
                + PER_DEPTH * depth
                + PER_DRAFT * sum(order.draft.values())
            )
            self.now += seconds
            rows = output.num_scheduled_tokens
            decoding = [each for each in rows if rows[each] == 1 + len(drafts.get(each, ()))]
            if len(decoding) == len(rows):
                self.steps.append(
                    (len(rows), Counter(len(drafts.get(each, ())) for each in rows), seconds)
                )
                self.tokens += sum(map(len, result.sampled_token_ids))
            return update(output, result)

        scheduler.update_from_output = simulated

    def renew(self) -> None:
        """Forget what was learned."""
        old = self.steering
        config = scheduler_of(self.llm).vllm_config
        self.steering.pilot = Pilot(
            old.options,
            engine_of(config, "0"),
            old.drafting.model,
            with_lookups=True,
            max_requests=config.scheduler_config.max_num_seqs,
            max_tokens=config.model_config.max_model_len,
            max_k=MOST_K,
            registry=type(old.registry)(),
        )

    def clear(self) -> None:
        self.steps, self.tokens = [], 0

    @property
    def goodput(self) -> float:
        return self.tokens / sum(seconds for _, _, seconds in self.steps)


@pytest.fixture(scope="module")
def simulated() -> Iterator[SimulatedEngine]:
    patch = pytest.MonkeyPatch()
    patch.setattr(DraftDesk, "report", lambda self: DraftReport(0.0, 0))
    with engine(None) as llm:
        texts = prompts(24, seed=7)
        for index, output in generate(llm, texts, TOKENS).items():
            ReplayDrafter.learn(texts[index], output)
    drafter = f"{ReplayDrafter.__module__}.{ReplayDrafter.__name__}"
    with engine(drafter, k=MOST_K, options={"lookups": []}) as llm:
        yield SimulatedEngine(llm)
    patch.undo()


TEXTS = prompts(24, seed=7)


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_chosen_k_is_the_best_k(simulated: SimulatedEngine, batch: int) -> None:
    ReplayDrafter.error = 0.2
    found: dict[int, float] = {}
    for k in range(MOST_K + 1):
        simulated.renew()
        fixed_decisions(simulated.steering.pilot, simulated.steering.pilot.model, k)
        simulated.clear()
        generate(simulated.llm, TEXTS[:batch], TOKENS)
        found[k] = simulated.goodput
    best = max(found, key=lambda k: found[k])
    simulated.renew()
    for round_ in range(8 if batch == 1 else 3):
        ReplayDrafter.seed = round_
        generate(simulated.llm, TEXTS[:batch], TOKENS)
    simulated.clear()
    ReplayDrafter.seed = 0
    generate(simulated.llm, TEXTS[:batch], TOKENS)
    steps = [counts for running, counts, _ in simulated.steps if running == batch]
    counts = sum(steps, Counter())
    chosen = counts.most_common(1)[0][0]
    assert abs(chosen - best) <= 1, (counts, found)
    assert simulated.goodput > 0.93 * found[best], (counts, found)


def test_off_where_drafts_are_always_wrong(simulated: SimulatedEngine) -> None:
    ReplayDrafter.error = 1.0
    simulated.renew()
    generate(simulated.llm, TEXTS[:16], TOKENS)
    simulated.clear()
    generate(simulated.llm, TEXTS[:16], TOKENS)
    off = [set(counts) == {0} for _, counts, _ in simulated.steps]
    assert sum(off) > 0.95 * len(off)


def test_load_swings(simulated: SimulatedEngine) -> None:
    """1, then 24, then 1 running request: no step stalls, and decisions settle."""
    ReplayDrafter.error = 0.2
    simulated.renew()
    for _ in range(2):
        for load in (1, 24, 1):
            simulated.clear()
            for _ in range(3 if load == 1 else 1):
                generate(simulated.llm, TEXTS[:load], TOKENS)
            steps = [step for step in simulated.steps if step[0] == load]
            seconds = sorted(each for _, _, each in steps)
            assert seconds[-1] <= 5 * seconds[len(seconds) // 2]
            if load == 24:
                settled = sum((counts for _, counts, _ in steps[50:]), Counter())
                early = sum((counts for _, counts, _ in steps[20:50]), Counter())
                usual = settled.most_common(1)[0][0]
                near = sum(n for k, n in settled.items() if abs(k - usual) <= 1)
                assert near > 0.8 * settled.total()
                assert early
    assert not samples(simulated.steering, "autospec_fallbacks_total")
