"""``autospec check``: what was asked for, in order, and what is done with what was found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autospec.check.analysis import Findings, find, first_of_each, sensitivity
from autospec.check.client import Answer, Endpoint, checked_url
from autospec.check.devices import device_of
from autospec.check.folders import FolderFacts, folder_facts, model_size
from autospec.check.gpu import local_gpus
from autospec.check.live import (
    READING_WORDS,
    LoadPlan,
    Measured,
    MeasuredLevel,
    Sampling,
    measure,
)
from autospec.check.logs import log_rate, read_log
from autospec.check.result import CheckResult, Sensitivity, result_json
from autospec.check.samples import (
    Level,
    Sample,
    prefill_seconds_per_token,
    summarize,
)
from autospec.check.show import print_result, say
from autospec.check.step_time import (
    FileTime,
    RooflineTime,
    StepTime,
    measured_time,
    profile_time,
    reading_time,
)
from autospec.check.tokens import load_tokenizer, output_ids, prompt_ids
from autospec.errors import InputError
from autospec.json_file import check_writable, write_json
from autospec.profile.file import load_profile
from autospec.prompts import Prompt, read_prompts
from autospec.replay.cost_file import read_cost_file
from autospec.report import check_report, write_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU = "cpu"
MOST_TRIED = 2000
"""Requests of a log that lookups are tried on: the last ones, which end next to each other."""

_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What ``autospec check`` was asked for: a ``url``, a ``log``, or folders alone."""

    url: str | None = None
    prompts: Path | None = None
    log: Path | None = None
    target: Path | None = None
    draft: Path | None = None
    tokenizer: Path | None = None
    rates: str = "0.5,1,2,4"
    duration: float = 60.0
    most_requests: int = 200
    most_in_flight: int = 256
    max_tokens: int = 256
    temperature: str | None = None
    top_p: str | None = None
    ladder: str = "1,2,4,8,16,32,64"
    endpoint: Endpoint = "chat"
    model: str | None = None
    metrics_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 120.0
    cost: Path | None = None
    profile: Path | None = None
    device: str | None = None
    batch: int = 16
    context: int = 4096
    json_path: Path | None = None
    report_path: Path | None = None
    seed: int = 0


def run_check(options: CheckOptions, console: Console) -> int:
    """Measure or read, decide, show, write; returns the exit code.

    Raises InputError, ModelError and NoService for what cannot be checked.
    """
    _check_sources(options)
    check_writable(options.json_path)
    if options.report_path is not None:
        check_report(options.report_path)
    time = _given_time(options)
    folders = None if options.target is None else _folders(options, options.target)
    if options.url is not None:
        result = _check_live(options, options.url, time, console)
    elif options.log is not None:
        result = _check_log(options, options.log, time)
    else:
        result = CheckResult("folders", _settings(options))
    result = replace(result, folders=folders)
    print_result(console, result)
    if options.json_path is not None:
        write_json(options.json_path, result_json(result))
        say(console, f"figures saved in {options.json_path}")
    if options.report_path is not None:
        write_report([result_json(result)], options.report_path)
        say(console, f"report saved in {options.report_path}")
    return 0


