"""Conversations to prompts, with the chat template of the checkpoint."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lily.errors import CheckpointError, UnsupportedError
from lily.files import is_there, named, read_file, shown

if TYPE_CHECKING:
    import jinja2

    from lily.template_sandbox import TemplateSandbox

_ROLES = ("system", "user", "assistant", "tool")
# Written behind the message to be continued; the blank shows whether the template strips what it writes.
_CONTINUE_MARK = "LILY_CONTINUE_FINAL_MESSAGE "
_MAX_TEMPLATE = 100_000
_MAX_PROMPT = 16_000_000
_MAX_DEPTH = 100


def find_template(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[str, pathlib.Path] | None:
    """Return the text of the chat template of a checkpoint folder and the file it is in, or None."""
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return read_file(path, _MAX_TEMPLATE).decode("utf-8"), path
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error
    path = folder / "tokenizer_config.json"
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        entries = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = entries[-1].get("template") if entries else None
    if not isinstance(found, str):
        return None
    if len(found) > _MAX_TEMPLATE:
        raise CheckpointError(f"{path}: chat_template is larger than {_MAX_TEMPLATE} characters")
    return found, path


class ChatTemplate:
    """The chat template of a checkpoint, rendered as transformers renders it."""

    def __init__(self, folder: pathlib.Path, config: Mapping[str, Any]) -> None:
        found = find_template(folder, config)
        if found is None:
            raise CheckpointError(
                f"{folder} has no chat template (chat_template.jinja): use text or token ids"
            )
        self._constants: dict[str, Any] = {"documents": None}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                self._constants[name] = token
        self._sandbox, self._template = _compile(*found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text. See Tokenizer.apply_chat_template."""
        import jinja2

        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        chat = checked_messages(messages)
        if continue_final_message:
            _mark_final(chat[-1])
        values = {
            **self._constants,
            **variables,
            "tools": checked_tools(tools),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _joined(self._sandbox.pieces(self._template, values))
        except Exception as error:  # a template is a program, and may raise anything
            what = "refuses" if isinstance(error, jinja2.TemplateError) else "cannot write"
            raise ValueError(f"the chat template {what} the messages: {_reason(error)}") from error
        return _cut_at_mark(text) if continue_final_message else text


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a plain copy of a conversation in the form templates expect.

    Keys that are None are left out, lists of text parts become text, JSON arguments of tool calls become
    objects, the role developer becomes system, and reasoning is accepted for reasoning_content.

    Raises:
        ValueError: A message is not valid; the text says which one and why.
        UnsupportedError: A message has an image, audio or video part.
    """
    plain = _plain(messages, "messages")
    if not isinstance(plain, list) or not plain:
        raise ValueError("messages must be a non-empty list of dicts with role and content")
    chat = []
    for index, message in enumerate(plain):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be a dict with role and content, not {type(message).__name__}")
        chat.append(_checked_message({k: v for k, v in message.items() if v is not None}, index, where))
    return chat


def _checked_message(message: dict[str, Any], index: int, where: str) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":  # OpenAI's newer name for the same thing
        role = message["role"] = "system"
    if role not in _ROLES:
        raise ValueError(f"{where} has role {role!r}; the roles are {', '.join(_ROLES)} and developer")
    if role == "system" and index > 0:
        raise ValueError(
            f"{where} has role 'system', which only the first message may have: join system messages"
        )
    if "content" in message:
        message["content"] = _content_text(message["content"], where)
    elif role != "assistant":
        raise ValueError(f"{where} has no content")
    for name in ("reasoning", "thinking"):
        if name in message:
            message.setdefault("reasoning_content", message[name])
    if "tool_calls" in message:
        message["tool_calls"] = _checked_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{where}.content must be text or a list of text parts, not {type(content).__name__}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and kind != "text":
            raise UnsupportedError(f"{where}.content has a part of type {kind!r}; Lily reads text only")
        else:
            raise ValueError(
                f"{where}.content: a part must be {{'type': 'text', 'text': ...}}, not {shown(part)}"
            )
    return "".join(texts)


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{where} must be a list, not {type(calls).__name__}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{index}] must be a dict with function.name and function.arguments")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}[{index}].function.arguments is not JSON: {error}") from error
            arguments = _plain(arguments, f"{where}[{index}].function.arguments")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise ValueError(f"{where}[{index}].function.arguments must be a JSON object, not {kind}")
        function["arguments"] = arguments
    return calls


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return a plain copy of a list of tools, or None.

    Raises:
        ValueError: A tool is not a dict with the name of a function.
    """
    if tools is None:
        return None
    plain = _plain(tools, "tools")
    if not isinstance(plain, list):
        raise ValueError(f"tools must be a list of dicts, not {type(tools).__name__}")
    for index, tool in enumerate(plain):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tools[{index}] must be a dict like {{'type': 'function', 'function': {{'name': ...}}}}"
            )
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy into plain JSON types, so that a template from the internet sees no object with methods."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested too deeply, or contains itself")
    depth += 1
    if hasattr(value, "model_dump"):  # messages of the OpenAI client are pydantic models
        return _plain(value.model_dump(), where, depth)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, where, depth) for item in value]
    raise ValueError(f"{where} must consist of JSON types, {type(value).__name__} found")


def _mark_final(message: dict[str, Any]) -> None:
    if not isinstance(message.get("content"), str):
        raise ValueError("continue_final_message: the last message has no content to continue")
    message["content"] += _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template leaves out the last message")
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_MARK, at) else kept.rstrip()


def _joined(pieces: Iterable[str]) -> str:
    parts = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > _MAX_PROMPT:
            raise OverflowError(f"more than {_MAX_PROMPT} characters")
        parts.append(piece)
    return "".join(parts)


def _reason(error: Exception) -> str:
    import jinja2

    from lily.template_meter import LimitError

    text = named(str(error))
    own = isinstance(error, (jinja2.TemplateError, LimitError))
    return text if own else f"{type(error).__name__}: {text}"


def _compile(text: str, path: pathlib.Path) -> tuple[TemplateSandbox, jinja2.Template]:
    import jinja2

    from lily.template_sandbox import TemplateSandbox

    sandbox = TemplateSandbox()
    try:
        return sandbox, sandbox.from_string(text)
    except Exception as error:  # Python compiles what jinja writes, with errors of its own
        line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CheckpointError(f"{path}: the chat template is broken{line}: {_reason(error)}") from error
