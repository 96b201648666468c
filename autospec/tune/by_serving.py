"""The order of a tuning run whose requests are really served: measure, search, judge, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from rich.console import Console

from autospec.profile.learned import Profile, Statistics, merge
from autospec.tune.budget import Budget
from autospec.tune.meter import Meter
from autospec.tune.on_traces import finish
from autospec.tune.state import State, save_state, state_path, trace_path
from autospec.tune.tuner import (
    Data,
    Final,
    Setting,
    TuneOptions,
    Tuner,
    chosen_setting,
    first_points,
)


class ServingFinal(Final, Protocol):
    """A final that learns: ``learned`` is what each arm's serving taught, by its name."""

    @property
    def learned(self) -> Mapping[str, Profile]: ...


def tune_by_serving(
    options: TuneOptions,
    state: State,
    budget: Budget,
    older: Profile | None,
    console: Console,
    measure: Callable[[Meter], tuple[Data, Statistics]],
    final_of: Callable[[Data, Profile, Mapping[str, Setting]], ServingFinal],
) -> int:
    """Write the profile; returns the exit code, 1 after an interrupt.

    ``measure`` records the requests and times steps, or knows what an earlier run had of them;
    ``final_of`` the recorded requests, a profile to start from and the finalists judges these.
    """
    with Meter(console, budget) as meter:
        try:
            data, step = measure(meter)
            tuner = Tuner(options, data, state, budget, meter)
            tuner.save()
            meter.show("learning from the requests")
            base = replace(tuner.learn_first(), cost={"step": step})
            tuner.warm = base
            tuner.search(first_points(tuner.space, older))
            arms = tuner.finalists()
            final = final_of(data, base, arms)
            verdict = tuner.run_final(final)
            meter.show("serving with what was chosen")
            chosen = chosen_setting(verdict, arms)
            learned = tuner.serve_all(chosen.proposers, chosen.caps, options.loads)
        except KeyboardInterrupt:
            state.spent = budget.spent
            save_state(state_path(options.out), state)
            console.print("interrupted: the same command goes on from here", markup=False)
            return 1
    profile = replace(learned, cost={"step": step})
    served = final.learned.get(verdict.arm)
    if served is not None:
        profile = merge(profile, served)
    finish(options, tuner, data, chosen, verdict, profile, console)
    trace_path(options.out).unlink(missing_ok=True)
    return 0
