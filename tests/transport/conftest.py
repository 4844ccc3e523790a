from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from transport.quic_choice import built

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["tcp", "quic"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each in turn, for what the interface of links promises."""
    if request.param == "quic" and not built():
        pytest.skip("ngtcp2 is not installed")
    return str(request.param)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on each of the two loops; unhandled errors of callbacks fail the test."""
    main: Any = asyncio.run if request.param == "asyncio" else uvloop.run

    def start(work: Coroutine[Any, Any, None]) -> None:
        async def watched() -> None:
            complaints: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
            await work
            assert not complaints, complaints

        main(watched())

    return start
