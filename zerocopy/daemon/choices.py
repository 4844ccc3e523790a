"""Several choices of one request: as many generations, side by side, their events in the order they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from zerocopy.daemon.ending import to_the_end
from zerocopy.daemon.requests import Event, GenerationRequest

_HELD_EVENTS: Final = 64  # then generations wait for the client, as a single one does

Generate = Callable[[GenerationRequest], AsyncGenerator[Event, None]]


async def generate_choices(
    generate: Generate, request: GenerationRequest, count: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """(choice, event). What one of them raises ends all. With a seed, each choice has the next one."""
    if count == 1:
        async with contextlib.aclosing(generate(request)) as events:
            async for only in events:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(_HELD_EVENTS)

    async def pump(index: int) -> None:
        try:
            async with contextlib.aclosing(generate(_nth(request, index))) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks, running = [asyncio.create_task(pump(index)) for index in range(count)], count
    try:
        while running:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await to_the_end(_all(tasks))


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _nth(request: GenerationRequest, index: int) -> GenerationRequest:
    sampling = request.sampling
    if sampling.seed is None:
        return request
    seeded = msgspec.structs.replace(sampling, seed=(sampling.seed + index) % (1 << 63))
    return msgspec.structs.replace(request, sampling=seeded)
