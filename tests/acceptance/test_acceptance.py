from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.acceptance.hazard_table import POOLED, HazardTable, Shrinkage
from autospec.acceptance.hazards import (
    NUM_BINS,
    UInt8Array,
    Verified,
    draft_bins,
    fill_hazards,
    learn_rows,
    offer_bins,
)
from autospec.acceptance.hazards import Rows as TableRows
from autospec.compiled import by_reference
from autospec.records import Float32Array

K = 8
LOOKUP, MODEL = 0, 1
SLOTS = 32


def make_table(num_workloads: int = 4, shrinkage: Shrinkage | None = None) -> HazardTable:
    """A lookup and a model, every slot started."""
    lookup = np.array([True, False])
    table = HazardTable(lookup, lookup, num_workloads, SLOTS, shrinkage or Shrinkage())
    for slot in range(SLOTS):
        table.start(slot)
    return table


def make_composite() -> HazardTable:
    """Two models; the second one's first two tokens are the first one's."""
    none = np.zeros(2, dtype=np.bool_)
    heads = np.array([[0, 0], [0, 2]], dtype=np.int16)
    table = HazardTable(none, none, 4, SLOTS, Shrinkage(), heads)
    for slot in range(SLOTS):
        table.start(slot)
    return table


@dataclass
class Rows:
    """One step's rows, with defaults for what a test does not care about."""

    table: HazardTable
    slots: list[int]
    workload: int = 1
    confidence: float = 0.5
    offered: int = K
    last_token: int = 0
    bins: UInt8Array = field(init=False)
    hazards: Float32Array = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.slots)
        self.offers = np.zeros((2, n), dtype=np.int16)
        self.offers[LOOKUP] = self.offered
        self.bins = np.zeros((n, 2, K), dtype=np.uint8)
        self.hazards = np.zeros((n, 2, K), dtype=np.float32)
        confidence = np.full((2, n, K), self.confidence, dtype=np.float32)
        reach = np.full((2, n), K, dtype=np.int16)
        offer_bins(self.table.arrays.lookup, self.offers, reach, confidence, self.bins)
        self.predict()

    def predict(self) -> Float32Array:
        """Hazards [n, p, k] now."""
        limits = np.full((2, len(self.slots)), K, dtype=np.int16)
        fill_hazards(by_reference(self.table.arrays), self.rows(), limits, self.bins, self.hazards)
        found: Float32Array = self.hazards.copy()
        return found

    def learn(
        self,
        verified: int | list[int],
        accepted: int | list[int],
        *,
        proposer: int = MODEL,
        committed: int | None = None,
        matched: int = -1,
        known: bool = True,
        asked: int | None = None,
        drafted: int | None = None,
        expected: float | None = None,
    ) -> int:
        """Teach the same outcome to every row, or one outcome a row."""
        n = len(self.slots)
        kept = np.broadcast_to(np.array(accepted, dtype=np.int16), n).copy()
        added = kept + 1 if committed is None else np.full(n, committed)
        matches = np.full((2, n), -1, dtype=np.int16)
        matches[LOOKUP] = matched
        taken = np.broadcast_to(np.array(verified, dtype=np.int16), n).copy()
        step = Verified(
            np.full(n, known),
            np.full(n, proposer, dtype=np.int16),
            taken if asked is None else np.full(n, asked, dtype=np.int16),
            taken if drafted is None else np.full(n, drafted, dtype=np.int16),
            taken,
            kept,
            added.astype(np.int16),
        )
        return learn_rows(
            by_reference(self.table.arrays),
            self.rows(),
            step,
            matches,
            self.offers,
            self.hazards if expected is None else np.full_like(self.hazards, expected),
            self.bins,
            self.hazards,
        )

    def rows(self) -> TableRows:
        """The same as kernels take it."""
        n = len(self.slots)
        return TableRows(
            np.array(self.slots, dtype=np.int32),
            np.full(n, self.workload, dtype=np.int32),
            np.full(n, self.last_token, dtype=np.int32),
        )


def counted(table: HazardTable, workload: int, proposer: int) -> tuple[list[float], list[float]]:
    """(successes, trials) since the last call, per position bucket."""
    fresh = table.take_fresh(workload, proposer)
    return fresh["successes"].sum(axis=1).tolist(), fresh["trials"].sum(axis=1).tolist()


