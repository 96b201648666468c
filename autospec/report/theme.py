"""Roles of color. A chart is drawn with stand-ins, which become CSS variables in the page.

So one drawing serves light, dark and print, and every proposer has one color on the whole page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autospec.bench.phases import ADAPTIVE, OFF, PLAIN

INK, MUTED, GRID, SURFACE, ACCENT, QUIET, WARN, BAD = (
    "ink", "muted", "grid", "surface", "accent", "quiet", "warn", "bad",
)  # fmt: skip
SERIES = ("s1", "s2", "s3", "s4", "s5", "s6")
SCALE = tuple(f"scale{step}" for step in range(6))
"""From the least to the greatest of an ordered quantity."""
HEAT = tuple(f"heat{step}" for step in range(8))
"""Speedups: HEAT_EDGES lie between neighbors; the first two are losses."""
HEAT_EDGES = (0.9, 0.98, 1.02, 1.2, 1.6, 2.2, 3.0)

ROLES = (INK, MUTED, GRID, SURFACE, ACCENT, QUIET, WARN, BAD, *SERIES, *SCALE, *HEAT)
_STAND_INS = {role: f"#fe{number:02x}ab" for number, role in enumerate(ROLES)}
VARIABLES = {color: f"var(--{role})" for role, color in _STAND_INS.items()}
"""Which CSS variable stands for which color of a drawing."""

_FAMILIES = {"ngram": "s1", "suffix": "s2", "eagle": "s3", "draft": "s4"}


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a chart's legend; ``shape`` is line, band, dot, ring or square."""

    label: str
    role: str
    shape: str = "square"


def paint(role: str) -> str:
    """The color that a chart is drawn with for a role."""
    return _STAND_INS[role]


def proposer_roles(names: Iterable[str]) -> dict[str, str]:
    """One role for each proposer, arm or policy; known families always have theirs."""
    roles: dict[str, str] = {}
    others = []
    for name in dict.fromkeys(names):
        family = next((role for stem, role in _FAMILIES.items() if name.startswith(stem)), None)
        if name in (OFF, PLAIN, "none"):
            roles[name] = QUIET
        elif name == ADAPTIVE:
            roles[name] = ACCENT
        elif family is not None and family not in roles.values():
            roles[name] = family
        else:
            others.append(name)
    free = [role for role in (*SERIES[4:], *SERIES[:4]) if role not in roles.values()] or [MUTED]
    for number, name in enumerate(others):
        roles[name] = free[number % len(free)]
    return roles


def heat_role(speedup: float) -> str:
    """The color of a speedup over plain decoding."""
    return HEAT[sum(speedup >= edge for edge in HEAT_EDGES)]
