"""What is fuzzed: a function for each kind of input from outside, which returns or raises a finding.

An input is fine if it is accepted, or refused with an error that the documentation names. Anything else that
comes out of a target is a finding, and so is a hang or much memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily import CheckpointError, ContextFullError, Engine, Tokenizer, UnsupportedError
from lily.chat import ChatTemplate, checked_messages, checked_tools
from lily.checkpoint import DEMO, open_checkpoint
from lily.reply import ReplyStream
from lily.tensor_files import read_tensor_table

DAMAGED = (CheckpointError, UnsupportedError)
WRONG = (ValueError, TypeError, UnsupportedError)
TEMPLATE_SECONDS = 0.2
_MOST_BYTES = 2000
_MOST_IDS = 300  # the fuzzer makes Python tens of times slower
DATA_BYTES = 4096  # behind a header that is put into a file of fitting length
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's the weather in <Paris>?"},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nA moment.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"a": [1]}'}}],
    },
    {"role": "tool", "content": "18 \u00b0C", "tool_call_id": "1"},
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Weather & more"}}]


@functools.cache
def _folder() -> Path:
    """Return a folder for this process; tmpfs, where there is one, spares the disk."""
    memory = Path("/dev/shm")
    place = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    _KEPT.append(place)
    return Path(place.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _write(name: str, data: bytes) -> Path:
    folder = _folder() / name.split("/")[0]
    folder.mkdir(exist_ok=True)
    (_folder() / name).write_bytes(data)
    return folder


def safetensors(data: bytes) -> None:
    """A whole file, or, behind an H, a header for 4096 bytes of tensors."""
    if data[:1] == b"H":
        data = (len(data) - 1).to_bytes(8, "little") + data[1:] + bytes(DATA_BYTES)
    folder = _write("safetensors/model.safetensors", data)
    try:
        table = read_tensor_table(folder)
    except DAMAGED:
        return
    size = len(data)
    for name, tensor in table.items():
        assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= size, name


def config(data: bytes) -> None:
    """The text of config.json and, behind a NUL, of generation_config.json."""
    text, _, generation = data.partition(b"\0")
    folder = _write("config/config.json", text)
    _write("config/generation_config.json", generation or b"{}")
    _write("config/model.safetensors", (2).to_bytes(8, "little") + b"{}")
    try:
        open_checkpoint(folder)
    except DAMAGED:
        return
    raise AssertionError("a checkpoint without tensors was opened")


def tokenizer(data: bytes) -> None:
    """The text of tokenizer.json."""
    folder = _write("tokenizer/tokenizer.json", data)
    try:
        made = Tokenizer(folder)
    except DAMAGED:
        return
    for text in ("Hello <|im_start|>w\u00f6rld 12\n\n", "\U0001f600 a\u0301", " " * 200, "a" * 200):
        try:
            ids = made.encode(text)
        except ValueError:
            continue
        assert all(0 <= index < made.vocab_size for index in ids)
        made.decode(ids, skip_special_tokens=True)
    made.decode(range(min(made.vocab_size, 300)))
    ReplyStream(made, [], ["stop"]).finish()


def template(data: bytes) -> None:
    """The text of a chat template."""
    try:
        made = ChatTemplate(Path("nowhere"), {"chat_template": data.decode("utf-8", errors="replace")})
    except DAMAGED:
        return
    made._sandbox._seconds = TEMPLATE_SECONDS
    for messages, tools, further in ((MESSAGES, TOOLS, False), (MESSAGES[:2], None, True)):
        with contextlib.suppress(ValueError):
            made.render(messages, tools, None, further, {"enable_thinking": False})


@functools.cache
def _demo() -> Tokenizer:
    return Tokenizer(DEMO)


def prompts(data: bytes) -> None:
    """T and text, I and token ids of two bytes each, or J and a conversation as JSON."""
    kind, rest = data[:1], data[1 : 1 + _MOST_BYTES]
    if kind == b"T":
        _check_text(rest)
    elif kind == b"I":
        _check_ids([int.from_bytes(rest[at : at + 2], "little") for at in range(0, len(rest), 2)])
    else:
        _check_messages(rest)


def _check_text(data: bytes) -> None:
    text = data.decode("utf-8", errors="surrogateescape")
    try:
        ids = _demo().encode(text)
    except ValueError:
        assert any("\ud800" <= character <= "\udfff" for character in text)
        text = data.decode("utf-8", errors="replace")
        ids = _demo().encode(text)
    decoded = _demo().decode(ids)
    # The tokenizer composes characters, those of newer versions of Unicode too.
    if decoded != text and all(unicodedata.category(character) != "Cn" for character in decoded):
        assert unicodedata.normalize("NFD", decoded) == unicodedata.normalize("NFD", text)
    assert _demo().encode(decoded) == ids
    _check_ids(ids)


def _check_ids(ids: list[int]) -> None:
    """However a stream of tokens is split, its pieces are the text of all of them."""
    ids = ids[:_MOST_IDS]
    known = [index for index in ids if index < _demo().vocab_size]
    try:
        _demo().decode(ids)
    except ValueError:
        assert len(known) < len(ids)
    for skip in (False, True):
        whole = _demo().decode(known, skip)
        detokenizer = _demo().detokenizer(skip)
        pieces = [detokenizer.add(index) for index in known]
        assert "".join(pieces) + detokenizer.flush() == whole
        assert not any("\ud800" <= character <= "\udfff" for character in whole)
    data = b"".join(map(_demo().token_bytes, known))
    for cut in range(0, len(known) + 1, 1 + len(known) // 4):
        parts = (known[:cut], known[cut:])
        assert b"".join(_demo().token_bytes(index) for part in parts for index in part) == data
    stream = ReplyStream(_demo(), [], ["stop", "\n\n"])
    for index in known:
        if stream.stopped:
            break
        stream.add(index)
    stream.finish()


def _check_messages(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    for check in (checked_messages, checked_tools):
        try:
            checked = check(value)
        except WRONG:
            continue
        json.dumps(checked)
    for tools in (None, value):
        with contextlib.suppress(*WRONG):
            text = _demo().apply_chat_template(value if tools is None else MESSAGES, tools)
            _demo().encode(text)


# A further target is a function of bytes here, and a folder of its name in corpus/.
@functools.cache
def _engine() -> Engine:
    return Engine("demo", device="cpu", context=64, max_sessions=2, threads=1)


@functools.cache
def _saved() -> tuple[dict[str, Any], bytes]:
    """Header and data of a session of three tokens."""
    path = _write("session/whole", b"") / "whole"
    with _engine().session() as session:
        list(session.prefill([5, 6, 7]))
        session.save(path)
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:length]), data[length:]


def session(data: bytes) -> None:
    """Behind an H, a header for the data of a session file; else changes of these, with right checksums.

    A change is three bytes of place and a new byte.
    """
    header, body = _saved()
    if data[:1] == b"H":
        text = data[1:].replace(b"FINGERPRINT", header["__metadata__"]["fingerprint"].encode())
    else:
        changed = bytearray(body)
        for i in range(0, len(data) - 3, 4):
            changed[int.from_bytes(data[i : i + 3], "big") % len(body)] = data[i + 3]
        body = bytes(changed)
        crcs = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                crcs[name] = f"{zlib.crc32(body[first:last]):08x}"
        text = json.dumps(
            {**header, "__metadata__": {**header["__metadata__"], "crc32": json.dumps(crcs)}}
        ).encode()
    path = _write("session/file", len(text).to_bytes(8, "little") + text + body) / "file"
    engine = _engine()
    try:
        loaded = engine.load_session(path)
    except (*DAMAGED, ContextFullError):
        pass
    else:
        with loaded:
            assert loaded.position == len(loaded.tokens) > 0
            (token,) = loaded.step(1)
            assert 0 <= token.id < engine.tokenizer.vocab_size
    assert engine.info()["cache"]["sessions"] == 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": safetensors,
    "config": config,
    "tokenizer": tokenizer,
    "template": template,
    "prompts": prompts,
    "session": session,
}
