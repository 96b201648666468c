"""What a plan promises of its drafts, by proposer [4, p], until its step is over.

Steps may overlap: the next one is planned before this one is known, so each keeps its own.
"""

from __future__ import annotations

ADVANTAGE, ALONE, APPENDED, PRICE = range(4)
"""Tokens that would be lost without the proposer; those it would be worth without the others; gains
of what is appended behind its head; the price of one more token to verify, in tokens."""

NUM_PROMISES = 4
