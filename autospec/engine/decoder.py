"""The decoding loop: continuous batching with speculation decided per request and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autospec.engine.drafting import Kept, ModelProposer
from autospec.engine.model import CausalModel, token_tensor
from autospec.engine.request import Event, GenerationOutput, GenerationRequest
from autospec.engine.sampling import SamplingRows, filtered_probabilities, sample, uniforms
from autospec.engine.scheduler import Batch, Scheduler
from autospec.engine.speculation import Speculation, Speculator, StepController
from autospec.engine.verification import Verdict, verify_choices, verify_sampled
from autospec.errors import EngineError
from autospec.proposers.base import LookupProposer
from autospec.records import Int64Array

VERIFY_STREAM = 0
"""Random stream of verification and plain sampling."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the target said: per row of the batch that got logits, in row order."""

    rows: Int64Array  # [r] rows of the batch
    lengths: Int64Array  # [r] verified draft tokens
    verdict: Verdict  # [r]
    tokens: Int64Array  # [r, k + 1] kept drafts, then the target's own token
    hidden: torch.Tensor | None  # [tokens, layers, hidden_size]


class Decoder:
    """Runs many requests at once on one target, adding tokens to each of them in every step.

    ``proposers`` are in the controller's order; without a controller decoding is plain and they
    stay unused. ``capacity`` is the most tokens of a request, prompt included, and at most the
    target's context. ``prefill_tokens`` bounds the prompt tokens of one step. ``submit`` and
    ``cancel`` may be called from any thread, everything else from one.
    """

    def __init__(
        self,
        target: CausalModel,
        proposers: Sequence[LookupProposer | ModelProposer] = (),
        controller: StepController | None = None,
        *,
        slots: int = 16,
        capacity: int = 2048,
        prefill_tokens: int = 512,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if slots < 1 or capacity < 2 or prefill_tokens < 1:
            raise EngineError(
                f"slots is {slots}, capacity {capacity}, prefill_tokens {prefill_tokens}; "
                "they must be at least 1, 2 and 1"
            )
        self.target = target
        self.controller = controller
        self.capacity = min(capacity, target.context_tokens)
        self.cache = target.new_cache(slots, self.capacity)
        self._clock = clock
        self._scheduler = Scheduler(target, self.cache, prefill_tokens, seed, clock)
        self._speculator: Speculator | None = None
        if controller is not None:
            self._speculator = Speculator(target, self.cache, proposers, controller, clock)

    def submit(self, request: GenerationRequest) -> str:
        """Queue a request and return its id. Raises InputError for one that can never run."""
        return self._scheduler.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request before its next step; unknown and finished ids are ignored."""
        self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return self._scheduler.has_work

    @property
    def running_requests(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.running_requests

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a slot."""
        return self._scheduler.waiting_requests

    def step(self) -> list[Event]:
        """Add tokens to the running requests with one target forward; [] when there are none."""
        events = self._scheduler.admit(self._speculator)
        started = self._clock()
        batch = self._scheduler.schedule()
        if batch is None:
            return events
        speculation = None
        if self._speculator is not None and batch.num_decoding:
            speculation = self._speculator.speculate(
                batch, self._scheduler
            )  # offer, plan, draft, trim
        outcome = self._decide(batch, speculation)  # forward, verify
        committed = self._scheduler.commit(
            batch, outcome.rows, outcome.tokens, outcome.verdict.accepted, events
        )
        if self._speculator is not None:
            self._speculator.commit(self._kept(batch, outcome), self._scheduler.history)
        if speculation is not None and self._speculator is not None:
            decoding = batch.decoding[outcome.rows]
            self._speculator.observe(
                speculation,
                accepted=outcome.verdict.accepted[decoding],
                committed=committed[decoding],
                tokens=outcome.tokens[decoding],
                step_seconds=self._clock() - started,
                prefill_tokens=batch.prefill_tokens,
            )
        self._scheduler.release(events, self._speculator)
        return events

    def events(self) -> Iterator[Event]:
        """Step until nothing is left to do, handing out events as they come."""
        while self.has_work:
            yield from self.step()

    def run_until_idle(self) -> list[GenerationOutput]:
        """Step until nothing is left to do; the requests that ended meanwhile, in that order."""
        return [event.output for event in self.events() if event.output is not None]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Run ``requests`` beside whatever else is there; their outputs in the order given."""
        ids = [self.submit(request) for request in requests]
        outputs = {output.id: output for output in self.run_until_idle()}
        return [outputs[request_id] for request_id in ids]

    def _decide(self, batch: Batch, speculation: Speculation | None) -> _Outcome:
        """Run the target on the batch with its drafts and verify them."""
        history, device = self._scheduler.history, self.target.device
        num_rows = len(batch.slots)
        verify: Int64Array = np.zeros(num_rows, dtype=np.int64)
        if speculation is not None:
            verify[batch.decoding] = speculation.verify
            drafts = speculation.tokens
        else:
            drafts = np.zeros((batch.num_decoding, 0), dtype=np.int64)
        self._write_drafts(batch, drafts)
        counts = (batch.counts + verify).astype(np.int32)
        step = self.target.new_step(self.cache, batch.slots, batch.starts, counts)
        tokens = token_tensor(history.tokens.reshape(-1)[step.write_positions], device)

        wanted = np.where(batch.completes, 1 + verify, 0)  # logits per row
        rows = np.flatnonzero(batch.completes)
        lengths, ends = verify[rows], step.offsets[1:][rows]
        offsets: Int64Array = np.cumsum(wanted[rows]) - wanted[rows]
        packed = np.repeat(ends - wanted[rows] - offsets, wanted[rows]) + np.arange(
            int(wanted.sum())
        )
        layers = self._speculator.hidden_layers if self._speculator is not None else ()
        result = self.target.forward(tokens, step, torch.from_numpy(packed).to(device), layers)

        padded: Int64Array = np.zeros((len(rows), drafts.shape[1]), dtype=np.int64)
        padded[batch.decoding[rows]] = drafts
        sampling = self._scheduler.sampling.take(batch.slots[rows].astype(np.int64))
        verdict = self._verify(
            result.logits, offsets, padded, lengths, sampling, batch.decoding[rows], speculation
        )
        committed = np.concatenate((padded, np.zeros((len(rows), 1), dtype=np.int64)), axis=1)
        committed[np.arange(len(rows)), verdict.accepted] = verdict.final
        return _Outcome(rows, lengths, verdict, committed, result.hidden)

    def _write_drafts(self, batch: Batch, drafts: Int64Array) -> None:
        """Put drafts behind the known tokens, where the packed forward reads them.

        Columns behind a row's last valid draft hold whatever they held; nobody reads them.
        """
        history = self._scheduler.history
        slots = batch.slots[batch.decoding]
        columns = history.lengths[slots][:, None] + np.arange(drafts.shape[1])
        inside = columns < history.tokens.shape[1]
        rows = np.broadcast_to(slots[:, None], columns.shape)
        history.tokens[rows[inside], columns[inside]] = drafts[inside]

    def _verify(
        self,
        logits: torch.Tensor,  # [packed rows, vocab]
        offsets: Int64Array,  # [r]
        drafts: Int64Array,  # [r, k]
        lengths: Int64Array,  # [r]
        sampling: SamplingRows,  # [r]
        decoding: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],  # [r]
        speculation: Speculation | None,
    ) -> Verdict:
        greedy = np.flatnonzero(sampling.temperature == 0.0)
        if len(greedy) == len(offsets):
            return verify_choices(_likeliest(logits), offsets, drafts, lengths)
        draft_row: Int64Array = np.full(drafts.shape, -1, dtype=np.int64)
        if speculation is not None:
            draft_row[decoding] = speculation.probs_row
        is_drawn = (draft_row >= 0).any(axis=1)  # rows whose drafts were drawn at random
        sampled = np.flatnonzero((sampling.temperature > 0.0) & ~is_drawn)
        drawn = np.flatnonzero((sampling.temperature > 0.0) & is_drawn)
        accepted: Int64Array = np.zeros(len(offsets), dtype=np.int64)
        final: Int64Array = np.zeros(len(offsets), dtype=np.int64)
        for rows in (greedy, sampled, drawn):
            if not len(rows):
                continue
            sizes = lengths[rows] + 1
            own_offsets: Int64Array = np.cumsum(sizes) - sizes
            packed = np.repeat(offsets[rows] - own_offsets, sizes) + np.arange(int(sizes.sum()))
            own_logits = logits.index_select(0, torch.from_numpy(packed).to(logits.device))
            settings = sampling.take(np.repeat(rows, sizes))
            if rows is drawn:
                numbers = uniforms(sampling.take(rows), drafts.shape[1] + 1, VERIFY_STREAM)
                verdict = verify_sampled(
                    filtered_probabilities(own_logits, settings),
                    own_offsets,
                    drafts[rows],
                    lengths[rows],
                    speculation.probs if speculation is not None else None,
                    draft_row[rows],
                    torch.from_numpy(numbers).to(logits.device),
                )
            else:
                ahead = np.arange(len(packed)) - np.repeat(own_offsets, sizes)
                choices = (
                    _likeliest(own_logits)
                    if rows is greedy
                    else _drawn(own_logits, settings.ahead(ahead))
                )
                verdict = verify_choices(choices, own_offsets, drafts[rows], lengths[rows])
            accepted[rows], final[rows] = verdict.accepted, verdict.final
        return Verdict(accepted, final)

    def _kept(self, batch: Batch, outcome: _Outcome) -> Kept:
        """The positions that this step added for good, with their hidden states."""
        counts = batch.counts.copy()
        counts[outcome.rows] += outcome.verdict.accepted.astype(np.int32)
        hidden = outcome.hidden
        if hidden is not None:
            sizes = batch.counts.astype(np.int64)
            sizes[outcome.rows] += outcome.lengths
            begins = np.cumsum(sizes) - sizes
            ends = np.cumsum(counts)
            index = np.repeat(begins - (ends - counts), counts) + np.arange(int(ends[-1]))
            hidden = hidden.index_select(0, torch.from_numpy(index).to(hidden.device))
        return Kept(batch.slots, batch.starts, counts, hidden)


def _likeliest(logits: torch.Tensor) -> Int64Array:
    """The first of the likeliest tokens of each row; on CPU several times faster than argmax."""
    choices: Int64Array = logits.max(dim=-1).indices.cpu().numpy()
    return choices


def _drawn(logits: torch.Tensor, settings: SamplingRows) -> Int64Array:
    """A token of each row, drawn with the random number of its position."""
    numbers = torch.from_numpy(uniforms(settings, 1, VERIFY_STREAM)[:, 0]).to(logits.device)
    tokens: Int64Array = sample(filtered_probabilities(logits, settings), numbers).cpu().numpy()
    return tokens
