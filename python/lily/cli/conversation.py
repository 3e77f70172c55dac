"""The messages of a chat, and the files they are kept in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.chat import checked_messages
from lily.files import MAX_JSON_BYTES, named, read_file
from lily.replacing import replacing

_FORMAT = "lily-chat"

Message = dict[str, Any]


class Conversation:
    """The messages of a chat, and whether the model thinks before it answers.

    Args:
        model: Name of the model, for files.
        system: System message in front, or None.
        thinking: Whether the model thinks; None leaves that to the chat template.
    """

    def __init__(self, model: str, system: str | None, thinking: bool | None) -> None:
        self.model = model
        self.thinking = thinking
        self.messages: list[Message] = []
        self._unanswered: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it. The rest of the conversation stays."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._unanswered = None

    def ask(self, question: str) -> list[Message]:
        """Return the messages that end with a question; answer() makes them those of the conversation."""
        self._unanswered = question
        return [*self.messages, {"role": "user", "content": question}]

    def answer(self, asked: list[Message], message: Message) -> None:
        """Add a question and what was answered."""
        self.messages = [*asked, message]
        self._unanswered = None

    def take_back(self) -> str | None:
        """Return the last question, and forget it with its answer; None if there is none."""
        if self._unanswered is not None:
            return self._unanswered
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                self._unanswered = str(self.messages[index]["content"])
                self.messages = self.messages[:index]
                return self._unanswered
        return None

    def save(self, path: Path) -> None:
        """Write the conversation to a file, in place of an older one.

        Raises:
            OSError: The file cannot be written; an older one stays.
        """
        record = {"format": _FORMAT, "model": self.model, "thinking": self.thinking}
        text = json.dumps({**record, "messages": self.messages}, ensure_ascii=False, indent=1)
        with replacing(path) as file:
            file.write(text.encode("utf-8", "surrogatepass") + b"\n")

    def load(self, path: Path, check: Callable[[list[Message]], object]) -> str | None:
        """Take over the conversation of a file, and return the name of the model it was with, if known.

        Args:
            path: A file that save() wrote, or a list of messages in JSON.
            check: Is called with the messages, and raises an error if the model cannot go on from them.

        Raises:
            ValueError: It is not such a file, or the model cannot go on from it; nothing was changed.
            CheckpointError: It cannot be read; nothing was changed.
        """
        try:
            found = json.loads(read_file(path, MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is no conversation, bad JSON ({error})") from error
        record = {"format": _FORMAT, "messages": found} if isinstance(found, list) else found
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise ValueError(f"{path}: is no conversation of lily chat, nor a list of messages")
        thinking = record.get("thinking", self.thinking)
        try:
            given: Any = record.get("messages")
            messages = [] if given == [] else checked_messages(given)
            if thinking is not None and not isinstance(thinking, bool):
                raise ValueError("thinking must be true or false")
            if messages:
                check(messages)
        except ValueError as error:
            raise ValueError(f"{path}: {named(str(error))}") from error
        unanswered = None
        if messages and messages[-1]["role"] == "user":
            unanswered = messages.pop()["content"]
        self.messages, self._unanswered, self.thinking = messages, unanswered, thinking
        model = record.get("model")
        return named(model) if isinstance(model, str) else None

    @property
    def unanswered(self) -> bool:
        """Whether the last question has no answer yet."""
        return self._unanswered is not None
