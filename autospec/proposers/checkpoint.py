"""A head's folder: its configuration, and its tensors checked by name and shape.

A folder holds ``config.json`` and either safetensors files or PyTorch files (``.bin``, ``.pt``),
which are opened without unpickling code. Only headers are read before a tensor is asked for.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autospec.errors import ModelError

CONFIG = "config.json"
_SAFETENSORS = "*.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")
_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    num_bytes: int
    loaded: torch.Tensor | None  # memory-mapped, for PyTorch files


class Checkpoint:
    """The contents of a head's folder. Every complaint is a ModelError that names the place."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], entries: Mapping[str, _Entry]
    ) -> None:
        self.folder = folder
        self.config = config
        self._entries = entries

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read ``config.json`` and the headers of the weights. Raises ModelError."""
        path = Path(folder)
        if not path.is_dir():
            raise ModelError(
                f"{path}: there is no such folder; a head is a folder with {CONFIG} and "
                "safetensors or PyTorch weights"
            )
        return cls(path, _read_config(path / CONFIG), _read_headers(path))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._entries)

    def memory_bytes(self) -> int:
        """Bytes of all tensors as they are stored; known before any is loaded."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError where it is missing."""
        return self._entry(name).shape

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Load a tensor, which must have ``shape``; ``dtype`` None keeps the stored one."""
        entry = self._entry(name)
        expected = tuple(shape)
        if entry.shape != expected:
            raise ModelError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected "
                f"{list(expected)}; was this head made for another target?"
            )
        if entry.loaded is not None:
            # A copy, so that the file can be unmapped.
            return entry.loaded.to(device=device, dtype=dtype or entry.loaded.dtype, copy=True)
        try:
            with safe_open(entry.file, framework="pt", device="cpu") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{entry.file}: tensor {name} cannot be read ({error})") from error
        return tensor.to(device=device, dtype=dtype or tensor.dtype)

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number of the configuration; ``key`` may be dotted (``layer.hidden_size``)."""
        value = self._setting(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self._wrong(key, value, f"a whole number from {at_least} on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the configuration."""
        value = self._setting(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A true or false of the configuration."""
        value = self._setting(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text of the configuration."""
        value = self._setting(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def require(self, key: str, found: object, allowed: Sequence[object]) -> None:
        """Raise ModelError unless ``found``, the value of ``key``, is one of ``allowed``."""
        if found not in allowed:
            raise self._wrong(key, found, " or ".join(repr(each) for each in allowed))

    def fits(self, key: str, found: int, expected: int, whose: str) -> None:
        """Raise ModelError unless a size of the head equals that of ``whose``, the target."""
        if found != expected:
            raise ModelError(
                f"{self.folder / CONFIG}: {key} is {found}, but {whose} has {expected}; "
                "a head only works with the target it was trained for"
            )

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            found = ", ".join(sorted(self._entries)[:6]) or "none"
            more = ", …" if len(self._entries) > 6 else ""
            raise ModelError(f"{self.folder}: tensor {name} is missing; there are {found}{more}")
        return entry

    def _setting(self, key: str, default: object) -> object:
        value: object = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                value = None
                break
            value = value[part]
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.folder / CONFIG}: {key} is missing")
        return default

    def _wrong(self, key: str, value: object, allowed: str) -> ModelError:
        return ModelError(f"{self.folder / CONFIG}: {key} is {value!r}; it must be {allowed}")


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must be a JSON object, found {type(config).__name__}")
    return config


def _read_headers(folder: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    files = sorted(folder.glob(_SAFETENSORS))
    for file in files:
        entries.update(_safetensors_entries(file))
    if files:
        return entries
    pickled = sorted(file for pattern in _PICKLED for file in folder.glob(pattern))
    if not pickled:
        raise ModelError(
            f"{folder}: holds no weights; expected {_SAFETENSORS} or {', '.join(_PICKLED)}"
        )
    for file in pickled:
        entries.update(_pickled_entries(file))
    return entries


def _safetensors_entries(file: Path) -> dict[str, _Entry]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            entries = {}
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                size = _BYTES.get(header.get_dtype(), 4)
                for length in shape:
                    size *= length
                entries[name] = _Entry(file, shape, size, None)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: is not a readable safetensors file ({error})") from error
    return entries


def _pickled_entries(file: Path) -> dict[str, _Entry]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{file}: is not a readable PyTorch weights file ({reason})") from error
    if not isinstance(state, Mapping):
        raise ModelError(f"{file}: must hold tensors by name, found {type(state).__name__}")
    return {
        str(name): _Entry(file, tuple(tensor.shape), tensor.nbytes, tensor)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
