"""The decoder's thread, and the streams through which its events reach an asyncio server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable

from autospec.engine.decoder import Decoder
from autospec.engine.request import Event, GenerationRequest
from autospec.errors import EngineError
from autospec.serve.counters import EngineCounters

log = logging.getLogger("autospec")


class QueueFull(EngineError):
    """As many requests wait as may."""


class EngineStopped(EngineError):
    """The engine failed or is shutting down; nothing runs any more."""


class TokenStream:
    """The events of one request, in order; ``close`` cancels it if it has not ended."""

    def __init__(self, request_id: str, engine: EngineLoop) -> None:
        self.request_id = request_id
        self._engine = engine
        self._events: asyncio.Queue[Event | EngineStopped] = asyncio.Queue()
        self._ended = False

    def put(self, item: Event | EngineStopped) -> None:
        """Called in the server's thread."""
        self._events.put_nowait(item)

    def close(self) -> None:
        """Nobody reads on. May be called again."""
        if not self._ended:
            self._ended = True
            self._engine.cancel(self.request_id)

    async def events(self) -> AsyncIterator[Event]:
        """Until the last event. Raises EngineStopped."""
        while not self._ended:
            item = await self._events.get()
            if isinstance(item, EngineStopped):
                self._ended = True
                raise item
            self._ended = item.output is not None
            yield item


class EngineLoop:
    """Steps the decoder in a thread of its own while there is work.

    ``start`` and everything else are called in the thread of one asyncio loop; only ``prepare`` and
    the steps, and what the controller does in them, happen in the engine's thread. A fault there
    ends every request with EngineStopped.
    """

    def __init__(
        self,
        decoder: Decoder,
        counters: EngineCounters,
        *,
        max_waiting: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.decoder = decoder
        self.counters = counters
        self.max_waiting = max_waiting
        self._prepare = prepare
        self._streams: dict[str, TokenStream] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing runs any more; None while all is well."""
        if self._failure is None and self._stopping:
            return "the server is shutting down"
        return self._failure

    @property
    def has_failed(self) -> bool:
        """Whether a step ended in a fault."""
        return self._failure is not None

    def start(self) -> None:
        """Begin to step; needs a running asyncio loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="autospec-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End every request and the thread, after the step that is under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail(EngineStopped("the server is shutting down"))

    def open(self, request: GenerationRequest) -> TokenStream:
        """Queue a request. Raises QueueFull, EngineStopped, and InputError for a wrong request."""
        if self.failure is not None:
            raise EngineStopped(self.failure)
        decoder = self.decoder  # those that wait may only do so until the next step admits them
        present = decoder.running_requests + decoder.waiting_requests
        if present >= decoder.cache.slots + self.max_waiting:
            self.counters.add_refused()
            raise QueueFull(f"{self.max_waiting} requests are waiting already; try again later")
        stream = TokenStream(request.id, self)
        self._streams[request.id] = stream
        try:
            self.decoder.submit(request)
        except BaseException:
            del self._streams[request.id]
            raise
        self._notify()
        return stream

    def cancel(self, request_id: str) -> None:
        """Forget a request and end it before its next step."""
        self._streams.pop(request_id, None)
        self.decoder.cancel(request_id)
        self._notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            self._give_up(error)
            return
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self.decoder.has_work)
                if self._stopping:
                    return
            try:
                events = self.decoder.step()
            except Exception as error:
                self._give_up(error)
                return
            for event in events:
                self.counters.add_tokens(len(event.token_ids))
                if event.output is not None:
                    self.counters.add_ended(event.output)
            self._in_loop(events)

    def _give_up(self, error: Exception) -> None:
        log.error("the engine failed; the server must be started again", exc_info=error)
        self._failure = f"the engine failed: {type(error).__name__}: {error}"
        self._in_loop(EngineStopped(self._failure))

    def _in_loop(self, what: list[Event] | EngineStopped) -> None:
        assert self._loop is not None
        try:
            if isinstance(what, EngineStopped):
                self._loop.call_soon_threadsafe(self._fail, what)
            elif what:
                self._loop.call_soon_threadsafe(self._deliver, what)
        except RuntimeError:  # the server's loop is closed: nobody listens
            log.debug("events after the end of the server")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.output is not None:
                del self._streams[event.request_id]
            stream.put(event)

    def _fail(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
