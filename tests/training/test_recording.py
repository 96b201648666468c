"""Recordings against full forwards of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autospec.engine.model import CausalModel
from autospec.errors import InputError
from autospec.training.labels import frequent_tokens, make_labels, target_choices
from autospec.training.recording import (
    Excerpt,
    Recording,
    joined,
    load_recording,
    record,
    save_recording,
)
from tests.engine.tiny_models import VOCAB, greedy, tiny

torch.set_num_threads(1)

QUESTIONS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11] * 20]
EXCERPTS = [
    *(Excerpt(tuple(question), len(question), 8) for question in QUESTIONS),
    Excerpt((3, 1, 4, 1, 5, 9, 2, 6), 3, 0),
]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(CausalModel(tiny("llama")), EXCERPTS, layers=(1, -1), slots=2)


def sequences(recording: Recording) -> list[tuple[list[int], torch.Tensor, int]]:
    found = []
    for start, end in zip(recording.starts[:-1], recording.starts[1:], strict=True):
        tokens = recording.tokens[start:end].tolist()
        context = int(recording.context[start:end].sum())
        assert recording.context[start : start + context].all()
        found.append((tokens, recording.hidden[start:end], context))
    return found


def test_tokens_and_states_are_those_of_the_target(recording: Recording) -> None:
    model = tiny("llama")
    expected = {(*q, *greedy(model, q, 7)): len(q) for q in QUESTIONS} | {EXCERPTS[-1].given: 3}
    found = sequences(recording)
    assert {tuple(tokens): context for tokens, _, context in found} == expected
    for tokens, hidden, _ in found:
        with torch.inference_mode():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(hidden, torch.stack([states[1][0], states[-1][0]], dim=1))
    assert recording.num_tokens == 4 * 7 + 5


def test_places_have_what_follows_and_learn_from_it(recording: Recording) -> None:
    places = recording.places(3).tolist()
    expected = [
        index
        for start, end in zip(recording.starts[:-1], recording.starts[1:], strict=True)
        for index in range(start, end - 3)
        if not recording.context[index + 1]
    ]
    assert places == expected
    assert len(places) == 4 * 5 + 3


def test_recording_stops_when_told(recording: Recording) -> None:
    target = CausalModel(tiny("llama"))
    short = record(target, EXCERPTS, layers=(-1,), slots=2, stop=lambda tokens: tokens >= 5)
    assert 5 <= short.num_tokens < recording.num_tokens


def test_recordings_join_and_come_back_from_a_file(recording: Recording, tmp_path: Path) -> None:
    both = joined([recording, recording])
    assert both.num_tokens == 2 * recording.num_tokens
    assert both.starts.tolist()[:2] == recording.starts.tolist()[:2]
    file = tmp_path / "some.safetensors"
    save_recording(file, both)
    again = load_recording(file)
    assert torch.equal(again.tokens, both.tokens)
    assert torch.equal(again.hidden, both.hidden)
    assert torch.equal(again.context, both.context)
    assert again.starts.tolist() == both.starts.tolist()
    file.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"some\.safetensors: is not a readable recording"):
        load_recording(file)


def test_labels_are_the_likeliest_tokens(recording: Recording) -> None:
    target = CausalModel(tiny("llama"))
    choices = target_choices(recording, target)
    for number, (said, _, context) in enumerate(sequences(recording)):
        start = int(recording.starts[number])
        if tuple(said) != EXCERPTS[-1].given:
            own = choices[start + context - 1 : start + len(said) - 1].tolist()
            assert own == said[context:]
    tokens = frequent_tokens(choices, 10, VOCAB)
    times = torch.bincount(choices, minlength=VOCAB)
    assert times[tokens].tolist() == sorted(times.tolist(), reverse=True)[:10]
    rows = target.output_rows(tokens)
    labels = make_labels(recording, choices, rows, target.device)
    logits = recording.hidden[:, -1] @ rows.T
    torch.testing.assert_close(labels.probs.sum(dim=-1), torch.ones(len(choices)))
    assert torch.equal(labels.columns[:, 0].long(), logits.argmax(dim=-1))


def test_rare_tokens_fill_up_in_order_of_their_ids() -> None:
    assert frequent_tokens(torch.tensor([7, 3, 3]), 5, 9).tolist() == [3, 7, 0, 1, 2]
