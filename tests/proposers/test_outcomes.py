from __future__ import annotations

import numpy as np
import pytest

from autospec.proposers.outcomes import (
    IN_CACHE,
    IN_OUTPUT,
    IN_PROMPT,
    Outcomes,
    learn_outcome,
    pair_row,
    place_row,
    token_row,
)

PLACE = place_row(IN_PROMPT, 1)


def drafted(tokens: list[int], start: int, scores: list[float] | None = None) -> Outcomes:
    """A draft for slot 0, all copied from one place."""
    of = Outcomes.empty(1, 4)
    of.starts[0], of.counts[0] = start, len(tokens)
    of.drafts[0, : len(tokens)] = tokens
    of.places[0] = PLACE
    of.scores[0, : len(tokens)] = [0.0] * len(tokens) if scores is None else scores
    return of


def text(*tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array([tokens], np.int32)


def belief(of: Outcomes, row: int) -> list[float]:
    return [float(of.offsets[row]), float(of.precisions[row])]


def moved(of: Outcomes) -> set[int]:
    return {int(row) for row in np.flatnonzero(of.offsets)}


def test_a_newton_step_for_the_token_its_pair_and_its_place() -> None:
    of = drafted([5], 2)
    learn_outcome(of, text(1, 2, 5), 0, 3)
    # p = 1/2: 1/4 of information, a residual of 1/2, on precisions of 4 and 16
    for row, precision in ((token_row(5), 4.25), (pair_row(2, 5), 4.25), (PLACE, 16.25)):
        assert belief(of, row) == pytest.approx([0.5 / precision, precision])
    assert len(moved(of)) == 3
    assert of.starts[0] == 0


def test_what_was_learned_counts_for_the_next_token() -> None:
    of = drafted([5, 6], 2)
    learn_outcome(of, text(1, 2, 5, 9), 0, 4)
    # the place has moved by 0.030769: p = 0.507692, information 0.249941
    for row in (token_row(6), pair_row(5, 6)):
        assert belief(of, row) == pytest.approx([-0.119459, 4.249941], abs=1e-5)
    assert belief(of, PLACE) == pytest.approx([0.0, 16.499941], abs=1e-5)


def test_a_likely_token_that_was_right_says_little() -> None:
    of = drafted([5], 2, [np.log(9.0)])
    learn_outcome(of, text(1, 2, 5), 0, 3)
    assert belief(of, token_row(5)) == pytest.approx([0.1 / 4.09, 4.09])


def test_tokens_after_the_first_wrong_one_say_nothing() -> None:
    of = drafted([5, 6, 7], 2)
    learn_outcome(of, text(1, 2, 8, 6, 7), 0, 5)
    assert moved(of) == {token_row(5), pair_row(2, 5), PLACE}


def test_tokens_that_did_not_come_yet_say_nothing() -> None:
    of = drafted([5, 6, 7], 2)
    learn_outcome(of, text(1, 2, 5, 6, 7), 0, 4)
    assert token_row(6) in moved(of)
    assert token_row(7) not in moved(of)


def test_a_draft_is_compared_once_and_only_when_its_text_has_gone_on() -> None:
    of = drafted([5], 2)
    learn_outcome(of, text(1, 2, 5), 0, 2)
    assert of.starts[0] == 2
    assert moved(of) == set()
    learn_outcome(of, text(1, 2, 5), 0, 3)
    once = of.offsets.copy()
    learn_outcome(of, text(1, 2, 5), 0, 3)
    assert (of.offsets == once).all()


def test_a_rewound_text_says_nothing() -> None:
    of = drafted([5], 2)
    learn_outcome(of, text(1, 2, 5), 0, 1)
    assert moved(of) == set()
    assert of.starts[0] == 0


def test_where_a_rewound_draft_began_is_not_looked_at() -> None:
    of = drafted([5], 9)
    checks_bounds = getattr(learn_outcome, "py_func", learn_outcome)
    checks_bounds(of, text(1, 2, 5), 0, 3)
    assert of.starts[0] == 0


def test_offsets_and_precisions_are_bounded() -> None:
    of = drafted([5], 2)
    for _ in range(20_000):
        of.starts[0], of.scores[0, 0] = 2, 0.0
        learn_outcome(of, text(1, 2, 5), 0, 3)
    assert of.offsets.max() <= 6.0
    assert of.precisions.max() <= 200.0
    assert of.offsets.sum() > 6.0


def test_rows_tell_tokens_pairs_places_and_octaves_apart() -> None:
    singles = [token_row(token) for token in (1, 2)]
    pairs = [pair_row(1, 2), pair_row(2, 1), pair_row(1, 3)]
    places = [
        place_row(place, octave)
        for place in (IN_PROMPT, IN_OUTPUT, IN_CACHE)
        for octave in (0, 1, 2, 30)
    ]
    rows = [*singles, *pairs, *places]
    assert len(set(rows)) == len(rows)
    assert max(rows) < len(Outcomes.empty(1, 1).offsets)
    assert token_row(2**31 - 1) < 4096
    assert 4096 <= pair_row(2**31 - 1, 2**31 - 1) < 4096 + 16384
