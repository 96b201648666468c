"""vLLM's own config class takes what is printed for it; runs where vLLM is installed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from autospec.export import EXPORTERS
from autospec.export.plan import Wish
from autospec.outlook import outlook
from tests.export.made_profiles import rates, tuned_profile

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's and its dependencies' own


@pytest.mark.parametrize("max_batch", [None, 1, 7])
def test_vllm_takes_the_ngram_table(tmp_path: Path, max_batch: int | None) -> None:
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    profile = tuned_profile({"code": {"ngram": rates(0.9, 0.85, 6)}})
    flags = EXPORTERS["vllm"](outlook(profile), Wish(version="0.32", max_batch=max_batch)).flags
    keys = json.loads(shlex.split(shlex.join(flags))[1])
    config = SpeculativeConfig(**keys)
    assert config.method == "ngram"
    assert config.uses_dynamic_speculative_decoding()
    lookup = build_dynamic_sd_schedule_lookup(
        config.num_speculative_tokens_per_batch_size, 512, config.num_speculative_tokens
    )
    for first, last, k in keys["num_speculative_tokens_per_batch_size"]:
        assert lookup[first] == lookup[min(last, 512)] == k
    assert lookup[512] == 0


def test_vllm_refuses_a_table_that_does_not_start_at_1() -> None:
    """The rule that the exporter keeps is one that vLLM really has."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    with pytest.raises(ValueError, match="must start at 1"):
        build_dynamic_sd_schedule_lookup([(2, 8, 3)], 16, 3)
