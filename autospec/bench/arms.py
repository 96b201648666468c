"""What is compared: plain decoding, one fixed proposer and k, or the adaptive controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autospec import __version__
from autospec.acceptance import hazard_table
from autospec.bench.phases import ADAPTIVE, PLAIN
from autospec.bench.serving import Served, Serving
from autospec.bench.tap import Tap
from autospec.config import Settings
from autospec.controller import Controller
from autospec.cost import step_cost
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters
from autospec.errors import InputError
from autospec.journal.writer import Journal
from autospec.metrics import Metrics
from autospec.policy.static import StaticOptions
from autospec.profile.file import warm_start
from autospec.profile.learned import Identity, Profile
from autospec.profile.place import own_place
from autospec.profile.tuned import ProposerSettings
from autospec.prompts import Prompt
from autospec.proposers.base import LookupProposer
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.early_exit import EarlyExitProposer
from autospec.proposers.heads import HEAD_KINDS, head_kind, load_head
from autospec.proposers.lookahead import LookaheadProposer
from autospec.proposers.settings import (
    LOOKUP_DEFAULTS,
    make_lookup,
    settings_of,
    untuned_lookups,
)
from autospec.proposers.suffix import SuffixProposer
from autospec.proposers.suffix_after import SuffixAfter
from autospec.records import EngineInfo, ProposerInfo

OF_THE_TARGET = ("early_exit", "lookahead")
"""Proposers that need no model but the target; static arms alone have them."""

APPENDED = "suffix_after"
STATIC_PROPOSERS = ("ngram", "suffix", "draft_model", *HEAD_KINDS, APPENDED, *OF_THE_TARGET)
MAX_STATIC_K = 32
_DRAFT_K = 8
_APPENDED_HEAD_K = 2


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm by name. ``proposer`` and ``k`` are those of a static arm, else None and 0."""

    name: str
    proposer: str | None = None
    k: int = 0