def numbers(text: str, option: str, *, least: float, most: float) -> tuple[float, ...]:
    """A comma separated list within bounds. Raises InputError."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = float("nan")
        if not (isfinite(value) and least <= value <= most):
            raise InputError(f"{option}: {part!r} is not a number from {least:g} to {most:g}")
        found.append(value)
    return tuple(found)


def _check_sources(options: CheckOptions) -> None:
    if options.url is not None and options.log is not None:
        raise InputError("give --url or --log, not both")
    if options.url is None and options.log is None and options.target is None:
        raise InputError(
            "nothing to check: give --url with --prompts, --log, or --target (and --draft)"
        )
    if options.url is not None:
        checked_url(options.url)
        if options.prompts is None:
            raise InputError("--url needs --prompts: the requests to send, a JSON Lines file")
    if options.draft is not None and options.target is None:
        raise InputError("--draft needs --target: the model it would draft for")
    given = [
        name
        for name, value in (
            ("--cost", options.cost), ("--profile", options.profile), ("--device", options.device),
        )
        if value is not None
    ]  # fmt: skip
    if options.cost is not None and options.profile is not None:
        raise InputError(f"give one of {' and '.join(given)}: both say how long a step takes")


def _given_time(options: CheckOptions) -> StepTime | None:
    """From a file or a data sheet; None where it is to be measured."""
    if options.cost is not None:
        return FileTime(read_cost_file(options.cost), options.cost.name)
    if options.profile is not None:
        return profile_time(load_profile(options.profile), options.profile.name)
    if options.device is None or options.device == CPU:
        return None
    device = device_of(options.device)
    if options.target is None or options.log is None:
        return None  # of folders alone only the memory is asked, a live service is measured
    size = model_size(options.target)
    if size.is_mixture:
        raise InputError(
            f"{options.target}: a mixture of experts, of which a step reads more the more tokens "
            "it has; a data sheet cannot say how long that takes: give a cost file with --cost"
        )
    return RooflineTime(device, size.weight_bytes, size.parameters, size.cache_bytes_per_token)


def _folders(options: CheckOptions, target: Path) -> FolderFacts:
    name, available = _memory(options.device)
    return folder_facts(
        target,
        options.draft,
        batch=options.batch,
        context=options.context,
        device=name,
        available=available,
    )


def _memory(device: str | None) -> tuple[str | None, float | None]:
    """A device's name and bytes: of the data sheet, of the GPUs here, or of this machine."""
    if device == CPU:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "this machine's memory", float(pages)
    if device is not None:
        sheet = device_of(device)
        return sheet.name, sheet.memory_bytes
    gpus = local_gpus()
    if not gpus:
        return None, None
    return f"{len(gpus)} x {gpus[0].name}", sum(gpu.memory_bytes for gpu in gpus)


# Logs -------------------------------------------------------------------------------------------


def _check_log(options: CheckOptions, path: Path, time: StepTime | None) -> CheckResult:
    samples = read_log(path, _tokenizer(options))
    level = summarize(samples, log_rate(samples), prefill_seconds_per_token(samples))
    notes = []
    tried = samples[-MOST_TRIED:]
    if len(tried) < len(samples):
        notes.append(f"lookups were tried on the last {MOST_TRIED} of {len(samples)} requests")
    found = find(tried, [level], samples, time)
    if level.shares is None:
        notes.append("the log has no first_token times: where the time goes is not known")
    return _result(options, "log", [level], found, _by_temperature(samples), notes)


def _by_temperature(samples: Sequence[Sample]) -> tuple[Sensitivity, ...]:
    """Where a log holds several samplings."""
    groups: dict[tuple[float, float], list[Sample]] = {}
    for each in samples:
        groups.setdefault((each.temperature, each.top_p), []).append(each)
    if len(groups) < 2:
        return ()
    rows = [sensitivity(t, p, group) for (t, p), group in sorted(groups.items())]
    return tuple(row for row in rows if row is not None)


# Live -------------------------------------------------------------------------------------------


def _check_live(
    options: CheckOptions, url: str, time: StepTime | None, console: Console
) -> CheckResult:
    assert options.prompts is not None
    tokenizer = _tokenizer(options)
    prompts = read_prompts(options.prompts)
    plan = _plan(options, url, prompts)
    if time is not None:
        plan = replace(plan, ladder=(), reading=())  # it is given
    measured = asyncio.run(measure(plan, lambda line: say(console, line)))
    by_id = {prompt.id: prompt for prompt in prompts}
    groups = [_samples(level.answers, by_id, tokenizer) for level in measured.levels]
    first = [
        (level, group)
        for level, group in zip(measured.levels, groups, strict=True)
        if level.sampling == plan.samplings[0]
    ]
    base = [each for _, group in first for each in group]
    prefill = prefill_seconds_per_token(first[0][1])
    levels = [_level(level, group, prefill) for level, group in first]
    if time is None:
        ladder = [answer.sample for answer in measured.ladder]
        lengths = [[answer.sample for answer in each] for each in measured.reading]
        time = measured_time(ladder or base, prefill, reading_time(lengths))
    found = find(first_of_each(base), levels, first[0][1], time)
    rows: list[Sensitivity] = []
    if len(plan.samplings) > 1:
        shown = [(plan.samplings[0], base)] + [
            (level.sampling, group)
            for level, group in zip(measured.levels, groups, strict=True)
            if level.sampling != plan.samplings[0]
        ]
        for sampling, group in shown:
            row = sensitivity(
                sampling.temperature or 0.0,
                1.0 if sampling.top_p is None else sampling.top_p,
                group,
            )
            if row is not None:
                rows.append(row)
    return _result(options, "live", levels, found, rows, _notes(measured, levels))


