"""Write a random checkpoint in MLX 4-bit layout, with any counts, and say which tensors one has.

From a shell: `python tests/make_checkpoint.py FOLDER --hidden 192 --shards 2`.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from lily.bench.synthetic import (
    CONV_WIDTH,
    DELTA_DIM,
    FULL_SIZE,
    GROUP,
    HEAD_DIM,
    INDEX,
    Shape,
    config_json,
    random_tensor,
    write_checkpoint,
    write_safetensors,
)

__all__ = [
    "FULL_SIZE",
    "INDEX",
    "Shape",
    "Spec",
    "config_json",
    "make_checkpoint",
    "random_tensor",
    "tensor_specs",
    "write_safetensors",
]


@dataclass(frozen=True)
class Spec:
    """One tensor: canonical name, accepted dtypes, shape."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def tensor_specs(config: dict[str, int | float]) -> list[Spec]:
    """List the tensors of a model from the keyword arguments of `_native.Config`, layer by layer.

    Written apart from the native list, which the loader and the writer go by, and compared with it.
    """
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


# As small as the format goes, and as quick to write and read.
SMALL = Shape(
    vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, delta_key_heads=1, delta_value_heads=2, experts=4,
    experts_used=2, inner=64, shared_inner=64,
)  # fmt: skip


def make_checkpoint(
    folder: Path, shape: Shape | None = None, *, seed: int = 0, shards: int = 1, a_log: str = "F32"
) -> Path:
    """Write a complete checkpoint and return `folder`; None is the default shape."""
    return write_checkpoint(folder, shape or Shape(), seed=seed, shards=shards, a_log=a_log)


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
