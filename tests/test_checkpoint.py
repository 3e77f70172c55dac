"""Opening checkpoints: every way a folder can be wrong ends in a typed error that says what and where."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from damage import edit_header, edit_json, edit_text_config, join, rebuild, split
from lily.checkpoint import DEMO, Checkpoint, open_checkpoint, resolve
from lily.errors import CheckpointError, UnsupportedError
from lily.model_config import load_config
from lily.tensor_files import read_header
from make_checkpoint import (
    FULL_SIZE,
    INDEX,
    SMALL,
    Shape,
    config_json,
    make_checkpoint,
    random_tensor,
    tensor_specs,
    write_safetensors,
)

SHARD = "model-00002-of-00003.safetensors"
MODEL = "model.safetensors"
NORM = "language_model.model.layers.0.input_layernorm.weight"
GATE = "language_model.model.layers.0.mlp.gate"
LOG = "language_model.model.layers.0.linear_attn.A_log"


def open_small(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, tensor_specs=tensor_specs)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "one", SMALL)


@pytest.fixture(scope="session")
def pristine_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "three", SMALL, shards=3)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "one")


@pytest.fixture
def shards(pristine_shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine_shards, tmp_path / "three")


def refused(folder: Path, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_small(folder)
    assert caught.type is kind
    for word in words:
        assert word in str(caught.value)


# ---- checkpoints that are fine ----


def test_demo_opens() -> None:
    checkpoint = open_small(resolve("demo"))
    assert checkpoint.name == "demo"
    assert checkpoint.folder == DEMO
    assert checkpoint.config == {
        "vocab": 4096, "hidden": 256, "layers": 8, "attention_interval": 4, "heads": 8, "kv_heads": 1,
        "delta_key_heads": 2, "delta_value_heads": 4, "experts": 16, "experts_used": 4, "inner": 128,
        "shared_inner": 128, "rms_eps": 1e-6, "rope_theta": 1e7,
    }  # fmt: skip
    assert checkpoint.eos_token_ids == {4087, 4089}
    assert checkpoint.max_position == 4096
    assert checkpoint.generation_config["top_k"] == 20
    assert len(checkpoint.tensors) == 357


@pytest.mark.parametrize("shape", [Shape(), SMALL, Shape(attention_interval=1), Shape(layers=1)])
@pytest.mark.parametrize("a_log", ["F32", "BF16"])
def test_any_counts(tmp_path: Path, shape: Shape, a_log: str) -> None:
    checkpoint = open_small(make_checkpoint(tmp_path / "x", shape, a_log=a_log))
    assert checkpoint.config == dataclasses.asdict(shape)
    assert checkpoint.name == "x"


def test_tensors_are_where_they_should_be(pristine: Path, pristine_shards: Path) -> None:
    specs = {spec.name: spec for spec in tensor_specs(dataclasses.asdict(SMALL))}
    for folder in (pristine, pristine_shards):
        tensors = {tensor[0]: tensor[1:] for tensor in open_small(folder).tensors}
        assert list(tensors) == list(specs)
        for name in (NORM, LOG, GATE + ".weight", "language_model.lm_head.scales"):
            dtype, path, offset, nbytes = tensors[name]
            expected = random_tensor(specs[name], dtype, SMALL.hidden, 0).tobytes()
            assert Path(path).read_bytes()[offset : offset + nbytes] == expected


def test_written_file_is_valid_for_the_official_reader(pristine: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(pristine / MODEL, "numpy") as file:
        assert file.metadata() == {"format": "mlx"}
        assert set(file.keys()) == {spec.name for spec in tensor_specs(dataclasses.asdict(SMALL))}


def test_vision_and_prediction_heads_are_ignored(folder: Path) -> None:
    names = ["vision_tower.a.weight", "model.visual.b", "mtp.c", "language_model.mtp.d", "model.mtp.e"]

    def add(tensors: dict[str, Any]) -> None:
        for name in names:
            tensors[name] = ("F16", [3], b"\x00" * 6)

    rebuild(folder / MODEL, add)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(names, MODEL)))
    override = {"mtp.layers.0.mlp.gate": {"bits": 8, "group_size": 64}}
    edit_json(folder / "config.json", lambda config: config["quantization"].update(override))
    assert len(open_small(folder).tensors) == len(tensor_specs(dataclasses.asdict(SMALL)))


@pytest.mark.parametrize(
    ("old", "new"), [("language_model.model.", "model.language_model."), ("language_model.", "")]
)
def test_other_name_prefixes(folder: Path, old: str, new: str) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    rebuild(folder / MODEL, rename)
    (folder / INDEX).unlink()
    assert open_small(folder).tensors[0][0] == "language_model.model.embed_tokens.weight"


def test_flat_config_and_one_quantisation_block(folder: Path) -> None:
    config = config_json(SMALL, [1])
    flat = {**config["text_config"], "quantization_config": config["quantization"]}
    del flat["quantization_config"]["mode"]
    flat["rope_parameters"]["rope_type"] = flat["rope_parameters"].pop("type")
    (folder / "config.json").write_text(json.dumps(flat))
    assert open_small(folder).config == dataclasses.asdict(SMALL)


def test_full_size_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(FULL_SIZE, [248046])))
    config = load_config(tmp_path)
    assert config.counts == dataclasses.asdict(FULL_SIZE)
    assert len(tensor_specs(config.counts)) == 1757
    assert config.generation_config == {}


def test_eos_is_the_union(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(eos_token_id=5))
    edit_text_config(folder, {"eos_token_id": [6, 7]})
    edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=[7, 8]))
    assert open_small(folder).eos_token_ids == {5, 6, 7, 8}


def test_writer_needs_room_for_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab 256"):
        make_checkpoint(tmp_path, Shape(vocab=256))
    write_safetensors(tmp_path / "empty.safetensors", {})
    assert read_header(tmp_path / "empty.safetensors") == {}


# ---- config.json ----


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "bad JSON"),
        ("{", "bad JSON"),
        ("[]", "expected an object"),
        ('{"a": 1, "a": 2}', "duplicate name 'a'"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[" * 200_000, "bad JSON"),
        ("\ufeff{}", "bad JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_bad_json(folder: Path, name: str, text: str, word: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    refused(folder, CheckpointError, name, word)


def test_json_that_is_no_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    refused(folder, CheckpointError, "config.json", "bad JSON")


@pytest.mark.parametrize("name", ["config.json", MODEL])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, CheckpointError, str(folder), name)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("hidden_size", None, "found None, expected an integer from 1 to 8192"),
        ("hidden_size", 64.0, "found 64.0"),
        ("hidden_size", "64", "found '64'"),
        ("hidden_size", True, "found True"),
        ("hidden_size", 0, "found 0"),
        ("hidden_size", -64, "found -64"),
        ("hidden_size", 1 << 40, "found 1099511627776"),
        ("num_hidden_layers", [2], "found [2]"),
        ("vocab_size", {}, "found {}"),
        ("num_experts", 10**30, "expected an integer"),
        ("max_position_embeddings", 0, "found 0"),
        ("full_attention_interval", 0, "found 0"),
        ("rms_norm_eps", True, "expected a number"),
        ("rms_norm_eps", "1e-6", "expected a number"),
        ("rms_norm_eps", 0.0, "expected a number"),
        ("rms_norm_eps", 1, "expected a number"),
        ("eos_token_id", 320, "expected ids below 320"),
        ("eos_token_id", [1, -1], "found -1"),
        ("eos_token_id", "end", "found 'end'"),
        ("rope_parameters", [], "expected an object"),
        ("layer_types", "full", "found str"),
        ("layer_types", ["full_attention"], "found 1 entries, expected num_hidden_layers (2)"),
        ("layer_types", ["linear_attention"] * 2, "layer_types[1]: found 'linear_attention'"),
    ],
)
def test_damaged_value(folder: Path, key: str, value: object, word: str) -> None:
    edit_text_config(folder, {key: value})
    refused(folder, CheckpointError, f"text_config.{key}", word)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", 128),
        ("head_dim", "256"),
        ("partial_rotary_factor", 0.5),
        ("linear_key_head_dim", 64),
        ("linear_value_head_dim", 256),
        ("linear_conv_kernel_dim", 3),
        ("hidden_act", "gelu"),
        ("norm_topk_prob", False),
        ("norm_topk_prob", 0),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("tie_word_embeddings", True),
        ("mlp_only_layers", [0]),
        ("vocab_size", 321),
        ("hidden_size", 96),
        ("moe_intermediate_size", 32),
        ("shared_expert_intermediate_size", 100),
        ("num_attention_heads", 9),
        ("num_experts", 513),
        ("num_experts_per_tok", 5),
    ],
)
def test_unsupported_value(folder: Path, key: str, value: object) -> None:
    edit_text_config(folder, {key: value})
    refused(folder, UnsupportedError, f"text_config.{key}: found {value!r}", "supported")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "multiples of num_key_value_heads (2)"),
        ({"num_key_value_heads": 4}, "num_attention_heads: found 2"),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 3}, "multiples of linear_num_key_heads (2)"),
        ({"num_attention_heads": 18, "num_key_value_heads": 2}, "at most 8 per num_key_value_heads (2)"),
        ({"num_experts": 64, "num_experts_per_tok": 65}, "at most num_experts (64)"),
    ],
)
def test_unsupported_combination(folder: Path, values: dict[str, int], word: str) -> None:
    edit_text_config(folder, values)
    refused(folder, UnsupportedError, word)


def test_many_experts_used_and_value_heads(tmp_path: Path) -> None:
    """Neither has a limit but the experts and a whole number of value heads per key head."""
    shape = dataclasses.replace(SMALL, experts=17, experts_used=17, delta_key_heads=1, delta_value_heads=9)
    config = open_checkpoint(make_checkpoint(tmp_path / "many", shape)).config
    assert config["experts_used"] == 17
    assert config["delta_value_heads"] == 9


def test_tied_embeddings_outside_the_text_config(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    refused(folder, UnsupportedError, "tie_word_embeddings")


@pytest.mark.parametrize(
    ("key", "value"),
    [("type", "yarn"), ("rope_type", "linear"), ("partial_rotary_factor", 1.0)],
)
def test_unsupported_rope(folder: Path, key: str, value: object) -> None:
    edit_json(
        folder / "config.json", lambda config: config["text_config"]["rope_parameters"].update({key: value})
    )
    refused(folder, UnsupportedError, f"rope_parameters.{key}: found {value!r}")


@pytest.mark.parametrize("value", [None, 1, 1.0, 1.0000000001, 0.5, -1e7, 1e13, 10**400, "1e7"])
def test_bad_rope_theta(folder: Path, value: object) -> None:
    edit_json(
        folder / "config.json",
        lambda config: config["text_config"]["rope_parameters"].update(rope_theta=value),
    )
    refused(
        folder, CheckpointError, f"config.json: text_config.rope_parameters.rope_theta: found {value!r}"[:200]
    )


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "qwen3_moe", None, 7])
def test_wrong_model_type(folder: Path, name: object) -> None:
    edit_json(folder / "config.json", lambda config: config.update(model_type=name))
    refused(folder, UnsupportedError, f"model_type: found {name!r}", "supported are 'qwen3_5_moe'")


def test_wrong_text_model_type(folder: Path) -> None:
    edit_text_config(folder, {"model_type": "qwen3_5_text"})
    refused(folder, UnsupportedError, "found 'qwen3_5_text'")
    edit_text_config(folder, {"model_type": "qwen3_5_moe"})
    words = "text_config.model_type: found 'qwen3_5_moe', supported is 'qwen3_5_moe_text'"
    refused(folder, UnsupportedError, words)


# ---- quantisation ----


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"bits": 8}, "found 8 bits in groups of 64, mode affine"),
        ({"group_size": 32}, "found 4 bits in groups of 32"),
        ({"mode": "mxfp4"}, "mode mxfp4"),
        ({"mode": "nvfp4", "group_size": 16}, "mode nvfp4"),
        ({"quant_method": "fp8"}, "quant_method: found 'fp8'"),
        ({GATE: {"bits": 4, "group_size": 64}}, f"{GATE}: found 4 bits"),
        ({GATE: {"bits": 8, "group_size": 32}}, f"{GATE}: found 8 bits in groups of 32"),
        ({GATE: {"bits": 8, "group_size": 64, "mode": "mxfp8"}}, "mode mxfp8"),
        ({GATE: False}, f"{GATE}: found unquantised"),
        ({"language_model.lm_head": {"bits": 6, "group_size": 64}}, "language_model.lm_head: found 6 bits"),
        ({"language_model.lm_head": False}, "language_model.lm_head: found unquantised"),
        ({"surprise": 3}, "surprise: found 3"),
    ],
)
def test_wrong_quantisation(folder: Path, values: dict[str, object], word: str) -> None:
    edit_json(folder / "config.json", lambda config: config["quantization"].update(values))
    refused(folder, UnsupportedError, "quantization", word)


def test_missing_override_of_many_layers(tmp_path: Path) -> None:
    config = config_json(FULL_SIZE)
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, UnsupportedError, f"{GATE}: found 4 bits", "supported is 8 bits", "... and 72 more")


def test_harmless_overrides(folder: Path) -> None:
    values = {
        "language_model.lm_head": {"bits": 4, "group_size": 64},
        "language_model.model.embed_tokens": True,
    }
    edit_json(folder / "config.json", lambda config: config["quantization"].update(values))
    open_small(folder)


@pytest.mark.parametrize("value", [4.0, True, "4", 0])
def test_damaged_quantisation(folder: Path, value: object) -> None:
    edit_json(folder / "config.json", lambda config: config["quantization"].update(bits=value))
    refused(folder, CheckpointError, f"quantization.bits: found {value!r}")


def test_unquantised_config(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: (c.pop("quantization"), c.pop("quantization_config")))
    refused(folder, UnsupportedError, "unquantised", "mlx_lm.convert", "-q")


def test_unquantised_tensors(folder: Path) -> None:
    def strip(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith((".scales", ".biases"))]:
            del tensors[name]

    rebuild(folder / MODEL, strip)
    (folder / INDEX).unlink()
    refused(folder, UnsupportedError, "unquantised", "mlx_lm.convert")


def test_unconverted_convolution(folder: Path) -> None:
    def transpose(tensors: dict[str, Any]) -> None:
        name = "language_model.model.layers.0.linear_attn.conv1d.weight"
        dtype, (channels, width, one), raw = tensors[name]
        tensors[name] = (dtype, [channels, one, width], raw)

    rebuild(folder / MODEL, transpose)
    refused(folder, UnsupportedError, "conv1d.weight has the unconverted layout", "mlx_lm.convert")


# ---- safetensors files ----


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -5000])
def test_truncated(folder: Path, keep: int) -> None:
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(data[:keep])
    refused(folder, CheckpointError, MODEL, "truncated")


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"\xff" * 8, "header length 18446744073709551615 is above the limit"),
        ((100_000_001).to_bytes(8, "little"), "above the limit"),
        ((99_999_999).to_bytes(8, "little"), "truncated, the header needs 99999999 bytes"),
        ((0).to_bytes(8, "little"), "bad JSON"),
        (b"<!DOCTYP", "above the limit"),
    ],
)
def test_bad_header_length(folder: Path, head: bytes, word: str) -> None:
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(head + data[8:])
    refused(folder, CheckpointError, MODEL, word)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'"x"', b"{}x", b'{"a": Infinity}', b"\xff\xfe", b"[" * 100_000]
)
def test_bad_header_json(folder: Path, text: bytes) -> None:
    join(folder / MODEL, text, b"")
    refused(folder, CheckpointError, MODEL, "header", "bad JSON")


def test_duplicate_name(folder: Path) -> None:
    header, data = split(folder / MODEL)
    entry = json.dumps({NORM: header[NORM]})[1:-1]
    join(folder / MODEL, json.dumps(header)[:-1].encode() + b", " + entry.encode() + b"}", data)
    refused(folder, CheckpointError, "duplicate name", NORM)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "BF17"}, "unknown dtype 'BF17'"),
        ({"dtype": None}, "unknown dtype None"),
        ({"dtype": []}, "unknown dtype []"),
        ({"shape": [64.0]}, "bad shape [64.0]"),
        ({"shape": [True, 64]}, "bad shape"),
        ({"shape": [-64]}, "bad shape [-64]"),
        ({"shape": 64}, "bad shape 64"),
        ({"shape": [1] * 9}, "bad shape"),
        ({"shape": [1 << 62, 1 << 62]}, "needs"),
        ({"shape": [63]}, "span 128 bytes, BF16 [63] needs 126"),
        ({"data_offsets": [0]}, "bad data_offsets [0]"),
        ({"data_offsets": [128, 0]}, "bad data_offsets [128, 0]"),
        ({"data_offsets": [-128, 0]}, "bad data_offsets"),
        ({"data_offsets": [0, 1 << 70]}, "bad data_offsets"),
        ({"data_offsets": "0"}, "bad data_offsets '0'"),
        ({"data_offsets": [1 << 40, (1 << 40) + 128]}, "truncated"),
        ({"data_offsets": [0, 128]}, "overlaps"),
        ({"extra": 1}, "exactly dtype, shape and data_offsets"),
    ],
)
def test_bad_entry(folder: Path, change: dict[str, object], word: str) -> None:
    edit_header(folder / MODEL, lambda header: header[NORM].update(change))
    refused(folder, CheckpointError, MODEL, word)


@pytest.mark.parametrize("entry", [None, 3, [], {"dtype": "BF16"}])
def test_entry_that_is_no_entry(folder: Path, entry: object) -> None:
    edit_header(folder / MODEL, lambda header: header.update({NORM: entry}))
    refused(folder, CheckpointError, NORM, "expected exactly")


def test_gap(folder: Path) -> None:
    edit_header(folder / MODEL, lambda header: header.pop(NORM))
    refused(folder, CheckpointError, MODEL, "leaves a gap")


def test_bytes_of_no_tensor(folder: Path) -> None:
    with (folder / MODEL).open("ab") as file:
        file.write(b"xyz")
    refused(folder, CheckpointError, MODEL, "3 bytes after the last tensor")


# ---- tensors that do not fit ----


def test_missing_tensor(folder: Path) -> None:
    rebuild(folder / MODEL, lambda tensors: tensors.pop(NORM))
    (folder / INDEX).unlink()
    refused(folder, CheckpointError, f"missing {NORM}: expected BF16 [64]")


def test_unexpected_tensor(folder: Path) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.bias"
    rebuild(folder / MODEL, lambda tensors: tensors.update({name: ("BF16", [4], b"\x00" * 8)}))
    refused(folder, CheckpointError, f"unexpected {name}: found BF16 [4]")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [(NORM, "F16", "BF16"), (GATE + ".weight", "I32", "U32"), (LOG, "U32", "F32 or BF16")],
)
def test_wrong_dtype(folder: Path, name: str, dtype: str, expected: str) -> None:
    edit_header(folder / MODEL, lambda header: header[name].update(dtype=dtype))
    refused(folder, CheckpointError, f"dtype of {name}: found {dtype}, expected {expected}")


def test_wrong_shape(folder: Path) -> None:
    edit_header(folder / MODEL, lambda header: header[GATE + ".weight"].update(shape=[2, 32]))
    refused(folder, CheckpointError, f"shape of {GATE}.weight: found [2, 32], expected [4, 16]")


def test_config_of_another_size(folder: Path) -> None:
    edit_text_config(folder, {"vocab_size": 384})
    refused(
        folder, CheckpointError, "embed_tokens.weight: found [320, 8], expected [384, 8]", "lm_head.biases"
    )


def test_at_most_eight_problems_are_listed(folder: Path) -> None:
    edit_text_config(folder, {"hidden_size": 128})
    with pytest.raises(CheckpointError) as caught:
        open_small(folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"  \.\.\. and \d+ more", lines[-1])


# ---- shards ----


def test_missing_shard(shards: Path) -> None:
    (shards / SHARD).unlink()
    refused(shards, CheckpointError, "incomplete", SHARD)


def test_missing_index(shards: Path) -> None:
    (shards / INDEX).unlink()
    refused(shards, CheckpointError, f"neither {MODEL} nor {INDEX}", "model-00001-of-00003.safetensors")


def test_index_names_a_tensor_that_is_not_in_the_shard(shards: Path) -> None:
    edit_json(shards / INDEX, lambda index: index["weight_map"].update({NORM: SHARD}))
    refused(shards, CheckpointError, SHARD, "lacks tensors", NORM)


def test_tensor_in_two_shards(shards: Path) -> None:
    rebuild(shards / SHARD, lambda tensors: tensors.update({NORM: ("BF16", [1], b"\x00" * 2)}))
    refused(shards, CheckpointError, "duplicate tensor", NORM)


def test_truncated_shard(shards: Path) -> None:
    data = (shards / SHARD).read_bytes()
    (shards / SHARD).write_bytes(data[:-1])
    refused(shards, CheckpointError, SHARD, "truncated")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\\b", "", ".", 3, None])
def test_index_that_leads_out_of_the_folder(shards: Path, name: object) -> None:
    edit_json(shards / INDEX, lambda index: index["weight_map"].update({NORM: name}))
    refused(shards, CheckpointError, INDEX, f"bad shard name {name!r}")


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_map(shards: Path, weight_map: object) -> None:
    edit_json(shards / INDEX, lambda index: index.update(weight_map=weight_map))
    refused(shards, CheckpointError, INDEX, "weight_map")