def _plan(options: CheckOptions, url: str, prompts: tuple[Prompt, ...]) -> LoadPlan:
    temperatures: tuple[float | None, ...] = (None,)
    if options.temperature is not None:
        temperatures = numbers(options.temperature, "--temperature", least=0.0, most=2.0)
    top_ps: tuple[float | None, ...] = (None,)
    if options.top_p is not None:
        top_ps = numbers(options.top_p, "--top-p", least=1e-6, most=1.0)
    if not 0.0 < options.duration <= _LONGEST_SECONDS:
        raise InputError(
            f"--duration: {options.duration:g} s is not from 0 to {_LONGEST_SECONDS:g}"
        )
    rates = numbers(options.rates, "--rates", least=1e-3, most=1e4)
    ladder = () if options.ladder in {"", "none"} else numbers(
        options.ladder, "--ladder", least=1, most=1024
    )  # fmt: skip
    return LoadPlan(
        url=checked_url(url),
        prompts=prompts,
        rates=tuple(sorted(rates)),
        samplings=tuple(Sampling(t, p) for t in temperatures for p in top_ps),
        ladder=tuple(sorted({round(count) for count in ladder})),
        reading=READING_WORDS if ladder else (),
        duration_seconds=options.duration,
        most_requests=options.most_requests,
        most_in_flight=options.most_in_flight,
        max_tokens=options.max_tokens,
        model=options.model,
        api_key=os.environ.get(options.api_key_env),
        endpoint=options.endpoint,
        metrics_url=options.metrics_url,
        timeout_seconds=options.timeout,
        seed=options.seed,
    )


def _samples(
    answers: Sequence[Answer],
    prompts: dict[str, Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Sample]:
    """With token ids where the server told them or a tokenizer makes them."""
    found = []
    for answer in answers:
        sample = answer.sample
        if tokenizer is not None and sample.error is None:
            if sample.prompt_token_ids is None:
                prompt = prompts[sample.id]
                ids = prompt_ids(tokenizer, prompt.messages, f"prompt {prompt.id!r}")
                sample = replace(
                    sample, prompt_token_ids=ids, prompt_tokens=sample.prompt_tokens or len(ids)
                )
            if sample.output_token_ids is None:
                sample = replace(sample, output_token_ids=output_ids(tokenizer, answer.text))
        found.append(sample)
    return found


def _level(measured: MeasuredLevel, samples: Sequence[Sample], prefill: float | None) -> Level:
    return summarize(
        samples,
        measured.rate,
        prefill,
        server=measured.server,
        gpu_use=measured.gpu_use,
        truncated=measured.truncated,
    )


def _notes(measured: Measured, levels: Sequence[Level]) -> list[str]:
    notes = []
    if measured.metrics_url is None:
        notes.append("the server shows no metrics: its own load and acceptance are not known")
    for level in levels:
        if level.failed:
            notes.append(f"{level.failed} requests at {level.rate:g}/s failed and are left out")
        if level.truncated:
            notes.append(f"{level.rate:g} requests/s: stopped early at the bound on requests")
    return notes


# Both -------------------------------------------------------------------------------------------


def _tokenizer(options: CheckOptions) -> PreTrainedTokenizerBase | None:
    folder = options.tokenizer or options.target
    return None if folder is None else load_tokenizer(folder)


def _result(
    options: CheckOptions,
    source: Any,
    levels: Sequence[Level],
    found: Findings,
    rows: Sequence[Sensitivity],
    notes: Sequence[str],
) -> CheckResult:
    return CheckResult(
        source,
        _settings(options),
        verdict=found.verdict,
        levels=tuple(levels),
        workloads=found.workloads,
        speedups=found.speedups,
        crossover=found.crossover,
        step_time=found.step_time,
        sensitivity=tuple(rows),
        notes=tuple(notes),
    )


def _settings(options: CheckOptions) -> dict[str, Any]:
    """What was asked, without paths of this machine."""
    return {
        "url": options.url,
        "prompts": None if options.prompts is None else options.prompts.name,
        "log": None if options.log is None else options.log.name,
        "target": None if options.target is None else options.target.resolve().name,
        "draft": None if options.draft is None else options.draft.resolve().name,
        "rates": options.rates,
        "duration_seconds": options.duration,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "ladder": options.ladder,
        "device": options.device,
        "seed": options.seed,
    }
