"""``autospec tune`` from end to end."""

from __future__ import annotations

import importlib.util

from rich.console import Console

from autospec.config import load_settings
from autospec.errors import InputError, MissingDependency
from autospec.profile.file import load_profile
from autospec.report import check_report
from autospec.tune.on_traces import traced_data, tune_on_traces
from autospec.tune.tuner import TuneOptions
from autospec.tune.vllm_engine import require_vllm

ENGINES = ("embedded", "replay", "vllm")


def run_tune(options: TuneOptions, console: Console) -> int:
    """Tune, save the profile, show what came out; returns the exit code.

    Raises InputError, ConfigError, ModelError or MissingDependency before anything is measured.
    """
    if options.engine not in ENGINES:
        raise InputError(f"--engine: {options.engine!r}; there are {', '.join(ENGINES)}")
    if options.out.is_dir() or not options.out.parent.is_dir():
        raise InputError(f"--out: {options.out} cannot be written; give a file in a folder")
    require_skopt()
    if options.report_path is not None:
        check_report(options.report_path)
    older = None if options.warm_start is None else load_profile(options.warm_start)
    if older is not None and older.tuned is None:
        raise InputError(f"--warm-start: {options.warm_start} was never tuned")
    policy = load_settings(options.policy)
    if options.engine == "replay":
        return tune_on_traces(options, traced_data(options, policy), older, console)
    if options.engine == "vllm":
        require_vllm()
        from autospec.tune.on_vllm import tune_on_vllm  # torch takes seconds to load

        return tune_on_vllm(options, policy, older, console)
    if options.target is None or options.prompts is None:
        raise InputError("--engine embedded needs --target and --prompts")
    from autospec.tune.on_engine import tune_on_engine  # torch takes seconds to load

    return tune_on_engine(options, policy, older, console)


def require_skopt() -> None:
    """Raises MissingDependency without scikit-optimize."""
    if importlib.util.find_spec("skopt") is None:
        raise MissingDependency(
            "autospec tune needs scikit-optimize, which is not installed; "
            "do: pip install 'autospec-llm[tune]'"
        )
