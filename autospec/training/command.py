"""``autospec train-proposer``: a head distilled from its target in minutes, on CPU or GPU."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autospec import __version__
from autospec.bench.command import load_model
from autospec.bench.live import say
from autospec.engine.model import CausalModel
from autospec.errors import InputError
from autospec.proposers.checkpoint import CONFIG
from autospec.training.eagle import EagleTrainee
from autospec.training.fit import DECAY_SHARE, Course, Progress, Report, fit
from autospec.training.labels import frequent_tokens, make_labels, target_choices
from autospec.training.material import Material, gather
from autospec.training.medusa import MedusaTrainee
from autospec.training.mlp import MlpTrainee
from autospec.training.recording import (
    Recording,
    joined,
    load_recording,
    record,
    save_recording,
)
from autospec.training.trainee import Lesson, Trainee, conditional
from autospec.training.view import View

KINDS = ("mlp_speculator", "medusa", "eagle")
_PATHS = ("target", "out", "data", "held_out")
UNFINISHED = "unfinished"
"""Folder inside the head's folder, for what an interrupted training goes on from."""

_RECORDING_SHARE = 0.5  # of the time
_GROUPS_OF_SLOTS = 4
_PATIENCE = 6
_RESERVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What ``autospec train-proposer`` was asked for.

    ``minutes`` are shared between recording and learning, and set ``tokens`` and ``steps`` where
    these are None. Equal ``tokens`` and ``steps`` on equal machines give equal heads.
    """

    target: Path
    out: Path
    kind: str = "mlp_speculator"
    data: str = "self"
    held_out: Path | None = None
    minutes: float = 8.0
    tokens: int | None = None
    steps: int | None = None
    frequent_tokens: int = 8192
    inner_size: int = 1024
    batch: int = 1024
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    slots: int = 64
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(slots=True)
class _Plan:
    """What is known of a training before it ends; kept in its unfinished folder."""

    options: dict[str, Any]
    seconds: float = 0.0
    recorded: bool = False
    learning_from: float | None = None  # seconds


def run_training(options: TrainingOptions, console: Console) -> int:
    """Record, learn, measure, write; returns the exit code. Raises InputError and ModelError.

    An interrupted training is gone on with by the same command.
    """
    _check(options)
    folder = options.out / UNFINISHED
    plan = _open(options, folder, console)
    began = time.monotonic() - plan.seconds

    def spent() -> float:
        return time.monotonic() - began

    target = load_model(options.target, options.dtype, options.device, console)
    torch.set_flush_denormal(True)  # shares of unlikely tokens; processors are slow at them
    material = gather(options.data, options.held_out, target, options.seed)
    try:
        with View(console) as view:
            measured, learned = _record(options, folder, plan, target, material, spent, view)
            trainee, choices = _prepare(options, target, measured, learned, console)
            if plan.learning_from is None:
                plan.learning_from = spent()
                _keep(plan, folder, spent())
            turn = _turning_seconds(options, plan.learning_from)
            course = Course(
                options.steps,
                options.learning_rate,
                options.weight_decay,
                options.seed,
                patience=_PATIENCE,
            )

            def report(told: Report) -> None:
                share = told.step / told.steps if told.steps else spent() / (options.minutes * 60.0)
                view.learned(told, share)
                if told.survived is not None:
                    _keep(plan, folder, spent())

            state = folder / "state.safetensors"
            progress = fit(
                trainee, course, (measured, choices), state, report, lambda: spent() >= turn
            )
    except KeyboardInterrupt:
        _keep(plan, folder, spent())
        say(console, "interrupted; the same command goes on from here")
        return 1
    trainee.save(options.out, _told(options, material, learned, progress, spent()))
    shutil.rmtree(folder)
    _show(console, progress)
    say(console, f"head written to {options.out}")
    return 0


def _check(options: TrainingOptions) -> None:
    if options.kind not in KINDS:
        raise InputError(f"--kind is {options.kind!r}; it must be one of {', '.join(KINDS)}")
    if (options.out / CONFIG).exists():
        raise InputError(f"--out: {options.out} already holds a head; name another folder")


def _open(options: TrainingOptions, folder: Path, console: Console) -> _Plan:
    """The plan of an interrupted training with the same options, else a new one."""
    asked = json.loads(json.dumps(asdict(options), default=str))
    file = folder / "plan.json"
    if not file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out: {folder} cannot be made: {error.strerror}") from None
        plan = _Plan(asked)
        _keep(plan, folder, 0.0)
        return plan
    try:
        plan = _Plan(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: is not readable ({error}); remove {folder}") from None
    for key, wanted in asked.items():
        if plan.options.get(key) != wanted:
            raise InputError(
                f"{folder}: holds a training begun with {key} {plan.options.get(key)!r}, now it is "
                f"{wanted!r}; go on with the same options, or remove the folder to begin anew"
            )
    say(console, f"going on from {folder} after {plan.seconds:.0f} s")
    return plan


def _keep(plan: _Plan, folder: Path, seconds: float) -> None:
    plan.seconds = seconds
    partial = folder / "plan.partial"
    partial.write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "plan.json")


def _record(
    options: TrainingOptions,
    folder: Path,
    plan: _Plan,
    target: CausalModel,
    material: Material,
    spent: Callable[[], float],
    view: View,
) -> tuple[Recording, Recording]:
    """What is held out, and what is learned from, in groups that are saved one by one."""
    layers = (-1,)
    file = folder / "held_out.safetensors"
    if not file.exists():

        def shown(tokens: int) -> bool:
            view.recorded(tokens, None, 0.0)
            return False

        save_recording(
            file,
            record(target, material.held_out, layers=layers, slots=options.slots, stop=shown),
        )
    measured = load_recording(file)
    parts = [load_recording(part) for part in sorted(folder.glob("part-*.safetensors"))]
    limit = options.minutes * 60.0 * _RECORDING_SHARE
    size = options.slots * _GROUPS_OF_SLOTS
    groups = [material.learned[at : at + size] for at in range(0, len(material.learned), size)]
    for number in range(len(parts), len(groups)):
        before = sum(part.num_tokens for part in parts)

        def enough(tokens: int, before: int = before) -> bool:
            view.recorded(before + tokens, options.tokens, spent() / limit)
            if options.tokens is not None:
                return before + tokens >= options.tokens
            return spent() >= limit and before + tokens >= options.batch

        if parts and (plan.recorded or enough(0)):
            break
        part = record(target, groups[number], layers=layers, slots=options.slots, stop=enough)
        save_recording(folder / f"part-{number:04d}.safetensors", part)
        parts.append(part)
        _keep(plan, folder, spent())
    plan.recorded = True
    return measured, joined(parts)


def _prepare(
    options: TrainingOptions,
    target: CausalModel,
    measured: Recording,
    learned: Recording,
    console: Console,
) -> tuple[Trainee, torch.Tensor]:
    """The untrained head with its lesson, and the target's choices on what is held out."""
    choices = target_choices(learned, target)
    count = min(options.frequent_tokens, target.vocab_size)
    tokens = frequent_tokens(choices[~learned.context], count, target.vocab_size)
    rows = target.output_rows(tokens.to(target.device))
    labels = make_labels(learned, choices, rows, target.device)
    lesson = Lesson(learned, labels, tokens, rows)
    batch, seed = options.batch, options.seed
    trainee: Trainee
    if options.kind == "medusa":
        trainee = MedusaTrainee(target, lesson, batch=batch)
    elif options.kind == "eagle":
        trainee = EagleTrainee(target, lesson, batch=batch, seed=seed)
    else:
        inner_size = options.inner_size
        trainee = MlpTrainee(target, lesson, inner_size=inner_size, batch=batch, seed=seed)
    parameters = sum(each.numel() for each in trainee.module.parameters())
    say(
        console,
        f"{options.kind}: {parameters / 1e6:.2f} million parameters, {parameters * 2 / 1e6:.1f} MB "
        f"as written; {learned.num_tokens} tokens to learn from, {measured.num_tokens} held out",
    )
    return trainee, target_choices(measured, target)


