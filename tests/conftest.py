"""Kernels are compiled anew for the tests when any of them has changed.

Numba keeps machine code until the file of its kernel changes. That it holds code of kernels in
other files, and constants, numba does not notice: a test would run what is no longer there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHES = ROOT / ".pytest_cache" / "numba"
CACHES_KEPT = 4
KERNEL = re.compile(r"^@(compiled|compiled_brief|inlined)$", re.MULTILINE)


def sources_of_kernels() -> set[Path]:
    """Files with kernels, and those that they import names from."""
    texts = {path: path.read_text("utf-8") for path in ROOT.glob("autospec/**/*.py")}
    kernels = {path: text for path, text in texts.items() if KERNEL.search(text)}
    imported = {
        ROOT.joinpath(*module.split(".")).with_suffix(".py")
        for text in kernels.values()
        for module in re.findall(r"^from (autospec\.[\w.]+) import", text, re.MULTILINE)
    }
    return kernels.keys() | (imported & texts.keys())


def use_own_cache() -> None:
    """Name numba's cache after the sources, also for processes that tests start; drop old ones."""
    digest = hashlib.sha256(metadata.version("numba").encode())
    for path in sorted(sources_of_kernels()):
        digest.update(path.read_bytes())
    cache = CACHES / digest.hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    cache.touch()
    for old in sorted(CACHES.iterdir(), key=lambda path: path.stat().st_mtime)[:-CACHES_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(cache)


if "NUMBA_CACHE_DIR" not in os.environ:  # read when numba is imported: before any test is
    use_own_cache()
