from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autospec.octave import octave_of
from autospec.rails.probe import (
    DRAFTS,
    PLAIN,
    SEVERAL,
    SEVERAL_TOKENS,
    ProbeClocks,
    note_arms,
    repeat_probe,
    restart_clocks,
)

MODEL, OTHER = 1, 2
BOTH = [PLAIN, DRAFTS]  # neither of them is due after such steps


class Clocks(ProbeClocks):
    """Clocks that note steps outside kernels."""

    def note(self, requests: int, used: Sequence[int], probe: bool, price: float = 0.0) -> None:
        self.arrays.used[:] = np.isin(self.arrays.arms, used)
        note_arms(self.reference, octave_of(requests), int(PLAIN not in used), probe, price)

    def repeat(self, draft_tokens: int = 1, models: Sequence[int] = ()) -> None:
        depth = np.isin(np.arange(OTHER + 1), models).astype(np.float64)
        repeat_probe(self.reference, octave_of(1), depth, draft_tokens)

    def restart(self) -> None:
        restart_clocks(self.reference)


def run(clocks: Clocks, steps: int, used: list[int], requests: int = 1) -> list[int]:
    """Steps at which something was tried; otherwise ``used`` drafts."""
    tried = []
    for step in range(steps):
        arm = clocks.due(requests, [MODEL])
        if arm is None:
            clocks.note(requests, used, False)
        else:
            tried.append(step)
            clocks.note(requests, [PLAIN] if arm == PLAIN else [arm], True)
    return tried


def gaps(steps: list[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(steps)]


def test_an_idle_model_is_tried_ever_more_seldom() -> None:
    tried = run(Clocks([MODEL], 4, 2.0, 64), 600, [PLAIN])
    assert tried[0] == 4
    assert gaps(tried)[:5] == [9, 17, 33, 65, 65]


def test_a_dear_model_is_tried_as_seldom_as_its_price_says() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 10_000)
    tried = []
    for step in range(2000):
        probe = clocks.due(1, [MODEL]) == MODEL
        if probe:
            tried.append(step)
        clocks.note(1, [MODEL] if probe else [PLAIN], probe, 2.0 if probe else 0.0)
        if step == 1500:
            clocks.restart()  # looking again soon is still dear
    assert tried == [4, 205, 606, 1407, 1608]


def test_plain_is_tried_while_everybody_speculates() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    tried = run(clocks, 600, [MODEL])
    assert tried[0] == 4
    assert gaps(tried)[:4] == [9, 17, 33, 65]
    assert max(gaps(tried)) == 65


def test_a_lookup_in_use_does_not_count_as_the_model() -> None:
    """Nobody of ``used`` is a model with a clock: the model and plain both come due."""
    clocks = Clocks([MODEL], 4, 2.0, 64)
    arms = set()
    for _ in range(20):
        arm = clocks.due(1, [MODEL])
        arms.add(arm)
        used = [] if arm is None else [arm]
        clocks.note(1, used, arm is not None)
    assert arms == {None, PLAIN, MODEL}


def test_using_a_model_starts_its_clock_again() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    run(clocks, 200, [PLAIN])
    clocks.note(1, [MODEL], False)  # the policy took it by itself
    assert run(clocks, 10, [PLAIN])[0] == 4


def test_each_load_has_its_own_plain_clock() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    run(clocks, 200, [MODEL], requests=1)
    assert run(clocks, 10, [MODEL], requests=16)[0] == 4
    assert run(clocks, 10, [MODEL], requests=100_000_000)[0] == 4


def test_a_model_that_cannot_draft_now_is_not_tried() -> None:
    clocks = Clocks([MODEL, OTHER], 4, 2.0, 64)
    for _ in range(50):
        assert clocks.due(1, []) is None
        clocks.note(1, [PLAIN], False)
    assert clocks.due(1, [OTHER]) == OTHER


def test_restart_looks_again_soon() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    run(clocks, 500, [PLAIN])
    clocks.note(1, [MODEL], True)
    clocks.restart()
    assert run(clocks, 10, [PLAIN])[0] == 4


def test_another_load_starts_the_models_anew() -> None:
    clocks = Clocks([MODEL], first_steps=4, backoff=8.0, max_steps=10_000)
    run(clocks, 400, [PLAIN], requests=64)  # long waits by now
    for _ in range(5):
        clocks.note(1, [PLAIN], probe=False)
    assert clocks.due(1, [MODEL]) == MODEL


def test_at_another_load_a_dear_model_has_another_price() -> None:
    clocks = Clocks([MODEL], first_steps=4, backoff=2.0, max_steps=10_000)
    run(clocks, 10, [PLAIN], requests=64)
    clocks.note(64, [MODEL], True, price=20.0)
    for _ in range(100):
        clocks.note(64, [PLAIN], probe=False)
    assert clocks.due(64, [MODEL]) is None
    clocks.note(1, [PLAIN], probe=False)
    assert clocks.due(1, [MODEL]) == MODEL


def test_drafts_of_anybody_are_tried_while_nobody_drafts() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    tried = []
    for step in range(200):
        arm = clocks.due(1, [DRAFTS])  # the model cannot draft now
        if arm == DRAFTS:
            tried.append(step)
        clocks.note(1, [PLAIN] if arm is None else [DRAFTS], arm is not None)
    assert tried[0] == 4
    assert gaps(tried)[:4] == [9, 17, 33, 65]


def test_drafts_in_use_are_not_tried() -> None:
    clocks = Clocks([MODEL], 4, 2.0, 64)
    for _ in range(50):
        assert clocks.due(1, [DRAFTS]) in (None, PLAIN)
        clocks.note(1, [DRAFTS], False)
    for _ in range(3):  # and then their clock is at its start
        clocks.note(1, [PLAIN], False)
        assert clocks.due(1, [DRAFTS]) is None
    clocks.note(1, [PLAIN], False)
    assert clocks.due(1, [DRAFTS]) == DRAFTS


