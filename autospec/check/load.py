"""The load that is put on a service: open loops at stepped rates, and what measures its steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from autospec.check.client import Answer, ServiceClient, Wanted
from autospec.prompts import Message, Prompt

LADDER_TOKENS = 24
_LADDER_WORDS = (
    "rivers", "clocks", "bread", "winter", "maps", "glass", "bridges", "birds",
    "salt", "letters", "islands", "engines", "gardens", "paper", "storms", "stars",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """What came back of one level; ``truncated`` when a bound stopped it before its time."""

    answers: tuple[Answer, ...]
    truncated: bool


async def open_loop(
    client: ServiceClient,
    requests: Sequence[Wanted],
    *,
    rate: float,
    duration_seconds: float,
    most_requests: int,
    most_in_flight: int,
    seed: int,
    arrived: Callable[[int], None] = lambda count: None,
) -> Sent:
    """Requests at Poisson arrivals of ``rate`` per second, whether or not earlier ones have ended.

    Prompts come in a shuffled order, again and again. Ends when all that was sent has ended. No
    more than ``most_in_flight`` are open at once: a service that far behind is saturated.
    """
    random_numbers = random.Random(f"{seed}:{rate}")
    order = list(requests)
    random_numbers.shuffle(order)
    loop = asyncio.get_running_loop()
    begin = due = loop.time()
    tasks: list[asyncio.Task[Answer]] = []
    truncated = False
    while due - begin < duration_seconds:
        await asyncio.sleep(max(0.0, due - loop.time()))
        open_now = sum(not task.done() for task in tasks)
        if len(tasks) >= most_requests or open_now >= most_in_flight:
            truncated = True
            break
        wanted = order[len(tasks) % len(order)]
        tasks.append(asyncio.create_task(client.send(wanted)))
        arrived(len(tasks))
        due += random_numbers.expovariate(rate)
    return Sent(await _all_of(tasks), truncated)


async def together(client: ServiceClient, count: int, seed: int) -> tuple[Answer, ...]:
    """``count`` short prompts at once, each with an output of ``LADDER_TOKENS`` that never ends
    early and does not repeat itself: how long a step takes with so many requests in it."""
    requests = [
        Wanted(
            Prompt(
                f"ladder-{number}",
                "ladder",
                (Message("user", _ladder_text(seed + number)),),
            ),
            LADDER_TOKENS,
            temperature=1.0,
        )
        for number in range(count)
    ]
    return await _all_of([asyncio.create_task(client.send(each)) for each in requests])


async def read_alone(
    client: ServiceClient, lengths: Sequence[int], rounds: int, seed: int
) -> tuple[tuple[Answer, ...], ...]:
    """Prompts of so many words, one after the other, each with one token for an answer; by length.

    No two begin alike, so that none is found in a cache of prefixes.
    """
    random_numbers = random.Random(f"reading:{seed}")
    found: list[list[Answer]] = [[] for _ in lengths]
    for number in range(rounds):
        for length, answers in zip(lengths, found, strict=True):
            text = " ".join(random_numbers.choices(_LADDER_WORDS, k=length))
            prompt = Prompt(f"reading-{length}-{number}", "ladder", (Message("user", text),))
            answers.append(await client.send(Wanted(prompt, 1)))
    return tuple(map(tuple, found))


def _ladder_text(number: int) -> str:
    first = _LADDER_WORDS[number % len(_LADDER_WORDS)]
    second = _LADDER_WORDS[(number // len(_LADDER_WORDS) + 5) % len(_LADDER_WORDS)]
    return f"Write a poem about {first} and {second}."


async def _all_of(tasks: Sequence[Awaitable[Answer]]) -> tuple[Answer, ...]:
    return tuple(await asyncio.gather(*tasks))
