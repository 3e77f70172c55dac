"""Arguments of tool calls: from the text a model writes to values of the types that a JSON schema names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_MAX_DEPTH = 32  # of references and alternatives in a schema
_NUMBERS = frozenset(("integer", "number"))
_ALL = frozenset(("string", "boolean", "null", "array", "object")) | _NUMBERS
_PYTHON = {"True": True, "False": False, "None": None}


class _Accepted(NamedTuple):
    """What a schema accepts: names of types, and texts that it lists."""

    types: frozenset[str] = _ALL
    texts: frozenset[str] = frozenset()


def typed_value(text: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of an argument.

    Where the schema accepts nothing but strings, the text is the value. Else the text is read as JSON, and as
    True, False or None where it cannot be a string, and taken for what it says if the schema accepts that
    type. What does not fit, or says nothing but a string, stays text.

    Args:
        text: What the model wrote.
        name: Name of the parameter; one that the schema does not describe may be of any type.
        parameters: JSON schema of all arguments.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    accepted = _accepted(schema, parameters)
    if accepted.types == {"string"} or text in accepted.texts:
        return text
    word = text.strip()
    if word in _PYTHON and "string" not in accepted.types:
        value: Any = _PYTHON[word]
    else:
        try:
            value = json.loads(text)
            # Infinity, NaN and halves of surrogate pairs pass there, but are not JSON.
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return text
    kind = _type_of(value)
    if kind == "number" and "number" not in accepted.types and value.is_integer():
        kind, value = "integer", int(value)
    return value if kind in accepted.types and kind != "string" else text


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _accepted(schema: Any, root: Mapping[str, Any], depth: int = 0) -> _Accepted:
    """Return what a schema accepts; what is not understood of it accepts everything."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _Accepted()
    types, texts = _ALL, frozenset[str]()
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    known = {name for name in names if isinstance(name, str) and name in _ALL}
    if known:
        types = frozenset(known) | (_NUMBERS if "number" in known else frozenset())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= {_type_of(value) for value in values}
        texts = frozenset(value for value in values if isinstance(value, str))
    parts = [_target(schema["$ref"], root)] if "$ref" in schema else []
    parts += _listed(schema, "allOf")
    for part in parts:
        found = _accepted(part, root, depth + 1)
        types, texts = types & found.types, texts | found.texts
    for key in ("anyOf", "oneOf"):
        if branches := [_accepted(branch, root, depth + 1) for branch in _listed(schema, key)]:
            types &= frozenset[str]().union(*(branch.types for branch in branches))
            texts = texts.union(*(branch.texts for branch in branches))
    return _Accepted(types, texts)


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema that a reference like #/$defs/NAME stands for, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for key in reference[1:].split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
