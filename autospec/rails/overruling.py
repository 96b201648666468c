"""What overrules an adaptive policy: the guard, and probes of what is not in use."""

from __future__ import annotations

from typing import Any

from autospec.config import Settings
from autospec.cost.step_cost import StepCost
from autospec.octave import octave_of
from autospec.policy.base import Decision, Policy, View, plain
from autospec.rails.guard import Guard
from autospec.rails.probe import ProbeClocks
from autospec.rails.probing import Probing
from autospec.rails.speedup import Speedup
from autospec.step.record import Watch


class Rails:
    """Guard and probes, None where the settings or the policy want none, and the speedup measured
    by the way. Kernels keep all of it up to date, in ``watch``."""

    def __init__(self, settings: Settings, policy: Policy[Any], cost: StepCost) -> None:
        probe, guard = settings.probe, settings.guard
        clocks = ProbeClocks(
            cost.models, probe.first_steps, probe.backoff, probe.max_interval_steps,
            lookup_k=max((p.max_k for p in policy.proposers if p.kind == "lookup"), default=0),
        )  # fmt: skip
        watcher = Guard(guard.margin, guard.window_steps, guard.hold_steps)
        self.probes = Probing(policy, cost, clocks) if policy.adaptive and probe.enabled else None
        self.guard = watcher if policy.adaptive and guard.enabled else None
        self.speedup = Speedup()
        self.watch = Watch(clocks.reference, watcher.reference, self.speedup.sums)

    @property
    def ask(self) -> bool:
        """Whether the next step may try what lookups offer, wanted by the policy or not."""
        return self.probes is not None and self.probes.clocks.ask

    def overrule(self, view: View) -> Decision | None:
        """The decision of a step that is not the policy's to decide."""
        if self.guard is not None and self.guard.is_holding(octave_of(view.requests)):
            return plain(view.requests, "guard")
        if self.probes is not None and view.cost.is_known and view.requests > 0:
            return self.probes.decide(view)
        return None
