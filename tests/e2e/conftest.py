"""Tiny models once per session, one pair of hosts that all share, a cache of file digests that is not the user's.

What depends on `transport` runs over both; `TEST_TRANSPORTS=quic` in the environment leaves one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pair import Pair, make_pair
from transport.quic_choice import built
from zerocopy.cli.hosts import Hosts
from zerocopy.runtime import models

ModelFile = Callable[..., Path]
StartPair = Callable[..., Any]


@pytest.fixture(scope="session", params=os.environ.get("TEST_TRANSPORTS", "tcp,quic").split(","))
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "quic" and not built():
        pytest.skip("ngtcp2 is not installed")
    return name


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    folder = tmp_path_factory.mktemp("models")

    def find(family: str, *, seed: int = 0, scale: int = 1) -> Path:
        path = folder / f"{family}-{seed}-{scale}.gguf"
        return path if path.exists() else models.make(family, path, seed=seed, scale=scale)

    return find


@pytest.fixture(scope="session")
def start_pair(model_file: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> StartPair:
    """`with start_pair(family, **how) as pair`: both hosts ready; both ended at the end."""

    @contextmanager
    def started(family: str = "nemotron_h_moe+mtp", *, model: Path | None = None, **how: Any) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp("hosts")
        with Hosts(folder) as hosts:
            pair = make_pair(hosts, model or model_file(family), folder, **how)
            pair.start()
            yield pair

    return started


@pytest.fixture(scope="session")
def pair(start_pair: StartPair, transport: str) -> Iterator[Pair]:
    """Two hosts with the model that has every component; nobody kills or plans anything here."""
    with start_pair(transport=transport) as ready:
        yield ready
