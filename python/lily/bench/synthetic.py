"""Checkpoints of random weights in MLX 4-bit layout, at any counts, and the folder that keeps them.

The weights mean nothing, but activations stay in a sane range, so that speed can be measured, and engines
compared, without the real weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import _native
from lily.checkpoint import TensorSpec, open_checkpoint
from lily.doctor.slots import bf16_bits
from lily.errors import CheckpointError, LilyError
from lily.files import cache_folder
from lily.hub import DEMO
from lily.plan import SHAPES

INDEX = "model.safetensors.index.json"
MAX_LAYERS = 1024
HEAD_DIM, DELTA_DIM, CONV_WIDTH, GROUP = 256, 128, 4, 64
MAX_POSITION = 262144
_NUMPY: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
_PREFIX = "synthetic:"
# Larger tensors repeat that many values: a prime, so that no two rows or experts begin alike.
_BLOCK = 1_048_573
# Gains that make logits, expert choices and embeddings as spread out as a trained model's.
GAINS = {"embed_tokens": 10.0, "lm_head": 4.0, "mlp.gate": 3.0, "mlp.shared_expert_gate": 2.0}

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Shape:
    """Counts of a model; the default resembles neither the demo model nor the full-size one."""

    vocab: int = 320
    hidden: int = 192
    layers: int = 5
    attention_interval: int = 2
    heads: int = 6
    kv_heads: int = 2
    delta_key_heads: int = 3
    delta_value_heads: int = 6
    experts: int = 24
    experts_used: int = 5
    inner: int = 64
    shared_inner: int = 192
    rms_eps: float = 1e-6
    rope_theta: float = 10_000_000.0


FULL_SIZE = Shape(**SHAPES["qwen3.6-35b-a3b"], attention_interval=4)


def layers_of(model: str | os.PathLike[str]) -> int | None:
    """Return LAYERS of a model named "synthetic:LAYERS", None if it is named otherwise.

    Raises:
        ValueError: LAYERS is no number from 1 to 1024.
    """
    if not isinstance(model, str) or not model.startswith(_PREFIX):
        return None
    text = model.removeprefix(_PREFIX)
    layers = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"synthetic:LAYERS needs a number of layers from 1 to {MAX_LAYERS}, not {text!r}")
    return layers


def full_size(layers: int) -> Shape:
    """Return the counts of the full-size model, with another number of layers."""
    return dataclasses.replace(FULL_SIZE, layers=layers)


def synthetic_checkpoint(shape: Shape, progress: Progress | None = None) -> Path:
    """Return the folder of a random checkpoint in Lily's cache folder; it is written if it is not there.

    Args:
        shape: Counts of the model.
        progress: Called with (done, total) bytes while the weights are written.

    Raises:
        LilyError: There is no room on the disk.
        UnsupportedError: Lily runs no model of these counts.
    """
    folder = entry_of(shape, f"synthetic-{shape.layers}", Path(__file__))
    if folder.is_dir():
        try:
            open_checkpoint(folder)
        except CheckpointError:  # somebody changed it
            shutil.rmtree(folder)
        else:
            return folder
    size = sum(_bytes_of(spec.shape, spec.dtypes[0]) for spec in _tensor_specs(shape))
    with new_entry(folder, size) as partial:
        write_checkpoint(partial, shape, progress=progress)
    return folder


def entry_of(shape: Shape, kind: str, *writers: Path) -> Path:
    """Return the entry of the cache for something made from a shape by the source text in `writers`."""

    def digest(text: bytes) -> str:
        return hashlib.sha256(text).hexdigest()[:8]

    counts = digest(json.dumps(dataclasses.asdict(shape)).encode())
    return cache_folder() / f"{kind}-{counts}-{digest(b''.join(path.read_bytes() for path in writers))}"


@contextlib.contextmanager
def new_entry(path: Path, size: int) -> Iterator[Path]:
    """Give a folder to write into, which becomes `path` at the end and disappears after an error.

    What other versions of the source text wrote for the same shape is removed first.

    Args:
        path: From entry_of(). Another process may be writing it as well: the first one to finish wins.
        size: Bytes it will have.

    Raises:
        LilyError: There is no room for them, or the cache folder cannot be used.
    """
    hint = "XDG_CACHE_HOME names another folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
    except OSError as error:
        reason = error.strerror or str(error)
        raise LilyError(f"{path.parent}: no place for random weights: {reason}; {hint}") from error
    try:
        for old in path.parent.glob(path.name.rsplit("-", 1)[0] + "-*"):
            if old != path:
                shutil.rmtree(old)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            needed = f"random weights need {size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free"
            raise LilyError(f"{path.parent}: {needed}; {hint}")
        yield partial
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_checkpoint(
    folder: Path,
    shape: Shape,
    *,
    seed: int = 0,
    shards: int = 1,
    a_log: str = "F32",
    progress: Progress | None = None,
) -> Path:
    """Write a complete checkpoint and return `folder`.

    Args:
        folder: Made if missing.
        shape: Counts of the model.
        seed: The tensors depend on it and on their names, not on `shards`.
        shards: 1 writes model.safetensors, more write numbered files; both have an index.
        a_log: dtype of `A_log`, "F32" or "BF16".
        progress: Called with (done, total) bytes of tensors.

    Raises:
        ValueError: The vocabulary has no room for a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    eos = write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config_json(shape, eos), indent=4))
    generation = {"eos_token_id": eos, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    specs = _tensor_specs(shape)
    dtypes = {spec.name: a_log if spec.name.endswith("A_log") else spec.dtypes[0] for spec in specs}
    widths = {spec.name.removesuffix(".scales"): spec.shape[-1] * GROUP for spec in specs}
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    total, done = sum(_bytes_of(spec.shape, dtypes[spec.name]) for spec in specs), 0

    def maker(spec: TensorSpec) -> Callable[[], NDArray[Any]]:
        def make() -> NDArray[Any]:
            nonlocal done
            width = widths.get(spec.name.rsplit(".", 1)[0], 1)
            values = random_tensor(spec, dtypes[spec.name], width, seed)
            if progress is not None:
                progress(done, total)
            done += values.nbytes
            return values

        return make

    for index, file_name in enumerate(names):
        tensors = {}
        for spec in specs[index * len(specs) // shards : (index + 1) * len(specs) // shards]:
            tensors[spec.name] = (dtypes[spec.name], tuple(spec.shape), maker(spec))
            weight_map[spec.name] = file_name
        write_safetensors(folder / file_name, tensors)
    if progress is not None:
        progress(total, total)
    size = sum((folder / name).stat().st_size for name in names)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=4)
    )
    return folder


