"""Steps of gradient descent that can be interrupted and gone on with as if nothing had happened."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from autospec.errors import InputError
from autospec.training.recording import Recording
from autospec.training.trainee import Trainee, survival

_WARM_UP_STEPS = 50
_LAST_RATE = 0.03  # of the learning rate
_CLIP = 1.0
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast to learn. Equal courses on equal data give equal weights.

    Every ``check_every`` steps the head is tried on what is held out and the state is saved; after
    ``patience`` checks without a better one it is enough.
    """

    steps: int
    learning_rate: float
    weight_decay: float
    seed: int
    check_every: int
    patience: int


@dataclass(slots=True)
class Progress:
    """Where a course stands; ``checks`` are (step, survival by draft position)."""

    step: int = 0
    best_step: int = 0
    checks: list[tuple[int, tuple[float, ...]]] | None = None

    @property
    def best(self) -> float:
        return max((survived[0] for _, survived in self.checks or []), default=-1.0)


@dataclass(frozen=True, slots=True)
class Report:
    """What is told after a step: the loss, and after a check how the head drafts."""

    step: int
    loss: float
    survived: tuple[float, ...] | None


def learning_rate(course: Course, step: int) -> float:
    """A short rise, then a cosine down to a small rest."""
    rise = min(1.0, (step + 1) / _WARM_UP_STEPS)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / course.steps)))
    return course.learning_rate * rise * (_LAST_RATE + (1.0 - _LAST_RATE) * fall)


def batch_units(course: Course, trainee: Trainee, step: int) -> torch.Tensor:
    """Units of a step: every epoch is a shuffle of its own, a function of seed and epoch alone."""
    size = min(trainee.batch_units, trainee.num_units)
    per_epoch = trainee.num_units // size
    epoch, position = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(course.seed * 1_000_003 + epoch)
    order = torch.randperm(trainee.num_units, generator=generator)
    return order[position * size : (position + 1) * size]


def fit(
    trainee: Trainee,
    course: Course,
    held_out: tuple[Recording, torch.Tensor],  # with the target's choices
    state_file: Path,
    report: Callable[[Report], None],
) -> Progress:
    """Train, leaving the best weights in the trainee. Goes on from ``state_file`` where it exists.

    The state is saved at every check; an interrupt loses the steps since the last one, and they
    come out the same the next time. Raises InputError for a state file of another course.
    """
    module = trainee.module
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [each for each in parameters.values() if each.ndim > 1],
                "weight_decay": course.weight_decay,
            },
            {"params": [each for each in parameters.values() if each.ndim <= 1], "weight_decay": 0},
        ],
        betas=_BETAS,
    )
    best = {name: value.detach().clone() for name, value in parameters.items()}
    progress = Progress(checks=[])
    if state_file.exists():
        progress = _restore(state_file, course, parameters, optimizer, best)

    def check(loss: float) -> None:
        assert progress.checks is not None
        before = progress.best
        survived = survival(trainee.hits(*held_out))
        progress.checks.append((progress.step, survived))
        if survived[0] > before:
            progress.best_step = progress.step
            for name, value in parameters.items():
                best[name].copy_(value.detach())
        _store(state_file, course, progress, parameters, optimizer, best)
        report(Report(progress.step, loss, survived))

    if not progress.checks:
        check(float("nan"))
    while progress.step < course.steps:
        if progress.step - progress.best_step >= course.patience * course.check_every:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(course, progress.step)
        loss = trainee.loss(batch_units(course, trainee, progress.step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        optimizer.step()
        progress.step += 1
        if progress.step % course.check_every == 0 or progress.step == course.steps:
            check(float(loss.detach()))
        else:
            report(Report(progress.step, float(loss.detach()), None))
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(best[name])
    return progress


def _store(
    path: Path,
    course: Course,
    progress: Progress,
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    best: dict[str, torch.Tensor],
) -> None:
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"now.{name}"] = parameter.detach()
        tensors[f"best.{name}"] = best[name]
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value.detach()
    told = {"course": asdict(course), "progress": asdict(progress)}
    partial = path.with_suffix(".partial")
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
        partial,
        {"state": json.dumps(told)},
    )
    partial.replace(path)


def _restore(
    path: Path,
    course: Course,
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    best: dict[str, torch.Tensor],
) -> Progress:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            told = json.loads(opened.metadata()["state"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a readable training state ({error})") from None
    for key, wanted in asdict(course).items():
        if told["course"].get(key) != wanted:
            raise InputError(
                f"{path}: was begun with {key} {told['course'].get(key)}, now it is {wanted}; "
                "go on with the same options, or remove the file to begin anew"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"now.{name}"])
            best[name].copy_(tensors[f"best.{name}"])
            for key in ("step", "exp_avg", "exp_avg_sq"):  # none before the first step
                if (value := tensors.get(f"{key}.{name}")) is not None:
                    where = value.device if key == "step" else parameter.device
                    optimizer.state[parameter][key] = value.to(where)
    found = told["progress"]
    checks = [(int(step), tuple(survived)) for step, survived in found["checks"]]
    return Progress(int(found["step"]), int(found["best_step"]), checks)
