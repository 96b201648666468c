"""The ``autospec`` command: one file per command; importing a file registers it."""

from autospec.cli import (
    bench,
    check,
    demo,
    export,
    policy,
    profile,
    record,
    replay,
    report,
    serve,
    train_proposer,
    tune,
    vllm_args,
    warm_up,
)
from autospec.cli.app import main

__all__ = [
    "bench",
    "check",
    "demo",
    "export",
    "main",
    "policy",
    "profile",
    "record",
    "replay",
    "report",
    "serve",
    "train_proposer",
    "tune",
    "vllm_args",
    "warm_up",
]
