"""Where a profile is kept whose file may already be of something else."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import astuple
from pathlib import Path

from autospec.errors import ProfileError, ProfileMismatch
from autospec.profile.file import load_profile
from autospec.profile.learned import Identity

log = logging.getLogger(__name__)


def own_place(
    path: Path, identity: Identity, acceptance_layout: str, cost_layout: str, *, is_strict: bool
) -> Path:
    """``path``, or a file of this identity's own beside it where a profile of something else lies.

    Else what this run learns could not be saved. It is logged; raises ProfileMismatch if strict.
    """
    try:
        load_profile(path).require(identity, acceptance_layout, cost_layout)
    except ProfileMismatch as error:
        if is_strict:
            raise ProfileMismatch(f"{path}: {error}; name another profile.path") from None
        parts = json.dumps([*astuple(identity), acceptance_layout, cost_layout])
        digest = hashlib.sha256(parts.encode()).hexdigest()[:8]
        own = path.with_name(f"{path.stem}.{digest}{path.suffix}")
        log.warning(
            "%s: %s; it is left as it is, and %s read and saved instead; "
            "to choose the file, name another profile.path",
            path, error, own,
        )  # fmt: skip
        return own
    except ProfileError:  # not there yet, or damaged: who loads it deals with that
        pass
    return path
