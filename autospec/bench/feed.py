"""The requests of a closed loop, which keeps as many of them running as a load says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """A block's requests in order, then the block again and again until its own are all done.

    With nothing to follow them a block would end with its slowest request alone, and what was
    meant to be measured at a load would be measured well below it. The repeats only hold the load:
    they are cut off with the last of the block's own.
    """

    def __init__(self, requests: Sequence[T], tokens: Sequence[int]) -> None:
        """``tokens`` is what each request asks for."""
        self._requests = tuple(requests)
        self._given = 0
        self._unfinished = set(range(len(self._requests)))
        self._missing = list(tokens)
        self._wanted = sum(tokens)

    @property
    def is_over(self) -> bool:
        """Whether every request of the block has ended."""
        return not self._unfinished

    @property
    def share(self) -> float:
        """The part of the block's own tokens that is there; 1 where it is over."""
        return 1.0 if self.is_over else 1.0 - sum(self._missing) / self._wanted

    def take(self) -> tuple[int, T]:
        """The next request and its number, which is that in the block for the block's own."""
        number = self._given
        self._given += 1
        return number, self._requests[number % len(self._requests)]

    def is_repeat(self, number: int) -> bool:
        """Whether the request of this number only holds the load."""
        return number >= len(self._requests)

    def advance(self, number: int, tokens: int) -> None:
        """The request of this number got so many more."""
        if not self.is_repeat(number):
            self._missing[number] -= tokens

    def finish(self, number: int) -> None:
        """The request of this number has ended, maybe with fewer than it asked for."""
        self._unfinished.discard(number)
        if not self.is_repeat(number):
            self._missing[number] = 0