def test_a_probe_that_was_cheap_is_repeated_at_once() -> None:
    clocks = Clocks([], 4, 2.0, 64)
    for _ in range(4):
        clocks.note(1, [PLAIN], False)
    assert clocks.due(1, [DRAFTS]) == DRAFTS
    clocks.note(1, [DRAFTS], True, 3.0)
    assert clocks.due(1, [DRAFTS]) is None
    clocks.repeat()
    assert clocks.due(1, [DRAFTS]) == DRAFTS
    clocks.note(1, [DRAFTS], True)
    assert clocks.due(1, [DRAFTS]) is None


def test_drafts_that_looked_very_dear_are_tried_again_before_long() -> None:
    clocks = Clocks([], 4, 2.0, 2048)
    tried = []
    for step in range(400):
        if clocks.due(1, [DRAFTS]) == DRAFTS:
            tried.append(step)
            clocks.note(1, [DRAFTS], True, 9.0)  # nine plain steps
        else:
            clocks.note(1, [PLAIN], False)
    assert tried == [4, 105, 306]


def test_lookups_are_asked_for_drafts_when_these_are_to_be_tried_next() -> None:
    clocks = Clocks([], 4, 2.0, 64, lookup_k=1)
    asked = []
    for _ in range(5):
        asked.append(clocks.ask)
        clocks.note(1, [PLAIN], False)
    assert asked == [False, False, False, False, True]
    assert clocks.ask  # until somebody has some
    clocks.note(1, [DRAFTS], True)
    assert not clocks.ask
    clocks.repeat()
    assert clocks.ask
    none = Clocks([MODEL], 4, 2.0, 64, lookup_k=0)
    for _ in range(9):
        none.note(1, [PLAIN], False)
    assert not none.ask


def test_a_probe_that_is_never_believed_is_not_repeated_for_ever() -> None:
    clocks = Clocks([], 200, 2.0, 4096)
    for _ in range(200):
        clocks.note(1, [PLAIN], False)
    repeats = 0
    while clocks.due(1, [DRAFTS]) == DRAFTS and repeats < 1000:
        clocks.note(1, [DRAFTS], True, 0.1)
        clocks.repeat()
        repeats += 1
    assert 8 < repeats < 100
    clocks.note(1, [DRAFTS], False)  # the policy drafts by itself: believed at last
    clocks.note(1, [PLAIN], False)
    clocks.repeat()
    assert clocks.due(1, [DRAFTS]) == DRAFTS


def test_several_draft_tokens_are_tried_where_one_at_a_time_is_in_use() -> None:
    clocks = Clocks([], 4, 2.0, 64)
    tried = []
    for step in range(200):
        arm = clocks.due(1, [SEVERAL])
        if arm == SEVERAL:
            tried.append(step)
        clocks.note(1, BOTH if arm is None else [arm], arm is not None)
    assert tried[0] == 4
    assert gaps(tried)[:4] == [9, 17, 33, 65]


def test_a_cheap_probe_of_several_tokens_is_repeated_with_several() -> None:
    clocks = Clocks([], 4, 2.0, 64)
    for _ in range(4):
        clocks.note(1, BOTH, False)
    clocks.note(1, [SEVERAL], True)
    clocks.repeat(4)
    assert clocks.due(1, [DRAFTS, SEVERAL]) == SEVERAL
    clocks.note(1, [SEVERAL], True)
    assert clocks.due(1, [DRAFTS, SEVERAL]) is None


def test_a_cheap_probe_of_a_model_is_repeated_with_it() -> None:
    clocks = Clocks([MODEL, OTHER], 4, 2.0, 64)
    for _ in range(8):
        clocks.note(1, BOTH, False)
    clocks.note(1, [MODEL, OTHER], True)
    clocks.repeat(8, [OTHER])
    assert clocks.due(1, [MODEL, OTHER]) == OTHER
    clocks.note(1, [OTHER], True)
    assert clocks.due(1, [MODEL, OTHER]) is None


def test_what_cannot_be_tried_is_looked_at_again_in_a_few_steps() -> None:
    clocks = Clocks([], 8, 2.0, 64)
    for _ in range(8):
        clocks.note(1, BOTH, False)
    waits = 0
    assert clocks.due(1) == SEVERAL
    clocks.postpone(SEVERAL)
    while clocks.due(1) != SEVERAL:
        clocks.note(1, BOTH, False)
        waits += 1
    assert 1 < waits < 8


def test_postponing_what_is_not_due_changes_nothing() -> None:
    clocks = Clocks([], 16, 2.0, 64)
    clocks.note(1, BOTH, False)
    clocks.postpone(SEVERAL)
    for _ in range(14):
        clocks.note(1, BOTH, False)
    assert clocks.due(1, [SEVERAL]) is None
    clocks.note(1, BOTH, False)
    assert clocks.due(1, [SEVERAL]) == SEVERAL


def test_lookups_that_draft_little_are_never_asked_for_several() -> None:
    clocks = Clocks([], 4, 2.0, 64, lookup_k=3)
    for _ in range(9):
        clocks.note(1, [DRAFTS], False)
    assert clocks.due(1) in (None, PLAIN)
    assert not clocks.ask


def test_several_are_twice_as_many_as_usual_within_bounds() -> None:
    clocks = Clocks([], 4, 2.0, 64)
    assert clocks.several(1) == SEVERAL_TOKENS
    clocks.arrays.usual[0] = 3.0
    assert clocks.several(1) == 6
    clocks.arrays.usual[0] = 100.0
    assert clocks.several(1) == 8
    assert clocks.several(32) == 32
