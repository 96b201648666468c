"""A check on the terminal: the load, what is written, what lookups would bring, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autospec.check.folders import FolderFacts, ModelSize
from autospec.check.lookups import Acceptance, Speedup
from autospec.check.result import CheckResult, Sensitivity, WorkloadFacts
from autospec.check.samples import Level
from autospec.replay.latency import Percentiles

_FILE_WIDTH = 140
_STYLES = {"candidate": "green", "off-above": "yellow", "unknown": "yellow"}
_SHOWN_LOADS = (1, 4, 16, 64)


def say(console: Console, text: str) -> None:
    """A line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_result(console: Console, result: CheckResult) -> None:
    """Every table that has rows, then the verdict."""
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    if result.levels:
        console.print(_load_table(result.levels))
        for level in result.levels:
            if told := _server(level):
                say(console, f"at {level.rate:.3g} requests/s the server says: {told}")
    if result.workloads:
        console.print(_workload_table(result.workloads, result.speedups))
    if result.speedups:
        console.print(_speedup_table(result.speedups))
    if result.step_time is not None:
        say(console, f"step times: {result.step_time.source}")
    if result.sensitivity:
        console.print(_sensitivity_table(result.sensitivity))
    if result.folders is not None:
        _print_folders(console, result.folders)
    for note in result.notes:
        say(console, f"note: {note}")
    verdict = result.verdict
    if verdict is None:
        return
    console.print()
    style = _STYLES.get(verdict.kind, "red")
    console.print(verdict.sentence, style=f"bold {style}", markup=False, soft_wrap=True)
    say(console, f"  because {verdict.reason}")
    for step in verdict.next_steps:
        say(console, f"  next: {step}")


def _load_table(levels: Sequence[Level]) -> Table:
    table = Table(
        "requests/s", "n", "running", "tokens in", "out", "first token s", "per token ms",
        "between ms", "end to end s", "tokens/s", "queue", "prefill", "decode",
        title="the load; times are p50 / p95 / p99",
    )  # fmt: skip
    for level in levels:
        shares = level.shares
        table.add_row(
            f"{level.rate:.3g}",
            str(level.requests),
            f"{level.running:.1f}",
            f"{level.prompt_tokens:.0f}",
            f"{level.output_tokens:.0f}",
            _percentiles(level.ttft, 1.0),
            _percentiles(level.tpot, 1000.0),
            _percentiles(level.inter_token, 1000.0),
            _percentiles(level.end_to_end, 1.0),
            f"{level.tokens_per_second:.1f}",
            *(
                ("-",) * 3
                if shares is None
                else (f"{shares.queue:.0%}", f"{shares.prefill:.0%}", f"{shares.decode:.0%}")
            ),
        )
    return table


def _server(level: Level) -> str:
    parts = []
    server = level.server
    if server is not None:
        told = (
            ("running", server.running, ".1f"), ("waiting", server.waiting, ".1f"),
            ("cache", server.cache_usage, ".0%"),
            ("accepted", server.accepted_per_draft_token, ".0%"),
            ("tokens/step", server.tokens_per_step, ".2f"),
        )  # fmt: skip
        parts = [f"{name} {value:{form}}" for name, value, form in told if value is not None]
        parts.insert(0, server.engine)
    if level.gpu_use is not None:
        parts.append(f"GPU {level.gpu_use:.0%}")
    return ", ".join(parts)


def _workload_table(workloads: Sequence[WorkloadFacts], speedups: Sequence[Speedup]) -> Table:
    loads = [load for load in _SHOWN_LOADS if any(each.running == load for each in speedups)]
    table = Table(
        "workload", "n", "tokens in", "out", "first token s", "per token ms", "repeated",
        "best lookup", "accepted", "tokens/step", *(f"at {load}" for load in loads),
        title="what lookups would bring on these outputs; speedup of decoding by running requests",
    )  # fmt: skip
    for workload in workloads:
        at = {each.running: each for each in workload.speedups}
        table.add_row(
            workload.name,
            str(workload.requests),
            f"{workload.prompt_tokens:.0f}",
            f"{workload.output_tokens:.0f}",
            "-" if workload.ttft is None else f"{workload.ttft:.3g}",
            "-" if workload.tpot is None else f"{workload.tpot * 1000:.3g}",
            f"{workload.repetitiveness:.0%}",
            *_acceptance(workload.best),
            *(_speedup(at.get(load)) for load in loads),
        )
    return table


