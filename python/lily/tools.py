"""Tools of a request: functions the model may call, and which of them it has to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

_NAME = re.compile(r"[^\s<>](?:[^\n<>]*[^\s<>])?")  # what can stand in <function=NAME>
_CHOICES = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    Attributes:
        name: Its name.
        parameters: JSON schema of its arguments; empty if nothing is known of them.
    """

    name: str
    parameters: Mapping[str, Any]


class ToolChoice(NamedTuple):
    """Whether the model may, must not or has to call a tool.

    Attributes:
        mode: "auto", "none" or "required".
        name: The function that has to be called, if it has to be a certain one.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


def tools_of(plain: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the functions of a list that checked_tools() returned.

    Raises:
        ValueError: A name or a schema cannot be used, or two functions have one name.
    """
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(plain):
        function = entry.get("function", entry)
        name, parameters = function["name"], function.get("parameters")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"tools[{index}]: a name is not empty and has no <, >, line breaks or outer blanks, "
                f"unlike {name!r}"
            )
        if name in tools:
            raise ValueError(f"tools[{index}]: {name!r} is the name of a tool before it as well")
        if parameters is not None and not isinstance(parameters, dict):
            kind = type(parameters).__name__
            raise ValueError(f"tools[{index}]: parameters must be a JSON schema (a dict), not {kind}")
        tools[name] = Tool(name, parameters or {})
    return tuple(tools.values())


def choice_of(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return a checked tool_choice; None is "auto".

    Raises:
        ValueError: It is none of what is supported, names no tool, or there are no tools.
    """
    if choice is None:
        return ToolChoice()
    if not tools:
        raise ValueError(f"tool_choice={choice!r} needs tools")
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        raise ValueError(f"tool_choice must be {_CHOICES}, not {choice!r}")
    if name not in (known := [tool.name for tool in tools]):
        raise ValueError(f"tool_choice: no tool is named {name!r}; the tools are {', '.join(known)}")
    return ToolChoice("required", name)
