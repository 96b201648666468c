"""Tiny vLLM engines for the adapter's tests: random models, greedy float32, in this process."""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

from autospec.adapters.vllm.pilot import Pilot
from autospec.adapters.vllm.steering import Steering
from autospec.policy.base import Decision, View
from autospec.records import NO_PROPOSER

registry._run_in_subprocess = lambda look: look()
"""vLLM looks at each kind of model in a process that imports vLLM anew: this one has."""

VOCABULARY = 128
HIDDEN = 64
MOST_K = 4
SCHEDULER = "autospec.adapters.vllm.AutoSpecScheduler"
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa")


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="autospec-vllm-tests-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def target() -> str:
    """A random Llama whose greedy outputs repeat themselves here and there."""
    path = _folder() / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(_config(3)).float().save_pretrained(path)
    return str(path)


@cache
def draft_model() -> str:
    """The target with some noise: it is right in most places, not in all."""
    path = _folder() / "draft"
    model = LlamaForCausalLM.from_pretrained(target(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator) * weight.std())
    model.save_pretrained(path)
    return str(path)


def _save(name: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> str:
    path = _folder() / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    weights = {
        key: torch.ones(shape) if "norm" in key else 0.15 * torch.randn(shape, generator=generator)
        for key, shape in shapes.items()
    }
    save_file(weights, path / "model.safetensors")
    return str(path)


def _layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (64, width),
        f"{prefix}.self_attn.k_proj.weight": (32, width),
        f"{prefix}.self_attn.v_proj.weight": (32, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, 64),
        f"{prefix}.mlp.gate_proj.weight": (2 * HIDDEN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (2 * HIDDEN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


@cache
def eagle() -> str:
    """A random EAGLE head: hardly ever right, but its cache can be compared."""
    config = _config(1).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return _save("eagle", config, {"fc.weight": (HIDDEN, 2 * HIDDEN)} | _layer("layers.0", HIDDEN))


@cache
def eagle3() -> str:
    """A random EAGLE-3 head over three layers of the target."""
    config = _config(1).to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    shapes = _layer("midlayer", 2 * HIDDEN) | {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    return _save("eagle3", config, shapes)


@cache
def medusa() -> str:
    """Random Medusa heads."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_heads": MOST_K,
        "num_hidden_layers": 1,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(MOST_K):
        shapes[f"blocks.{head}.layers.0.weight"] = (HIDDEN, HIDDEN)
        shapes[f"lm_heads.{head}.weight"] = (VOCABULARY, HIDDEN)
    return _save("medusa", config, shapes)


def speculation(method: str, k: int = MOST_K) -> dict[str, Any]:
    """``speculative_config`` for a method."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    elif method != "suffix":
        paths = {"draft_model": draft_model, "eagle": eagle, "eagle3": eagle3, "medusa": medusa}
        config["model"] = paths[method]() if method in paths else method
        if method not in paths:
            config["method"] = "custom_class"
    return config


def _start(
    method: str | None,
    *,
    options: dict[str, Any] | None = None,
    alone: bool = False,
    k: int = MOST_K,
    **arguments: Any,
) -> LLM:
    settings: dict[str, Any] = {
        "model": target(),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 512,
    }
    if method is not None:
        settings["speculative_config"] = speculation(method, k)
        if not alone:
            settings["scheduler_cls"] = SCHEDULER
            settings["additional_config"] = {"autospec": options or {}}
    # vLLM collects garbage ten times while it starts: nothing that was imported is looked at.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return LLM(**settings | arguments)


def _stop(llm: LLM) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)  # the next start does it
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def engine(method: str | None, **settings: Any) -> Iterator[LLM]:
    """An engine with AutoSpec, or vLLM ``alone``; ``method`` None is plain decoding.

    ``options`` are AutoSpec's, ``k`` the most tokens to draft, all else arguments of vLLM's.
    """
    llm = _start(method, **settings)
    try:
        yield llm
    finally:
        _stop(llm)


class Standing:
    """An engine that stands from test to test until another one is wanted.

    One at a time: vLLM's engines share what is global to a process, and end it when they stop.
    """

    def __init__(self) -> None:
        self._method = ""
        self._llm: LLM | None = None

    @contextmanager
    def engine(self, method: str, options: dict[str, Any] | None = None) -> Iterator[LLM]:
        """As ``engine``, or the one that stands, which has then forgotten everything."""
        if self._llm is None or self._method != method:
            self.stop()
            self._method, self._llm = method, _start(method, options=options)
        else:
            self._llm.reset_prefix_cache()
            scheduler_of(self._llm).steer_anew(options or {})
        scheduler = scheduler_of(self._llm)
        own = set(vars(scheduler))
        try:
            yield self._llm
        except BaseException:
            self.stop()  # requests may still run
            raise
        for patched in set(vars(scheduler)) - own:
            delattr(scheduler, patched)

    def stop(self) -> None:
        """No engine stands any more."""
        llm, self._llm = self._llm, None
        if llm is not None:
            _stop(llm)


def scheduler_of(llm: LLM) -> Any:
    """The scheduler inside an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def steering_of(llm: LLM) -> Steering:
    """AutoSpec's part of it."""
    steering: Steering = scheduler_of(llm).steering
    return steering


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts with repetitions in them."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        phrase = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(4, 20))]
        made.append(phrase + phrase[: rng.randrange(2, 5)])
    return made


def generate(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    tokens: int = 48,
    *,
    extra: Callable[[int], dict[str, Any] | None] = lambda _: None,
    between: Callable[[int], None] = lambda _: None,
    tag: str = "r",
) -> dict[int, list[int]]:
    """Greedy outputs by prompt; ``between`` is called after every step with its number."""
    core = llm.llm_engine
    for index, text in enumerate(texts):
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra(index),
        )
        core.add_request(f"{tag}{index}", {"prompt_token_ids": list(text)}, parameters)
    done: dict[int, list[int]] = {}
    step = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                done[int(output.request_id.removeprefix(tag))] = list(output.outputs[0].token_ids)
        step += 1
        between(step)
    return done


def decide_with(pilot: Pilot, decide: Callable[[View], Decision]) -> None:
    """Replace the policy's decision; nothing overrules it."""
    policy = pilot.controller.policy
    policy.decide = decide  # type: ignore[assignment, method-assign]
    policy.program = lambda *_: None  # type: ignore[method-assign]
    pilot.controller._rails.probes = None
    pilot.controller._rails.guard = None


def random_decisions(pilot: Pilot, seed: int = 0) -> None:
    """A random proposer, or none, and a random k for every request and step."""
    rng = np.random.default_rng(seed)

    def decide(view: View) -> Decision:
        proposers = view.limits.shape[0]
        proposer = rng.integers(NO_PROPOSER, proposers, view.requests).astype(np.int16)
        k = rng.integers(0, MOST_K + 1, view.requests).astype(np.int16)
        return Decision(proposer, np.where(proposer == NO_PROPOSER, 0, k).astype(np.int16))

    decide_with(pilot, decide)


def fixed_decisions(pilot: Pilot, proposer: int, k: int) -> None:
    """One proposer and k for all."""

    def decide(view: View) -> Decision:
        chosen = proposer if k else NO_PROPOSER
        return Decision(
            np.full(view.requests, chosen, dtype=np.int16),
            np.full(view.requests, k, dtype=np.int16),
        )

    decide_with(pilot, decide)


def samples(steering: Steering, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one metric by the values of its labels."""
    found: dict[tuple[str, ...], float] = {}
    for family in steering.registry.collect():
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels.values())] = sample.value
    return found
