"""Engine versions as people write them."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from autospec.errors import ExportError


def parse_version(text: str | None, engine: str, oldest: str, example: str) -> Version | None:
    """A version, None for none given. Raises ExportError for what is none, or older than
    ``oldest``, the first whose rules are known."""
    if text is None:
        return None
    try:
        version = Version(text.removeprefix("v"))
    except InvalidVersion:
        raise ExportError(
            f"--engine-version: {text!r} is no version of {engine}; one looks like {example}"
        ) from None
    if version < Version(oldest):
        raise ExportError(
            f"--engine-version: {engine} {text} is not known; known are {oldest} and later"
        )
    return version


def parse_build(text: str | None, oldest: int) -> int | None:
    """A llama.cpp build number such as ``b8955``, None for none given. Raises ExportError."""
    if text is None:
        return None
    digits = text.removeprefix("b")
    if not (digits.isascii() and digits.isdigit()):
        raise ExportError(
            f"--engine-version: {text!r} is no llama.cpp build; one looks like b{oldest}"
        )
    if int(digits) < oldest:
        raise ExportError(
            f"--engine-version: llama.cpp {text} is not known; known are b{oldest} and later"
        )
    return int(digits)
