"""Tiny models once per session, runtimes that are closed, and a cache of file digests that is not the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerocopy.runtime import models
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime

TINY = LlamaOptions(n_ctx=512, chunk_tokens=64, page_tokens=32, threads=1)

ModelFile = Callable[[str], Path]
OpenRuntime = Callable[..., LlamaRuntime]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    folder = tmp_path_factory.mktemp("models")

    def find(family: str) -> Path:
        path = folder / f"{family}.gguf"
        return path if path.exists() else models.make(family, path)

    return find


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def open_runtime(model_file: ModelFile) -> Iterator[OpenRuntime]:
    """open_runtime(family, options=TINY)"""
    opened: list[LlamaRuntime] = []

    def open_one(family: str, options: LlamaOptions = TINY) -> LlamaRuntime:
        opened.append(LlamaRuntime(model_file(family), options))
        return opened[-1]

    yield open_one
    for runtime in opened:
        runtime.close()
