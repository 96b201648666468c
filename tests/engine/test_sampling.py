"""Sampling filters against transformers' own, and the random numbers behind them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from autospec.engine.sampling import (
    SamplingParameters,
    SamplingRows,
    filtered_probabilities,
    sample,
    uniforms,
)
from autospec.errors import InputError

SETTINGS = [
    SamplingParameters(temperature=0.7),
    SamplingParameters(temperature=1.3, top_k=7),
    SamplingParameters(temperature=1.0, top_p=0.8),
    SamplingParameters(temperature=5.0, top_p=0.95),
    SamplingParameters(temperature=0.9, min_p=0.1),
    SamplingParameters(temperature=1.5, top_k=300, top_p=0.97, min_p=0.01),
    SamplingParameters(temperature=1.0, top_k=1),
    SamplingParameters(temperature=1.0, top_p=1e-6),
    SamplingParameters(temperature=1.0, top_k=5000),
]


def by_transformers(logits: torch.Tensor, settings: SamplingParameters) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    scores: torch.Tensor = cast(Any, warpers)(torch.zeros((1, 1), dtype=torch.long), logits[None])
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.parametrize("vocab", [9, 1000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_rows_with_different_settings_match_transformers(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(SETTINGS), vocab, generator=generator, dtype=torch.float64) * spread
    probs = filtered_probabilities(logits, SamplingRows.of(SETTINGS))
    for row, settings in enumerate(SETTINGS):
        torch.testing.assert_close(probs[row], by_transformers(logits[row], settings))


def test_half_precision_logits_give_float32_probabilities() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    probs = filtered_probabilities(logits, SamplingRows.of(SETTINGS[:2]))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(2))


def test_sampling_inverts_the_distribution() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for uniform, token in ((0.0, 1), (0.249, 1), (0.251, 3), (0.749, 3), (0.751, 4)):
        assert sample(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_the_largest_uniform_never_leaves_the_support() -> None:
    probs = torch.rand(50, 1000, generator=torch.Generator().manual_seed(3))
    probs[:, 700:] = 0.0
    largest = torch.full((50,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert int(sample(probs, largest).max()) < 700


def test_uniforms_depend_on_seed_draw_and_stream_alone() -> None:
    rows = SamplingRows.of([SamplingParameters(1.0, seed=seed) for seed in (5, 6, -7)], draw=3)
    numbers = uniforms(rows, 4, stream=0)
    swapped = uniforms(rows.take(np.array([2, 0])), 6, stream=0)
    np.testing.assert_array_equal(swapped[:, :4], numbers[[2, 0]])
    later = SamplingRows.of([SamplingParameters(1.0, seed=5)], draw=4)
    assert not np.isin(uniforms(later, 4, stream=0), numbers).any()
    assert not np.isin(uniforms(rows, 4, stream=1), numbers).any()


def test_uniforms_are_uniform() -> None:
    """Over seeds, over draws and over columns, neighbors being uncorrelated."""
    rows = SamplingRows.of([SamplingParameters(1.0, seed=seed) for seed in range(2000)])
    numbers = uniforms(rows, 50, stream=0)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=100, range=(0.0, 1.0))[0]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 99 + 4 * np.sqrt(2 * 99)
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / np.sqrt(left.size)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("min_p", 1.5),
    ],
)
def test_bad_settings_name_the_field_and_the_value(field: str, value: float) -> None:
    settings: dict[str, float] = {field: value}
    with pytest.raises(InputError, match=rf"{field} is {value}"):
        SamplingParameters(**settings)  # type: ignore[arg-type]
