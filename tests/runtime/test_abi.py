"""A library that is not known is refused before anything is passed to it by value."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from zerocopy.runtime.base import EngineError
from zerocopy.runtime.llama import abi

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the fingerprint is for x86-64")


def test_the_pinned_library_is_known_by_its_digest() -> None:
    library = abi.open_library()
    assert library.sha256 in abi.KNOWN_FILES
    assert library.version == abi.LLAMA_0_6.version
    assert abi.open_library() is library


def test_the_pinned_version_is_the_one_the_project_declares() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"{abi.PACKAGE}=={abi.PACKAGE_VERSION}"' in text


def test_parameter_structs_have_the_sizes_of_0_6() -> None:
    ffi = abi.open_library().ffi
    assert ffi.sizeof("struct llama_context_params") == 168
    assert ffi.sizeof("struct llama_model_params") == 80
    assert ffi.offsetof("struct llama_context_params", "embeddings") == 136


@X86
def test_the_pinned_library_has_the_known_fingerprint() -> None:
    assert abi.fingerprint(abi.locate()) == abi.LLAMA_0_6


@X86
def test_our_declarations_read_the_defaults_where_the_engine_wrote_them() -> None:
    """Values, not only extents: a struct with two fields swapped has the same size."""
    c = abi.open_library().c
    p = c.llama_context_default_params()
    assert (p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_outputs_max_per_seq) == (512, 2048, 512, 1, 1)
    assert (p.rope_scaling_type, p.flash_attn_type, p.type_k, p.type_v, p.added_in_0_6) == (-1, -1, 1, 1, 0)
    assert (p.embeddings, p.offload_kqv, p.no_perf, p.op_offload, p.swa_full, p.kv_unified) == (
        False, True, True, True, True, False,
    )  # fmt: skip
    assert (p.defrag_thold, p.yarn_ext_factor, p.n_samplers) == (-1.0, -1.0, 0)
    m = c.llama_model_default_params()
    assert (m.n_gpu_layers, m.use_extra_bufts, m.load_mtp, m.vocab_only) == (-1, True, False, False)


@X86
def test_a_file_of_another_digest_passes_by_its_fingerprint(tmp_path: Path) -> None:
    abi.check_profile(abi.open_library(), "0" * 64)


@X86
@pytest.mark.parametrize(
    "change", [{"version": "0.5.0"}, {"context_bytes": 160}, {"context_holes": ()}, {"defaults": "0" * 16}]
)
def test_an_unknown_fingerprint_is_refused_with_both_values(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = msgspec.structs.replace(abi.LLAMA_0_6, **change)
    monkeypatch.setattr(abi, "fingerprint", lambda path: found)
    with pytest.raises(EngineError) as error:
        abi.check_profile(abi.open_library(), "0" * 64)
    assert error.value.reason == "engine-unknown"
    assert str(found) in str(error.value) and str(abi.LLAMA_0_6) in str(error.value)
    assert abi.PACKAGE_VERSION in str(error.value)


def test_elsewhere_only_known_files_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library = abi.open_library()
    monkeypatch.setattr(abi.platform, "machine", lambda: "arm64")
    abi.check_profile(library, library.sha256)
    with pytest.raises(EngineError, match="only files known by sha256") as error:
        abi.check_profile(library, "f" * 64)
    assert error.value.reason == "engine-unknown"


def test_a_library_without_our_functions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any shared object will do: the C library, which has none of them."""
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if re.search(r"libc[.-].*so", line))
    with pytest.raises(EngineError, match=r"does not export.*llama_decode") as error:
        abi.Library(Path(line.split()[-1]))
    assert error.value.reason == "engine-unknown"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "PACKAGE", "no_such_package_here")
    with pytest.raises(EngineError, match="pip install") as error:
        abi.locate()
    assert error.value.reason == "engine-missing"


def test_only_errors_are_kept_and_only_the_last_few() -> None:
    library = abi.open_library()
    library._log.clear()
    for level, text in [
        *[(4, b"error %d\n" % i) for i in range(50)],
        (2, b"info\n"),
        (3, b"warning\n"),
        (5, b"more\n"),
    ]:
        library._callback(level, library.ffi.new("char[]", text), library.ffi.NULL)
    message = str(library.failure("test", "something failed"))
    assert message.endswith("error 46 / error 47 / error 48 / error 49")
    assert str(library.failure("test", "again")).endswith("nothing")
    library._callback(4, library.ffi.new("char[]", b"x" * 5000), library.ffi.NULL)
    assert len(str(library.failure("test", "long"))) < 600


@pytest.mark.skipif(platform.system() != "Linux", reason="OpenMP is libgomp on Linux")
@pytest.mark.parametrize(
    ("given", "shared", "spins"),
    [
        ({}, True, "400"),
        ({}, False, "7000"),
        ({"OMP_WAIT_POLICY": "passive"}, False, "0"),
        ({"GOMP_SPINCOUNT": "7"}, True, "7"),
    ],
)
def test_engine_threads_look_shortly_for_each_other_and_shorter_on_shared_cores(
    given: dict[str, str], shared: bool, spins: str
) -> None:
    """Asked of OpenMP itself, in a process of its own: it reads its settings when it is loaded."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_DISPLAY_ENV": "verbose"} | given
    script = (
        "import os; from zerocopy.runtime.llama.abi import open_library; before = dict(os.environ); "
        f"open_library(shared_cores={shared}); assert dict(os.environ) == before, 'children would inherit it'"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown.stderr
