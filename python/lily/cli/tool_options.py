"""Options whose values are JSON: tools that the model may call, and the form of its answer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lily.chat import checked_tools
from lily.errors import CheckpointError
from lily.files import MAX_JSON_BYTES, read_file

_CHOICES = ("auto", "none", "required")
_FORMATS = ("text", "json_object", "json_schema")


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    """Add --tools, --tool-choice and --response-format."""
    group = parser.add_argument_group(
        "form of the answer", "JSON is given as it is, or as the name of a file."
    )
    group.add_argument("--tools", metavar="JSON", help="list of functions the model may call, as for OpenAI")
    group.add_argument(
        "--tool-choice",
        metavar="CHOICE",
        help="'auto', 'none', 'required', or the name of the function to call (default: auto)",
    )
    group.add_argument(
        "--response-format",
        metavar="JSON",
        help="a JSON schema, a response_format as for OpenAI, or 'json_object' for any JSON",
    )


def tool_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given, as arguments of generate(). An error ends the program as wrong usage."""
    options: dict[str, Any] = {}
    if args.tools is not None:
        try:
            options["tools"] = checked_tools(_read(args, "tools"))
        except ValueError as error:
            args.parser.error(f"argument --tools: {error}")
    if args.tool_choice is not None:
        if args.tools is None:
            args.parser.error("--tool-choice needs --tools")
        options["tool_choice"] = args.tool_choice
        if args.tool_choice not in _CHOICES:
            options["tool_choice"] = {"type": "function", "function": {"name": args.tool_choice}}
    if args.response_format is not None:
        options["response_format"] = _response_format(args)
    return options


def _response_format(args: argparse.Namespace) -> dict[str, Any]:
    if args.response_format in _FORMATS[:2]:
        return {"type": args.response_format}
    value: dict[str, Any] = _read(args, "response_format")
    if not isinstance(value, dict):
        args.parser.error(f"argument --response-format: must be a JSON object, not {type(value).__name__}")
    if value.get("type") in _FORMATS:
        return value
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def _read(args: argparse.Namespace, name: str) -> Any:
    """Return the value of an option that is JSON, or the name of a file with it."""
    given = getattr(args, name)
    option = f"--{name.replace('_', '-')}"
    where = ""
    if given.lstrip()[:1] not in ("[", "{"):
        where = f"{given}: "
        try:
            given = read_file(Path(given), MAX_JSON_BYTES)
        except CheckpointError as error:
            args.parser.error(f"argument {option}: {error}")
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        args.parser.error(f"argument {option}: {where}bad JSON ({error})")
