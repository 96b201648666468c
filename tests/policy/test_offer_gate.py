from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from autospec.policy.offer_gate import OfferGate, note_offers
from autospec.policy.promise import ADVANTAGE, ALONE, NUM_PROMISES
from autospec.records import Float64Array, Int16Array

LOOKUPS = np.array([True, True, False])  # two lookups and a model


def promise(
    advantage: Sequence[float] | Float64Array, alone: Sequence[float] | Float64Array
) -> Float64Array:
    promised = np.zeros((NUM_PROMISES, len(advantage)))
    promised[ADVANTAGE], promised[ALONE] = advantage, alone
    return promised


def step(
    gate: OfferGate,
    expected: list[float],
    accepted: list[int],
    cost: list[float],
    *,
    proposer: int = 0,
    matched: list[int] | None = None,
) -> None:
    """One step of one request for which ``proposer`` drafted; a paused lookup offers nothing."""
    is_open = gate.arrays.is_open.copy()
    if proposer >= 0 and not is_open[proposer]:
        proposer, accepted, expected = -1, [0], [0.0, 0.0, 0.0]
    matches = np.full((3, 1), -1, dtype=np.int16)
    matches[:2, 0] = [0, 0] if matched is None else matched
    matches[:, 0] = np.where(is_open, matches[:, 0], -1)
    note(
        gate,
        np.array([proposer], dtype=np.int16),
        np.array(accepted, dtype=np.int16),
        matches,
        promise(expected, expected),
        np.where(is_open, cost, 0.0),
    )


def note(
    gate: OfferGate,
    proposer: Int16Array,
    accepted: Int16Array,
    matched: Int16Array,
    promised: Float64Array,
    cost: Float64Array,
) -> None:
    """The step is over; ``cost`` [p] is each proposer's time in tokens."""
    if note_offers(gate.arrays, proposer, accepted, matched, promised, cost, 1.0):
        gate.judge(len(proposer))


def open_share(gate: OfferGate, steps: int, **outcome: object) -> list[float]:
    """Share of steps that each proposer was open for."""
    count = np.zeros(3)
    for _ in range(steps):
        count += gate.arrays.is_open
        step(gate, **outcome)  # type: ignore[arg-type]
    return [float(share) for share in count / steps]


def test_lookups_are_open_at_first_and_models_are_none() -> None:
    assert OfferGate(LOOKUPS).arrays.is_open.tolist() == [True, True, False]


def test_a_lookup_that_pays_stays_open_and_an_idle_one_is_paused() -> None:
    gate = OfferGate(LOOKUPS)
    outcome = {"expected": [2.0, 0.0, 0.0], "accepted": [2], "cost": [0.1, 0.1, 0.0]}
    paying, idle, model = open_share(gate, 4000, **outcome)
    assert paying == 1.0
    assert idle < 0.25
    assert model == 0.0


def test_free_lookups_are_never_paused() -> None:
    gate = OfferGate(LOOKUPS)
    outcome = {"expected": [0.0, 0.0, 0.0], "accepted": [0], "cost": [0.0, 0.0, 0.0]}
    assert open_share(gate, 2000, proposer=-1, **outcome)[:2] == [1.0, 1.0]


def test_promises_alone_do_not_keep_it_open() -> None:
    gate = OfferGate(LOOKUPS)
    outcome = {"expected": [2.0, 0.0, 0.0], "accepted": [0], "cost": [0.3, 0.0, 0.0]}
    assert open_share(gate, 4000, **outcome)[0] < 0.25


def test_of_two_that_draft_alike_one_stays() -> None:
    gate = OfferGate(LOOKUPS)
    both_paused = 0
    for _ in range(3000):
        is_open = gate.arrays.is_open
        both_paused += not is_open[:2].any()
        chosen = int(np.argmax(is_open[:2]))
        both = bool(is_open[:2].all())
        expected = [0.0, 0.0, 0.0]
        expected[chosen] = 0.0 if both else 2.0  # the other would draft the same
        step(gate, expected, [2], [0.1, 0.1, 0.0], proposer=chosen, matched=[2, 2])
    assert both_paused < 100
    assert gate.arrays.is_open.any()


def test_pauses_grow_and_end() -> None:
    gate = OfferGate(LOOKUPS)
    pauses, length = [], 0
    for _ in range(4000):
        if gate.arrays.is_open[0]:
            if length:
                pauses.append(length)
            length = 0
        else:
            length += 1
        step(gate, [0.0, 5.0, 0.0], [0], [0.5, 0.0, 0.0], proposer=1)
    assert pauses[0] < pauses[1] < pauses[2]
    assert max(pauses) <= 520


