"""Tokenizer and streaming detokenizer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from lily import CheckpointError, Tokenizer, UnsupportedError
from lily.tokenizer import _BYTES

TEXTS = [
    "Plain English, 123.",
    "naïve café — “quotes”",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flags \U0001f1eb\U0001f1f7",
    "mixed a\u0301\u00e9\n\n\t  end\r\n",
    "<|im_start|>user\nhi<|im_end|><think>\n</think>",
]


@pytest.fixture(scope="module")
def backend(demo_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Token id of every single byte."""
    by_byte = {byte: tokenizer.token_id(character) for character, byte in _BYTES.items()}
    return [index for byte in range(256) if (index := by_byte[byte]) is not None]


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> tuple[list[str], str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [detokenizer.add(index) for index in ids], detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_encode__equals_tokenizers(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def test_encode__knows_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_id("<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>a<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert tokenizer.token_id("no such token") is None


def test_encode__refuses_what_is_not_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match="must be a string"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 4096, 10**12, 1.0, "a", True, None])
def test_decode__refuses_ids_out_of_range(tokenizer: Tokenizer, index: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 4095"):
        tokenizer.decode([5, index])


@pytest.mark.parametrize("ids", [1.5, None, object()])
def test_decode__refuses_what_is_no_sequence(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 4095"):
        tokenizer.decode(ids)


def test_decode__takes_one_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.int32(70)) == tokenizer.decode(70) == tokenizer.decode([70])


def test_decode__padding_ids_are_empty(demo_folder: Path) -> None:
    padded = Tokenizer(demo_folder, vocab=4200)
    assert padded.decode([4150]) == ""
    with pytest.raises(ValueError, match="from 0 to 4199"):
        padded.decode([4200])


def test_decode__random_ids_equal_tokenizers(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
    source = random.Random(1)
    for _ in range(200):
        ids = [source.randrange(4096) for _ in range(source.randrange(1, 30))]
        pieces, rest = stream(tokenizer, ids)
        assert (
            "".join(pieces) + rest == tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)
        )


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer__every_split_equals_the_whole(
    tokenizer: Tokenizer, byte_ids: list[int], text: str
) -> None:
    """Tokens on one side of the split, single bytes on the other, so characters break at every byte."""
    data = text.encode()
    for at in range(len(data) + 1):
        head = [byte_ids[byte] for byte in data[:at]]
        tail = tokenizer.encode(data[at:].decode(errors="ignore"))
        skipped = data[at:].decode(errors="ignore").encode()
        middle = [byte_ids[byte] for byte in data[at : len(data) - len(skipped)]]
        pieces, rest = stream(tokenizer, head + middle + tail)
        assert "".join(pieces) == tokenizer.decode(head + middle + tail)
        assert rest == ""
        assert "\ufffd" not in "".join(pieces)


def test_detokenizer__random_bytes(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, byte_ids: list[int]
) -> None:
    source = random.Random(2)
    for _ in range(300):
        data = bytes(source.choice([source.randrange(256), 0xE2, 0x80, 0xF0, 0x41]) for _ in range(12))
        ids = [byte_ids[byte] for byte in data]
        pieces, rest = stream(tokenizer, ids)
        assert "".join(pieces) + rest == data.decode(errors="replace")
        assert "".join(pieces) + rest == backend.decode(ids, skip_special_tokens=False)


def test_detokenizer__holds_back_and_flushes(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = [byte_ids[byte] for byte in "\U0001f600".encode()]
    assert [detokenizer.add(index) for index in ids] == ["", "", "", "\U0001f600"]
    assert [detokenizer.add(index) for index in ids[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.add(byte_ids[65]) == "A"


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (target / "tokenizer.json").write_text(json.dumps({**data, **changes}), encoding="utf-8")
    return target


def test_tokenizer__ignores_stored_truncation(demo_folder: Path, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(edited(demo_folder, tmp_path, truncation=truncation))
    assert len(tokenizer.encode("one two three four five six seven")) >= 7


def test_tokenizer__refuses_other_kinds_and_damage(demo_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="byte-level"):
        Tokenizer(edited(demo_folder, tmp_path, decoder={"type": "Fuse"}))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer(tmp_path)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 100_000}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "////////"}


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"normalizer": REPLACE}, "normalizer Replace found"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, REPLACE]}}, "Replace found"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}}, "normalizer Prepend found"),
        ({"normalizer": CHARSMAP}, "normalizer Precompiled found"),
        ({"normalizer": {"precompiled_charsmap": "////////"}}, "normalizer Precompiled found"),
        ({"normalizer": {"type": "Sequence", "normalizers": [CHARSMAP]}}, "normalizer Precompiled found"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pre_tokenizer FixedLength found"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, "pre_tokenizer Metaspace found"),
    ],
)
def test_tokenizer__refuses_parts_of_other_kinds(
    demo_folder: Path, tmp_path: Path, parts: dict[str, Any], error: str
) -> None:
    """Some of them let a short text grow without end; the library aborts the process over a bad charsmap."""
    with pytest.raises(UnsupportedError, match=error):
        Tokenizer(edited(demo_folder, tmp_path, **parts))


def test_tokenizer__refuses_a_charsmap_that_is_hidden_in_escapes(demo_folder: Path, tmp_path: Path) -> None:
    path = edited(demo_folder, tmp_path, normalizer=CHARSMAP) / "tokenizer.json"
    path.write_text(path.read_text().replace("recompiled", "re\\u0063ompiled"))
    with pytest.raises(UnsupportedError, match="normalizer Precompiled found"):
        Tokenizer(tmp_path)


WORD = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
UNIGRAM: dict[str, Any] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}


@pytest.mark.parametrize("model", [WORD, UNIGRAM])
def test_tokenizer__refuses_other_models(demo_folder: Path, tmp_path: Path, model: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"tokenizer.json: model {model['type']} found"):
        Tokenizer(edited(demo_folder, tmp_path, model=model))


# The backend, written in Rust, reports its panics on stderr as well.
def test_tokenizer__a_panic_while_loading(demo_folder: Path, tmp_path: Path) -> None:
    model = json.loads((demo_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(edited(demo_folder, tmp_path, model={**model, "continuing_subword_prefix": "##"}))


class Panic(BaseException):
    pass


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("raised", [Exception("no unk"), Panic("no unk")])
def test_encode__errors_of_the_backend(demo_folder: Path, raised: BaseException) -> None:
    class Backend:
        def encode(self, *_: object, **__: object) -> None:
            raise raised

    tokenizer = Tokenizer(demo_folder)
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot be turned into tokens: no unk"):
        tokenizer.encode("a")


def test_encode__leaves_interrupts_alone(demo_folder: Path) -> None:
    class Backend:
        def encode(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    tokenizer = Tokenizer(demo_folder)
    tokenizer._backend = Backend()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_tokenizer__has_no_more_ids_than_the_model(demo_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: .* 4095, but the model has 4000 tokens"):
        Tokenizer(demo_folder, vocab=4000)
    data = json.loads((demo_folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["vocab"]["H"] = 100_000
    folder = edited(demo_folder, tmp_path, model=data["model"])
    with pytest.raises(CheckpointError, match="100000, but the model has 4096 tokens"):
        Tokenizer(folder, vocab=4096)
    assert Tokenizer(folder).vocab_size == 100_001


def test_template__missing_or_broken(demo_folder: Path, tmp_path: Path) -> None:
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    (tmp_path / "chat_template.jinja").write_text("line\n{% if %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="broken at line 2"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ eos_token }}x", "eos_token": "E"}')
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "Ex"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: bad JSON \(found list, expected an object"
    ):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
