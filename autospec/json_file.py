"""Figures as JSON files, replaced in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autospec.errors import InputError


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a path for figures before they are measured, not after. Raises InputError."""
    if path is None:
        return
    folder = path.parent
    replaceable = path.is_file() or not path.exists()
    if not replaceable or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option}: {path} cannot be written; give a file in a folder that exists")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file in one step. Raises InputError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(value, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
