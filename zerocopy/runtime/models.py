"""Tiny models with random weights, one per certified family, small enough to write and run in a test.

They say nothing sensible, but their state has every part that the real family's has, and a wrong bit in any part
changes their logits. Deterministic: family, seed and scale decide every byte. `scale` widens a model (heads, state,
hidden size grow with it, weights with its square) where a demonstration wants more bytes of state.
Layouts were found by reading the engine's loaders; numpy shapes are reversed ggml dimensions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

N_VOCAB: Final = 128
CONTEXT: Final = 32768
WINDOW: Final = 64  # gemma3's sliding window
_HEAD: Final = 32  # one block of q8_0, so that every KV type can be tried
_CONV: Final = 4
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(family: str, path: Path, *, seed: int = 0, scale: int = 1) -> Path:
    """Write the family's GGUF to `path` and return it. Raises ValueError for an unknown family or a scale outside
    [1, 16]."""
    if family not in _BUILDERS:
        raise ValueError(f"no tiny model of family {family}: choose one of {', '.join(FAMILIES)}")
    if not 1 <= scale <= 16:
        raise ValueError(f"scale {scale} is outside 1 to 16")
    sizes = _Sizes.of(scale)
    model = _Writer(family, path, np.random.default_rng([seed, scale, zlib.crc32(family.encode())]), sizes)
    model.tensor("token_embd.weight", (sizes.hidden, N_VOCAB), spread=1.0)
    model.norm("output_norm.weight", sizes.hidden)
    model.matrix("output.weight", sizes.hidden, N_VOCAB)
    _BUILDERS[family](model)
    model.close()
    return path


class _Sizes(msgspec.Struct, frozen=True):
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    expert: int
    inner: int  # recurrent width
    state: int
    groups: int
    ranks: int  # recurrent heads

    @classmethod
    def of(cls, scale: int) -> _Sizes:
        return cls(
            hidden=64 * scale,
            heads=2 * scale,
            kv_heads=scale,
            feed_forward=128 * scale,
            expert=32 * scale,
            inner=128 * scale,
            state=32,
            groups=2,
            ranks=4 * scale,
        )


class _Writer:
    """GGUFWriter with ggml's dimension order and this file's conventions."""

    def __init__(self, family: str, path: Path, random: np.random.Generator, sizes: _Sizes) -> None:
        self._prefix = family.removesuffix("+mtp")
        self._gguf: Any = gguf.GGUFWriter(str(path), self._prefix)
        self._random = random
        self.sizes = sizes
        self._gguf.add_string("general.name", f"tiny-{family}")
        self._gguf.add_string("tokenizer.ggml.model", "test")
        self._gguf.add_array("tokenizer.ggml.tokens", [f"tok_{i}" for i in range(N_VOCAB)])
        self._gguf.add_array("tokenizer.ggml.scores", [0.0] * N_VOCAB)
        self._gguf.add_string("tokenizer.chat_template", _TEMPLATE)
        self.integers(vocab_size=N_VOCAB, context_length=CONTEXT, embedding_length=sizes.hidden)

    def integers(self, **values: int | list[int]) -> None:
        """Metadata of the architecture; two underscores in a name stand for a dot."""
        for name, value in values.items():
            key = f"{self._prefix}.{name.replace('__', '.')}"
            if isinstance(value, list):
                self._gguf.add_array(key, value)
            else:
                self._gguf.add_uint32(key, value)

    def floats(self, **values: float) -> None:
        for name, value in values.items():
            self._gguf.add_float32(f"{self._prefix}.{name.replace('__', '.')}", value)

    def flag(self, name: str) -> None:
        self._gguf.add_bool(f"{self._prefix}.{name}", True)

    def exact(self, name: str, values: NDArray[np.float32]) -> None:
        self._gguf.add_tensor(name, values)

    def tensor(self, name: str, dims: tuple[int, ...], *, spread: float | None = None, base: float = 0.0) -> None:
        """Random F32 tensor; `dims` in ggml order, fastest first. The spread keeps activations near one."""
        spread = 1.0 / float(np.sqrt(dims[0])) if spread is None else spread
        self.exact(name, (base + spread * self._random.standard_normal(dims[::-1])).astype(np.float32))

    def matrix(self, name: str, columns: int, rows: int) -> None:
        self.tensor(name, (columns, rows))

    def norm(self, name: str, *dims: int) -> None:
        self.tensor(name, dims, spread=0.1, base=1.0)

    def negative(self, name: str, shape: tuple[int, ...]) -> None:
        """Decay rates: F32 and below zero, or the recurrence explodes."""
        self.exact(name, -np.exp(self._random.uniform(-1, 1, shape)).astype(np.float32))

    def close(self) -> None:
        self._gguf.write_header_to_file()
        self._gguf.write_kv_data_to_file()
        self._gguf.write_tensors_to_file()
        self._gguf.close()


# -- blocks ----------------------------------------------------------------------------------------------------


def _attention(m: _Writer, layer: int, *, norms: bool = False, gate: int = 1) -> None:
    s, at = m.sizes, f"blk.{layer}.attn"
    m.matrix(f"{at}_q.weight", s.hidden, s.heads * _HEAD * gate)
    m.matrix(f"{at}_k.weight", s.hidden, s.kv_heads * _HEAD)
    m.matrix(f"{at}_v.weight", s.hidden, s.kv_heads * _HEAD)
    m.matrix(f"{at}_output.weight", s.heads * _HEAD, s.hidden)
    if norms:
        m.norm(f"{at}_q_norm.weight", _HEAD)
        m.norm(f"{at}_k_norm.weight", _HEAD)


def _feed_forward(m: _Writer, layer: int, *, gated: bool = True) -> None:
    s, at = m.sizes, f"blk.{layer}.ffn"
    if gated:
        m.matrix(f"{at}_gate.weight", s.hidden, s.feed_forward)
    m.matrix(f"{at}_up.weight", s.hidden, s.feed_forward)
    m.matrix(f"{at}_down.weight", s.feed_forward, s.hidden)


_EXPERTS: Final = 4


def _experts(m: _Writer, layer: int) -> None:
    s, at = m.sizes, f"blk.{layer}"
    m.tensor(f"{at}.ffn_gate_inp.weight", (s.hidden, _EXPERTS))
    m.tensor(f"{at}.exp_probs_b.bias", (_EXPERTS,), spread=0.05)
    m.tensor(f"{at}.ffn_up_exps.weight", (s.hidden, s.expert, _EXPERTS))
    m.tensor(f"{at}.ffn_down_exps.weight", (s.expert, s.hidden, _EXPERTS))
    m.matrix(f"{at}.ffn_up_shexp.weight", s.hidden, 2 * s.expert)
    m.matrix(f"{at}.ffn_down_shexp.weight", 2 * s.expert, s.hidden)


def _mamba(m: _Writer, layer: int) -> None:
    s, at = m.sizes, f"blk.{layer}.ssm"
    channels = s.inner + 2 * s.groups * s.state
    m.matrix(f"{at}_in.weight", s.hidden, s.inner + channels + s.ranks)
    m.tensor(f"{at}_conv1d.weight", (_CONV, channels), spread=0.5)
    m.tensor(f"{at}_conv1d.bias", (channels,), spread=0.1)
    m.tensor(f"{at}_dt.bias", (s.ranks,), spread=0.5)
    m.negative(f"{at}_a", (s.ranks, 1))
    m.exact(f"{at}_d", np.ones((s.ranks, 1), np.float32))
    m.norm(f"{at}_norm.weight", s.inner // s.groups, s.groups)
    m.matrix(f"{at}_out.weight", s.inner, s.hidden)


def _recurrent_metadata(m: _Writer, *, inner: int, state: int, ranks: int, groups: int) -> None:
    m.integers(
        ssm__conv_kernel=_CONV,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=ranks,
        ssm__group_count=groups,
    )


def _mamba_metadata(m: _Writer) -> None:
    s = m.sizes
    _recurrent_metadata(m, inner=s.inner, state=s.state, ranks=s.ranks, groups=s.groups)


def _mtp_head(m: _Writer, layer: int) -> None:
    hidden, at = m.sizes.hidden, f"blk.{layer}.nextn"
    m.matrix(f"{at}.eh_proj.weight", 2 * hidden, hidden)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        m.norm(f"{at}.{name}.weight", hidden)


def _attention_metadata(m: _Writer, layers: int) -> None:
    s = m.sizes
    m.integers(
        block_count=layers,
        attention__head_count=s.heads,
        attention__head_count_kv=s.kv_heads,
        feed_forward_length=s.feed_forward,
        attention__key_length=_HEAD,
        attention__value_length=_HEAD,
        rope__dimension_count=_HEAD,
    )
    m.floats(attention__layer_norm_rms_epsilon=1e-5)


# -- families --------------------------------------------------------------------------------------------------


def _llama(m: _Writer) -> None:
    layers = 4
    _attention_metadata(m, layers)
    for i in range(layers):
        m.norm(f"blk.{i}.attn_norm.weight", m.sizes.hidden)
        _attention(m, i)
        m.norm(f"blk.{i}.ffn_norm.weight", m.sizes.hidden)
        _feed_forward(m, i)


def _gemma3(m: _Writer) -> None:
    layers = 6
    _attention_metadata(m, layers)
    m.integers(attention__sliding_window=WINDOW, attention__sliding_window_pattern=3)
    for i in range(layers):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            m.norm(f"blk.{i}.{name}.weight", m.sizes.hidden)
        _attention(m, i, norms=True)
        _feed_forward(m, i)


def _mamba2(m: _Writer) -> None:
    layers = 3
    m.integers(block_count=layers, attention__head_count=0, feed_forward_length=0)
    m.floats(attention__layer_norm_rms_epsilon=1e-5)
    _mamba_metadata(m)
    for i in range(layers):
        m.norm(f"blk.{i}.attn_norm.weight", m.sizes.hidden)
        _mamba(m, i)


_NEMOTRON: Final = "M*EM*E"  # M recurrent, * attention, E feed-forward or experts; the engine tells them apart by sizes


def _nemotron(m: _Writer, *, experts: bool, mtp: bool) -> None:
    s = m.sizes
    pattern = _NEMOTRON + ("X" if mtp else "")  # X: the MTP block, which block_count includes
    m.integers(
        block_count=len(pattern),
        attention__head_count=s.heads,  # a list whose first entry is 0 would switch key_length off
        attention__head_count_kv=[s.kv_heads if kind in "*X" else 0 for kind in pattern],
        feed_forward_length=[(s.expert if experts else s.feed_forward) if kind in "EX" else 0 for kind in pattern],
        attention__key_length=_HEAD,
        attention__value_length=_HEAD,
        rope__dimension_count=_HEAD,
    )
    m.floats(attention__layer_norm_epsilon=1e-5, attention__layer_norm_rms_epsilon=1e-5)
    _mamba_metadata(m)
    if experts:
        _expert_metadata(m)
    if mtp:
        m.integers(nextn_predict_layers=1)
    for i, kind in enumerate(pattern):
        m.norm(f"blk.{i}.attn_norm.weight", s.hidden)
        _nemotron_block(m, i, kind, experts)


def _expert_metadata(m: _Writer) -> None:
    s = m.sizes
    m.integers(
        expert_count=_EXPERTS,
        expert_used_count=2,
        expert_feed_forward_length=s.expert,
        expert_shared_feed_forward_length=2 * s.expert,
        expert_shared_count=1,
        expert_gating_func=2,
    )
    m.flag("expert_weights_norm")
    m.floats(expert_weights_scale=1.0)


def _nemotron_block(m: _Writer, layer: int, kind: str, experts: bool) -> None:
    match kind:
        case "M":
            _mamba(m, layer)
        case "*":
            _attention(m, layer)
        case "E" if experts:
            _experts(m, layer)
        case "E":
            _feed_forward(m, layer, gated=False)
        case "X":
            _attention(m, layer)
            _mtp_head(m, layer)
            m.norm(f"blk.{layer}.post_attention_norm.weight", m.sizes.hidden)
            _experts(m, layer)


def _qwen35_mtp(m: _Writer) -> None:
    layers, hidden = 4, m.sizes.hidden
    _attention_metadata(m, layers + 1)
    m.integers(full_attention_interval=2, rope__dimension_sections=[4, 4, 4, 0], nextn_predict_layers=1)
    key_heads, value_heads, width = 2, m.sizes.ranks, m.sizes.state
    _recurrent_metadata(m, inner=width * value_heads, state=width, ranks=value_heads, groups=key_heads)
    for i in range(layers + 1):
        m.norm(f"blk.{i}.attn_norm.weight", hidden)
        m.norm(f"blk.{i}.post_attention_norm.weight", hidden)
        if i == layers or i % 2:
            _attention(m, i, norms=True, gate=2)
        else:
            _delta_net(m, i, key_heads, value_heads, width)
        _feed_forward(m, i)
    _mtp_head(m, layers)


def _delta_net(m: _Writer, layer: int, key_heads: int, value_heads: int, width: int) -> None:
    hidden, at = m.sizes.hidden, f"blk.{layer}"
    channels = (2 * key_heads + value_heads) * width
    m.matrix(f"{at}.attn_qkv.weight", hidden, channels)
    m.matrix(f"{at}.attn_gate.weight", hidden, value_heads * width)
    m.tensor(f"{at}.ssm_conv1d.weight", (_CONV, channels), spread=0.5)
    m.tensor(f"{at}.ssm_dt.bias", (value_heads,), spread=0.5)
    m.negative(f"{at}.ssm_a", (value_heads,))
    m.matrix(f"{at}.ssm_beta.weight", hidden, value_heads)
    m.matrix(f"{at}.ssm_alpha.weight", hidden, value_heads)
    m.norm(f"{at}.ssm_norm.weight", width)
    m.matrix(f"{at}.ssm_out.weight", value_heads * width, hidden)


_BUILDERS: Final[dict[str, Callable[[_Writer], None]]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mamba2": _mamba2,
    "nemotron_h": lambda m: _nemotron(m, experts=False, mtp=False),
    "nemotron_h_moe": lambda m: _nemotron(m, experts=True, mtp=False),
    "nemotron_h_moe+mtp": lambda m: _nemotron(m, experts=True, mtp=True),
    "qwen35+mtp": _qwen35_mtp,
}
FAMILIES: Final = tuple(_BUILDERS)
