"""Steps of gradient descent that can be interrupted and gone on with as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from autospec.errors import InputError
from autospec.training.recording import Recording
from autospec.training.trainee import Trainee, survival

CHECK_EVERY = 40
"""Steps between two looks at what is held out; the state is saved there."""

DECAY_SHARE = 0.3
"""Share of all steps, at the end, in which the learning rate falls."""

_WARM_UP_STEPS = 50
_LAST_RATE = 0.03  # of the learning rate
_CLIP = 1.0
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Course:
    """How fast and how long to learn. Equal courses on equal data give equal weights.

    ``steps`` None leaves their number to be settled on the way, by whom the time is kept. After
    ``patience`` checks without a better one the rate begins to fall, or where it does already, it
    is enough.
    """

    steps: int | None
    learning_rate: float
    weight_decay: float
    seed: int
    patience: int


@dataclass(slots=True)
class Progress:
    """Where a course stands. ``steps`` is how many it will have, once that is settled;
    ``turned_step`` where it was settled for lack of progress; ``checks`` are (step, survival by
    draft position)."""

    step: int = 0
    steps: int | None = None
    best_step: int = 0
    turned_step: int = 0
    checks: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Share of first draft tokens accepted at the best check."""
        return max((survived[0] for _, survived in self.checks), default=-1.0)


@dataclass(frozen=True, slots=True)
class Report:
    """What is told after a step: the loss, and after a check how the head drafts."""

    step: int
    steps: int | None
    loss: float
    survived: tuple[float, ...] | None


def learning_rate(course: Course, step: int, steps: int | None) -> float:
    """A short rise, a plateau, and a fall at the end, once the end is known."""
    share = min(1.0, (step + 1) / _WARM_UP_STEPS)
    if steps is not None:
        left = (steps - step) / (DECAY_SHARE * steps)
        share *= _LAST_RATE + (1.0 - _LAST_RATE) * min(1.0, left)
    return course.learning_rate * share


def settled(step: int) -> int:
    """How many steps a course has whose rate begins to fall after ``step``."""
    return max(step + 1, round(step / (1.0 - DECAY_SHARE)))


def _turning(steps: int) -> float:
    """The step after which the rate falls."""
    return (1.0 - DECAY_SHARE) * steps


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
    time_to_settle: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train, leaving the best weights in the trainee. Goes on from ``state_file`` where it exists.

    ``time_to_settle`` is asked after every step of a course without a number of steps. The state is
    saved at every check; an interrupt loses the steps since the last one, and they come out the
    same the next time. Raises InputError for a state file of another course.
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
    progress = Progress(steps=course.steps)
    if state_file.exists():
        progress = _restore(state_file, course, parameters, optimizer, best)

    def check(loss: float) -> None:
        before = progress.best
        survived = survival(trainee.hits(*held_out))
        progress.checks.append((progress.step, survived))
        if survived[0] > before:
            progress.best_step = progress.step
            for name, value in parameters.items():
                best[name].copy_(value.detach())
        _store(state_file, course, progress, parameters, optimizer, best)
        report(Report(progress.step, progress.steps, loss, survived))

    if not progress.checks:
        check(float("nan"))
    while progress.steps is None or progress.step < progress.steps:
        since = progress.step - max(progress.best_step, progress.turned_step)
        if since >= course.patience * CHECK_EVERY:
            if progress.steps is not None and progress.step >= _turning(progress.steps):
                break
            progress.turned_step = progress.step
            progress.steps = settled(progress.step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(course, progress.step, progress.steps)
        loss = trainee.loss(batch_units(course, trainee, progress.step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        optimizer.step()
        progress.step += 1
        if progress.steps is None and time_to_settle():
            progress.steps = settled(progress.step)
        if progress.step % CHECK_EVERY == 0 or progress.step == progress.steps:
            check(float(loss.detach()))
        else:
            report(Report(progress.step, progress.steps, float(loss.detach()), None))
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
    return Progress(
        int(found["step"]),
        found["steps"],
        int(found["best_step"]),
        int(found["turned_step"]),
        checks,
    )
