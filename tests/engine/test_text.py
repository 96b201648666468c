"""Text as it grows: stop strings, characters that span tokens, held-back beginnings of stops."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.engine.text import TextStream


def decode(tokens: Sequence[int]) -> str:
    """Tokens are bytes of UTF-8."""
    return bytes(tokens).decode("utf-8", errors="replace")


def feed(stream: TextStream, text: str) -> list[str]:
    """Push the bytes of ``text`` until a stop; what ``take`` gave after each."""
    pieces = []
    for token in text.encode():
        stopped = stream.push(token)
        pieces.append(stream.take())
        if stopped:
            break
    return pieces


def test_text_without_stops_flows_through() -> None:
    stream = TextStream(decode)
    assert feed(stream, "plain") == list("plain")
    assert stream.finish() == ""
    assert stream.text == "plain"


def test_a_character_is_given_out_whole() -> None:
    stream = TextStream(decode)
    assert feed(stream, "a\N{SNOWMAN}b") == ["a", "", "", "\N{SNOWMAN}", "b"]


def test_an_unfinished_character_appears_at_the_end() -> None:
    stream = TextStream(decode)
    assert stream.push(0xE2) is False
    assert stream.take() == ""
    assert stream.finish() == "\ufffd"


def test_the_stop_string_and_what_follows_are_cut_off() -> None:
    stream = TextStream(decode, ("END",))
    assert "".join(feed(stream, "one END two")) == "one "
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "one "


def test_the_beginning_of_a_stop_is_held_back_until_it_is_none() -> None:
    stream = TextStream(decode, ("##!",))
    assert feed(stream, "a##b#") == ["a", "", "", "##b", ""]
    assert stream.finish() == "#"
    assert stream.text == "a##b#"


def test_the_earliest_of_several_stops_counts() -> None:
    stream = TextStream(lambda tokens: "".join(["x, y; z"][: len(tokens)]), ("; ", ", "))
    assert stream.push(0)
    assert stream.text == "x"
