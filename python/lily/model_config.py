"""Read a checkpoint's `config.json` and reduce it to the counts the engine needs.

Head geometry, activation and quantisation format are the model's identity and must match exactly
(`UnsupportedError` otherwise); the counts are free within limits. A value of the wrong type or out of any
sensible range is a damaged file (`CheckpointError`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily.errors import CheckpointError, UnsupportedError
from lily.files import MAX_JSON_BYTES, is_there, named, read_file, shown

CONVERT = "convert the original model with `mlx_lm.convert --hf-path MODEL --mlx-path FOLDER -q`"
GROUP_SIZE = 64
MAX_LISTED = 8

# Keyword of _native.Config -> (key in config.json, largest sane value).
_COUNTS = {
    "vocab": ("vocab_size", 1 << 22),
    "hidden": ("hidden_size", 1 << 13),
    "layers": ("num_hidden_layers", 1024),
    "heads": ("num_attention_heads", 1024),
    "kv_heads": ("num_key_value_heads", 1024),
    "delta_key_heads": ("linear_num_key_heads", 1024),
    "delta_value_heads": ("linear_num_value_heads", 1024),
    "experts": ("num_experts", 1 << 16),
    "experts_used": ("num_experts_per_tok", 1 << 16),
    "inner": ("moe_intermediate_size", 1 << 16),
    "shared_inner": ("shared_expert_intermediate_size", 1 << 16),
}

# Key -> the one supported value, which is also what an absent key means.
_FIXED: dict[str, object] = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attn_output_gate": True,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_SIZED = ("vocab", "hidden", "inner", "shared_inner")
_PLAIN = (4, GROUP_SIZE, "affine")
_GATE = (8, GROUP_SIZE, "affine")


@dataclass(frozen=True)
class ModelConfig:
    """What `config.json` and `generation_config.json` say.

    Attributes:
        counts: keyword arguments of `lily._native.Config`.
        max_position: positions the model was trained for, in tokens.
        eos_token_ids: union of every end-of-sequence id that either file names.
        generation_config: `generation_config.json` as it is, `{}` if there is none.
    """

    counts: dict[str, int | float]
    max_position: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any]


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file that must hold one object; `CheckpointError` if it cannot be read or is not one."""
    return parse_json(read_file(path, limit), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; a repeated key or anything that is not plain JSON is a `CheckpointError`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: bad JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: bad JSON (found {type(value).__name__}, expected an object)")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate name {shown(name)}")
        result[name] = value
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def canonical_name(name: str) -> str:
    """Return the name under which mlx-lm would load a tensor or module (`language_model.` first)."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name[len("model.language_model.") :]
    return name if name.startswith("language_model.") else "language_model." + name


def is_ignored(name: str) -> bool:
    """Tell whether a tensor or module belongs to the vision tower or the multi-token-prediction layer."""
    return not {"vision_tower", "visual", "mtp"}.isdisjoint(name.split("."))


def listed(problems: list[str]) -> str:
    """Join up to eight problems, one a line, and say how many more there are."""
    lines = problems[:MAX_LISTED]
    if len(problems) > MAX_LISTED:
        lines.append(f"... and {len(problems) - MAX_LISTED} more")
    return "".join(f"\n  {line}" for line in lines)


class _Section:
    """One JSON object of config.json, with typed access that names file and key in every error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            expected = f"an integer from {low} to {high}"
            raise CheckpointError(f"{self.where}{key}: found {shown(value)}, expected {expected}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.values.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            expected = f"a number from {low} to {high}"
            raise CheckpointError(f"{self.where}{key}: found {shown(value)}, expected {expected}")
        return float(value)

    def fixed(self, key: str, expected: object) -> None:
        value = self.values.get(key)
        # True == 1 in Python, so types are compared too; 256.0 for 256 is no different model.
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        if value is not None and not same:
            raise UnsupportedError(f"{self.where}{key}: found {shown(value)}, supported is {expected!r}")

    def section(self, key: str) -> _Section | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}{key}: found {type(value).__name__}, expected an object")
        return _Section(value, f"{self.where}{key}.")


def load_config(folder: Path) -> ModelConfig:
    """Read and check `config.json` and, if present, `generation_config.json` of `folder`.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedError: the model is another one, has another geometry or quantisation.
    """
    path = folder / "config.json"
    outer = _Section(read_json(path), f"{path}: ")
    text = _text_section(outer)
    counts = _counts(text)
    for key, expected in _FIXED.items():
        text.fixed(key, expected)
    outer.fixed("tie_word_embeddings", False)
    _check_layer_types(text, counts["layers"], counts["attention_interval"])
    _check_quantisation(outer, counts["layers"])

    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if is_there(generation_path) else {}
    eos: frozenset[int] = frozenset()
    for section in (outer, text, _Section(generation, f"{generation_path}: ")):
        eos |= _eos(section, counts["vocab"])
    eps = text.number("rms_norm_eps", 1e-12, 1e-2)
    return ModelConfig(
        counts={**counts, "rms_eps": eps, "rope_theta": _rope_theta(text)},
        max_position=text.integer("max_position_embeddings", 1, 1 << 31),
        eos_token_ids=eos,
        generation_config=generation,
    )