# Positions 1 to 4 have a bucket each; 5 and 6, 7 and 8 share one.
@pytest.mark.parametrize(
    "verified, accepted, successes, trials",
    [
        (4, 2, [1, 1, 0, 0], [1, 1, 1, 0]),
        (4, 4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (4, 0, [0, 0, 0, 0], [1, 0, 0, 0]),
        (1, 1, [1, 0, 0, 0], [1, 0, 0, 0]),
        (0, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_observations_are_censored(
    verified: int, accepted: int, successes: list[int], trials: list[int]
) -> None:
    table = make_table()
    Rows(table, [1], workload=2).learn(verified, accepted)
    found = counted(table, 2, MODEL)
    assert found == (successes + [0] * 4, trials + [0] * 4)
    assert counted(table, 2, MODEL) == ([0] * 8, [0] * 8)  # taken once
    assert counted(table, 2, LOOKUP) == ([0] * 8, [0] * 8)


@pytest.mark.parametrize(
    "matched, committed, successes, trials",
    [
        (2, 4, [1, 1, 0, 0], [1, 1, 1, 0]),  # the third token differs from a committed one
        (2, 2, [1, 1, 0, 0], [1, 1, 0, 0]),  # nothing is known of the third
        (0, 1, [0, 0, 0, 0], [1, 0, 0, 0]),
        (9, 2, [1, 1, 0, 0], [1, 1, 0, 0]),  # more matches than tokens: no evidence for more
        (1, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
        (-1, 3, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_an_offer_nobody_used_teaches_as_far_as_tokens_were_committed(
    matched: int, committed: int, successes: list[int], trials: list[int]
) -> None:
    table = make_table()
    Rows(table, [1], workload=2).learn(0, 0, proposer=-1, committed=committed, matched=matched)
    assert counted(table, 2, LOOKUP) == (successes + [0] * 4, trials + [0] * 4)


def test_an_offer_is_no_evidence_beyond_its_end() -> None:
    table = make_table()
    Rows(table, [1], offered=2).learn(0, 0, proposer=-1, committed=5, matched=2)
    assert counted(table, 1, LOOKUP) == ([1, 1] + [0] * 6, [1, 1] + [0] * 6)


def test_a_used_lookup_is_counted_once() -> None:
    table = make_table()
    Rows(table, [1]).learn(4, 2, proposer=LOOKUP, committed=3, matched=2)
    assert counted(table, 1, LOOKUP) == ([1, 1] + [0] * 6, [1, 1, 1] + [0] * 5)


def test_a_used_lookup_learns_without_matches() -> None:
    table = make_table()
    Rows(table, [1]).learn(4, 2, proposer=LOOKUP, matched=-1)
    assert counted(table, 1, LOOKUP) == ([1, 1] + [0] * 6, [1, 1, 1] + [0] * 5)


@pytest.mark.parametrize("proposer", [LOOKUP, MODEL])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_hazards_converge_from_censored_outcomes(proposer: int, rate: float) -> None:
    """An update that took every position after a rejection for a failure would land far below."""
    rng = np.random.default_rng(3)
    table = make_table()
    for _ in range(400):
        rows = Rows(table, list(range(1, 17)))
        hits = np.cumprod(rng.random((16, K)) < rate, axis=1).sum(axis=1)
        rows.learn([K] * 16, hits.tolist(), proposer=proposer)
        for slot in range(1, 17):
            table.start(slot)
    found = Rows(table, [0]).hazards[0, proposer]
    seen = 3 if rate < 0.5 else K  # deeper ones are hardly ever reached
    assert found[:seen] == pytest.approx(rate, abs=0.07)


def test_hazards_differ_by_position_and_confidence() -> None:
    """A first token is often wrong while those after it are right; confidence tells them apart."""
    rng = np.random.default_rng(4)
    table = make_table()
    truth = {0.3: [0.4] + [0.9] * 7, 0.95: [0.9] + [0.97] * 7}
    for _ in range(300):
        for confidence, hazards in truth.items():
            rows = Rows(table, list(range(1, 17)), confidence=confidence)
            hits = np.cumprod(rng.random((16, K)) < hazards, axis=1).sum(axis=1)
            rows.learn([K] * 16, hits.tolist(), proposer=LOOKUP)
            for slot in range(1, 17):
                table.start(slot)
    for confidence, hazards in truth.items():
        found = Rows(table, [0], confidence=confidence).hazards[0, LOOKUP]
        assert found == pytest.approx(hazards, abs=0.06)


def test_unseen_confidence_is_taken_at_its_word() -> None:
    table = make_table()
    low = Rows(table, [1], confidence=0.15).hazards[0, LOOKUP]
    high = Rows(table, [1], confidence=0.95).hazards[0, LOOKUP]
    assert low == pytest.approx(0.15, abs=0.05)
    assert high == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("garbage", [np.nan, -1.0, np.inf, -np.inf, 7.0])
def test_garbage_confidence_is_still_a_hazard(garbage: float) -> None:
    found = Rows(make_table(), [1], confidence=garbage).hazards
    assert ((found > 0) & (found < 1)).all()


def test_a_request_moves_its_own_estimate_alone() -> None:
    table = make_table()
    before = Rows(table, [1, 2]).hazards.copy()
    for _ in range(20):
        rows = Rows(table, [1])
        rows.learn(2, 0)
    after = Rows(table, [1, 2], workload=1).predict()
    # Both see the workload's new counts; the request that failed sees its own record as well.
    assert after[0, MODEL, 0] < after[1, MODEL, 0] < before[1, MODEL, 0]
    table.start(1)
    fresh = Rows(table, [1, 2]).hazards
    assert fresh[0, MODEL] == pytest.approx(fresh[1, MODEL])


def test_a_token_moves_the_first_position_after_it_alone() -> None:
    table = make_table()
    for _ in range(60):
        Rows(table, [1], last_token=7).learn(4, 0, proposer=LOOKUP)
        Rows(table, [1], last_token=9).learn(4, 4, proposer=LOOKUP)
        table.start(1)
    hard = Rows(table, [2], last_token=7).hazards[0, LOOKUP]
    easy = Rows(table, [2], last_token=9).hazards[0, LOOKUP]
    assert hard[0] < easy[0] - 0.2
    assert hard[1:] == pytest.approx(easy[1:])


def test_a_request_that_ended_still_teaches_its_workload() -> None:
    table = make_table()
    offset = table.arrays.request_offset.copy()
    Rows(table, [3], workload=2).learn(4, 1, known=False)
    assert counted(table, 2, MODEL) == ([1] + [0] * 7, [1, 1] + [0] * 6)
    assert np.array_equal(table.arrays.request_offset, offset)


def test_a_new_workload_starts_from_the_others() -> None:
    table = make_table()
    prior = Rows(table, [1], workload=3).hazards[0, MODEL, 0]
    for _ in range(100):
        Rows(table, [1], workload=1).learn(1, 0)
        table.start(1)
    assert Rows(table, [2], workload=3).hazards[0, MODEL, 0] < 0.25 < prior


def test_a_workload_of_its_own_outweighs_the_others() -> None:
    table = make_table()
    for _ in range(200):
        Rows(table, [1], workload=1).learn(2, 0)
        Rows(table, [2], workload=2).learn(2, 2)
        table.start(1)
        table.start(2)
    assert Rows(table, [3], workload=1).hazards[0, MODEL, 0] < 0.2
    assert Rows(table, [3], workload=2).hazards[0, MODEL, 0] > 0.8


def test_old_observations_weigh_no_more_than_the_limit() -> None:
    table = make_table(shrinkage=Shrinkage(cell_limit=50.0, drift_threshold=1e9))
    for _ in range(2000):
        Rows(table, [1]).learn(1, 1)
    assert table.arrays.trials.max() <= 50.0 + 1e-6
    assert (table.arrays.successes <= table.arrays.trials + 1e-9).all()


def test_load_bounds_the_weight_and_keeps_the_rate() -> None:
    table = make_table()
    trials = np.zeros((8, NUM_BINS))
    trials[0, 0] = 1e9
    table.load(2, MODEL, 0.25 * trials, trials)
    assert table.arrays.trials[2, MODEL].max() == pytest.approx(Shrinkage().cell_limit)
    assert Rows(table, [1], workload=2, offered=0).hazards[0, MODEL, 0] == pytest.approx(
        0.25, abs=0.01
    )
    assert not table.take_fresh(2, MODEL)["trials"].any()  # loaded counts are not new ones


def test_drift_is_noticed_and_forgets_the_old_rate() -> None:
    table = make_table()
    for _ in range(500):
        Rows(table, [1]).learn(1, 1)
        table.start(1)
    weight = table.arrays.trials[1, MODEL].sum()
    alarms = 0
    for _ in range(60):
        alarms += Rows(table, [1]).learn(1, 0)
        table.start(1)
    assert alarms >= 1
    assert table.arrays.trials[1, MODEL].sum() < 0.5 * weight
    assert Rows(table, [2]).hazards[0, MODEL, 0] < 0.5


def test_many_requests_that_begin_alike_are_no_drift() -> None:
    table = make_table()
    for _ in range(500):
        Rows(table, [1]).learn(1, 1)
        table.start(1)
    # all rows of one step fail at once: one observation of what they share, not thirty-one
    assert Rows(table, list(range(1, SLOTS)), last_token=7).learn(1, 0) == 0
    table.start(2)
    assert Rows(table, [2]).hazards[0, MODEL, 0] > 0.8


@pytest.mark.parametrize("drafted, hits", [(4, 0.25), (2, 0.0)])
def test_what_was_cut_behind_a_head_counts_by_what_was_expected(drafted: int, hits: float) -> None:
    table = make_composite()
    Rows(table, [1]).learn(2, 2, proposer=1, asked=6, drafted=drafted, expected=0.25)
    assert counted(table, 1, 0) == ([1, 1, *[0] * 6], [1, 1, *[0] * 6])
    assert counted(table, 1, 1) == ([0, 0, hits, *[0] * 5], [0, 0, 1, *[0] * 5])


@pytest.mark.parametrize("verified, accepted, proposer", [(2, 1, 1), (1, 1, 1), (2, 2, 0)])
def test_a_rejection_or_a_cut_elsewhere_says_nothing_of_what_follows(
    verified: int, accepted: int, proposer: int
) -> None:
    table = make_composite()
    rows = Rows(table, [1])
    rows.learn(verified, accepted, proposer=proposer, asked=6, drafted=4, expected=0.25)
    assert sum(counted(table, 1, 1)[1]) == 0
    assert sum(counted(table, 1, 0)[1]) == verified


def test_without_a_confidence_the_earlier_hazard_stands() -> None:
    table = make_table()
    rows = Rows(table, [1])
    confidence = np.full((1, K), np.nan, dtype=np.float32)
    confidence[0, 2:] = 0.95
    limits = np.array([[0], [4]], dtype=np.int16)
    draft_bins(confidence, limits, rows.bins)
    before = np.full((1, 2, K), 0.37, dtype=np.float32)
    fill_hazards(by_reference(table.arrays), rows.rows(), limits, rows.bins, before)
    assert before[0, MODEL, :2].tolist() == pytest.approx([0.37, 0.37])
    assert before[0, MODEL, 2] != pytest.approx(0.37)
    rows.learn(4, 4)
    assert counted(table, 1, MODEL)[1][:4] == [0, 0, 1, 1]


def test_a_composite_shares_what_is_known_of_its_head() -> None:
    table = make_composite()
    Rows(table, [1]).learn(4, 3, proposer=1)
    assert counted(table, 1, 0)[1][:4] == [1, 1, 0, 0]
    assert counted(table, 1, 1) == ([0, 0, 1, 0, *[0] * 4], [0, 0, 1, 1, *[0] * 4])
    for _ in range(100):
        Rows(table, [1]).learn(2, 0, proposer=0)
    hazards = Rows(table, [1]).hazards[0]
    assert hazards[1, :2].tolist() == hazards[0, :2].tolist()
    assert hazards[1, 0] < 0.2 < hazards[1, 2]


def test_steady_acceptance_raises_no_drift_alarm() -> None:
    rng = np.random.default_rng(0)
    table = make_table()
    alarms = 0
    for _ in range(3000):
        hit = int(rng.random() < 0.6)
        alarms += Rows(table, [1]).learn(1, hit)
    assert alarms == 0


def test_growing_keeps_requests() -> None:
    table = make_table()
    for _ in range(10):
        Rows(table, [1]).learn(2, 0)
    before = Rows(table, [1]).hazards.copy()
    table.grow(4 * SLOTS)
    table.start(4 * SLOTS - 1)
    assert Rows(table, [1]).hazards == pytest.approx(before)
    assert Rows(table, [4 * SLOTS - 1]).hazards[0, MODEL, 0] > before[0, MODEL, 0]


outcomes = st.tuples(
    st.integers(1, SLOTS - 1),  # slot
    st.integers(1, 3),  # workload
    st.integers(0, K),  # verified
    st.integers(0, K),  # accepted
    st.sampled_from([LOOKUP, MODEL]),
    st.floats(0, 1, width=32),
    st.booleans(),  # known
    st.integers(-1, K + 2),  # matched
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(outcomes, max_size=40))
def test_whatever_was_seen_hazards_are_probabilities(
    seen: list[tuple[int, int, int, int, int, float, bool, int]],
) -> None:
    table = make_table()
    for slot, workload, verified, accepted, proposer, confidence, known, matched in seen:
        Rows(table, [slot], workload, confidence).learn(
            verified, min(accepted, verified), proposer=proposer, known=known, matched=matched
        )
    rows = Rows(table, list(range(SLOTS)), workload=2)
    assert np.isfinite(rows.hazards).all()
    assert ((rows.hazards > 0) & (rows.hazards < 1)).all()
    for i in range(SLOTS):
        curve = np.cumprod(rows.hazards[i, MODEL].astype(np.float64))
        assert (np.diff(curve) <= 0).all()
    assert (table.arrays.successes >= 0).all()
    assert (table.arrays.successes <= table.arrays.trials + 1e-9).all()
    assert np.isfinite(table.arrays.request_offset).all()
    assert np.isfinite(table.arrays.token_offset).all()
    total = sum(table.take_fresh(w, p)["trials"].sum() for w in range(1, 4) for p in (0, 1))
    assert table.take_fresh(POOLED, 0)["trials"].sum() == 0  # profiles are per workload
    assert total >= table.arrays.trials[1:].sum() - 1e-6


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.permutations(list(range(6))), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_the_order_of_independent_rows_does_not_matter(
    order: list[int], accepted: list[int]
) -> None:
    """Rows of one step are of different requests; their counts only add (fading aside)."""
    tables = []
    for rows in (list(range(6)), order):
        table = make_table(shrinkage=Shrinkage(cell_limit=1e12, drift_threshold=1e9, token=1e12))
        Rows(table, [1 + i for i in rows]).learn([4] * 6, [accepted[i] for i in rows])
        tables.append(table)
    assert tables[0].arrays.trials == pytest.approx(tables[1].arrays.trials)
    assert tables[0].arrays.successes == pytest.approx(tables[1].arrays.successes)
    assert tables[0].arrays.request_offset == pytest.approx(tables[1].arrays.request_offset)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, K), st.data())
def test_a_success_never_lowers_and_a_failure_never_raises(
    verified: int, data: st.DataObject
) -> None:
    accepted = data.draw(st.integers(0, verified))
    fixed = Shrinkage(proposer=1e12, proposer_limit=1e12, label=1e12, label_limit=1e12)
    table = make_table(shrinkage=fixed)
    before = Rows(table, [1]).hazards[0, MODEL].copy()
    Rows(table, [1]).learn(verified, accepted)
    after = Rows(table, [2]).hazards[0, MODEL]  # another request of the workload
    if accepted == verified:
        assert (after[:accepted] >= before[:accepted]).all()
    if accepted == 0:
        assert after[0] < before[0]
        assert after[1:] == pytest.approx(before[1:])


def test_what_is_seen_of_a_proposer_moves_what_was_not_seen_yet() -> None:
    """Failures at the first position lower the prior of cells without a count of their own."""
    table = make_table()
    before = Rows(table, [1]).hazards[0].copy()
    for _ in range(20):
        Rows(table, [1]).learn(3, 0)
    after = Rows(table, [2]).hazards[0]
    assert (after[MODEL, 1:] < before[MODEL, 1:] - 0.1).all()
    other = 1 - MODEL
    assert after[other] == pytest.approx(before[other])


def test_a_new_workload_is_told_from_the_others_by_a_few_failures() -> None:
    """It has no cells of its own yet; what the others taught of them is moved as a whole."""
    table = make_table()
    for _ in range(300):
        Rows(table, [1], workload=1).learn(3, 3)
    trusted = Rows(table, [2], workload=2).hazards[0, MODEL].copy()
    for _ in range(4):
        Rows(table, [2], workload=2).learn(3, 0)
    doubted = Rows(table, [3], workload=2).hazards[0, MODEL]
    assert (trusted[:3] > 0.95).all()
    odds_kept = doubted / (1 - doubted) / (trusted / (1 - trusted))
    assert (odds_kept[1:3] < 0.1).all()  # positions that were never reached


def test_draft_evidence_follows_confidence() -> None:
    """Once a model has drafted, its tokens' own probabilities are the evidence."""
    lookup = np.array([True, False])
    table = HazardTable(lookup, np.array([True, True]), 2, SLOTS, Shrinkage())
    table.start(1)
    bins = np.zeros((1, 2, K), dtype=np.uint8)
    limits = np.zeros((2, 1), dtype=np.int16)
    limits[MODEL] = 3
    confidence = np.full((1, K), np.nan, dtype=np.float32)
    confidence[0, :3] = [0.95, 0.25, np.nan]
    draft_bins(confidence, limits, bins)
    out = np.zeros((1, 2, K), dtype=np.float32)
    zeros = np.zeros(1, dtype=np.int32)
    rows = TableRows(np.ones(1, dtype=np.int32), zeros, zeros)
    fill_hazards(by_reference(table.arrays), rows, limits, bins, out)
    assert out[0, MODEL, 0] == pytest.approx(0.95, abs=0.05)
    assert out[0, MODEL, 1] == pytest.approx(0.25, abs=0.05)
    assert out[0, MODEL, 2] == pytest.approx(0.05, abs=0.05)
