"""Sampling is lossless: frequencies of two-token sequences against the exact distribution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from autospec.engine import verification
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import (
    SamplingParameters,
    SamplingRows,
    filtered_probabilities,
    sample,
)
from autospec.engine.verification import verify_sampled
from autospec.proposers.base import Drafts, History
from autospec.proposers.draft_model import DraftModelProposer
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array, Plan, ProposerInfo
from tests.engine.tiny_models import ScriptedController

VOCAB = 8
START = 3
SAMPLES = 50_000
SETTINGS = {
    "cool": SamplingParameters(temperature=0.7),
    "hot": SamplingParameters(temperature=1.3),
    "cool-top-p": SamplingParameters(temperature=0.7, top_p=0.85),
    "hot-top-k": SamplingParameters(temperature=1.3, top_k=5),
    "hot-min-p": SamplingParameters(temperature=1.3, min_p=0.15),
    "hot-all": SamplingParameters(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
}


def exact(logits: NDArray[np.float64], settings: SamplingParameters) -> NDArray[np.float64]:
    """What a row samples from, written down once more as plainly as possible."""
    probs = np.exp(logits / settings.temperature)
    order = np.argsort(-probs)
    keep = list(order[: settings.top_k or len(order)])
    mass = probs[keep].sum()
    nucleus, total = [], 0.0
    for token in keep:
        if total < settings.top_p * mass:
            nucleus.append(token)
        total += probs[token]
    nucleus = [token for token in nucleus if probs[token] >= settings.min_p * probs.max()]
    filtered = np.zeros_like(probs)
    filtered[nucleus] = probs[nucleus]
    result: NDArray[np.float64] = filtered / filtered.sum()
    return result


def exact_pairs(
    logits_after: Callable[[list[int]], NDArray[np.float64]], settings: SamplingParameters
) -> NDArray[np.float64]:
    """Probability of every two-token continuation of START, [vocab * vocab]."""
    first = exact(logits_after([START]), settings)
    rows = [first[token] * exact(logits_after([START, token]), settings) for token in range(VOCAB)]
    return np.concatenate(rows)


def deviation(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    """Chi-square statistic as a standard normal deviate (Wilson and Hilferty, 1931).

    Infinite where something impossible was seen. Cells that expect under 5 are pooled.
    """
    if counts[probs == 0.0].any():
        return float("inf")
    expected = probs * counts.sum()
    large = expected >= 5.0
    observed = np.append(counts[large], counts[~large].sum()).astype(np.float64)
    expected = np.append(expected[large], expected[~large].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(observed) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * freedom)
    return float((np.cbrt(chi_square / freedom) - (1.0 - spread)) / np.sqrt(spread))


FITS = 4.0
"""Deviates above this happen once in 30,000 tests of a right distribution."""

FAILS = 12.0


# The verification function alone, over a Markov chain ------------------------------------------


def chain(seed: int) -> torch.Tensor:
    """Logits [vocab, vocab] of the next token by the last."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, 1.2, (VOCAB, VOCAB)))


def draft_distribution(
    kind: str, target: torch.Tensor, settings: SamplingParameters
) -> torch.Tensor:
    """What drafts are sampled from [vocab, vocab], by the last token."""
    logits = {"good": target + 0.4 * chain(9), "adversarial": -target}[kind]
    return filtered_probabilities(logits, SamplingRows.of([settings] * VOCAB))


