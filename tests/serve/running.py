"""A tiny model with words for tokens, and the real server around it, on a port of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from autospec.bench.command import kept_settings
from autospec.config import load_settings
from autospec.engine.model import CausalModel
from autospec.serve.app import Service
from autospec.serve.server import ServeOptions, listen, make_service, server_config
from tests.word_folders import word_tokenizer

WORDS = 96
CONTEXT = 2048
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def save_tiny_model(
    path: Path, *, hidden: int = 32, layers: int = 2, attends: bool = True, seed: int = 3
) -> None:
    """A random model in float64 whose token i reads ``wi``; nothing ends it but the limit.

    One that does not attend sees its last token alone: greedily it runs into a circle.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.float64)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = {"embed_tokens": 1.0, "lm_head": 0.4}.get(name.split(".")[-2], 0.25)
                parameter.normal_(0.0, scale)
            if not attends and "o_proj" in name:
                parameter.zero_()
    model.save_pretrained(path)
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at ``url``, which ends in /v1."""

    url: str
    service: Service

    @property
    def root(self) -> str:
        """Where /metrics and /health are."""
        return self.url.removesuffix("/v1")


@contextlib.contextmanager
def running(options: ServeOptions) -> Iterator[Running]:
    """The server in a thread, until the block ends; then it has been shut down in good order."""
    settings = kept_settings(load_settings(options.policy), options.profile, options.journal, None)
    target = CausalModel.load(options.target)
    service = make_service(options, settings, target, None, torch.get_num_threads())
    with listen("127.0.0.1", 0) as port:
        server = uvicorn.Server(server_config(service))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [port]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server ended before it began"
                time.sleep(0.01)
            yield Running(f"http://127.0.0.1:{port.getsockname()[1]}/v1", service)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()
