from __future__ import annotations

import json

import numpy as np
import pytest

from autospec.octave import octave_of
from autospec.policy.kept_share import KeptShare, note_kept
from autospec.records import Float64Array, Int16Array

LOOKUP, MODEL = 0, 1


def int16(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    return np.array(numbers, dtype=np.int16)


def watch() -> KeptShare:
    return KeptShare(np.array([False, True]))


def at(shares: KeptShare, requests: int) -> Float64Array:
    found: Float64Array = shares.arrays.share[octave_of(requests)]
    return found


def note(shares: KeptShare, proposer: Int16Array, drafted: Int16Array, kept: Int16Array) -> None:
    note_kept(shares.arrays, octave_of(len(proposer)), proposer, drafted, kept)


def test_all_is_kept_until_something_was_seen() -> None:
    assert at(watch(), 1).tolist() == [1.0, 1.0]


def test_the_share_is_kept_over_drafted() -> None:
    shares = watch()
    note(shares, int16(MODEL, MODEL, -1), int16(4, 4, 0), int16(4, 0, 0))
    # 16 tokens were assumed kept of 16; each row fades them by 4 / 512 before it is added.
    keep = 1.0 - 4.0 / 512.0
    kept = (16.0 * keep + 4.0) * keep
    drafted = (16.0 * keep + 4.0) * keep + 4.0
    assert at(shares, 3)[MODEL] == pytest.approx(kept / drafted)


def test_it_settles_where_it_should() -> None:
    shares = watch()
    for step in range(600):
        note(shares, int16(MODEL), int16(4), int16(4 if step % 4 == 0 else 0))
    assert at(shares, 1)[MODEL] == pytest.approx(0.25, abs=0.02)


def test_lookups_and_other_loads_are_left_alone() -> None:
    shares = watch()
    for _ in range(50):
        note(shares, int16(LOOKUP, MODEL), int16(8, 4), int16(0, 0))
    assert at(shares, 2)[LOOKUP] == 1.0
    assert at(shares, 2)[MODEL] < 0.2
    assert at(shares, 64)[MODEL] == 1.0


def test_state_comes_back() -> None:
    first, second = watch(), watch()
    note(first, int16(MODEL), int16(4), int16(1))
    second.restore(json.loads(json.dumps(first.state())))
    for shares in (first, second):
        note(shares, int16(MODEL), int16(2), int16(1))
    assert at(first, 1).tolist() == at(second, 1).tolist()