def _turning_seconds(options: TrainingOptions, learning_from: float) -> float:
    """When the learning rate must begin to fall for a training to end in time."""
    left = options.minutes * 60.0 - _RESERVE_SECONDS - learning_from
    return learning_from + (1.0 - DECAY_SHARE) * max(left, 0.0)


def _told(
    options: TrainingOptions,
    material: Material,
    learned: Recording,
    progress: Progress,
    seconds: float,
) -> dict[str, Any]:
    """How a head came to be, for its configuration file."""
    kept = dict(progress.checks)[progress.best_step]
    return {
        "made_by": f"autospec {__version__} train-proposer",
        "options": {
            key: Path(value).name if key in _PATHS and value is not None else value
            for key, value in asdict(options).items()
        },
        "tokens": learned.num_tokens,
        "sequences": len(learned.starts) - 1,
        "held_out_prompts": len(material.held_out),
        "steps": progress.step,
        "best_step": progress.best_step,
        "seconds": round(seconds, 1),
        "acceptance_before": [round(each, 4) for each in conditional(progress.checks[0][1])],
        "acceptance": [round(each, 4) for each in conditional(kept)],
    }


def _show(console: Console, progress: Progress) -> None:
    table = Table("held-out acceptance, greedy")
    before, after = progress.checks[0][1], dict(progress.checks)[progress.best_step]
    for position in range(len(after)):
        table.add_column(f"token {position + 1}", justify="right")
    for name, survived in (("before", before), ("after", after)):
        table.add_row(name, *(f"{share:.3f}" for share in conditional(survived)))
    console.print(table)
    say(console, "each position once all before it were accepted")
