"""The heartbeat of long work."""

from __future__ import annotations

import threading

import pytest

from autospec.progress import heartbeat


def test_it_beats_until_the_block_ends() -> None:
    lines: list[str] = []
    beaten = threading.Event()

    def note(line: str) -> None:
        lines.append(line)
        if len(lines) >= 3:
            beaten.set()

    with heartbeat("converting", note, every_seconds=0.001):
        assert beaten.wait(10.0)
    assert lines[0] == "converting …"
    assert lines[1] == "converting … 0 s"
    count = len(lines)
    assert not threading.Event().wait(0.02)
    assert len(lines) == count


def test_it_ends_with_an_error() -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="broken"), heartbeat("loading", lines.append):
        raise ValueError("broken")
    assert lines == ["loading …"]