def parse_arms(
    text: str, *, has_draft: bool, head_kinds: Sequence[str] = ()
) -> tuple[ArmSpec, ...]:
    """Arms of a comma separated list: ``plain``, ``NAME:K`` or ``adaptive``.

    ``head_kinds`` are those of the heads at hand. Raises InputError that names the arm and what is
    allowed.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    specs = [_parse_arm(name, has_draft, head_kinds) for name in names]
    if not specs:
        raise InputError(f"--arms is empty; {_allowed()}")
    repeated = [name for name, n in Counter(spec.name for spec in specs).items() if n > 1]
    if repeated:
        raise InputError(f"--arms: {repeated[0]!r} is named twice")
    return tuple(specs)


def _parse_arm(name: str, has_draft: bool, head_kinds: Sequence[str]) -> ArmSpec:
    if name in (PLAIN, ADAPTIVE):
        return ArmSpec(name)
    proposer, colon, number = name.partition(":")
    if not colon or proposer not in STATIC_PROPOSERS:
        raise InputError(f"--arms: unknown arm {name!r}; {_allowed()}")
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_STATIC_K):
        raise InputError(f"--arms: {name!r}: k is {number!r}; it must be from 1 to {MAX_STATIC_K}")
    if proposer == "draft_model" and not has_draft:
        raise InputError(f"--arms: {name!r} needs a draft model; give its folder with --draft")
    if proposer in HEAD_KINDS and proposer not in head_kinds:
        given = f"those given are of {', '.join(head_kinds)}" if head_kinds else "none was given"
        raise InputError(f"--arms: {name!r} needs a head; give its folder with --head ({given})")
    if proposer == APPENDED and not (head_kinds or has_draft):
        raise InputError(f"--arms: {name!r} needs a head or a draft model; give --head or --draft")
    if proposer == APPENDED and int(number) <= _APPENDED_HEAD_K:
        raise InputError(f"--arms: {name!r}: k must be above {_APPENDED_HEAD_K}, the head's part")
    return ArmSpec(f"{proposer}:{int(number)}", proposer, int(number))


def _allowed() -> str:
    static = ", ".join(f"{name}:K" for name in STATIC_PROPOSERS)
    return f"allowed are {PLAIN}, {static}, {ADAPTIVE}"


@dataclass(frozen=True, slots=True)
class ArmInputs:
    """What all the arms share; ``heads`` are folders.

    With ``appended`` the adaptive arm may also let its suffix lookup go on behind the first head,
    or behind the draft model where there is no head.
    """

    target: CausalModel
    draft: CausalModel | None
    slots: int
    capacity: int
    seed: int
    heads: tuple[Path, ...] = ()
    appended: bool = False

    @property
    def has_model(self) -> bool:
        """Whether anything but lookups may draft."""
        return self.draft is not None or bool(self.heads)


class Arm:
    """A decoder of its own over the shared target, with or without a controller."""

    def __init__(
        self,
        spec: ArmSpec,
        inputs: ArmInputs,
        settings: Settings,
        *,
        profile: Profile | None = None,
        journal: Journal | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.spec = spec
        self.controller: Controller | None = None
        self._tap: Tap | None = None
        self._target = inputs.target
        proposers: tuple[LookupProposer | ModelProposer, ...] = ()
        if spec.name != PLAIN:
            engine = engine_info(inputs.target)
            if spec.name == ADAPTIVE and profile is None and settings.profile.path is not None:
                settings, profile = _saved(settings, settings.profile.path, inputs, engine)
            own = settings_of(profile, beside_model=inputs.has_model)
            proposers = _proposers(spec, inputs, own)
            infos = tuple(proposer.info for proposer in proposers)
            self.controller = Controller(
                settings if spec.name == ADAPTIVE else static_settings(spec),
                infos,
                engine,
                profile=profile,
                journal=journal,
                metrics=metrics,
                seed=inputs.seed,
            )
            self._tap = Tap(self.controller)
        self.decoder = Decoder(
            inputs.target,
            proposers,
            self._tap,
            slots=inputs.slots,
            capacity=inputs.capacity,
            seed=inputs.seed,
        )

    def begin(self, requests: Sequence[GenerationRequest], load: int) -> Serving:
        """Begin to serve a block of ``requests``, ``load`` at a time."""
        return Serving(self.decoder, self._tap, requests, load)

    def serve(self, requests: Sequence[GenerationRequest], load: int) -> Served:
        """Serve a block to its end."""
        serving = self.begin(requests, load)
        while not serving.is_over:
            serving.step()
        return serving.end()


def _saved(
    settings: Settings, path: Path, inputs: ArmInputs, engine: EngineInfo
) -> tuple[Settings, Profile | None]:
    """The settings with the profile's place, and the profile to start from, if there is one."""
    names = [*LOOKUP_DEFAULTS, *(head_kind(folder) for folder in inputs.heads)]
    if inputs.draft is not None:
        names.append("draft_model")
    if inputs.appended:
        names.append(APPENDED)
    infos = tuple(ProposerInfo(name, "lookup", 1) for name in names)  # names alone identify
    of = Identity.of(engine, infos), hazard_table.LAYOUT, step_cost.LAYOUT
    path = own_place(path, *of, is_strict=False)
    return settings.with_profile(path), warm_start(path, *of)


