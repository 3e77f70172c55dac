"""A GGUF file of random Q4_K weights, of the shape that a random checkpoint has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.bench import synthetic
from lily.bench.synthetic import CONV_WIDTH, DELTA_DIM, GAINS, HEAD_DIM, Progress, Shape
from lily.errors import UnsupportedError

_ARCHITECTURE = "qwen35moe"
_NAME = "model.gguf"
_ROTARY_DIM = HEAD_DIM // 4
_ROPE_SECTIONS = [11, 11, 10, 0]
# A block of Q4_K has 256 weights d * scale * code - dmin * minimum: d and dmin are fp16, 8 scales and
# 8 minima of 6 bits take 12 bytes, and the codes of 4 bits take the rest.
_WEIGHTS, _BYTES = 256, 144
_SPREAD = 257.0  # standard deviation of scale * code - 7.5 * minimum if all bits are random
_BLOCKS = 32_749  # random ones, repeated; a prime, so that no two rows or experts begin alike


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    quantised: bool  # otherwise fp32
    make: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        count = math.prod(self.shape)
        return count // _WEIGHTS * _BYTES if self.quantised else 4 * count


def synthetic_gguf(shape: Shape, progress: Progress | None = None) -> Path:
    """Return a GGUF file of random weights in Lily's cache folder; it is written if it is not there.

    Args:
        shape: Counts of the model.
        progress: Called with (done, total) bytes while it is written.

    Raises:
        ImportError: The package gguf is not installed.
        LilyError: There is no room on the disk.
        UnsupportedError: A width is no multiple of 256, the weights in a block of Q4_K.
    """
    writers = Path(__file__), Path(synthetic.__file__)
    folder = synthetic.entry_of(shape, f"synthetic-{shape.layers}-q4_k", *writers)
    if not (folder / _NAME).is_file():
        size = sum(tensor.nbytes for tensor in _tensors(shape))
        with synthetic.new_entry(folder, size) as partial:
            write_gguf(partial / _NAME, shape, progress)
    return folder / _NAME


def write_gguf(path: Path, shape: Shape, progress: Progress | None = None) -> None:
    """Write the file; arguments and errors as for synthetic_gguf()."""
    from gguf import GGMLQuantizationType, GGUFWriter

    tensors = _tensors(shape)
    writer: Any = GGUFWriter(path, _ARCHITECTURE)
    _add_keys(writer, shape)
    for tensor in tensors:
        if tensor.quantised:
            rows = (*tensor.shape[:-1], tensor.shape[-1] // _WEIGHTS * _BYTES)
            q4_k = GGMLQuantizationType.Q4_K
            writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), tensor.nbytes, raw_dtype=q4_k)
        else:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            writer.write_tensor_data(tensor.make())
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
    finally:
        writer.close()


def _add_keys(writer: Any, shape: Shape) -> None:
    writer.add_name("random weights")
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(synthetic.MAX_POSITION)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", shape.attention_interval)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(_ROTARY_DIM)
    writer.add_rope_dimension_sections(_ROPE_SECTIONS)
    writer.add_ssm_conv_kernel(CONV_WIDTH)
    writer.add_ssm_state_size(DELTA_DIM)
    writer.add_ssm_group_count(shape.delta_key_heads)
    writer.add_ssm_time_step_rank(shape.delta_value_heads)
    writer.add_ssm_inner_size(shape.delta_value_heads * DELTA_DIM)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_used)
    writer.add_feed_forward_length(shape.inner)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_expert_shared_feed_forward_length(shape.shared_inner)


def _tensors(shape: Shape) -> list[_Tensor]:
    """List the tensors, widths last."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (_BLOCKS, _BYTES), np.uint8)
    tensors: list[_Tensor] = []

    def quantised(name: str, *dims: int, gain: float = 1.0) -> None:
        *lead, width = dims
        if width % _WEIGHTS:
            raise UnsupportedError(f"{name}: rows of {width} weights; Q4_K needs multiples of {_WEIGHTS}")

        def make() -> NDArray[Any]:
            values = np.resize(blocks, (math.prod(dims) // _WEIGHTS, _BYTES))
            step = gain / math.sqrt(width) / _SPREAD
            values[:, :4] = np.array([step, 7.5 * step], "<f2").view(np.uint8)
            return values.reshape(*lead, -1)

        tensors.append(_Tensor(f"{name}.weight", dims, True, make))

    def plain(name: str, *dims: int, mean: float = 0.0, spread: float = 0.0) -> None:
        def make() -> NDArray[Any]:
            return rng.normal(mean, spread, dims).astype(np.float32)

        tensors.append(_Tensor(name, dims, False, make))

    def norm(name: str, width: int) -> None:
        plain(f"{name}.weight", width, mean=1.0)

    hidden = shape.hidden
    quantised("token_embd", shape.vocab, hidden, gain=GAINS["embed_tokens"])
    for index in range(shape.layers):
        layer = f"blk.{index}"
        norm(f"{layer}.attn_norm", hidden)
        norm(f"{layer}.post_attention_norm", hidden)
        if (index + 1) % shape.attention_interval:
            _delta(layer, shape, quantised, plain, norm)
        else:
            quantised(f"{layer}.attn_q", 2 * shape.heads * HEAD_DIM, hidden)
            quantised(f"{layer}.attn_k", shape.kv_heads * HEAD_DIM, hidden)
            quantised(f"{layer}.attn_v", shape.kv_heads * HEAD_DIM, hidden)
            quantised(f"{layer}.attn_output", hidden, shape.heads * HEAD_DIM)
            norm(f"{layer}.attn_q_norm", HEAD_DIM)
            norm(f"{layer}.attn_k_norm", HEAD_DIM)
        router = GAINS["mlp.gate"] / math.sqrt(hidden)
        plain(f"{layer}.ffn_gate_inp.weight", shape.experts, hidden, spread=router)
        plain(f"{layer}.ffn_gate_inp_shexp.weight", hidden, spread=router)
        for kind, width, lead in (
            ("exps", shape.inner, (shape.experts,)),
            ("shexp", shape.shared_inner, ()),
        ):
            quantised(f"{layer}.ffn_gate_{kind}", *lead, width, hidden)
            quantised(f"{layer}.ffn_up_{kind}", *lead, width, hidden)
            quantised(f"{layer}.ffn_down_{kind}", *lead, hidden, width)
    norm("output_norm", hidden)
    quantised("output", shape.vocab, hidden, gain=GAINS["lm_head"])
    return tensors


def _delta(layer: str, shape: Shape, quantised: Any, plain: Any, norm: Any) -> None:
    heads, values = shape.delta_value_heads, shape.delta_value_heads * DELTA_DIM
    channels = 2 * shape.delta_key_heads * DELTA_DIM + values
    quantised(f"{layer}.attn_qkv", channels, shape.hidden)
    quantised(f"{layer}.attn_gate", values, shape.hidden)
    quantised(f"{layer}.ssm_beta", heads, shape.hidden)
    quantised(f"{layer}.ssm_alpha", heads, shape.hidden)
    quantised(f"{layer}.ssm_out", shape.hidden, values)
    plain(f"{layer}.ssm_conv1d.weight", channels, CONV_WIDTH, spread=0.5)
    plain(f"{layer}.ssm_dt.bias", heads, mean=-2.5, spread=0.5)
    plain(f"{layer}.ssm_a", heads, mean=-3.0, spread=0.3)  # minus exp(A_log)
    norm(f"{layer}.ssm_norm", DELTA_DIM)
