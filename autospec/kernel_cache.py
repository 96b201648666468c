"""Where machine code is kept: in a folder for each state of the kernels' sources.

Numba keeps machine code until the file of its kernel changes. That it holds code, types and
constants of other files numba does not notice: after an upgrade it would run what is no longer
there, or fail to read what it kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from autospec.user_cache import cache_folder

PACKAGE = Path(__file__).parent
_KEPT = 4
_NAME = "kernels-"
_KERNEL = re.compile(r"^@(compiled|compiled_brief|inlined)$", re.MULTILINE)
_IMPORT = re.compile(r"^from (autospec\.[\w.]+) import", re.MULTILINE)


def places() -> Sequence[Path]:
    """Where the folder may lie: where the user says, or beside the sources, or else in the user's
    cache. Never where others can write: what is read from there is run."""
    said = os.environ.get("NUMBA_CACHE_DIR")
    if said:
        return (Path(said),)
    beside = PACKAGE / "__pycache__"
    try:
        return beside, cache_folder()
    except RuntimeError:  # a user without a home
        return (beside,)


def state_of_kernels(package: Path, numba_version: str) -> str:
    """A name for the files with kernels and those that they import from, as they are now."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    kernels = {path: text for path, text in texts.items() if _KERNEL.search(text)}
    imported = {
        package.parent.joinpath(*module.split(".")).with_suffix(".py")
        for text in kernels.values()
        for module in _IMPORT.findall(text)
    }
    digest = hashlib.sha256(numba_version.encode())
    for path, text in texts.items():
        if path in kernels or path in imported:
            digest.update(f"{path.relative_to(package)}\n{text}".encode())
    return digest.hexdigest()[:16]


def kernel_cache(state: str, candidates: Sequence[Path]) -> Path | None:
    """The folder for this state in the first place that can be written, None if none can.

    Of other states' folders the latest few stay.
    """
    for place in candidates:
        folder = place / (_NAME + state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.touch()
            others = sorted(place.glob(_NAME + "*"), key=lambda path: path.stat().st_mtime)
        except OSError:
            continue
        if not os.access(folder, os.W_OK):
            continue
        for other in others[:-_KEPT]:
            shutil.rmtree(other, ignore_errors=True)
        return folder
    return None