def _proposers(
    spec: ArmSpec, inputs: ArmInputs, tuned: Mapping[str, ProposerSettings]
) -> tuple[LookupProposer | ModelProposer, ...]:
    """Those of an arm: with the settings of a profile, or at a static arm's k."""
    chosen: list[LookupProposer | ModelProposer] = []
    for name in LOOKUP_DEFAULTS:
        if spec.proposer in (None, name):
            own = tuned[name] if spec.proposer is None else _at_k(name, spec.k, inputs)
            chosen.append(make_lookup(name, own, inputs.slots, inputs.capacity))
    if spec.proposer in (None, "draft_model") and inputs.draft is not None:
        found = None if spec.proposer else tuned.get("draft_model")
        chosen.append(
            DraftModelProposer(
                inputs.draft,
                max_k=spec.k or (_DRAFT_K if found is None else found.max_k),
                min_confidence=0.0 if found is None else found.min_confidence or 0.0,
            )
        )
    for folder in inputs.heads:
        kind = head_kind(folder)
        if spec.proposer in (None, kind):
            # A static arm's k is also the deepest it may draft; else what the head was made or
            # tuned for.
            found = None if spec.proposer else tuned.get(kind)
            k = spec.k or (None if found is None else found.max_k)
            chosen.append(load_head(folder, inputs.target, k))
    if spec.proposer == "early_exit":
        chosen.append(EarlyExitProposer(max_k=spec.k))
    if spec.proposer == "lookahead":
        chosen.append(LookaheadProposer(max_k=spec.k))
    if spec.proposer == APPENDED:
        chosen.append(_appended(spec.k, inputs))
    if spec.proposer is None and inputs.appended:
        named = {proposer.info.name: proposer for proposer in chosen}
        suffix = cast(SuffixProposer, named["suffix"])
        head = named[head_kind(inputs.heads[0]) if inputs.heads else "draft_model"]
        chosen.append(
            SuffixAfter(
                cast(ModelProposer, head),
                suffix,
                head_k=_APPENDED_HEAD_K,
                shared=True,
                name=APPENDED,
            )
        )
    return tuple(chosen)


def _appended(k: int, inputs: ArmInputs) -> SuffixAfter:
    """A suffix lookup behind the first head, or behind the draft model where there is no head."""
    head: ModelProposer
    if inputs.heads:
        head = load_head(inputs.heads[0], inputs.target)
    else:
        assert inputs.draft is not None
        head = DraftModelProposer(inputs.draft, max_k=_APPENDED_HEAD_K)
    settings = _at_k("suffix", k - _APPENDED_HEAD_K, inputs)
    suffix = cast(SuffixProposer, make_lookup("suffix", settings, inputs.slots, inputs.capacity))
    return SuffixAfter(head, suffix, head_k=_APPENDED_HEAD_K, name=APPENDED)


def _at_k(name: str, k: int, inputs: ArmInputs) -> ProposerSettings:
    """A static lookup drafts like the adaptive arm's."""
    untuned = untuned_lookups(beside_model=inputs.has_model)
    return untuned[name].model_copy(update={"max_k": k})


def static_settings(spec: ArmSpec) -> Settings:
    """Settings of a static arm: its proposer at its k, always."""
    return Settings(version=1, policy=StaticOptions(proposer=spec.proposer, k=spec.k), max_k=spec.k)


def engine_info(target: CausalModel) -> EngineInfo:
    """The embedded engine on this target, as profiles know it."""
    return EngineInfo(
        target=target.name,
        engine="embedded",
        version=__version__,
        device=_device_of(target),
        dtype=str(target.dtype).removeprefix("torch."),
    )


def _device_of(target: CausalModel) -> str:
    """What step times belong to: a GPU's own name."""
    import torch

    device = target.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def encode(prompt: Prompt, target: CausalModel, place: Path) -> list[int]:
    """Token ids of a prompt, through the chat template where the tokenizer has one."""
    if target.tokenizer is None:
        raise InputError(f"{target.name}: the model folder has no tokenizer, which prompts need")
    return encode_with(target.tokenizer, prompt, place)


def encode_with(tokenizer: Any, prompt: Prompt, place: Path) -> list[int]:
    """The same with a tokenizer of transformers. Raises InputError."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the model's own template says
            raise InputError(
                f"{place}: prompt {prompt.id!r} does not fit the chat template: {error}"
            ) from None
        ids = tokenizer(str(text), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    return [int(token) for token in ids]


def generation_request(
    prompt: Prompt,
    token_ids: Sequence[int],
    name: str,
    max_tokens: int,
    *,
    stop_at_eos: bool,
    seed: int,
) -> GenerationRequest:
    """The request that serves a prompt; equal arguments give equal requests."""
    return GenerationRequest(
        prompt_token_ids=token_ids,
        max_tokens=min(max_tokens, prompt.max_tokens or max_tokens),
        sampling=SamplingParameters(temperature=prompt.temperature, seed=seed),
        id=name,
        ignore_eos=not stop_at_eos,
        workload=prompt.workload,
        text=prompt.text,
    )
