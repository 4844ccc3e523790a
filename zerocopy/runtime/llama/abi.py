"""The one place that knows how libllama is laid out in memory, and that refuses a library it does not know.

The library is the shared object of the pinned `xllamacpp` package, opened through cffi without importing the package.
llama.cpp has no stable ABI and its version string does not name one, so before the first real call the file must
match a known profile: by its sha256, else by a fingerprint of what its default-parameter functions write.
Owns declarations, the check and the log ring (bounded); owns no model and no context.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from cffi import FFI

from zerocopy.runtime.base import EngineError
from zerocopy.runtime.file_digest import file_sha256

PACKAGE: Final = "xllamacpp"
PACKAGE_VERSION: Final = "2026.10.11549"
BLOB_FORMAT: Final = "0.6"  # state blobs of 0.5 lack the two rotation words and are refused by 0.6

_LOG_LINES: Final = 4
_LOG_LINE_BYTES: Final = 500
_ERROR: Final = 4  # GGML_LOG_LEVEL_ERROR; warnings of every context would crowd the errors out

# llama.cpp 0.6.0-dev as built into the pinned package. Enums are plain int32_t: cffi needs sizes, not names.
CDEF: Final = """
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
struct llama_model; struct llama_context; struct llama_vocab; struct llama_memory_i; struct llama_batch_ext;

struct llama_model_params {
    void * devices; void * tensor_buft_overrides;
    int32_t n_gpu_layers; int32_t split_mode; int32_t load_mode; int32_t lazy_mode; int32_t main_gpu;
    float * tensor_split; void * progress_callback; void * progress_callback_user_data; void * kv_overrides;
    bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; uint32_t n_rs_seq;
    uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq; int32_t n_threads; int32_t n_threads_batch;
    int32_t ctx_type; int32_t rope_scaling_type; int32_t pooling_type; int32_t attention_type; int32_t flash_attn_type;
    float rope_freq_base; float rope_freq_scale; float yarn_ext_factor; float yarn_attn_factor;
    float yarn_beta_fast; float yarn_beta_slow; uint32_t yarn_orig_ctx; float defrag_thold;
    void * cb_eval; void * cb_eval_user_data; int32_t type_k; int32_t type_v;
    void * abort_callback; void * abort_callback_data;
    uint64_t added_in_0_6;  /* absent from the 0.5 header; written as zero by the default-parameter function */
    bool embeddings; bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; bool kv_unified;
    void * samplers; size_t n_samplers; struct llama_context * ctx_other;
};
struct llama_batch {
    int32_t n_tokens; llama_token * token; float * embd; llama_pos * pos;
    int32_t * n_seq_id; llama_seq_id ** seq_id; int8_t * logits;
};
struct llama_embd { const float * data; size_t n_rows; size_t n_embd; };
struct llama_perf_context_data {
    double t_start_ms; double t_load_ms; double t_p_eval_ms; double t_eval_ms;
    int32_t n_p_eval; int32_t n_eval; int32_t n_reused;
};

const char * llama_version(void);
const char * llama_print_system_info(void);
void llama_backend_init(void);
void llama_log_set(void (*callback)(int32_t level, const char * text, void * user_data), void * user_data);
size_t ggml_row_size(int32_t type, int64_t n);

struct llama_model_params llama_model_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params);
void llama_model_free(struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
int32_t llama_model_n_layer_nextn(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);

const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
bool llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_eos(const struct llama_vocab * vocab);
int llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
const char * llama_vocab_get_text(const struct llama_vocab * vocab, llama_token token);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length,
                             int32_t lstrip, bool special);

struct llama_context_params llama_context_default_params(void);
struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);
void llama_free(struct llama_context * ctx);
uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context * ctx, int32_t i);
struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
void llama_perf_context_reset(struct llama_context * ctx);

