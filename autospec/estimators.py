"""What a controller has learned, and its form in a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autospec.acceptance import hazard_table
from autospec.acceptance.hazard_table import HazardTable, Shrinkage
from autospec.acceptance.shared_heads import shared_heads
from autospec.compiled import by_reference
from autospec.config import LearningSettings
from autospec.cost import step_cost
from autospec.cost.step_cost import StepCost
from autospec.profile.learned import Identity, Profile, WorkloadProfile
from autospec.records import EngineInfo, ProposerInfo
from autospec.step.counts import TokenCounts
from autospec.step.record import Standing, Watch
from autospec.step.rows import RequestArrays


class Estimators:
    """Acceptance before and after drafting, and step cost, of one engine.

    ``ahead`` judges lookup offers and models that have not drafted; ``drafted`` knows the
    confidence of a model's drafts. Rows of workloads in them are one more than their index.
    """

    def __init__(
        self,
        proposers: Sequence[ProposerInfo],
        engine: EngineInfo,
        learning: LearningSettings,
        num_workloads: int,
        num_slots: int,
    ) -> None:
        self.identity = Identity.of(engine, tuple(proposers))
        self.lookup = np.array([info.kind == "lookup" for info in proposers], dtype=np.bool_)
        shrinkage = Shrinkage(
            cell_limit=learning.half_life_tokens / math.log(2.0),
            drift_threshold=Shrinkage.drift_threshold if learning.drift else math.inf,
        )
        rows = num_workloads + 1
        every = np.ones_like(self.lookup)
        heads = shared_heads(proposers)
        self.ahead = HazardTable(self.lookup, self.lookup, rows, num_slots, shrinkage, heads)
        self.drafted = HazardTable(self.lookup, every, rows, num_slots, shrinkage, heads)
        self.cost = StepCost(proposers, engine, follows_jumps=learning.drift)
        self._names = [info.name for info in proposers]
        self._requests = np.zeros(num_workloads)

    def start(self, slot: int, workload: int, num_slots: int) -> None:
        """A request of a workload begins in a slot."""
        for table in (self.ahead, self.drafted):
            if num_slots > len(table.arrays.request_offset):
                table.grow(num_slots)
            table.start(slot)
        self._requests[workload] += 1.0

    def standing(self, requests: RequestArrays, counts: TokenCounts, watch: Watch) -> Standing:
        """All of it, the running requests, what is counted and what watches, for kernels; ``start``
        may replace arrays."""
        return by_reference(
            Standing(
                by_reference(requests),
                by_reference(self.ahead.arrays),
                by_reference(self.drafted.arrays),
                self.cost.reference,
                by_reference(counts),
                by_reference(watch),
            )
        )

    def load(self, profile: Profile, labels: Sequence[str]) -> None:
        """Start from a profile; ``labels`` are the controller's workloads in order."""
        for w, label in enumerate(labels):
            saved = profile.workloads.get(label)
            for p, name in enumerate(self._names if saved is not None else ()):
                counts = saved.proposers.get(name) if saved is not None else None
                if counts is not None:
                    self.ahead.load(w + 1, p, counts["successes"], counts["trials"])
                    self.drafted.load(w + 1, p, counts["draft_successes"], counts["draft_trials"])
        if "step" in profile.cost:
            self.cost.load(profile.cost["step"])

    def take_fresh(self, labels: Sequence[str], provenance: str, now: float) -> Profile:
        """What was learned since the last call, as a profile to be added."""
        workloads = {}
        for w, label in enumerate(labels):
            proposers = {}
            for p, name in enumerate(self._names):
                ahead = self.ahead.take_fresh(w + 1, p)
                drafted = self.drafted.take_fresh(w + 1, p)
                if ahead["trials"].any() or drafted["trials"].any():
                    proposers[name] = {
                        "successes": ahead["successes"],
                        "trials": ahead["trials"],
                        "draft_successes": drafted["successes"],
                        "draft_trials": drafted["trials"],
                    }
            requests = float(self._requests[w])
            self._requests[w] = 0.0
            if proposers or requests:
                workloads[label] = WorkloadProfile(requests, proposers)
        outdates_cost = self.cost.has_jumped
        return Profile(
            self.identity,
            hazard_table.LAYOUT,
            step_cost.LAYOUT,
            workloads,
            {"step": self.cost.take_fresh()},
            (provenance,),
            now,
            outdates_cost=outdates_cost,
        )

    def return_fresh(self, fresh: Profile, labels: Sequence[str]) -> None:
        """Take back what could not be saved."""
        for w, label in enumerate(labels):
            learned = fresh.workloads.get(label)
            if learned is None:
                continue
            self._requests[w] += learned.requests
            for name, counts in learned.proposers.items():
                p = self._names.index(name)
                self.ahead.return_fresh(w + 1, p, counts["successes"], counts["trials"])
                self.drafted.return_fresh(
                    w + 1, p, counts["draft_successes"], counts["draft_trials"]
                )
        self.cost.return_fresh(fresh.cost["step"], fresh.outdates_cost)
