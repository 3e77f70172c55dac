"""Write a random checkpoint in MLX 4-bit layout, with any counts.

The weights mean nothing, but activations stay in a sane range, so that engines can be compared on shapes the
shipped model does not have. From a shell: `python tests/make_checkpoint.py FOLDER --hidden 192 --shards 2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEMO = Path(__file__).resolve().parent.parent / "python" / "lily" / "demo"
HEAD_DIM, DELTA_DIM, CONV_WIDTH, GROUP = 256, 128, 4, 64
INDEX = "model.safetensors.index.json"
_NUMPY: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}


@dataclass(frozen=True)
class Shape:
    """Counts of a model; the default resembles neither the shipped model nor the full-size one."""

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


FULL_SIZE = Shape(
    vocab=248320, hidden=2048, layers=40, attention_interval=4, heads=16, kv_heads=2, delta_key_heads=16,
    delta_value_heads=32, experts=256, experts_used=8, inner=512, shared_inner=512,
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One tensor: canonical name, accepted dtypes, shape."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def tensor_specs(config: dict[str, int | float]) -> list[Spec]:
    """List the tensors of a model from the keyword arguments of `_native.Config`, layer by layer."""
    shape = Shape(**config)  # type: ignore[arg-type]
    hidden, experts = shape.hidden, shape.experts
    specs: list[Spec] = []

    def plain(name: str, *dims: int, dtypes: tuple[str, ...] = ("BF16",)) -> None:
        specs.append(Spec(f"language_model.{name}", dtypes, dims))

    def quantised(name: str, *dims: int, bits: int = 4) -> None:
        *lead, width = dims
        plain(f"{name}.weight", *lead, width * bits // 32, dtypes=("U32",))
        plain(f"{name}.scales", *lead, width // GROUP)
        plain(f"{name}.biases", *lead, width // GROUP)

    keys, values = shape.delta_key_heads * DELTA_DIM, shape.delta_value_heads * DELTA_DIM
    quantised("model.embed_tokens", shape.vocab, hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        plain(f"{layer}.input_layernorm.weight", hidden)
        if (index + 1) % shape.attention_interval:
            delta = f"{layer}.linear_attn"
            quantised(f"{delta}.in_proj_qkv", 2 * keys + values, hidden)
            quantised(f"{delta}.in_proj_z", values, hidden)
            quantised(f"{delta}.in_proj_a", shape.delta_value_heads, hidden)
            quantised(f"{delta}.in_proj_b", shape.delta_value_heads, hidden)
            plain(f"{delta}.conv1d.weight", 2 * keys + values, CONV_WIDTH, 1)
            plain(f"{delta}.A_log", shape.delta_value_heads, dtypes=("F32", "BF16"))
            plain(f"{delta}.dt_bias", shape.delta_value_heads)
            plain(f"{delta}.norm.weight", DELTA_DIM)
            quantised(f"{delta}.out_proj", hidden, values)
        else:
            attention = f"{layer}.self_attn"
            quantised(f"{attention}.q_proj", 2 * shape.heads * HEAD_DIM, hidden)
            quantised(f"{attention}.k_proj", shape.kv_heads * HEAD_DIM, hidden)
            quantised(f"{attention}.v_proj", shape.kv_heads * HEAD_DIM, hidden)
            plain(f"{attention}.q_norm.weight", HEAD_DIM)
            plain(f"{attention}.k_norm.weight", HEAD_DIM)
            quantised(f"{attention}.o_proj", hidden, shape.heads * HEAD_DIM)
        plain(f"{layer}.post_attention_layernorm.weight", hidden)
        quantised(f"{layer}.mlp.gate", experts, hidden, bits=8)
        quantised(f"{layer}.mlp.shared_expert_gate", 1, hidden, bits=8)
        for name, out, width in (
            ("gate_proj", shape.inner, hidden),
            ("up_proj", shape.inner, hidden),
            ("down_proj", hidden, shape.inner),
        ):
            quantised(f"{layer}.mlp.switch_mlp.{name}", experts, out, width)
        for name, out, width in (
            ("gate_proj", shape.shared_inner, hidden),
            ("up_proj", shape.shared_inner, hidden),
            ("down_proj", hidden, shape.shared_inner),
        ):
            quantised(f"{layer}.mlp.shared_expert.{name}", out, width)
    plain("model.norm.weight", hidden)
    quantised("lm_head", shape.vocab, hidden)
    return specs


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
        "max_position_embeddings": 4096,
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


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite fp32 values to bf16 bits, nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# Gains that make logits, expert choices and embeddings as spread out as a trained model's.
_GAINS = {"embed_tokens": 10.0, "lm_head": 4.0, "mlp.gate": 3.0, "mlp.shared_expert_gate": 2.0}


def random_tensor(spec: Spec, dtype: str, width: int, seed: int) -> NDArray[Any]:
    """Draw one tensor; the result depends on name and seed only, not on the order of calls.

    Args:
        spec: what to draw.
        dtype: one of `spec.dtypes`.
        width: inputs of the quantised matrix the tensor belongs to; unused for plain tensors.
        seed: of the whole checkpoint.
    """
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    name = spec.name.removeprefix("language_model.").removeprefix("model.")
    if dtype == "U32":
        return rng.integers(0, 1 << 32, spec.shape, np.uint32)
    module, kind = name.rsplit(".", 1)
    if kind in ("scales", "biases"):
        # Both come from one stream: bias = -half * scale centres the codes. Half of the scales are negative.
        rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
        half = 127.5 if module.endswith(("mlp.gate", "shared_expert_gate")) else 7.5
        gain = next((gain for end, gain in _GAINS.items() if module.endswith(end)), 1.0)
        scales = rng.uniform(0.5, 1.5, spec.shape).astype(np.float32) * np.float32(
            gain / half / math.sqrt(width)
        )
        scales *= rng.choice(np.array([-1, 1], np.float32), spec.shape)
        return to_bf16(scales if kind == "scales" else scales * np.float32(-half))
    if kind == "A_log":
        values = rng.uniform(0.0, 2.0, spec.shape)
    elif kind == "dt_bias":
        values = rng.uniform(-4.0, -1.0, spec.shape)
    elif module.endswith("conv1d"):
        values = rng.normal(0.0, 0.5, spec.shape)
    else:
        values = rng.normal(1.0, 0.1, spec.shape)
    single = values.astype(np.float32)
    return single if dtype == "F32" else to_bf16(single)


def write_safetensors(
    path: Path, tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], NDArray[Any]]]]
) -> None:
    """Write name -> (dtype, shape, function that makes the data); one tensor is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        end = offset + math.prod(shape) * _NUMPY[dtype].itemsize
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


