"""What each input says, in a sentence or two and a few figures."""

from __future__ import annotations

from autospec.bench.phases import ADAPTIVE, PLAIN
from autospec.profile.tuned import Tuning
from autospec.report.page import Figure, Verdict
from autospec.report.readers.bench_run import BenchRun, Phase, Spread
from autospec.report.readers.check_run import CheckRun
from autospec.report.readers.journal_run import JournalRun
from autospec.report.readers.profile_counts import ProfileCounts
from autospec.report.readers.replay_run import ReplayRun
from autospec.report.readers.tune_run import TuneRun
from autospec.report.sections.acceptance import panels_of
from autospec.report.sections.rails import rails_sentences
from autospec.report.wording import count, duration, percent, plural, rate, sentence, series, times


def bench_verdict(run: BenchRun) -> Verdict:
    """How the adaptive arm did against plain decoding and the best fixed arm."""
    total = run.total.get(ADAPTIVE)
    best = run.best_fixed()
    sentences: list[str] = []
    figures: list[Figure] = []
    if total is not None and total.ratio_to_plain is not None:
        lead = f"AutoSpec served everything at {times(total.ratio_to_plain)} the speed of plain "
        lead += "decoding"
        figures.append(Figure(times(total.ratio_to_plain), "everything, against plain decoding"))
        fixed = run.total[best].ratio_to_plain if best is not None else None
        if fixed:
            against = total.ratio_to_plain / fixed
            lead += f" and at {times(against)} that of the best fixed choice, {best}"
            figures.append(Figure(times(against), f"against {best}, the best fixed choice"))
        sentences.append(lead + ".")
        phases = [
            (spread, phase)
            for phase in run.phases
            if ADAPTIVE in phase.arms
            and (spread := phase.arms[ADAPTIVE].ratio_to_plain) is not None
        ]
        if len(phases) > 1:
            sentences.append(_extremes(phases, figures))
    elif best is not None and run.total[best].ratio_to_plain is not None:
        ratio = run.total[best].ratio_to_plain or 0.0
        sentences.append(f"The best arm was {best}, at {times(ratio)} the speed of plain decoding.")
    else:
        sentences.append("Plain decoding was not among the arms, so there is no speedup to name.")
    compared = [
        (total.outputs_equal_to_plain, total.requests)
        for arm, total in run.total.items()
        if arm != PLAIN and total.outputs_equal_to_plain is not None
    ]
    requests = sum(each for _, each in compared)
    if PLAIN in run.total and requests:
        equal = sum(each for each, _ in compared)
        sentences.append(
            f"{count(equal)} of {count(requests)} outputs are those of plain decoding token for "
            "token"
            + ("." if equal == requests else "; the others differ where rounding decides a tie.")
        )
    if run.is_interrupted:
        sentences.append("The measurement was interrupted: these are the finished rounds.")
    return Verdict(run.name, tuple(sentences), tuple(figures))


def _extremes(phases: list[tuple[Spread, Phase]], figures: list[Figure]) -> str:
    best = max(phases, key=lambda each: each[0].median)
    worst = min(phases, key=lambda each: each[0].median)
    figures.append(Figure(times(best[0].median), f"best: {best[1].title}"))
    figures.append(Figure(times(worst[0].median), f"least: {worst[1].title}"))
    return (
        f"By requests running and workload it went from {times(worst[0].median)} "
        f"({worst[1].title}) to {times(best[0].median)} ({best[1].title})."
    )


def replay_verdict(run: ReplayRun) -> Verdict:
    """How the first policy did against plain decoding and the best fixed choice."""
    policy = run.policies[0] if run.policies else ""
    rows = run.closed(policy)
    if not rows:
        return Verdict(
            run.name,
            ("Only open loops were replayed: their latencies are below.",)
            if run.results
            else ("No policy was replayed.",),
            (),
        )
    words = [f"{times(row.speedup_vs_plain)} at {row.concurrency}" for row in rows]
    sentences = [
        f"Policy {policy} decoded {series(words)} running requests, against plain decoding of the "
        "same recorded requests."
    ]
    figures = [
        Figure(times(row.speedup_vs_plain), f"{policy}, {row.concurrency} running")
        for row in (rows[:1] if len(rows) == 1 else (rows[0], rows[-1]))
    ]
    against = [
        (row.concurrency, row.speedup_vs_plain / run.best_fixed[row.concurrency].speedup_vs_plain)
        for row in rows
        if row.concurrency in run.best_fixed
    ]
    if against:
        least = min(ratio for _, ratio in against)
        most = max(ratio for _, ratio in against)
        span = times(least) if len(against) == 1 else f"{times(least)} to {times(most)}"
        sentences.append(f"That is {span} of the best fixed proposer and k in hindsight.")
        figures.append(Figure(times(least), "least, against the best fixed choice in hindsight"))
    return Verdict(run.name, tuple(sentences), tuple(figures))