def sequences(
    kind: str,
    settings: SamplingParameters,
    keep: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> NDArray[np.int64]:
    """Counts [vocab * vocab] of two tokens decoded speculatively with two drafts.

    ``keep`` says from the draft probability of the first draft whether to verify it at all.
    """
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    target = chain(1)
    probs = filtered_probabilities(target, SamplingRows.of([settings] * VOCAB))
    last = torch.full((SAMPLES,), START)
    columns = []
    draft_probs: torch.Tensor | None = None
    draft_row: Int64Array = np.full((SAMPLES, 2), -1, dtype=np.int64)
    if kind == "point-mass":
        favorites = torch.from_numpy(np.random.default_rng(2).integers(0, VOCAB, VOCAB))
        columns = [favorites[last], favorites[favorites[last]]]
    else:
        draft = draft_distribution(kind, target, settings)
        first = sample(draft[last], numbers(SAMPLES))
        columns = [first, sample(draft[first], numbers(SAMPLES))]
        draft_probs = torch.stack([draft[last], draft[first]], dim=1)
        draft_row[:] = np.arange(SAMPLES)[:, None]
    drafts = torch.stack(columns, dim=1)
    lengths: Int64Array = np.full(SAMPLES, 2, dtype=np.int64)
    if keep is not None and draft_probs is not None:
        first_prob = draft_probs[torch.arange(SAMPLES), 0, drafts[:, 0]]
        lengths[~keep(first_prob).numpy()] = 0
    contexts = torch.stack([last, drafts[:, 0], drafts[:, 1]], dim=1).reshape(-1)
    verdict = verify_sampled(
        probs[contexts],
        np.arange(SAMPLES, dtype=np.int64) * 3,
        drafts.numpy(),
        lengths,
        draft_probs,
        draft_row,
        numbers(SAMPLES, 3),
    )
    accepted, final = torch.from_numpy(verdict.accepted), torch.from_numpy(verdict.final)
    token_1 = torch.where(accepted >= 1, drafts[:, 0], final)
    plain = sample(probs[token_1], numbers(SAMPLES))
    token_2 = torch.where(accepted >= 2, drafts[:, 1], torch.where(accepted == 1, final, plain))
    return np.bincount((token_1 * VOCAB + token_2).numpy(), minlength=VOCAB * VOCAB)


def chain_pairs(settings: SamplingParameters) -> NDArray[np.float64]:
    logits = chain(1).numpy()
    return exact_pairs(lambda tokens: cast(NDArray[np.float64], logits[tokens[-1]]), settings)


@pytest.mark.parametrize("kind", ["point-mass", "good", "adversarial"])
@pytest.mark.parametrize("name", SETTINGS)
def test_verification_keeps_the_distribution(name: str, kind: str) -> None:
    settings = SETTINGS[name]
    assert deviation(sequences(kind, settings), chain_pairs(settings)) < FITS


@pytest.mark.parametrize("kind", ["point-mass", "good", "adversarial"])
def test_the_check_notices_a_wrong_acceptance_rule(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping a token when it is merely likelier than half the draft's probability is wrong."""
    monkeypatch.setattr(
        verification, "accepts", lambda target, draft, uniform: uniform * draft * 0.8 < target
    )
    settings = SETTINGS["hot"]
    assert deviation(sequences(kind, settings), chain_pairs(settings)) > FAILS


@pytest.mark.parametrize("kind", ["point-mass", "good", "adversarial"])
def test_the_check_notices_a_wrong_recovered_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the target's own distribution counts the rejected mass twice."""
    monkeypatch.setattr(verification, "residual", lambda target, draft: target)
    settings = SETTINGS["hot"]
    assert deviation(sequences(kind, settings), chain_pairs(settings)) > FAILS


def test_choosing_by_the_drawn_token_would_bias() -> None:
    """Why ``trim`` is kept from seeing the probabilities of sampled draft tokens."""
    settings = SETTINGS["hot"]
    counts = sequences("good", settings, keep=lambda first_prob: first_prob > 0.2)
    assert deviation(counts, chain_pairs(settings)) > FAILS


# The whole decoder -----------------------------------------------------------------------------


class FixedLookup:
    """Always drafts the token after the last one, modulo the vocabulary."""

    info = ProposerInfo("fixed", "lookup", 2)

    def reset(self, slot: int) -> None:
        pass

    def propose(self, history: History, slots: Int32Array, out: Drafts) -> None:
        last = history.tokens[slots, history.lengths[slots] - 1]
        out.tokens[:] = (last[:, None] + np.arange(1, out.tokens.shape[1] + 1)) % VOCAB
        out.lengths[:] = 2
        out.confidence[:] = 0.5

    def retire(self, history: History, slot: int) -> None:
        pass

    def memory_bytes(self) -> int:
        return 0


@dataclass
class ConfidentController(ScriptedController):
    """Verifies whatever the confidences seem to promise, as a real policy does."""

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        sure = np.logical_and.accumulate(confidence[:, : int(drafted.max())] > 0.22, axis=1)
        verify = np.minimum(drafted, sure.sum(axis=1))
        return plan._replace(verify=verify.astype(np.int16))


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.4)
    return model


def pairs_of(model: LlamaForCausalLM) -> NDArray[np.float64]:
    """Probability of every two-token continuation, [vocab * vocab]."""
    logits = {}
    with torch.inference_mode():
        for tokens in [[START], *([START, token] for token in range(VOCAB))]:
            row = model(torch.tensor([tokens])).logits[0, -1]
            logits[tuple(tokens)] = row.double().numpy()
    return exact_pairs(lambda tokens: logits[tuple(tokens)], SETTINGS["hot-all"])


def drafted_pairs(
    target: CausalModel, proposer: ModelProposer, samples: int
) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """How often each pair came, [vocab * vocab], and how many drafts of each were verified.

    Point masses and ``proposer`` draft, mixed at random with plain rows, trimmed by confidence.
    """
    controller = ConfidentController(2, 2, np.random.default_rng(4))
    decoder = Decoder(target, [FixedLookup(), proposer], controller, slots=500, capacity=6)
    request = GenerationRequest([START], max_tokens=3, sampling=SETTINGS["hot-all"])
    counts = np.zeros(VOCAB * VOCAB, dtype=np.int64)
    for output in decoder.generate([request] * samples):
        counts[output.token_ids[0] * VOCAB + output.token_ids[1]] += 1
    by_lookup, by_model = (
        sum(int(result.verified[plan.proposer == p].sum()) for plan, result in controller.results)
        for p in range(2)
    )
    return counts, (by_lookup, by_model)


@pytest.mark.parametrize("drafting", ["similar draft", "adversarial draft"])
def test_decoder_keeps_the_distribution(drafting: str) -> None:
    model = tiny_target()
    expected = pairs_of(model)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        if drafting == "similar draft":
            draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.1)
        else:
            draft.lm_head.weight.neg_()
    proposer = DraftModelProposer(CausalModel(draft), max_k=2)
    counts, verified = drafted_pairs(CausalModel(model), proposer, SAMPLES)
    assert sum(verified) > SAMPLES // 10
    assert deviation(counts, expected) < FITS
