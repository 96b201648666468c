"""Loads that behave alike: an octave of running requests each (1, 2, 3-4, 5-8, ...)."""

from __future__ import annotations

NUM_OCTAVES = 12
"""The last octave holds every larger load."""


def octave_of(requests: int) -> int:
    """The number of the octave that holds this many running requests."""
    return min(NUM_OCTAVES - 1, max(0, requests - 1).bit_length())
