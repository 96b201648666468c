"""``autospec tune --engine replay``: recorded requests, a cost file, no engine."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from autospec.config import Settings
from autospec.errors import InputError
from autospec.json_file import write_json
from autospec.profile.file import save_profile
from autospec.profile.learned import Profile
from autospec.records import EngineInfo
from autospec.replay.cost_file import read_cost_file
from autospec.replay.recorded import check_recorded
from autospec.replay.trace import read_traces
from autospec.report import write_report
from autospec.tune.final import Verdict
from autospec.tune.meter import Meter
from autospec.tune.outcome import document, make_tuning, tell, with_figures
from autospec.tune.rates import measure_rates
from autospec.tune.state import state_path
from autospec.tune.traced import Bed, proposers_of
from autospec.tune.tuner import (
    Data,
    Setting,
    TracedFinal,
    TuneOptions,
    Tuner,
    begin,
    chosen_setting,
    digest_of,
    first_points,
    split,
)


def traced_data(options: TuneOptions, policy: Settings) -> Data:
    """What ``--engine replay`` tunes on. Raises InputError."""
    if not options.traces or options.cost is None:
        raise InputError("--engine replay needs --traces (one or more) and --cost")
    requests = read_traces(options.traces)
    cost = read_cost_file(options.cost)
    check_recorded(options.cost, cost, requests)
    info = EngineInfo("trace", "replay", "1", "simulated", "none", cost.shape, cost.captured_sizes)
    found = proposers_of(requests, cost)
    if not {"ngram", "suffix"} <= set(found):
        raise InputError(f"{options.cost}: proposers must name ngram and suffix, which are tuned")
    tuning, held_out = split(requests, options.seed)
    names = ", ".join(path.name for path in options.traces)
    return Data(tuning, held_out, Bed(info, policy, cost), found, names, digest_of(options.traces))


def tune_on_traces(
    options: TuneOptions, data: Data, older: Profile | None, console: Console
) -> int:
    """Search and judge on the traces; write the profile; returns the exit code."""
    state, budget = begin(options, data.digest)
    with Meter(console, budget) as meter:
        tuner = Tuner(options, data, state, budget, meter)
        try:
            meter.show("learning from the requests")
            warm = tuner.learn_first()
            tuner.search(first_points(tuner.space, older))
            arms = tuner.finalists()
            final = TracedFinal(data, arms, options.loads, warm, tuner.space.defaults)
            verdict = tuner.run_final(final)
            meter.show("serving with what was chosen")
            chosen = chosen_setting(verdict, arms)
            profile = tuner.serve_all(chosen.proposers, chosen.caps, options.loads)
        except KeyboardInterrupt:
            tuner.save()
            console.print("interrupted: the same command goes on from here", markup=False)
            return 1
    finish(options, tuner, data, chosen, verdict, profile, console)
    return 0


def finish(
    options: TuneOptions,
    tuner: Tuner,
    data: Data,
    chosen: Setting,
    verdict: Verdict,
    profile: Profile,
    console: Console,
) -> None:
    """Add what was found to the learned profile, save it and the figures, and drop the state."""
    rates, _ = measure_rates((*data.tuning, *data.held_out), chosen.proposers, data.bed.confidence)
    tuning = make_tuning(options, data, chosen, verdict, rates, data.bed.info.device)
    profile = with_figures(
        replace(profile, tuned=tuning), options.loads, tuner.state.rounds, verdict.arm
    )
    save_profile(options.out, profile)
    figures = document(options, tuner.state, tuner.space, verdict, profile)
    if options.json_path is not None:
        write_json(options.json_path, figures)
    if options.report_path is not None:
        write_report([figures, options.out], options.report_path)
    state_path(options.out).unlink(missing_ok=True)
    tell(console, options, profile, verdict)
