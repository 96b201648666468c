"""Is it a candidate? A decision from a handful of facts, and the sentence that says it.

Pure: what was measured comes in as ``Evidence``, and equal evidence gives an equal verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autospec.check.lookups import Acceptance, Crossover, Speedup
from autospec.check.samples import Shares

Kind = Literal["candidate", "off-above", "not-yet-prefill", "not-yet-queue", "no", "unknown"]
"""``candidate``: at the loads seen, at least the lowest. ``off-above``: only below them."""

MOST_BEFORE_FIRST_TOKEN = 0.6
"""Above this share of a request's time, decoding twice as fast saves less than a fifth of it."""

MOST_QUEUE = 0.5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on.

    ``shares`` are those of the lowest and the highest load, None without times of first tokens;
    ``running`` the requests decoding at these two. ``at_low`` and ``at_high`` are the best choices
    at them, None beyond what is known; ``largest_k`` the largest best k at loads where it pays.
    Without a step time ``crossover`` is None; ``best_crossover`` is that at the cheaper price of a
    verified token, where two are known. ``best_acceptance`` is the most tokens per step that
    any lookup reaches, None where the tokens are not known. Of several workloads
    ``best_workload`` gains most at the lowest load, or at 1 running request.
    """

    output_tokens: float
    shares_low: Shares | None
    shares_high: Shares | None
    running_low: float
    running_high: float
    best_acceptance: Acceptance | None
    crossover: Crossover | None = None
    best_crossover: Crossover | None = None
    at_low: Speedup | None = None
    at_high: Speedup | None = None
    at_one: Speedup | None = None
    largest_k: int = 0
    best_workload: tuple[str, Speedup] | None = None
    speculates_already: float | None = None  # tokens per step


@dataclass(frozen=True, slots=True)
class Verdict:
    """``sentence`` says all; ``reason`` the numbers behind it; ``next_steps`` what to do."""

    kind: Kind
    sentence: str
    reason: str
    next_steps: tuple[str, ...]


def decide(evidence: Evidence) -> Verdict:
    """First what comes before decoding, then what drafts would bring at this load."""
    verdict = _prefill(evidence) or _lookups(evidence)
    already = evidence.speculates_already
    if already is None:
        return verdict
    return Verdict(
        verdict.kind,
        verdict.sentence,
        f"{verdict.reason}; the server speculates already ({already:.2f} tokens per step), so its "
        "step times hold its drafts' too",
        (*verdict.next_steps, "measure again with the server's speculation off for exact figures"),
    )


def _prefill(evidence: Evidence) -> Verdict | None:
    shares = evidence.shares_low
    if shares is None or shares.prefill_without_queue < MOST_BEFORE_FIRST_TOKEN:
        return None
    share = shares.prefill_without_queue
    return Verdict(
        "not-yet-prefill",
        f"not yet: {share:.0%} of the time is before the first token",
        f"prompts are read for {share:.0%} of a request's time and {evidence.output_tokens:.0f} "
        "output tokens are decoded in the rest, which is all that speculation shortens: even twice "
        f"as fast it would save {(1.0 - share) / 2.0:.0%}",
        (
            "look at the prompts first: prefix caching, shorter prompts, chunked prefill",
            "check again when outputs are longer",
        ),
    )


def _lookups(evidence: Evidence) -> Verdict:
    best, crossover = evidence.best_acceptance, evidence.crossover
    if best is None:
        return Verdict(
            "unknown",
            "unknown: what was written cannot be told apart into tokens",
            "what lookups would bring is counted in tokens, and the server does not tell them",
            ("give the model's folder with --tokenizer",),
        )
    drafts = (
        f"{best.proposer} would bring {best.tokens_per_step:.2f} tokens per step at k {best.k}, "
        f"{best.accepted_share:.0%} of its drafts accepted"
    )
    if crossover is None:
        return Verdict(
            "unknown",
            f"unknown: {drafts}, but how long a step takes is not known",
            "a speedup needs the time of a step by its tokens",
            (
                "give a cost file with --cost, or --device and --target for an estimate",
                "or measure the service itself with --url",
            ),
        )
    queue = evidence.shares_high.queue if evidence.shares_high is not None else 0.0
    if crossover.off_from == 1:
        if queue >= MOST_QUEUE:
            return _queue(evidence, queue, drafts)
        gain = f"{evidence.at_one.speedup:.2f}x" if evidence.at_one is not None else "nothing"
        return Verdict(
            "no",
            f"no: lookups find too little to copy, the best brings {gain} at 1 running request",
            f"{drafts}{_at_best(evidence)}",
            (
                "a trained draft (EAGLE, MTP, a small model of the same family) does not depend "
                "on repetition: record it with `autospec record --draft` and replay",
                *_workload_steps(evidence),
            ),
        )
    at_one = evidence.at_one
    below = f"at 1 running request it would be {at_one.speedup:.2f}x" if at_one is not None else ""
    off_from = crossover.off_from
    if off_from is None and round(evidence.running_low) > crossover.known_to:
        return Verdict(
            "unknown",
            f"unknown: drafts pay up to {_requests(crossover.known_to)}, but {_here(evidence)} run "
            "here, and how long larger steps take is not known",
            drafts,
            ("measure larger batches with --ladder, or give a cost file with --cost",),
        )
    if off_from is not None and evidence.running_low >= off_from:
        here = evidence.at_low
        left = "" if here is None else f" ({here.cautious:.2f}x)"
        return Verdict(
            "off-above",
            f"off above {_requests(off_from - 1)}: {_here(evidence)} run here, where drafts bring "
            f"too little{left}",
            (f"{drafts}; {below}" if below else drafts) + _at_best(evidence),
            (
                *_queue_steps(queue),
                "if the load falls at times: an adaptive policy is off above this and on below "
                "(autospec's default is)",
                *_workload_steps(evidence),
            ),
        )
    return _candidate(evidence, crossover, drafts, queue)


def _candidate(evidence: Evidence, crossover: Crossover, drafts: str, queue: float) -> Verdict:
    low, high = evidence.at_low, evidence.at_high
    chosen = low or evidence.at_one
    assert chosen is not None
    off_from = crossover.off_from
    if off_from is not None:
        where = f"below {_requests(off_from)}"
    else:
        where = f"up to at least {_requests(crossover.known_to)}"
    seen = [each for each in (low, high) if each is not None and each.pays] or [chosen]
    least, most = min(each.low for each in seen), max(each.high for each in seen)
    expected = f"{least:.1f}-{most:.1f}x" if f"{least:.1f}" != f"{most:.1f}" else f"{most:.1f}x"
    shares = evidence.shares_low
    whole = ""
    if shares is not None:
        decode = 1.0 - shares.prefill_without_queue
        saved = 1.0 / (1.0 - decode + decode / chosen.speedup)
        whole = f"; from sending to the last token that is {saved:.2f}x without a queue"
    return Verdict(
        "candidate",
        f"candidate: {chosen.proposer}, k up to {evidence.largest_k} {where}, expected {expected}",
        f"{drafts}; with {_here(evidence)} running as in this check decoding would be "
        f"{chosen.speedup:.2f}x as fast{whole}{_at_best(evidence)}",
        (
            f"try it: k {chosen.k} for {chosen.proposer}, or an adaptive policy that finds k and "
            "the load at which to stop by itself",
            *_workload_steps(evidence),
            *_queue_steps(queue),
        ),
    )


def _at_best(evidence: Evidence) -> str:
    """What the cheaper price of a verified token would change."""
    dear, cheap = evidence.crossover, evidence.best_crossover
    if dear is None or cheap is None or cheap.off_from == dear.off_from:
        return ""
    up_to = (
        f"at least {_requests(cheap.known_to)}"
        if cheap.off_from is None
        else _requests(cheap.off_from - 1)
    )
    return f"; at the cheaper of the two prices of a verified token it would pay up to {up_to}"


def _queue(evidence: Evidence, queue: float, drafts: str) -> Verdict:
    return Verdict(
        "not-yet-queue",
        f"not yet: {queue:.0%} of the time is spent waiting for a place",
        f"{evidence.running_high:.0f} requests run at once and more wait; {drafts}",
        _queue_steps(queue),
    )


def _queue_steps(queue: float) -> tuple[str, ...]:
    if queue < MOST_QUEUE:
        return ()
    return (
        f"{queue:.0%} of the time at the highest load is queue: more replicas or places to run, or "
        "a lower rate, come first",
    )


def _workload_steps(evidence: Evidence) -> tuple[str, ...]:
    if evidence.best_workload is None:
        return ()
    name, best = evidence.best_workload
    return (
        f"of the workloads {name} gains most: {best.speedup:.2f}x with {best.proposer}:{best.k} at "
        f"{_requests(best.running)}",
    )


def _requests(count: int) -> str:
    return f"{count} running request{'' if count == 1 else 's'}"


def _here(evidence: Evidence) -> str:
    """The running requests of the check, from the lowest load to the highest."""
    low, high = round(evidence.running_low), round(evidence.running_high)
    return f"{low} to {high}" if high > low else f"{low}"
