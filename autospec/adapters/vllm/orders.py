"""What the scheduler tells the workers, as attributes of vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

ORDER = "autospec_order"
"""Attribute of SchedulerOutput that holds a DraftOrder; without it the worker is vLLM's alone."""

REPORT = "autospec_report"
"""Attribute of ModelRunnerOutput that holds a DraftReport."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """What the configured drafter does just before the target forward of this step.

    ``draft`` is how many tokens each request gets; ``catch_up`` names requests whose draft cache is
    brought up to date without drafting; ``forget`` those whose skipped tokens need not be kept.
    """

    draft: dict[str, int] = field(default_factory=dict)
    catch_up: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What the drafter did. ``seconds`` is None where the host cannot tell (on a GPU).

    ``supports`` is False for a drafter that cannot wait for orders.
    """

    seconds: float | None
    faults: int
    supports: bool = True