def test_a_lookup_that_pays_again_comes_back() -> None:
    gate = OfferGate(LOOKUPS)
    bad = {"expected": [0.0, 0.0, 0.0], "accepted": [0], "cost": [0.5, 0.0, 0.0]}
    good = {"expected": [3.0, 0.0, 0.0], "accepted": [3], "cost": [0.5, 0.0, 0.0]}
    assert open_share(gate, 1500, **bad)[0] < 0.4
    open_share(gate, 700, **good)
    assert open_share(gate, 1000, **good)[0] == 1.0


def test_many_requests_tell_sooner() -> None:
    pauses = []
    for rows in (1, 100):
        gate = OfferGate(LOOKUPS)
        steps = 0
        while gate.arrays.is_open[0] and steps < 200:
            note(
                gate,
                np.full(rows, -1, dtype=np.int16),
                np.zeros(rows, dtype=np.int16),
                np.full((3, rows), -1, dtype=np.int16),
                promise([0.0] * 3, [0.0] * 3),
                np.array([0.5, 0.0, 0.0]),
            )
            steps += 1
        pauses.append(steps)
    assert pauses[0] == 128
    assert pauses[1] < 32


def test_state_survives_json() -> None:
    gate, again = OfferGate(LOOKUPS), OfferGate(LOOKUPS)
    outcome = {"expected": [0.0, 0.0, 0.0], "accepted": [0], "cost": [0.5, 0.2, 0.0]}
    open_share(gate, 300, **outcome)
    again.restore(json.loads(json.dumps(gate.state())))
    for _ in range(500):
        assert gate.arrays.is_open.tolist() == again.arrays.is_open.tolist()
        step(gate, [0.0, 0.0, 0.0], [0], [0.5, 0.2, 0.0])
        step(again, [0.0, 0.0, 0.0], [0], [0.5, 0.2, 0.0])


def test_of_two_that_draft_alike_the_one_that_knows_less_is_paused() -> None:
    """Both bring the same; the second one's confidence is worth more alone."""
    gate = OfferGate(LOOKUPS)
    for _ in range(400):
        note(
            gate,
            np.array([0, 1], dtype=np.int16),
            np.array([2, 2], dtype=np.int16),
            np.array([[2, 2], [2, 2], [-1, -1]], dtype=np.int16),
            promise([0.2, 0.2, 0.0], [1.0, 1.5, 0.0]),
            np.array([0.1, 0.1, 0.0]),
        )
        if not gate.arrays.is_open[:2].all():
            break
    assert gate.arrays.is_open[:2].tolist() == [False, True]


def test_the_better_of_two_takes_over_although_the_other_was_luckier_at_first() -> None:
    """While it is paused nothing is known of what it would be worth."""
    gate = OfferGate(LOOKUPS)
    last = []
    for n in range(5000):
        is_open = gate.arrays.is_open[:2]
        alone = np.array([0.11 if n < 1200 else 0.2, 0.13, 0.0])
        alone[:2] *= is_open
        advantage = np.array([0.0, 0.0, 0.0]) if is_open.all() else alone
        matched = np.where(is_open, 2, -1)
        note(
            gate,
            np.array([int(np.argmax(is_open))], dtype=np.int16),
            np.array([2], dtype=np.int16),
            np.array([[matched[0]], [matched[1]], [-1]], dtype=np.int16),
            promise(advantage, alone),
            np.array([0.1, 0.1, 0.0]) * gate.arrays.is_open,
        )
        last.append(gate.arrays.is_open[:2].tolist())
    assert last[130] == [False, True]
    assert np.mean([each[0] for each in last[3000:]]) > 0.9


def test_what_was_here_first_does_not_stay_for_what_it_brought_alone() -> None:
    """The second lookup is worth more, and everything the first one brings it would bring too."""
    gate = OfferGate(LOOKUPS)
    arrays = gate.arrays
    arrays.is_open[1], arrays.pause[1] = False, 64  # it had bad luck once
    count = np.zeros(2)
    for n in range(6000):
        is_open = arrays.is_open[:2]
        alone = np.array([1.0, 1.5, 0.0]) * arrays.is_open
        chosen = int(np.argmax(alone))
        advantage = np.zeros(3)
        advantage[chosen] = 0.5 if is_open.all() else alone[chosen]
        matched = np.where(is_open, 2, -1)
        note(
            gate,
            np.array([chosen], dtype=np.int16),
            np.array([2], dtype=np.int16),
            np.array([[matched[0]], [matched[1]], [-1]], dtype=np.int16),
            promise(advantage, alone),
            np.array([0.1, 0.1, 0.0]) * arrays.is_open,
        )
        count += is_open * (n >= 1000)
    assert count[1] == 5000
    assert count[0] < 1500
