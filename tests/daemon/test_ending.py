from __future__ import annotations

import asyncio

import pytest

from tests.daemon.wires import run
from zerocopy.daemon.ending import to_the_end


class Ending:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.done = False

    async def work(self) -> int:
        await self.go.wait()
        self.done = True
        return 7


def test_its_result_is_the_works() -> None:
    async def scenario() -> None:
        ending = Ending()
        ending.go.set()
        assert await to_the_end(ending.work()) == 7

    run(scenario())


@pytest.mark.parametrize("times", [1, 3])
def test_the_work_is_done_before_the_cancellation_is_heard(times: int) -> None:
    async def scenario() -> None:
        ending = Ending()
        task = asyncio.create_task(to_the_end(ending.work()))
        for _ in range(times):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        ending.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ending.done

    run(scenario())


@pytest.mark.parametrize("cancel", [False, True])
def test_an_error_of_the_work_is_heard(cancel: bool) -> None:
    async def fails() -> None:
        await asyncio.sleep(0.02)
        raise ValueError("broken")

    async def scenario() -> None:
        task = asyncio.create_task(to_the_end(fails()))
        await asyncio.sleep(0)
        if cancel:
            task.cancel()
        with pytest.raises(ValueError, match="broken"):
            await task

    run(scenario())