def _speedup_table(speedups: Sequence[Speedup]) -> Table:
    table = Table(
        "running", "best lookup", "speedup", "90 % interval", "lower quartile",
        title="all requests together",
    )  # fmt: skip
    if any(each.at_best is not None for each in speedups):
        table.add_column("at the cheaper price")
    for each in speedups:
        table.add_row(
            str(each.running),
            f"{each.proposer}:{each.k}",
            f"{each.speedup:.2f}x",
            f"{each.low:.2f}-{each.high:.2f}",
            f"{each.cautious:.2f}x",
            *([] if each.at_best is None else [f"{each.at_best:.2f}x"]),
        )
    return table


def _sensitivity_table(rows: Sequence[Sensitivity]) -> Table:
    table = Table(
        "temperature", "top-p", "n", "best lookup", "accepted", "tokens/step",
        title="sensitivity to sampling",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.temperature:g}", f"{row.top_p:g}", str(row.requests), *_acceptance(row.best)
        )
    return table


def _acceptance(each: Acceptance) -> tuple[str, str, str]:
    return (
        f"{each.proposer}:{each.k}", f"{each.accepted_share:.0%}", f"{each.tokens_per_step:.2f}",
    )  # fmt: skip


def _speedup(each: Speedup | None) -> str:
    return "-" if each is None else f"{each.speedup:.2f}x"


def _percentiles(each: Percentiles | None, scale: float) -> str:
    if each is None:
        return "-"
    return " / ".join(f"{value * scale:.3g}" for value in (each.p50, each.p95, each.p99))


def _print_folders(console: Console, facts: FolderFacts) -> None:
    for role, size in (("target", facts.target), ("draft", facts.draft)):
        if size is not None:
            say(console, f"{role} {size.name}: {_size(size)}")
    if facts.draft is not None:
        ratio = facts.draft.parameters / facts.target.parameters
        say(console, f"the draft has {ratio:.1%} of the target's parameters")
    agreement = facts.agreement
    if agreement is not None:
        if agreement.is_compatible:
            say(console, f"tokens agree: all {agreement.target_tokens} of them")
        else:
            say(
                console,
                f"tokens differ: {agreement.differing} of {agreement.target_tokens} and "
                f"{agreement.draft_tokens}; this draft's tokens mean something else to the target",
            )
        for line in (*agreement.examples, *agreement.special_tokens_differ):
            say(console, f"  {line}")
        if agreement.same_chat_template is False:
            say(console, "  the chat templates differ: prompts must go through the target's")
    memory = facts.memory
    told = (
        f"memory at {memory.batch} requests of {memory.context} tokens: {_bytes(memory.needed)} "
        f"(target {_bytes(memory.target_weights)} + cache {_bytes(memory.target_cache)}"
    )
    if facts.draft is not None:
        told += f", draft {_bytes(memory.draft_weights)} + cache {_bytes(memory.draft_cache)}"
    told += "), activations on top"
    if memory.available is not None:
        word = "fits into" if memory.fits else "does not fit into"
        told += f"; {word} the {_bytes(memory.available)} of {memory.device}"
    say(console, told)


def _size(size: ModelSize) -> str:
    context = "" if size.context_tokens is None else f", context {size.context_tokens}"
    return (
        f"{size.parameters / 1e6:.0f} M parameters, {_bytes(size.weight_bytes)}, "
        f"{size.cache_bytes_per_token / 1024:.1f} KiB of cache a token, "
        f"vocabulary {size.vocab_size}{context}"
    )


def _bytes(count: float) -> str:
    gigabytes = count / 1e9
    return f"{gigabytes:.2f} GB" if gigabytes >= 1.0 else f"{count / 1e6:.0f} MB"