def _tensor_specs(shape: Shape) -> list[_native.TensorSpec]:
    return _native.tensor_specs(_native.Config(**dataclasses.asdict(shape)))


def _bytes_of(shape: Iterable[int], dtype: str) -> int:
    return math.prod(shape) * _NUMPY[dtype].itemsize


def config_json(shape: Shape, eos: Iterable[int] = ()) -> dict[str, Any]:
    """Return config.json as mlx-lm writes it for a model of this shape."""
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for layer in range(shape.layers):
        for gate in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{layer}.mlp.{gate}"] = {"group_size": GROUP, "bits": 8}
    kinds = [
        "linear_attention" if (i + 1) % shape.attention_interval else "full_attention"
        for i in range(shape.layers)
    ]
    text = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": shape.attention_interval,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "linear_num_key_heads": shape.delta_key_heads,
        "linear_num_value_heads": shape.delta_value_heads,
        "moe_intermediate_size": shape.inner,
        "shared_expert_intermediate_size": shape.shared_inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "dtype": "bfloat16",
        "layer_types": kinds,
        "rope_parameters": {
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
            "type": "default",
        },
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": list(eos),
        "quantization": quantization,
        "quantization_config": quantization,
        "text_config": text,
        "tie_word_embeddings": False,
    }


def random_tensor(spec: TensorSpec, dtype: str, width: int, seed: int) -> NDArray[Any]:
    """Draw one tensor; the result depends on name and seed only, not on the order of calls.

    Args:
        spec: What to draw.
        dtype: One of `spec.dtypes`.
        width: Inputs of the quantised matrix the tensor belongs to; unused for plain tensors.
        seed: Of the whole checkpoint.
    """
    count = min(math.prod(spec.shape), _BLOCK)
    return np.resize(_random_values(spec.name, count, dtype, width, seed), tuple(spec.shape))


def _random_values(name: str, count: int, dtype: str, width: int, seed: int) -> NDArray[Any]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if dtype == "U32":
        return rng.integers(0, 1 << 32, count, np.uint32)
    module, kind = name.removeprefix("language_model.").removeprefix("model.").rsplit(".", 1)
    if kind in ("scales", "biases"):
        # Both come from one stream: bias = -half * scale centres the codes. Half of the scales are negative.
        rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
        half = 127.5 if module.endswith(("mlp.gate", "shared_expert_gate")) else 7.5
        gain = next((gain for end, gain in GAINS.items() if module.endswith(end)), 1.0)
        scales = rng.uniform(0.5, 1.5, count).astype(np.float32) * np.float32(gain / half / math.sqrt(width))
        scales *= rng.choice(np.array([-1, 1], np.float32), count)
        return bf16_bits(scales if kind == "scales" else scales * np.float32(-half))
    if kind == "A_log":
        values = rng.uniform(0.0, 2.0, count)
    elif kind == "dt_bias":
        values = rng.uniform(-4.0, -1.0, count)
    elif module.endswith("conv1d"):
        values = rng.normal(0.0, 0.5, count)
    else:
        values = rng.normal(1.0, 0.1, count)
    single = values.astype(np.float32)
    return single if dtype == "F32" else bf16_bits(single)


def write_safetensors(
    path: Path, tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], NDArray[Any]]]]
) -> None:
    """Write name -> (dtype, shape, function that makes the data); one tensor is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        end = offset + _bytes_of(shape, dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, _, make in tensors.values():
            file.write(make().astype(_NUMPY[dtype], order="C", copy=False).data)


def write_tokenizer(folder: Path, vocab: int) -> list[int]:
    """Write the shipped tokenizer, cut down to `vocab` tokens if need be; return the end-of-sequence ids."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    special = tokenizer["added_tokens"]
    kept = min(vocab - len(special), len(tokenizer["model"]["vocab"]))
    if kept < 256:
        raise ValueError(f"vocab {vocab}: needs at least {256 + len(special)}")
    tokenizer["model"]["vocab"] = {k: v for k, v in tokenizer["model"]["vocab"].items() if v < kept}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][: kept - 256]
    for index, token in enumerate(special):
        token["id"] = kept + index
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / name, folder / name)
    return [token["id"] for token in special if token["content"] in ("<|im_end|>", "<|endoftext|>")]
