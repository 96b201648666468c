"""vLLM in this process, steered by AutoSpec, and steered anew between servings."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autospec.adapters.vllm.arguments import configure
from autospec.adapters.vllm.modes import Mode
from autospec.errors import AutoSpecError, EngineError, MissingDependency, ModelError
from autospec.profile.file import save_profile
from autospec.profile.learned import Profile
from autospec.records import EngineInfo, Int32Array

MOST_K = 32
"""Draft tokens of a request in a step that the engine has room for: those of the search space."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its prompt, what it is labeled, and the most tokens it is answered by."""

    id: str
    workload: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Answers:
    """Output tokens by request, and the seconds that all of them took, prompts included."""

    token_ids: Mapping[str, Int32Array]
    seconds: float

    @property
    def goodput(self) -> float | None:
        """Tokens per second; None when nothing was served."""
        tokens = sum(len(each) for each in self.token_ids.values())
        return tokens / self.seconds if tokens and self.seconds > 0.0 else None


class VllmEngine:
    """vLLM with AutoSpec's lookups. ``scratch`` is a folder for the profiles it starts from.

    Prefix caching is off, so that no serving of a prompt helps a later one. On a CPU nothing is
    compiled. Raises MissingDependency, ModelError and EngineError.
    """

    def __init__(
        self,
        target: Path,
        scratch: Path,
        *,
        dtype: str,
        seed: int,
        most_requests: int,
        most_tokens: int,
    ) -> None:
        require_vllm()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
        arguments: dict[str, Any] = configure(
            {
                "model": str(target),
                "dtype": dtype,
                "seed": seed,
                "max_num_seqs": most_requests,
                "max_model_len": most_tokens,
                "enable_prefix_caching": False,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": MOST_K,
                    "prompt_lookup_max": 4,
                    "prompt_lookup_min": 2,
                },
                "additional_config": {"autospec": {"metrics": False}},
            },
            combine=True,
        )
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            arguments["enforce_eager"] = True
        try:
            self._llm = LLM(**arguments)
        except AutoSpecError:
            raise
        except Exception as error:  # whatever vLLM says of a model that it cannot serve
            raise ModelError(f"{target}: vLLM cannot serve it: {error}") from error
        self._core = self._llm.llm_engine
        self._scheduler = self._core.engine_core.engine_core.scheduler
        self._scratch = scratch
        self._served = 0
        drafting = self._scheduler.steering.drafting
        if drafting.mode is not Mode.NOW:
            self.close()
            raise EngineError(f"lookups do not draft in this vLLM: {drafting.reason}")

    @property
    def info(self) -> EngineInfo:
        """The engine, as profiles know it."""
        engine: EngineInfo = self._scheduler.steering.pilot.controller.engine
        return engine

    def steer(self, policy: str | Path, profile: Profile | None) -> None:
        """Begin anew under a policy, from a profile with its settings, or cold and untuned."""
        path = self._scratch / "profile.json"
        path.unlink(missing_ok=True)
        if profile is not None:
            save_profile(path, profile)
        self._scheduler.steer_anew({"policy": str(policy), "profile": str(path), "metrics": False})

    def serve(self, calls: Sequence[Call], load: int, within: float = math.inf) -> Answers:
        """Answer requests, ``load`` of them at a time; none is begun after ``within`` seconds."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        pending = deque(calls)
        self._served += 1
        running: dict[str, str] = {}
        answers: dict[str, Int32Array] = {}
        began = time.perf_counter()
        while pending or running:
            if time.perf_counter() - began > within:
                pending.clear()
            while pending and len(running) < load:
                call = pending.popleft()
                name = f"{self._served}-{call.id}"
                running[name] = call.id
                self._core.add_request(
                    name,
                    {"prompt_token_ids": list(call.prompt_token_ids)},
                    SamplingParams(
                        temperature=call.temperature,
                        seed=call.seed if call.temperature > 0.0 else None,
                        max_tokens=call.max_tokens,
                        ignore_eos=call.ignore_eos,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                        extra_args={"autospec": {"workload": call.workload}},
                    ),
                )
            for output in self._core.step() if running else ():
                if output.finished:
                    tokens = output.outputs[0].token_ids
                    answers[running.pop(output.request_id)] = np.array(tokens, dtype=np.int32)
        return Answers(answers, time.perf_counter() - began)

    def learned(self) -> Profile:
        """What the servings since the last ``steer`` taught, once."""
        controller = self._scheduler.steering.pilot.controller
        fresh: Profile = controller.learned.take_fresh(
            controller.workloads.labels, "tuned: prompts served by vLLM", time.time()
        )
        return fresh

    def close(self) -> None:
        """Shut vLLM down."""
        self._core.engine_core.shutdown()
        del self._llm, self._core, self._scheduler
        gc.collect()


def require_vllm() -> None:
    """Raises MissingDependency without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependency(
            'autospec tune --engine vllm needs vLLM: pip install "autospec-llm[vllm,tune]"'
        )
