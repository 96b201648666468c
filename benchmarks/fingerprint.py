"""The fingerprint of code: a digest of modules and of all that they import of AutoSpec."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import autospec

_PACKAGE = Path(autospec.__file__).parent


@cache
def fingerprint(modules: tuple[str, ...], without: tuple[str, ...] = (), text: str = "") -> str:
    """Of ``modules`` and what they import, not by way of those ``without``, and of ``text``."""
    digest = hashlib.sha256(text.encode())
    for path in sorted(_files(modules, without)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _files(modules: tuple[str, ...], without: tuple[str, ...]) -> set[Path]:
    found: set[Path] = set()
    left = list(modules)
    while left:
        name = left.pop()
        path = _file(name)
        if path is not None and path not in found and name not in without:
            found.add(path)
            left += _imported(path)
    return found


def _file(module: str) -> Path | None:
    """None for what is no module of AutoSpec, such as a name that a module defines."""
    top, *inner = module.split(".")
    if top != "autospec" or not inner:
        return None
    path = _PACKAGE.joinpath(*inner)
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
