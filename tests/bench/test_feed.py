"""Feed: a block's requests, and repeats that hold the load until all of them are done."""

from __future__ import annotations

from autospec.bench.feed import Feed


def test_the_load_is_held_until_the_blocks_own_requests_are_done() -> None:
    """Two at a time; ``slow`` takes six steps, the others one."""
    steps = {"a": 1, "slow": 6, "b": 1}
    feed = Feed(list(steps), list(steps.values()))
    left: dict[int, int] = {}
    running: list[int] = []
    served: list[tuple[int, str]] = []
    while not feed.is_over:
        while len(left) < 2:
            number, request = feed.take()
            served.append((number, request))
            left[number] = steps[request]
        running.append(len(left))
        for number in list(left):
            left[number] -= 1
            if left[number] == 0:
                del left[number]
                feed.finish(number)
    assert running == [2] * 6
    assert served[:4] == [(0, "a"), (1, "slow"), (2, "b"), (3, "a")]
    assert [feed.is_repeat(number) for number, _ in served[:4]] == [False, False, False, True]


def test_a_repeat_that_ends_does_not_end_the_block() -> None:
    feed = Feed(["only"], [3])
    assert feed.take() == (0, "only")
    assert feed.take() == (1, "only")
    feed.finish(1)
    assert not feed.is_over
    feed.finish(0)
    assert feed.is_over


def test_nothing_to_serve_is_over() -> None:
    assert Feed([], []).is_over


def test_the_share_is_that_of_the_blocks_own_tokens() -> None:
    feed = Feed(["a", "b"], [4, 4])
    for _ in range(3):
        feed.take()
    feed.advance(0, 3)
    feed.advance(2, 5)  # a repeat
    assert feed.share == 0.375
    feed.finish(0)  # with a token less than it asked for
    assert feed.share == 0.5
    feed.finish(2)
    feed.finish(1)
    assert feed.share == 1.0