def _text_section(outer: _Section) -> _Section:
    found = outer.values.get("model_type")
    if found not in ("qwen3_5_moe", "qwen3_5_moe_text"):
        raise UnsupportedError(
            f"{outer.where}model_type: found {shown(found)}, supported are 'qwen3_5_moe' "
            "(Qwen3.5 and 3.6 mixture of experts) and its text part 'qwen3_5_moe_text'"
        )
    text = outer.section("text_config")
    if text is None:
        return outer
    if "model_type" in text.values:
        inner = text.values["model_type"]
        if inner != "qwen3_5_moe_text":
            raise UnsupportedError(
                f"{text.where}model_type: found {shown(inner)}, supported is 'qwen3_5_moe_text'"
            )
    return text


def _counts(text: _Section) -> dict[str, int]:
    counts = {name: text.integer(key, 1, most) for name, (key, most) in _COUNTS.items()}
    counts["attention_interval"] = text.integer("full_attention_interval", 1, 1024, default=4)

    def refuse(name: str, what: str) -> None:
        key = _COUNTS[name][0]
        raise UnsupportedError(f"{text.where}{key}: found {counts[name]}, supported {what}")

    for name in _SIZED:
        if counts[name] % GROUP_SIZE:
            refuse(name, f"are multiples of {GROUP_SIZE}")
    for many, few in (("heads", "kv_heads"), ("delta_value_heads", "delta_key_heads")):
        few_key = _COUNTS[few][0]
        if counts[many] % counts[few]:
            refuse(many, f"are multiples of {few_key} ({counts[few]})")
    if counts["heads"] // counts["kv_heads"] > 8:
        refuse("heads", f"are at most 8 per {_COUNTS['kv_heads'][0]} ({counts['kv_heads']})")
    if counts["experts"] > 512:
        refuse("experts", "are at most 512")
    if counts["experts_used"] > counts["experts"]:
        refuse("experts_used", f"are at most num_experts ({counts['experts']})")
    if counts["experts_used"] > 32:
        refuse("experts_used", "are at most 32")
    return counts


def _check_layer_types(text: _Section, layers: int, interval: int) -> None:
    types = text.values.get("layer_types")
    if types is None:
        return
    expected = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        found = f"{len(types)} entries" if isinstance(types, list) else type(types).__name__
        raise CheckpointError(
            f"{text.where}layer_types: found {found}, expected num_hidden_layers ({layers})"
        )
    for index, (found, wanted) in enumerate(zip(types, expected, strict=True)):
        if found != wanted:
            raise CheckpointError(
                f"{text.where}layer_types[{index}]: found {shown(found)}, "
                f"but full_attention_interval {interval} means {wanted!r}"
            )


def _rope_theta(text: _Section) -> float:
    rope = text.section("rope_parameters") or text
    for section in (rope, text.section("rope_scaling")):
        if section:
            # mlx-lm renames rope_type to type on saving.
            section.fixed("type", "default")
            section.fixed("rope_type", "default")
            section.fixed("partial_rotary_factor", 0.25)
    # The engine needs more than 1 in fp32.
    return rope.number("rope_theta", 1.001, 1e12)


def _eos(section: _Section, vocab: int) -> frozenset[int]:
    value = section.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            where = f"{section.where}eos_token_id"
            raise CheckpointError(f"{where}: found {shown(token)}, expected ids below {vocab}")
    return frozenset(ids)


def _check_quantisation(outer: _Section, layers: int) -> None:
    # mlx-lm writes the same block twice; other tools write only the second, with quant_method.
    key = "quantization" if outer.values.get("quantization") is not None else "quantization_config"
    block = outer.section(key)
    if block is None:
        raise UnsupportedError(f"{outer.where}unquantised weights, supported is MLX 4-bit affine: {CONVERT}")
    if "quant_method" in block.values:
        method = block.values["quant_method"]
        supported = f"supported is MLX 4-bit affine: {CONVERT}"
        raise UnsupportedError(f"{block.where}quant_method: found {shown(method)}, {supported}")
    default = _setting(block)
    if default != _PLAIN:
        found, supported = _describe(default), _describe(_PLAIN)
        raise UnsupportedError(f"{block.where[:-1]}: found {found}, supported is {supported}")
    modules: dict[str, object] = {}
    for name, value in block.values.items():
        if name in ("bits", "group_size", "mode") or is_ignored(name):
            continue
        setting = default if value is True else value
        if isinstance(value, dict):
            setting = _setting(_Section(value, f"{block.where}{named(name)}."))
        modules[canonical_name(name)] = setting
    wanted: dict[str, object] = {}
    for layer in range(layers):
        for gate in ("gate", "shared_expert_gate"):
            wanted[f"language_model.model.layers.{layer}.mlp.{gate}"] = _GATE
    problems = []
    for name in {**wanted, **modules}:
        setting, needed = modules.get(name, default), wanted.get(name, _PLAIN)
        if setting != needed:
            problems.append(f"{named(name)}: found {_describe(setting)}, supported is {_describe(needed)}")
    if problems:
        raise UnsupportedError(f"{block.where[:-1]}: unsupported quantisation{listed(problems)}")


def _setting(section: _Section) -> tuple[int, int, object]:
    bits = section.integer("bits", 1, 32, default=4)
    group_size = section.integer("group_size", 1, 1 << 16, default=GROUP_SIZE)
    return bits, group_size, section.values.get("mode", "affine")


def _describe(setting: object) -> str:
    if isinstance(setting, tuple):
        mode = setting[2]
        mode = named(mode) if isinstance(mode, str) else shown(mode)
        return f"{setting[0]} bits in groups of {setting[1]}, mode {mode}"
    return "unquantised" if setting is False else shown(setting)
