"""Where AutoSpec keeps what it can make again, for all that a user runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$AUTOSPEC_CACHE``, else ``~/.cache/autospec``."""
    configured = os.environ.get("AUTOSPEC_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "autospec"
