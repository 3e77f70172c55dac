"""Text to token ids and back, for the byte-level BPE tokenizer of the checkpoint."""

from __future__ import annotations

import codecs
import contextlib
import json
import operator
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from lily.errors import CheckpointError, UnsupportedError
from lily.files import MAX_JSON_BYTES, is_there, named, read_file
from lily.model_config import parse_json, read_json

if TYPE_CHECKING:
    from lily.chat import ChatTemplate


def _byte_alphabet() -> dict[str, int]:
    """Return the printable character that byte-level BPE writes for each byte, inverted.

    Source: openai/gpt-2 encoder.py: bytes_to_unicode.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_alphabet()
_MAX_CONFIG_BYTES = 10_000_000
# Parts that byte-level tokenizers have. Others could let a text grow without end, or cannot keep its bytes.
_PARTS = {
    "normalizer": {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"},
    "pre_tokenizer": {
        "Sequence",
        "Split",
        "ByteLevel",
        "Digits",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
    },
}
# How a normalizer Precompiled may be written: by name, by its one key, or with letters as escapes.
_CHARSMAP = re.compile(rb"recompiled|\\u00[4-7]")


class Tokenizer:
    """The tokenizer and chat template of a checkpoint folder. Safe to use from several threads.

    Args:
        folder: Checkpoint folder with tokenizer.json and, optionally, tokenizer_config.json and
            chat_template.jinja.
        vocab: Number of token ids the model has, which may exceed the tokenizer's; None takes the tokenizer's
            own.

    Raises:
        CheckpointError: tokenizer.json is missing or damaged, or has ids the model does not have.
        UnsupportedError: It is not a byte-level BPE tokenizer.
    """

    def __init__(self, folder: str | pathlib.Path, vocab: int | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        self._folder = pathlib.Path(folder)
        path = self._folder / "tokenizer.json"
        data = read_file(path, MAX_JSON_BYTES)
        _refuse_charsmap(data, path)
        with _typed(CheckpointError, f"{path} cannot be read"):
            self._backend = Backend.from_buffer(data)
        for part, wanted in (("model", "BPE"), ("decoder", "ByteLevel")):
            found = type(getattr(self._backend, part)).__name__
            if found != wanted:
                raise UnsupportedError(
                    f"{path}: {part} {found} found, only byte-level BPE ({wanted}) is supported"
                )
        for part, known in _PARTS.items():
            _check_part(part, getattr(self._backend, part), known, path)
        # A saved tokenizer may carry a length limit or padding; a prompt must not be cut or filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = {
            token.content: index for index, token in self._backend.get_added_tokens_decoder().items()
        }
        self._special = frozenset(
            index for index, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        highest = max([*ids, *self._added.values()], default=-1)
        if vocab is not None and highest >= vocab:
            raise CheckpointError(
                f"{path}: token ids go up to {highest}, but the model has {vocab} tokens (config.json)"
            )
        self._vocab = highest + 1 if vocab is None else vocab
        self._pieces: dict[int, bytes] = {}
        self._template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """Number of valid token ids; ids are 0 ... vocab_size - 1."""
        return self._vocab

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which skip_special_tokens leaves out."""
        return self._special

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        from lily.chat import find_template

        return self._template is not None or find_template(self._folder, _config(self._folder)) is not None

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is written exactly like this, or None."""
        found = self._added.get(text)
        return found if found is not None else self._backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids; special tokens written in the text become their ids.

        Raises:
            ValueError: The text is not a string of Unicode characters (it has lone surrogates).
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at character {error.start}, which is not Unicode"
            ) from None
        with _typed(ValueError, "text cannot be turned into tokens"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is outside 0 ... vocab_size - 1.
        """
        try:
            many = iter(ids)  # type: ignore[arg-type]
        except TypeError:
            many = iter([ids])  # type: ignore[list-item]
        data = b"".join(self.token_bytes(index, skip_special_tokens) for index in many)
        return data.decode("utf-8", errors="replace")

    def detokenizer(self, skip_special_tokens: bool = False) -> Detokenizer:
        """Return a streaming decoder."""
        return Detokenizer(self, skip_special_tokens)

    def token_bytes(self, index: int, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes a token stands for; none for padding ids above the tokenizer's vocabulary.

        Raises:
            ValueError: The id is outside 0 ... vocab_size - 1.
        """
        index = self.checked_id(index)
        if skip_special_tokens and index in self._special:
            return b""
        piece = self._pieces.get(index)
        if piece is None:
            text = self._backend.id_to_token(index) or ""
            if text in self._added or any(character not in _BYTES for character in text):
                piece = text.encode("utf-8")
            else:
                piece = bytes(_BYTES[character] for character in text)
            self._pieces[index] = piece
        return piece

    def checked_id(self, index: object) -> int:
        """Return a token id as an int.

        Raises:
            ValueError: It is not an integer, or outside 0 ... vocab_size - 1.
        """
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if isinstance(index, bool) or not 0 <= number < self._vocab:
            raise ValueError(f"token id {index!r} is not an integer from 0 to {self._vocab - 1}")
        return number

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        *,
        add_generation_prompt: bool | None = ...,
        continue_final_message: bool = ...,
        enable_thinking: bool | None = ...,
        tokenize: Literal[False] = ...,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        *,
        add_generation_prompt: bool | None = ...,
        continue_final_message: bool = ...,
        enable_thinking: bool | None = ...,
        tokenize: Literal[True],
        **variables: Any,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        tokenize: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Write a conversation as the prompt the model was trained on.

        Args:
            messages: Dicts with role (system or developer, user, assistant, tool) and content (text, or a
                list of text parts). Assistant messages may have reasoning_content and tool_calls, whose
                arguments may be JSON text.
            tools: Functions the model may call, as in OpenAI's API.
            add_generation_prompt: End with the header of the next assistant message. Default: yes, unless
                continue_final_message.
            continue_final_message: Leave the last message open, so that the model goes on with it.
            enable_thinking: False asks for an answer without reasoning. None is the template's default.
            tokenize: Return token ids instead of text.
            **variables: Further variables of the template.

        Raises:
            ValueError: The messages do not fit the template; the message says which one and why.
            CheckpointError: The checkpoint has no chat template, or the template is broken.
        """
        if enable_thinking is not None and not isinstance(enable_thinking, bool):
            raise ValueError(f"enable_thinking must be True or False, not {enable_thinking!r}")
        if self._template is None:
            from lily.chat import ChatTemplate

            self._template = ChatTemplate(self._folder, _config(self._folder))
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        text = self._template.render(
            messages, tools, add_generation_prompt, continue_final_message, variables
        )
        return self.encode(text) if tokenize else text


class Detokenizer:
    """Turns a stream of token ids into text, piece by piece.

    A character whose bytes are spread over several tokens is held back until it is complete, so the pieces
    together always equal the text of all ids decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, index: int) -> str:
        """Take one token id and return the text that is complete with it, which may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(index, self._skip))

    @property
    def inside_character(self) -> bool:
        """Whether some bytes of the last character are still to come."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return what is held back (an incomplete character as U+FFFD) and start afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _config(folder: pathlib.Path) -> dict[str, Any]:
    """Read tokenizer_config.json; a checkpoint may do without it."""
    path = folder / "tokenizer_config.json"
    return read_json(path, _MAX_CONFIG_BYTES) if is_there(path) else {}


def _refuse_charsmap(data: bytes, path: pathlib.Path) -> None:
    """Refuse what the backend must not even read: a damaged charsmap makes it ask for gigabytes and abort."""
    if _CHARSMAP.search(data) is None:
        return
    normalizer = parse_json(data, f"{path} cannot be read").get("normalizer")
    if _CHARSMAP.search(json.dumps(normalizer).encode()):
        _unsupported("normalizer", "Precompiled", _PARTS["normalizer"], path)


def _check_part(part: str, found: Any, known: set[str], path: pathlib.Path) -> None:
    if found is None:
        return
    values = [json.loads(found.__getstate__())]
    while values:
        value = values.pop()
        if value["type"] not in known:
            _unsupported(part, value["type"], known, path)
        values += [*value.get("normalizers", ()), *value.get("pretokenizers", ())]


def _unsupported(part: str, found: str, known: set[str], path: pathlib.Path) -> NoReturn:
    raise UnsupportedError(f"{path}: {part} {named(found)} found, supported are {', '.join(sorted(known))}")


@contextlib.contextmanager
def _typed(kind: type[Exception], what: str) -> Iterator[None]:
    """Give errors of the backend a class: it raises bare Exception, and panics that are not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {named(str(error))}") from error
