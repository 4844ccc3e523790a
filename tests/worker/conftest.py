"""One tiny engine per family and session; its lanes are cleared between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.worker.stage import Stage
from zerocopy.runtime import models
from zerocopy.runtime.llama.engine import LlamaOptions, LlamaRuntime

TINY = LlamaOptions(n_ctx=512, chunk_tokens=32, page_tokens=16, threads=1, sequences=4)

OpenStage = Callable[..., Stage]


@pytest.fixture(scope="session")
def runtime_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LlamaRuntime]]:
    folder = tmp_path_factory.mktemp("worker")
    opened: dict[str, LlamaRuntime] = {}

    def find(family: str) -> LlamaRuntime:
        if family not in opened:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ZC_CACHE", str(folder / "cache"))
                opened[family] = LlamaRuntime(models.make(family, folder / f"{family}.gguf"), TINY)
        return opened[family]

    yield find
    for runtime in opened.values():
        runtime.close()


@pytest.fixture
def stage(runtime_of: Callable[[str], LlamaRuntime]) -> Iterator[OpenStage]:
    """stage(family, ring_bytes=...)"""
    opened: list[Stage] = []

    def build(family: str, **options: int) -> Stage:
        opened.append(Stage(runtime_of(family), **options))
        return opened[-1]

    yield build
    for one in opened:
        one.close()
