"""``autospec train-proposer`` on a tiny target: every kind learns, resumes, repeats itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError
from autospec.proposers.heads import head_kind, load_head
from autospec.training import command
from autospec.training.command import KINDS, UNFINISHED, TrainingOptions, run_training
from autospec.training.fit import Report
from autospec.training.material import gather
from autospec.training.view import View
from tests.engine.tiny_models import ScriptedController
from tests.word_folders import word_tokenizer

WORDS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # what follows depends mostly on the last word: a head can learn that
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                outer = "embed" in name or "lm_head" in name
                parameter.normal_(0.0, 1.0 if outer else 0.12)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    word_tokenizer(WORDS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(40):
        words = " ".join(f"w{each}" for each in torch.randint(0, WORDS, (6,), generator=generator))
        rows.append({"id": number, "workload": "words", "prompt": words})
        if number % 8 == 0:
            messages = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
            rows[-1] = {"id": number, "workload": "words", "messages": messages}
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(target: Path, prompts: Path, out: Path, kind: str) -> TrainingOptions:
    return TrainingOptions(
        target,
        out,
        kind,
        str(prompts),
        tokens=1200,
        steps=60,
        frequent_tokens=30,
        inner_size=32,
        batch=64,
        learning_rate=0.01,
        slots=8,
        seed=2,
    )


def train(asked: TrainingOptions) -> tuple[int, str]:
    output = io.StringIO()
    code = run_training(asked, Console(file=output, width=100))
    return code, output.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_drafts(
    kind: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    code, text = train(options(target, prompts, out, kind))
    assert code == 0
    assert "held-out acceptance" in text
    assert not (out / UNFINISHED).exists()
    told = json.loads((out / "config.json").read_text())["training"]
    assert 0 < told["best_step"] <= told["steps"] <= 60
    assert told["options"]["data"] == "prompts.jsonl"
    assert told["acceptance"][0] > max(0.3, told["acceptance_before"][0] + 0.1)
    assert head_kind(out) == kind
    controller = ScriptedController(1, 3, np.random.default_rng(0), fixed_k=3)
    model = CausalModel.load(target)
    decoder = Decoder(model, [load_head(out, model, 3)], controller, slots=4, capacity=60)
    decoder.generate([GenerationRequest([number, 3, 4], max_tokens=50) for number in range(8)])
    verified = sum(int((result.verified > 0).sum()) for _, result in controller.results)
    accepted = sum(int((result.accepted > 0).sum()) for _, result in controller.results)
    assert accepted / verified > 0.3


class Interrupted(View):
    """The user presses Ctrl-C at a step."""

    at = 47

    def learned(self, report: Report, share: float) -> None:
        super().learned(report, share)
        if report.step == self.at:
            raise KeyboardInterrupt


def test_an_interrupted_training_goes_on_to_the_same_head(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(target, prompts, tmp_path / "a" / "head", "mlp_speculator")
    with monkeypatch.context() as patched:
        patched.setattr(command, "View", Interrupted)
        code, text = train(asked)
    assert code == 1
    assert "interrupted; the same command goes on from here" in text
    with pytest.raises(InputError, match="begun with seed 2, now it is 3; go on with the same"):
        train(replace(asked, seed=3))
    code, text = train(asked)
    assert code == 0
    assert "going on from" in text
    assert "recording:" not in text
    whole = options(target, prompts, tmp_path / "b" / "head", "mlp_speculator")
    assert train(whole)[0] == 0
    heads = [load_file(each.out / "model.safetensors") for each in (asked, whole)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_the_time_decides_where_no_numbers_are_given(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    asked = options(target, prompts, tmp_path / "head", "mlp_speculator")
    asked = replace(asked, minutes=0.06, tokens=None, steps=None)
    assert train(asked)[0] == 0
    told = json.loads((asked.out / "config.json").read_text())["training"]
    assert told["tokens"] > 0
    assert told["steps"] > 0


def test_prompts_with_answers_are_given_texts(target: Path, prompts: Path) -> None:
    material = gather(str(prompts), None, CausalModel.load(target), 0)
    assert (len(material.learned), len(material.held_out)) == (35, 5)
    every = (*material.learned, *material.held_out)
    given = [each for each in every if each.generate == 0]
    assert len(given) == 5
    assert all((len(each.given), each.context) == (12, 6) for each in given)
    assert all(each.context == len(each.given) == 6 for each in every if each.generate)
    other = gather(str(prompts), prompts, CausalModel.load(target), 0)
    assert (len(other.learned), len(other.held_out)) == (40, 40)


def test_what_cannot_be_trained(target: Path, prompts: Path, tmp_path: Path) -> None:
    asked = options(target, prompts, tmp_path / "head", "mlp_speculator")
    with pytest.raises(InputError, match="--kind is 'mtp'; it must be one of mlp_speculator"):
        train(replace(asked, kind="mtp"))
    asked.out.mkdir()
    (asked.out / "config.json").write_text("{}")
    with pytest.raises(InputError, match="already holds a head"):
        train(asked)
    single = tmp_path / "one.jsonl"
    single.write_text('{"prompt": "w1 w2"}\n')
    with pytest.raises(InputError, match="holds 1 prompt; training needs at least 2"):
        train(replace(asked, out=tmp_path / "other", data=str(single)))
