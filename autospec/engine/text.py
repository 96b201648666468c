"""Text of a growing token sequence, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 6
"""Tokens decoded again before the new ones: what a token looks like depends on those before it."""


class TextStream:
    """Turns tokens into text as they come and finds the first stop string.

    Text that could still turn into a stop string, or ends inside a character, is held back until
    the next token or ``finish``.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is in self.text
        self._released = 0  # characters handed out

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is complete, and ``text`` then ends before it."""
        self._tokens.append(token)
        self._extend(final=False)
        return self.stopped

    def finish(self) -> str:
        """No token follows: the text that was still held back."""
        if not self.stopped:
            self._extend(final=True)
        return self._release(len(self.text))

    def take(self) -> str:
        """New text that no later token can take back."""
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self._release(len(self.text) - (0 if self.stopped else held))

    def _extend(self, *, final: bool) -> None:
        start = max(0, self._read - _CONTEXT_TOKENS)
        before = self._decode(self._tokens[start : self._read])
        after = self._decode(self._tokens[start:])
        if not final and after.endswith(_UNFINISHED):
            return
        searched = len(self.text)
        self.text += after[len(before) :]
        self._read = len(self._tokens)
        found = [
            position
            for stop in self._stop
            if (position := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _release(self, end: int) -> str:
        fresh = self.text[self._released : end]
        self._released = max(self._released, end)
        return fresh