def make_checkpoint(
    folder: Path, shape: Shape | None = None, *, seed: int = 0, shards: int = 1, a_log: str = "F32"
) -> Path:
    """Write a complete checkpoint and return `folder`.

    Args:
        folder: made if missing.
        shape: counts; None means `Shape()`.
        seed: the tensors depend on it and on their names, not on `shards`.
        shards: 1 writes model.safetensors, more write numbered files; both have an index.
        a_log: dtype of `A_log`, "F32" or "BF16".
    """
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    eos = write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config_json(shape, eos), indent=4))
    generation = {"eos_token_id": eos, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    specs = tensor_specs(dataclasses.asdict(shape))
    widths = {spec.name.removesuffix(".scales"): spec.shape[-1] * GROUP for spec in specs}
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for index, file_name in enumerate(names):
        tensors = {}
        for spec in specs[index * len(specs) // shards : (index + 1) * len(specs) // shards]:
            dtype = a_log if spec.name.endswith("A_log") else spec.dtypes[0]
            width = widths.get(spec.name.rsplit(".", 1)[0], 1)
            tensors[spec.name] = (dtype, spec.shape, _maker(spec, dtype, width, seed))
            weight_map[spec.name] = file_name
        write_safetensors(folder / file_name, tensors)
    total = sum((folder / name).stat().st_size for name in names)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index_json, indent=4))
    return folder


def _maker(spec: Spec, dtype: str, width: int, seed: int) -> Callable[[], NDArray[Any]]:
    return lambda: random_tensor(spec, dtype, width, seed)


def main() -> None:
    """Command line: a folder, one option per count, and the options of `make_checkpoint`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--full-size", action="store_true", help="start from the counts of the 35B model (20 GB)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--a-log", choices=("F32", "BF16"), default="F32")
    for field in dataclasses.fields(Shape):
        number = int if isinstance(field.default, int) else float
        parser.add_argument("--" + field.name.replace("_", "-"), type=number, default=None)
    options = vars(parser.parse_args())
    start = FULL_SIZE if options["full_size"] else Shape()
    counts = {f.name: options[f.name] for f in dataclasses.fields(Shape) if options[f.name] is not None}
    make_checkpoint(
        options["folder"],
        dataclasses.replace(start, **counts),
        seed=options["seed"],
        shards=options["shards"],
        a_log=options["a_log"],
    )


if __name__ == "__main__":
    main()
