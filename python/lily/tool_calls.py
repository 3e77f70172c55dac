"""Tool calls in a reply: where one ends, and what it says.

The form is the one that the chat template writes:

    <tool_call>
    <function=NAME>
    <parameter=NAME>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are raw text, so they may contain the very tags. The rules:

* A value ends at the first </parameter> behind which, after white space, the next <parameter=NAME> or the end
  of the function follows. One line break at either end is not part of it.
* A whole call within a value belongs to the value.
* </tool_call> ends a call unless a value is still open. Then it does so only if the reply ends there, or the
  next call begins.
* </function>, the last </parameter> and </tool_call> may be missing if nothing but the end of the reply or
  the next call follows.

What could be understood in two ways is no call.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from lily.results import ToolCall
from lily.tool_arguments import typed_value
from lily.tools import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END = "</function>"

_TAG = re.compile("</?tool_call>")
_HEAD = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_INNER_OPEN = r"<tool_call>\s*<function="
_INNER_CLOSE = r"</function>\s*</tool_call>"
_INNER = re.compile(f"(?P<open>{_INNER_OPEN})|{_INNER_CLOSE}")
# What matters in a value: inner calls, its end or what looks like it, and a line like a parameter's head.
_MARKS = re.compile(
    rf"(?P<open>{_INNER_OPEN})|(?P<close>{_INNER_CLOSE})"
    r"|(?P<end></parameter>(?=\s*(?:<parameter=[^<>\n]+>|\Z)))|(?P<stray></parameter>)"
    r"|^<parameter=(?P<head>[^<>\n]+)>",
    re.MULTILINE,
)
_SECOND = re.compile(r"\s*</function>\s*<function=")


class NoCallError(ValueError):
    """Text that looks like a tool call is none that can be carried out."""


class Read(NamedTuple):
    """What was read from <tool_call> on.

    Attributes:
        raw: What the model wrote, tags included.
        body: What is between the tags.
        rest: What follows.
        problem: Why it is no call, or None.
    """

    raw: str
    body: str
    rest: str
    problem: str | None = None


class CallReader:
    """Reads what follows <tool_call>, in pieces, up to the end of the call."""

    def __init__(self) -> None:
        self.begun = False  # <function= was read: text inside is no longer part of the answer
        self._parts: list[str] = []
        self._tail = ""  # what may be the beginning of a tag
        self._scanned = 0  # tags before this place were looked at
        self._maybe: int | None = None  # where the call ends if another one follows, or nothing

    def add(self, piece: str) -> Read | None:
        """Take more text and return the call if it is over, or cannot become one."""
        self._parts.append(piece)
        if self.begun and self._maybe is None:
            tail = self._tail + piece
            if _TAG.search(tail) is None:
                self._tail = tail[tail_start(tail, OPEN, CLOSE) :]
                return None
        text = self._text()
        if not self.begun:
            begins = _begins(text, _FUNCTION)
            if begins is False:
                return Read(OPEN, "", text, f"{OPEN} without {_FUNCTION}...> behind it")
            if begins is None:
                return None
            self.begun = True
        return self._scan(text)

    def finish(self, complete: bool) -> Read:
        """Return what was read when nothing more comes; complete if the model ended the reply itself."""
        text = self._text()
        if complete and self.begun:
            if self._maybe is not None and not text[self._maybe :].strip():
                return _read(text, self._maybe)
            if text.rstrip().endswith(_END) and _closed(text) and not _inside_inner(text):
                return _read(text, len(text))
        return Read(OPEN + text, text, "", "the reply ended before the call did")

    def _text(self) -> str:
        text = "".join(self._parts)
        self._parts = [text]
        return text

    def _scan(self, text: str) -> Read | None:
        while True:
            if self._maybe is not None:
                begins = _begins(text[self._maybe :], OPEN, _FUNCTION)
                if begins is None:
                    return None
                if begins:
                    return _read(text, self._maybe)
                self._maybe = None
            tag = _TAG.search(text, self._scanned)
            if tag is None:
                rest = text[self._scanned :]
                self._tail = rest[tail_start(rest, OPEN, CLOSE) :]
                return None
            self._scanned = tag.end()
            before = text[: tag.start()]
            if _inside_inner(before):
                continue
            if tag.group() == OPEN:
                if before.rstrip().endswith(_END) and _closed(before):
                    self._maybe = len(before.rstrip())
            elif _closed(before):
                return _read(text, tag.end())
            else:
                self._maybe = tag.end()


def parse_call(body: str, tools: Mapping[str, Tool]) -> ToolCall:
    """Return the call that is written between the tags, with an id of its own.

    Raises:
        NoCallError: Its structure is not understood, or it names no known function.
    """
    head = _HEAD.match(body)
    if head is None:
        raise NoCallError(f"{_FUNCTION}...> is not complete")
    tool = tools.get(head[1])
    if tool is None:
        raise NoCallError(f"there is no function {head[1]!r}; there are {', '.join(tools)}")
    rest = body.rstrip().removesuffix(_END)[head.end() :].rstrip()
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(rest):
        parameter = _PARAMETER.match(rest, at)
        if parameter is None:
            raise NoCallError("there is text outside of the parameters")
        name = parameter[1]
        if name in arguments:
            raise NoCallError(f"parameter {name!r} is there twice")
        end, at = _value_end(rest, parameter.end(), tool)
        arguments[name] = typed_value(_stripped(rest[parameter.end() : end]), name, tool.parameters)
    return ToolCall("call_" + secrets.token_hex(12), tool.name, arguments)


def tail_start(text: str, *tags: str) -> int:
    """Return where the end of a text may be the beginning of a tag; the text's length if it is not."""
    at = text.rfind("<")
    return at if at >= 0 and any(tag.startswith(text[at:]) for tag in tags) else len(text)


def _value_end(text: str, start: int, tool: Tool) -> tuple[int, int]:
    """Return where a value ends, and where what follows its end tag begins."""
    declared = tool.parameters.get("properties")
    depth, stray = 0, False
    for mark in _MARKS.finditer(text, start):
        kind = mark.lastgroup
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(depth - 1, 0)
        elif depth:
            continue
        elif kind == "end":
            return mark.start(), mark.end()
        elif kind == "head" and isinstance(declared, Mapping) and mark["head"] in declared:
            raise NoCallError(f"parameter {mark['head']!r} begins within another one")
        elif kind == "stray":
            stray = True
            if _SECOND.match(text, mark.end()):
                raise NoCallError("there is a second function in it")
    if stray:
        raise NoCallError("what follows </parameter> is not understood")
    return len(text), len(text)


def _stripped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _begins(text: str, *words: str) -> bool | None:
    """Tell whether a text begins with words, white space between them; None: more of it has to be known."""
    for word in words:
        text = text.lstrip()
        if not text.startswith(word):
            return None if word.startswith(text) else False
        text = text[len(word) :]
    return True


def _closed(body: str) -> bool:
    """Tell whether no value is open at the end of a call."""
    body = body.rstrip().removesuffix(_END).rstrip()
    return body.endswith("</parameter>") or "<parameter=" not in body


def _inside_inner(body: str) -> bool:
    """Tell whether a call within a value is not over."""
    depth = 0
    for mark in _INNER.finditer(body):
        depth = depth + 1 if mark["open"] else max(depth - 1, 0)
    return depth > 0


def _read(text: str, end: int) -> Read:
    return Read(OPEN + text[:end], text[:end].removesuffix(CLOSE), text[end:])