struct llama_memory_i * llama_get_memory(const struct llama_context * ctx);
void llama_memory_clear(struct llama_memory_i * mem, bool data);
bool llama_memory_seq_rm(struct llama_memory_i * mem, llama_seq_id seq, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(struct llama_memory_i * mem, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
llama_pos llama_memory_seq_pos_max(struct llama_memory_i * mem, llama_seq_id seq);
size_t llama_state_seq_get_size_ext(struct llama_context * ctx, llama_seq_id seq, uint32_t flags);
size_t llama_state_seq_get_data_ext(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq,
                                    uint32_t flags);
size_t llama_state_seq_set_data_ext(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq,
                                    uint32_t flags);

struct llama_batch_ext * llama_batch_ext_init(struct llama_context * ctx);
void llama_batch_ext_free(struct llama_batch_ext * batch);
void llama_batch_ext_clear(struct llama_batch_ext * batch);
int32_t llama_batch_ext_add_token(struct llama_batch_ext * batch, llama_seq_id seq, llama_token id);
bool llama_batch_ext_set_embd_state(struct llama_batch_ext * batch, int32_t idx, struct llama_embd embd);
bool llama_batch_ext_set_output_logits(struct llama_batch_ext * batch, int32_t idx, bool value);
bool llama_batch_ext_set_pos(struct llama_batch_ext * batch, int32_t idx, const llama_pos * pos);
int32_t llama_process(struct llama_context * ctx, int32_t type, struct llama_batch_ext * batch);

/* llama-ext.h: C++ linkage, so their mangled names */
void _Z26llama_set_embeddings_nextnP13llama_contextbb(struct llama_context * ctx, bool value, bool masked);
float * _Z26llama_get_embeddings_nextnP13llama_context(struct llama_context * ctx);

/* ggml's scheduler of a context, and the switch of its CPU backend to kernels that see one row at a time */
struct ggml_backend_sched; struct ggml_backend;
struct ggml_backend_sched * _ZNK13llama_context9get_schedEv(const struct llama_context * ctx);
int ggml_backend_sched_get_n_backends(struct ggml_backend_sched * sched);
struct ggml_backend * ggml_backend_sched_get_backend(struct ggml_backend_sched * sched, int i);
bool ggml_backend_is_cpu(struct ggml_backend * backend);
void ggml_backend_cpu_set_use_ref(struct ggml_backend * backend_cpu, bool use_ref);
"""


class Fingerprint(msgspec.Struct, frozen=True):
    """What tells two ABIs apart without knowing the file: what the default-parameter functions do to memory."""

    version: str
    context_bytes: int  # written by llama_context_default_params, holes included
    context_holes: tuple[int, ...]
    model_bytes: int
    model_holes: tuple[int, ...]
    defaults: str  # digest of the written bytes, holes as zero

    def __str__(self) -> str:
        return (
            f"{self.version}, context parameters {self.context_bytes} bytes, model parameters {self.model_bytes} "
            f"bytes, defaults {self.defaults}"
        )


LLAMA_0_6: Final = Fingerprint(
    version="0.6.0-dev",
    context_bytes=168,
    context_holes=(142, 143),
    model_bytes=78,
    model_holes=(36, 37, 38, 39),
    defaults="ddf9bbd2cd02ecaa",
)

# sha256 of the shared object in each wheel of the pinned version. Only the first has been run; the others are the
# same release and header, and the calibration at start (`calibrate.py`) would refuse a layout that does not fit.
KNOWN_FILES: Final = {
    "78dcbbfcc861ee3377554325dc12864829a76ec3de6f1882886d4a82a2def7f5": "manylinux2014 x86-64",
    "d217f8da7094890dffa84ce3be7c88fa021e6e6e54f64f49d165df886ec62ed8": "manylinux2014 aarch64",
    "9e7a0d4d692fe590a7562109f90f57835fcd324c2b6ec0b5251a34860cbf80d4": "macOS 13 arm64",
}


class Library:
    """libllama, checked and initialised. One per process: see `open_library`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sha256 = file_sha256(path)
        self.ffi: Any = FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(path))
        check_profile(self, self.sha256)
        self.version = self._text(self.c.llama_version())
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        # kept for the life of the process: the engine calls it from its own threads, up to the very end
        self._callback = self.ffi.callback("void(int32_t, const char *, void *)", self._take_log, onerror=None)
        self.c.llama_log_set(self._callback, self.ffi.NULL)
        self.c.llama_backend_init()

    def cpu(self) -> str:
        """Instruction sets the engine was built for; part of the exactness class."""
        flags = re.findall(r"(\w+) = 1", self._text(self.c.llama_print_system_info()))
        return "+".join([platform.machine(), *flags])

    def failure(self, reason: str, what: str) -> EngineError:
        """An EngineError that carries the engine's own last words, and forgets them."""
        words = " / ".join(self._log)
        self._log.clear()
        return EngineError(reason, f"{what}; the engine says: {words or 'nothing'}")

    def _take_log(self, level: int, text: Any, _: Any) -> None:
        if level == _ERROR:
            self._log.append(self.ffi.string(text, _LOG_LINE_BYTES).decode("utf-8", "replace").strip())

    def _text(self, pointer: Any) -> str:
        return str(self.ffi.string(pointer).decode("utf-8", "replace"))


def thread_settings(given: Mapping[str, str], *, shared_cores: bool) -> dict[str, str]:
    """How long the engine's threads look for each other, at some thousand barriers a token, before they sleep: nothing
    where the user has said. 175 us here, which is longer than most pauses between two calls, and 10 us on cores that
    others compute on, too: there a thread that looks keeps the one it waits for from running. OpenMP's own default is
    milliseconds."""
    if "OMP_WAIT_POLICY" in given or "GOMP_SPINCOUNT" in given:
        return {}
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "400" if shared_cores else "7000"}


