"""The ``autospec`` command: one file per command; importing a file registers it."""

from autospec.cli import bench, demo, policy, profile, record, replay
from autospec.cli.app import main

__all__ = ["bench", "demo", "main", "policy", "profile", "record", "replay"]
