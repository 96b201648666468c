"""``autospec profile``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autospec.cli.app import app
from autospec.errors import ProfileError, ProfileMismatch

if TYPE_CHECKING:
    from rich.console import Console

    from autospec.profile.fitted_cost import LoadTimes
    from autospec.profile.learned import Profile, Statistics
    from autospec.profile.tuned import Tuning

profile_app = typer.Typer(no_args_is_help=True, help="Show, compare, merge and check profiles.")
app.add_typer(profile_app, name="profile")


ProfileFile = Annotated[Path, typer.Argument(metavar="FILE", help="Profile, JSON.")]


@profile_app.command("check")
def profile_check(file: ProfileFile) -> None:
    """Check that a file is a whole profile."""
    from autospec.profile.file import load_profile

    profile = load_profile(file)
    typer.echo(f"{file}: good, {len(profile.workloads)} workloads")


@profile_app.command("show")
def profile_show(file: ProfileFile) -> None:
    """Show what a profile was learned on and what it holds."""
    from rich.console import Console
    from rich.table import Table

    from autospec.profile.file import load_profile

    profile = load_profile(file)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in _facts(profile):
        console.print(f"{name:<18} {value}", markup=False)
    table = Table("workload", "requests", "proposer", "observed", "accepted", "by position")
    for label, workload in profile.workloads.items():
        for row, (proposer, statistics) in enumerate(workload.proposers.items() or [("-", {})]):
            first = (label, f"{workload.requests:g}") if row == 0 else ("", "")
            table.add_row(*first, proposer, *_acceptance(statistics))
    console.print(table)
    _show_times(console, file, profile)
    if profile.tuned is not None:
        for line in _tuned(profile.tuned):
            console.print(line, markup=False)


def _show_times(console: Console, file: Path, profile: Profile) -> None:
    from rich.table import Table

    try:
        times = _load_times(file, profile)
    except ProfileError as error:
        console.print(f"step cost: cannot be shown: {error}", markup=False)
        return
    if not times:
        console.print("step cost: too few steps were counted")
        return
    rows = [_times(each) for each in times]
    table = Table("running", *rows[0])
    for each, row in zip(times, rows, strict=True):
        table.add_row(str(each.requests), *row.values())
    console.print(table)
    console.print("beyond the plain step: with a draft of so many tokens for each request")


def _tuned(tuned: Tuning) -> Iterator[str]:
    """What a tuning chose and found, a line each."""
    yield f"tuned by {tuned.provenance.command}, {tuned.provenance.date}"
    kept = "settings that won on held-out requests" if tuned.kept else "the untuned settings"
    yield f"kept {kept}:"
    for name, settings in sorted(tuned.proposers.items()):
        values = settings.model_dump(exclude_none=True, exclude={"kind"})
        yield f"  {name}: " + ", ".join(f"{key} {value:g}" for key, value in values.items())
    for cap in tuned.caps:
        yield f"  from {cap.load} running requests on: k at most {cap.k}"
    for each in tuned.loads:
        best = "plain" if each.proposer is None else f"{each.proposer}:{each.k}"
        line = f"  load {each.load}: best fixed choice {best}, {each.predicted:.2f}x expected"
        found = each.measured
        if found is not None:
            line += f"; measured {found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"
        yield line
    if tuned.crossover is not None:
        yield f"  from {tuned.crossover} running requests on no fixed choice is expected to pay"


@profile_app.command("diff")
def profile_diff(first: ProfileFile, second: ProfileFile) -> None:
    """Show where two profiles differ."""
    from rich.console import Console
    from rich.table import Table

    from autospec.profile.file import load_profile

    profiles = load_profile(first), load_profile(second)
    table = Table("", str(first), str(second))
    facts = zip(_facts(profiles[0]), _facts(profiles[1]), strict=True)
    rows = [(name, mine, theirs) for (name, mine), (_, theirs) in facts if mine != theirs]
    files = zip((first, second), profiles, strict=True)
    contents = [_contents(file, profile) for file, profile in files]
    for name in sorted({*contents[0], *contents[1]}):
        mine, theirs = contents[0].get(name, "-"), contents[1].get(name, "-")
        if mine != theirs:
            rows.append((name, mine, theirs))
    if not rows:
        typer.echo("no difference")
        return
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


@profile_app.command("merge")
def profile_merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Profiles of the same identity.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the sum goes.")],
    half_life_days: Annotated[
        float | None, typer.Option(min=0.001, help="Fade older profiles to the newest one's time.")
    ] = None,
) -> None:
    """Add up profiles of the same identity."""
    from autospec.profile.file import load_profile, save_profile
    from autospec.profile.learned import merge

    for number, file in enumerate(files):
        for other in files[:number]:
            if file.resolve() == other.resolve():
                raise ProfileError(
                    f"{file}: is the same file as {other}; added to itself, all it has learned "
                    f"would count twice; give every file once"
                )
    merged = load_profile(files[0])
    for file in files[1:]:
        try:
            merged = merge(merged, load_profile(file), half_life_days)
        except ProfileMismatch as error:
            raise ProfileMismatch(f"{file}: {error} as in {files[0]}") from None
    save_profile(out, merged)
    typer.echo(f"{out}: {len(files)} profiles, {len(merged.workloads)} workloads")


def _facts(profile: Profile) -> list[tuple[str, str]]:
    identity = profile.identity
    updated = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(profile.updated))
    return [
        ("target", identity.target),
        ("proposers", ", ".join(identity.proposers)),
        ("engine", identity.engine),
        ("version", identity.version),
        ("device", identity.device),
        ("dtype", identity.dtype),
        ("acceptance_layout", profile.acceptance_layout),
        ("cost_layout", profile.cost_layout),
        ("updated", updated),
        ("provenance", "; ".join(profile.provenance) or "-"),
    ]


def _load_times(file: Path, profile: Profile) -> tuple[LoadTimes, ...]:
    """What steps take by load, as far as the profile says. Raises ProfileError."""
    from autospec.profile.fitted_cost import cost_fit, load_times

    fit = cost_fit(str(file), profile)
    return () if fit is None else load_times(fit)


def _times(times: LoadTimes) -> dict[str, str]:
    """The columns of one load."""
    from autospec.profile.fitted_cost import DRAFT_LENGTHS
    from autospec.report.wording import duration

    lengths = " / ".join(map(str, DRAFT_LENGTHS))
    return {
        "plain step": duration(times.plain_seconds),
        f"verifying {lengths} each": " / ".join(map(duration, times.verifying_seconds)),
        **{
            f"drafting {lengths} each, {name}": " / ".join(map(duration, seconds))
            for name, seconds in times.drafting_seconds.items()
        },
        "steps counted": f"{times.steps:.0f}",
    }


def _contents(file: Path, profile: Profile) -> dict[str, str]:
    rows = {}
    for label, workload in profile.workloads.items():
        rows[f"{label}: requests"] = f"{workload.requests:g}"
        for proposer, statistics in workload.proposers.items():
            observed, accepted, _ = _acceptance(statistics)
            rows[f"{label}: {proposer}"] = f"{accepted} accepted of {observed}"
    with contextlib.suppress(ProfileError):  # of statistics that cannot be read nothing is known
        for each in _load_times(file, profile):
            rows |= {f"{each.requests} running: {key}": text for key, text in _times(each).items()}
    return rows


def _acceptance(statistics: Statistics) -> tuple[str, str, str]:
    """Draft tokens observed, the share of them that was accepted, and that share by position."""
    if "trials" not in statistics or "successes" not in statistics:
        return "-", "-", _totals(statistics)
    trials, successes = statistics["trials"], statistics["successes"]
    if not trials.any() or trials.shape != successes.shape:
        return "0", "-", "-"
    rows = zip(
        successes.reshape(len(trials), -1).sum(axis=1),
        trials.reshape(len(trials), -1).sum(axis=1),
        strict=True,
    )
    positions = " ".join(f"{hits / seen:.2f}" if seen else "-" for hits, seen in rows)
    accepted = f"{successes.sum() / trials.sum():.3f}"
    return f"{trials.sum():.0f}", accepted, positions.rstrip(" -")


def _totals(statistics: Statistics) -> str:
    totals = {name: float(array.sum()) for name, array in statistics.items()}
    return ", ".join(f"{name} {total:.6g}" for name, total in totals.items() if total) or "-"
