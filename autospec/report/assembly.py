"""From inputs to a page: which sections there are, and what is said of those that are not."""

from __future__ import annotations

from datetime import datetime, timezone

from autospec import __version__
from autospec.report.inputs import Inputs
from autospec.report.page import Page, Section, Source, Verdict
from autospec.report.sections.acceptance import acceptance_section
from autospec.report.sections.best_choice import best_choice_section
from autospec.report.sections.comparison import comparison_section
from autospec.report.sections.crossover import crossover_section
from autospec.report.sections.drafting import drafting_section
from autospec.report.sections.latency import latency_section
from autospec.report.sections.rails import rails_section
from autospec.report.sections.service import service_section
from autospec.report.sections.speedup import speedup_section
from autospec.report.sections.step_cost import cost_section
from autospec.report.sections.timeline import timeline_section
from autospec.report.sections.tuning import tuning_section
from autospec.report.sections.verdict import (
    bench_verdict,
    check_verdict,
    journal_verdict,
    profile_verdict,
    replay_verdict,
    tune_verdict,
)
from autospec.report.wording import plural, series

_REPLAY = "replay"  # the engine of a simulated clock; its target is a trace

_NEEDS = {
    "speedup": "Speed by load and workload against plain decoding and fixed choices: takes the "
    "JSON of 'autospec bench' or 'autospec demo' (--json FILE) with plain among the arms.",
    "timeline": "Throughput, k and proposers over time: takes a journal (--journal FILE of bench "
    "and demo, or journal.path in the policy).",
    "rails": "What the guard rails did: takes a journal.",
    "acceptance": "Acceptance by position: takes a profile or a journal in which enough was "
    "drafted.",
    "cost": "What a step costs: takes a journal, or a profile with step times.",
    "best": "The best choice by load and workload: takes a measurement against plain decoding, a "
    "tuned profile, a check or a journal.",
    "crossover": "Where speculation stops paying: takes a measurement of one workload at two loads "
    "or more, a replay of two concurrencies, a tuned profile, a check, or a journal with plain "
    "steps at two loads.",
    "comparison": "Runs compared: takes two runs of a kind.",
}


def report_page(inputs: Inputs, now: datetime | None = None) -> Page:
    """The whole report; ``now`` is the time that it names."""
    journals = inputs.last_runs
    every_run = tuple(run for runs in inputs.journals for run in runs)
    comparison = comparison_section(inputs.benches, inputs.replays, every_run)
    found = (
        comparison if comparison is not None and comparison.charts else None,
        service_section(inputs.checks),
        tuning_section(inputs.tunes),
        speedup_section(inputs.benches),
        drafting_section(inputs.benches),
        best_choice_section(inputs.benches, journals, inputs.profiles, inputs.checks),
        crossover_section(inputs.benches, inputs.replays, journals, inputs.tunings, inputs.checks),
        latency_section(inputs.replays),
        timeline_section(journals),
        rails_section(journals),
        acceptance_section(inputs.profiles, journals),
        cost_section(inputs.profiles, journals, inputs.tunes),
        comparison if comparison is not None and not comparison.charts else None,
    )
    sections = tuple(section for section in found if section is not None)
    return Page(
        title=_title(inputs),
        subtitle=_subtitle(inputs, now or datetime.now(timezone.utc)),
        verdicts=_verdicts(inputs),
        sections=sections,
        sources=_sources(inputs),
        absent=_absent(sections),
    )


def _absent(sections: tuple[Section, ...]) -> tuple[str, ...]:
    there = {section.name for section in sections}
    return tuple(sentence for name, sentence in _NEEDS.items() if name not in there)


def _title(inputs: Inputs) -> str:
    facts = [dict(run.facts) for run in inputs.benches]
    facts += [dict(run.facts) for run in inputs.last_runs]
    facts += [dict(profile.identity) for profile in inputs.profiles]
    models = list(
        dict.fromkeys(
            each["model"]
            for each in facts
            if each.get("model") and not each.get("engine", "").startswith(_REPLAY)
        )
    )
    if not models:
        return (
            "Is this service a candidate?"
            if inputs.checks and not inputs.replays
            else "Speculative decoding, replayed"
        )
    named = series(models) if len(models) <= 2 else f"{models[0]} and {len(models) - 1} others"
    return f"Speculative decoding of {named}"


def _subtitle(inputs: Inputs, now: datetime) -> str:
    kinds = (
        (len(inputs.benches), "measurement"),
        (len(inputs.replays), "replay"),
        (len(inputs.journals), "journal"),
        (len(inputs.profiles), "profile"),
        (len(inputs.checks), "check"),
        (len(inputs.tunes), "tuning"),
    )
    named = series([plural(number, noun) for number, noun in kinds if number])
    return f"From {named} · {now:%Y-%m-%d %H:%M} UTC · AutoSpec {__version__}"


def _verdicts(inputs: Inputs) -> tuple[Verdict, ...]:
    """One for each input; a tuning's own profile says the same as its figures."""
    in_profiles = [profile.tuned for profile in inputs.profiles]
    return (
        *(check_verdict(run) for run in inputs.checks),
        *(tune_verdict(run) for run in inputs.tunes if run.tuned not in in_profiles),
        *(bench_verdict(run) for run in inputs.benches),
        *(replay_verdict(run) for run in inputs.replays),
        *(journal_verdict(run) for run in inputs.last_runs),
        *(profile_verdict(profile) for profile in inputs.profiles),
    )


def _sources(inputs: Inputs) -> tuple[Source, ...]:
    return (
        *(Source(run.name, "Tuning", run.date, run.facts) for run in inputs.tunes),
        *(Source(run.name, "Check", run.date, run.facts) for run in inputs.checks),
        *(Source(run.name, "Measurement", run.date, run.facts) for run in inputs.benches),
        *(Source(run.name, "Replay", run.date, run.facts) for run in inputs.replays),
        *(Source(run.name, "Journal, last run", run.date, run.facts) for run in inputs.last_runs),
        *(
            Source(
                profile.name,
                "Profile",
                profile.date,
                (*profile.identity, ("learned from", "; ".join(profile.provenance))),
            )
            for profile in inputs.profiles
        ),
    )