def journal_verdict(run: JournalRun) -> Verdict:
    """What was served and how much of it was drafted."""
    speed = run.tokens / run.seconds if run.seconds > 0.0 else None
    length = run.tokens / run.request_steps if run.request_steps else None
    lead = f"{count(run.tokens)} tokens were decoded in {plural(run.steps, 'step')}"
    if speed is not None:
        lead += f" and {duration(run.seconds)} of step time, {rate(speed)} tokens/s"
    if length is not None:
        lead += f": {length:.2f} tokens per request and step, where plain decoding has 1"
    figures = []
    if speed is not None:
        figures.append(Figure(rate(speed), "tokens per second of step time"))
    if length is not None:
        figures.append(Figure(f"{length:.2f}", "tokens per request and step"))
    sentences = [lead + "."]
    if run.verified and run.request_steps:
        drafting = run.drafting_steps / run.request_steps
        sentences.append(
            f"Requests drafted in {percent(drafting)} of their steps; "
            f"{percent(run.accepted / run.verified)} of {count(run.verified)} verified draft "
            "tokens were accepted."
        )
        figures.append(Figure(percent(run.accepted / run.verified), "of draft tokens accepted"))
    else:
        sentences.append("Nothing was drafted: every step was plain.")
    if run.steps:
        mean = run.decision_seconds / run.steps
        sentences.append(f"Deciding took {duration(mean)} a step on average.")
    sentences += rails_sentences(run)
    return Verdict(run.name, tuple(sentences), tuple(figures))


def check_verdict(run: CheckRun) -> Verdict:
    """The check's own verdict, its reason, and what to do."""
    if run.verdict is None:
        return Verdict(run.name, run.notes or ("The check came to no verdict.",), ())
    figures = []
    if run.speedups:
        for each in dict.fromkeys((run.speedups[0], run.speedups[-1])):
            words = f"expected of {each.proposer}:{each.k} at {each.running} running"
            figures.append(Figure(times(each.speedup), words if each.k else "plain decoding"))
    sentences = (run.verdict.sentence, run.verdict.reason, *run.verdict.next_steps, *run.notes)
    return Verdict(run.name, tuple(sentence(each) for each in sentences if each), tuple(figures))


def tune_verdict(run: TuneRun) -> Verdict:
    """What was kept, and what it brought."""
    sentences, figures = _tuning(run.tuned)
    return Verdict(run.name, tuple(sentences), tuple(figures))


def profile_verdict(profile: ProfileCounts) -> Verdict:
    """What it was learned on, and which proposer is accepted most readily."""
    requests = sum(profile.requests.values())
    seen = [label for label, number in profile.requests.items() if number > 0]
    lead = f"Learned on {count(requests)} requests of {plural(len(seen), 'workload')}"
    sentences = [lead + (f": {series(seen)}." if 0 < len(seen) <= 6 else ".")]
    best = None
    for panel in panels_of(profile.counts):
        for line in panel.lines:
            position, interval = line.points[0]
            if position == 0 and (best is None or interval.low > best[0].low):
                best = (interval, line.proposer, panel.workload)
    if best is not None:
        interval, proposer, workload = best
        sentences.append(
            f"Most readily accepted is {proposer} on {workload}: its first draft token in "
            f"{percent(interval.share)} of cases ({percent(interval.low)} to "
            f"{percent(interval.high)})."
        )
    figures: list[Figure] = []
    if profile.tuned is not None:
        tuning, figures = _tuning(profile.tuned)
        sentences = [*tuning, *sentences]
    if profile.cost is None:
        sentences.append("It holds no step times yet.")
    return Verdict(profile.name, tuple(sentences), tuple(figures))


def _tuning(tuned: Tuning) -> tuple[list[str], list[Figure]]:
    """What a tuning run decided, and what its settings brought at each load."""
    sentences = [
        "Tuned settings are kept: they won on held-out requests outside the noise."
        if tuned.kept
        else "The default settings are kept: no others won on held-out requests outside the noise."
    ]
    figures = []
    for each in sorted(tuned.loads, key=lambda each: each.load):
        if each.measured is not None:
            span = f"{times(each.measured.low)} to {times(each.measured.high)}"
            label = f"{each.load} running, against plain ({span})"
            figures.append(Figure(times(each.measured.value), label))
    if tuned.crossover is None:
        sentences.append("Speculation is expected to pay at every load that was looked at.")
    else:
        sentences.append(
            f"From {plural(tuned.crossover, 'running request')} on, no fixed choice is expected to "
            "pay."
        )
    return sentences, figures
