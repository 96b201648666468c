"""``autospec serve``: load a model, open a port, serve until interrupted."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from prometheus_client import CollectorRegistry
from rich.console import Console

from autospec.bench.arms import Arm, ArmInputs, ArmSpec
from autospec.bench.command import checked_heads, kept_settings, load_model, tell_heads
from autospec.bench.live import say
from autospec.bench.phases import ADAPTIVE
from autospec.config import Settings, load_settings
from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import AutoSpecError
from autospec.metrics import Metrics
from autospec.progress import heartbeat
from autospec.serve.app import Service, create_app
from autospec.serve.counters import EngineCounters
from autospec.serve.engine_loop import EngineLoop

_GRACE_SECONDS = 5
_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 32


class PortTaken(AutoSpecError):
    """The address cannot be listened on."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``autospec serve`` was asked for. ``slots`` requests run at once, ``max_waiting`` more
    may wait; ``context`` is the most tokens of one, prompt included."""

    target: Path
    draft: Path | None = None
    heads: tuple[Path, ...] = ()
    policy: str = "default"
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    slots: int = 16
    max_waiting: int = 256
    context: int = 2048
    profile: Path | None = None
    journal: Path | None = None
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0


def run_serve(options: ServeOptions, console: Console) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises ConfigError, ModelError and PortTaken for what cannot be served.
    """
    settings = kept_settings(load_settings(options.policy), options.profile, options.journal, None)
    checked_heads(options.heads)
    with listen(options.host, options.port) as port, threads_left_to_the_engine() as threads:
        target = load_model(options.target, options.dtype, options.device, console)
        draft = None
        if options.draft is not None:
            draft = load_model(options.draft, options.dtype, options.device, console)
        tell_heads(options.heads, console)
        with heartbeat("preparing (compiles once)", lambda line: say(console, line)):
            service = make_service(options, settings, target, draft, threads)
        if (path := service.controller.settings.profile.path) is not None:
            start = "warm" if service.controller.is_warm else "cold"
            say(console, f"{start} start; what is learned is added to {path}")
        place = f"{options.host}:{port.getsockname()[1]}"
        say(console, f"serving {service.name} at http://{place}/v1 (metrics: /metrics)")
        server = uvicorn.Server(server_config(service))
        with contextlib.suppress(KeyboardInterrupt):  # raised again after a shutdown in good order
            server.run(sockets=[port])
    return 1 if service.engine.has_failed else 0


def server_config(service: Service) -> uvicorn.Config:
    """How uvicorn serves it."""
    return uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free. Raises PortTaken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        port_socket = socket.create_server((host, port), family=family)
        # Connections inherit it. Without it the first tokens wait 40 ms for an acknowledgment.
        port_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return port_socket
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None


@contextlib.contextmanager
def threads_left_to_the_engine() -> Iterator[int]:
    """The number of threads to compute with, of which this thread takes none meanwhile.

    OpenMP gives every thread that computes a team of its own. With more in all than there are
    cores, each team sleeps between two operations: steps took 1.6 times as long on two cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def make_service(
    options: ServeOptions,
    settings: Settings,
    target: CausalModel,
    draft: CausalModel | None,
    threads: int,
) -> Service:
    """The engine with its controller, ready to be started; it computes with so many threads."""
    registry = CollectorRegistry()
    inputs = ArmInputs(target, draft, options.slots, options.context, options.seed, options.heads)
    arm = Arm(ArmSpec(ADAPTIVE), inputs, settings, metrics=Metrics(registry))

    def prepare() -> None:
        torch.set_num_threads(threads)
        _warm_up(target)

    engine = EngineLoop(
        arm.decoder,
        EngineCounters(arm.decoder, registry),
        max_waiting=options.max_waiting,
        prepare=prepare,
    )
    controller = arm.controller
    assert controller is not None
    reader = copy.copy(target)
    reader.tokenizer = copy.deepcopy(target.tokenizer)
    return Service(options.name or target.name, engine, reader, registry, controller)


def _warm_up(target: CausalModel) -> None:
    """Let the runtime allocate and choose its kernels; the controller learns nothing from it."""
    size = min(_WARM_UP_PROMPT, target.context_tokens - _WARM_UP_TOKENS - 1)
    decoder = Decoder(target, slots=1, capacity=size + _WARM_UP_TOKENS + 1)
    decoder.generate([GenerationRequest([0] * size, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)])
