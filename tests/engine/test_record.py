"""What a draft would have had accepted, against one full forward per drafted token."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from autospec import cli
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.heads import load_head
from autospec.proposers.mlp_folder import write_shared
from autospec.proposers.mlp_network import SharedLayout, SharedNetwork
from autospec.records import Request
from autospec.replay.recording import RecordOptions, record, run_record
from autospec.replay.trace import TraceRequest, read_traces, write_traces
from autospec.workload import TokenRange, WorkloadRule, Workloads
from tests.engine.tiny_models import VOCAB, greedy, tiny
from tests.word_folders import save_untrained

K = 3


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            prompt_token_ids=rng.integers(0, VOCAB, length).tolist(),
            max_tokens=tokens,
            id=f"r{length}",
            ignore_eos=True,
            workload="chat",
        )
        for length, tokens in ((5, 12), (17, 1), (9, 20), (3, 7))
    ]


def test_records_what_every_draft_would_have_had_accepted() -> None:
    model = tiny("llama")
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    proposer = DraftModelProposer(CausalModel(copy.deepcopy(draft), name="draft"), max_k=K)
    wanted = requests()
    traces = record(CausalModel(copy.deepcopy(model)), wanted, proposer, concurrency=2)
    assert [trace.id for trace in traces] == [request.id for request in wanted]
    found = set()
    for request, trace in zip(wanted, traces, strict=True):
        prompt, output = list(request.prompt_token_ids), trace.output_token_ids.tolist()
        assert output == greedy(model, prompt, request.max_tokens)
        assert trace.prompt_token_ids.tolist() == prompt
        assert trace.workload == "chat"
        accepted = trace.accepted["draft_model"].tolist()
        assert accepted[0] == 0
        for position in range(1, len(output)):
            depth = min(K, len(output) - position - 1)
            drafted = greedy(draft, prompt + output[:position], depth)
            right = 0
            while right < depth and drafted[right] == output[position + right]:
                right += 1
            assert accepted[position] == right, (request.id, position)
            found.add(right)
    assert len(found) > 1


def test_without_a_model_only_tokens_are_recorded(tmp_path: Path) -> None:
    traces = record(CausalModel(tiny("llama")), requests(), None, concurrency=4)
    assert [dict(trace.accepted) for trace in traces] == [{}] * 4
    path = tmp_path / "t.jsonl"
    write_traces(path, traces)
    again = read_traces([path])
    assert [trace.id for trace in again] == [trace.id for trace in traces]
    for first, second in zip(traces, again, strict=True):
        np.testing.assert_array_equal(first.output_token_ids, second.output_token_ids)


def test_heads_are_recorded_as_models_are(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    network = SharedNetwork(SharedLayout(target.hidden_size, 8))
    write_shared(tmp_path, network, torch.arange(VOCAB), target, K, {})
    traces = record(target, requests(), load_head(tmp_path, target), concurrency=4)
    for request, trace in zip(requests(), traces, strict=True):
        assert trace.output_token_ids.tolist() == greedy(
            tiny("llama"), list(request.prompt_token_ids), request.max_tokens
        )
        assert len(trace.accepted["mlp_speculator"]) == request.max_tokens


def test_traces_are_read_as_written(tmp_path: Path) -> None:
    trace = TraceRequest(
        "a",
        None,
        np.array([1, 2], dtype=np.int32),
        np.array([3, 4], dtype=np.int32),
        {"draft_model": np.array([0, 1], dtype=np.int16)},
    )
    path = tmp_path / "t.jsonl"
    write_traces(path, [trace])
    [again] = read_traces([path])
    assert (again.id, again.workload, again.temperature) == ("a", None, 0.0)
    assert again.accepted["draft_model"].tolist() == [0, 1]


def test_a_prompt_without_a_workload_is_left_to_rules(tmp_path: Path) -> None:
    save_untrained(tmp_path / "model", 64)
    prompts, out = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    prompts.write_text('{"workload": "chat", "prompt": "w7"}\n{"prompt": "w8 w9"}\n')
    options = RecordOptions(tmp_path / "model", prompts, out, max_tokens=4, stop_at_eos=False)
    assert run_record(options, Console(quiet=True)) == 0
    labeled, bare = read_traces([out])
    assert (labeled.workload, bare.workload) == ("chat", None)
    workloads = Workloads([WorkloadRule(label="short", prompt_tokens=TokenRange(max=8))])
    found = [
        workloads.index(Request(each.id, each.prompt_token_ids, workload=each.workload))
        for each in (labeled, bare)
    ]
    assert [workloads.labels[index] for index in found] == ["chat", "short"]


@pytest.mark.parametrize(
    "out,message", [("t.jsonl", "no-model"), ("missing/t.jsonl", "--out"), (".", "--out")]
)
def test_the_command_refuses_what_cannot_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    message: str,
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "workload": "chat", "prompt": "hi"}\n')
    options = ["--target", tmp_path / "no-model", "--prompts", prompts, "--out", tmp_path / out]
    monkeypatch.setattr("sys.argv", ["autospec", "record", *map(str, options)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