def open_library(*, shared_cores: bool = False) -> Library:
    """The process's one libllama. `shared_cores` is the first caller's to say: OpenMP reads its settings when it is
    loaded. They do not stay in the environment, where daemons that are started from here would find them."""
    settings = thread_settings(os.environ, shared_cores=shared_cores)
    os.environ.update(settings)
    try:
        return _library()
    finally:
        for name in settings:
            del os.environ[name]


@functools.cache
def _library() -> Library:
    return Library(locate())


def locate() -> Path:
    """The package's shared object, found without importing the package. Raises EngineError."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = sorted(Path(folders[0]).glob(f"{PACKAGE}*.so")) if folders else []
    if not found:
        raise EngineError("engine-missing", f"{PACKAGE} is not installed: pip install {PACKAGE}=={PACKAGE_VERSION}")
    return found[0]


def check_profile(library: Library, sha256: str) -> None:
    """Refuse a library whose ABI is not one of the profiles here, before anything is passed to it by value."""
    names = set(re.findall(r"(\w+)\(", re.sub(r"/\*.*?\*/|\(\*callback\)[^;]*", "", CDEF)))
    missing = sorted(name for name in names if not hasattr(library.c, name))
    if missing:
        raise _unknown(library.path, f"it does not export {', '.join(missing)}")
    if sha256 in KNOWN_FILES:
        return
    if platform.machine() != "x86_64":
        raise _unknown(library.path, f"its sha256 is {sha256}, and only files known by sha256 run on this machine")
    found = fingerprint(library.path)
    if found != LLAMA_0_6:
        raise _unknown(library.path, f"it has {found}; known is {LLAMA_0_6}")


def _unknown(path: Path, why: str) -> EngineError:
    return EngineError(
        "engine-unknown",
        f"{path} is not an engine this program knows: {why}. Install {PACKAGE}=={PACKAGE_VERSION}",
    )


def fingerprint(path: Path) -> Fingerprint:
    """Run the default-parameter functions into oversize buffers of two patterns. x86-64 only: there a large result is
    returned through a hidden first argument, so the function can be called as if it took the buffer's address."""
    ffi: Any = FFI()
    ffi.cdef(
        "const char * llama_version(void); void llama_context_default_params(void *);"
        "void llama_model_default_params(void *);"
    )
    c: Any = ffi.dlopen(str(path))
    sizes, holes, digest = [], [], hashlib.sha256()
    for function in (c.llama_context_default_params, c.llama_model_default_params):
        size, untouched, written = _written(ffi, function)
        sizes.append(size)
        holes.append(untouched)
        digest.update(written)
    version = ffi.string(c.llama_version()).decode()
    return Fingerprint(version, sizes[0], holes[0], sizes[1], holes[1], digest.hexdigest()[:16])


def _written(ffi: Any, function: Any) -> tuple[int, tuple[int, ...], bytes]:
    """(extent, untouched offsets in it, its bytes with those as zero) of what `function` writes."""
    buffers = []
    for pattern in (0xAA, 0x55):
        buffer = ffi.new("uint8_t[1024]", [pattern] * 1024)
        function(buffer)
        buffers.append(bytes(ffi.buffer(buffer)))
    touched = [i for i, (a, b) in enumerate(zip(*buffers, strict=True)) if not (a == 0xAA and b == 0x55)]
    extent = touched[-1] + 1 if touched else 0
    holes = tuple(sorted(set(range(extent)) - set(touched)))
    return extent, holes, bytes(0 if i in holes else buffers[0][i] for i in range(extent))
