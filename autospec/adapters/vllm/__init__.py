"""AutoSpec inside vLLM: a scheduler class, a worker plugin, and nothing forked.

Use: ``vllm serve MODEL --scheduler-cls autospec.adapters.vllm.AutoSpecScheduler
--additional-config '{"autospec": {"policy": "default"}}' --speculative-config '{...}'``, or let
``configure(engine_args, ...)`` / ``autospec vllm-args`` fill these arguments in.

One step, where vLLM's synchronous scheduler runs (``modes.Mode.NOW``)::

    engine core                                       workers (all ranks, model runner V1)
    update_from_output(t-1): tokens are known
    schedule(t)
      AutoSpec's n-gram and suffix lookups offer
      Controller.plan: who drafts, k per request
      k tokens a request: lookup tokens as they are,
      zeros where the model shall draft
      SchedulerOutput + DraftOrder  ────────────────▶ execute_model(t)
    get_grammar_bitmask(t)                              the model drafts, as deep as was ordered,
      Controller.observe of t-1                         after catching up on what it skipped
                                                        target forward over k+1 tokens a request
    update_from_output(t)  ◀──────────────────────────  sampled tokens
      accepted, matched, seconds are noted

Learning from step t-1 waits for the moment when step t is with the workers, where it delays nobody
(unless they compute in this very process, as a single CPU worker does).

vLLM itself drafts at the end of step t-1, when nobody can know how many tokens are worth it. The
plugin defers that to the start of step t, so that the plan is made with the latest tokens, a step
without model drafts costs no draft forward, and what was skipped is caught up in one forward.

Where drafts cannot wait (asynchronous scheduling, pipeline parallelism, model runner V2, methods
that the plugin does not know: ``Mode.AHEAD``) the plan of step t is made while step t-1 is
scheduled: vLLM's own drafter then drafts that deep at the end of step t-1, and each request
verifies as many tokens as planned. Lookups cannot take part there, their tokens are not known yet.

The decision is made once, in the scheduler's process, and travels with SchedulerOutput: tensor and
pipeline ranks obey it. Data parallelism has one scheduler a rank and is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.adapters.vllm.arguments import configure
    from autospec.adapters.vllm.scheduler import AutoSpecAsyncScheduler, AutoSpecScheduler

__all__ = ["AutoSpecAsyncScheduler", "AutoSpecScheduler", "configure"]


def __getattr__(name: str) -> Any:
    """The public names, imported when asked for: only two of them need vLLM."""
    if name == "configure":
        from autospec.adapters.vllm.arguments import configure

        return configure
    if name in __all__:
        from autospec.adapters.vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
