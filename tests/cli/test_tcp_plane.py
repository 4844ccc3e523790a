"""`benches.tcp_plane`: what it counts is what arrived."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from benches.tcp_plane import mapped, move
from tests.transport.hosts import linked
from transport.link import LinkError

PAGE = 1 << 20


def test_what_is_counted_is_whole_pages_that_arrived(tmp_path: Path) -> None:
    """With less than a page asked for, an eighth of what moved was counted."""

    async def work() -> None:
        async with linked(tmp_path, "tcp") as (_, b, link):
            assert await move(link, mapped(4 * PAGE), PAGE // 8, PAGE) == PAGE == link.stats.page_bytes_sent
            assert await move(link, mapped(4 * PAGE), 9 * PAGE + 5, PAGE) == 9 * PAGE
            assert len(b.landings.published) == 10

    uvloop.run(work())


def test_pages_that_did_not_arrive_are_no_measurement(tmp_path: Path) -> None:
    """They counted, and failed fast."""

    async def work() -> None:
        async with linked(tmp_path, "tcp") as (_, _, link):
            moving = asyncio.ensure_future(move(link, mapped(4 * PAGE), 4 * PAGE, PAGE))
            await asyncio.sleep(0)
            link.close("cut")
            with pytest.raises(LinkError):
                await moving

    uvloop.run(work())
