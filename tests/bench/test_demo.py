"""The demo's own prompts and phases."""

from __future__ import annotations

from collections import Counter

from autospec.bench.demo import HEAD, PHASES, PROMPTS
from autospec.bench.phases import plan_blocks
from autospec.prompts import read_prompts
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.heads import head_kind


def test_the_demo_has_prompts_enough_for_its_phases() -> None:
    prompts = read_prompts(PROMPTS)
    counts = Counter(prompt.workload for prompt in prompts)
    assert set(counts) == {"code-edit", "rag", "chat", "story"}
    assert min(counts.values()) >= 10
    assert [phase.load for phase in PHASES] == [1, 4, 16, 16, 1]
    for block in plan_blocks(PHASES, prompts):
        twice = [name for name, n in Counter(p.id for p in block.prompts).items() if n > 1]
        assert not twice, "a prompt runs beside itself"
    assert all(prompt.max_tokens is not None for prompt in prompts)


def test_the_head_is_made_for_the_demos_model_and_small() -> None:
    checkpoint = Checkpoint.open(HEAD)
    assert head_kind(HEAD) == "mlp_speculator"
    assert checkpoint.text("target") == HEAD.name
    assert (checkpoint.integer("hidden_size"), checkpoint.integer("vocab_size")) == (576, 49152)
    assert sum(file.stat().st_size for file in HEAD.iterdir()) <= 8_000_000
    told = checkpoint.config["training"]
    assert told["acceptance"][0] >= 0.34
    assert (HEAD / "README.md").is_file()
