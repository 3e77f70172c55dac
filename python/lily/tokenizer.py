"""Text to token ids and back, for the byte-level BPE tokenizer of the checkpoint."""

from __future__ import annotations

import codecs
import json
import operator
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from lily.errors import CheckpointError, UnsupportedError

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


class Tokenizer:
    """The tokenizer and chat template of a checkpoint folder. Safe to use from several threads.

    Args:
        folder: Checkpoint folder with tokenizer.json and, optionally, tokenizer_config.json and
            chat_template.jinja.
        vocab: Number of token ids the model has, which may exceed the tokenizer's; None takes the tokenizer's
            own.

    Raises:
        CheckpointError: tokenizer.json is missing or damaged.
        UnsupportedError: It is not a byte-level tokenizer.
    """

    def __init__(self, folder: str | pathlib.Path, vocab: int | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        self._folder = pathlib.Path(folder)
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if type(self._backend.decoder).__name__ != "ByteLevel":
            found = type(self._backend.decoder).__name__
            raise UnsupportedError(
                f"{path}: decoder {found} found, only byte-level BPE (ByteLevel) is supported"
            )
        # A saved tokenizer may carry a length limit or padding; a prompt must not be cut or filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = {
            token.content: index for index, token in self._backend.get_added_tokens_decoder().items()
        }
        self._special = frozenset(
            index for index, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        highest = max([self._backend.get_vocab_size(with_added_tokens=True) - 1, *self._added.values()])
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
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is outside 0 ... vocab_size - 1.
        """
        many = [ids] if isinstance(ids, int) else ids
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

    def flush(self) -> str:
        """Return what is held back (an incomplete character as U+FFFD) and start afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _config(folder: pathlib.Path) -> dict[str, Any]:
    """Read tokenizer_config.json; a checkpoint may do without it."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: a JSON object expected, {type(config).__name__} found")
    return config
