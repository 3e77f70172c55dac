"""Changes inputs so that they stay close to what their reader accepts: as JSON, as text, or as bytes."""

from __future__ import annotations

import json
import random
from typing import Any

_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 255, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, 0.5, "", "a", "\0",
    "\ud800", "\U0001f600", "a" * 5000, [], {}, [[]], [0, 0], {"a": 1}, [1] * 100, "default", "BF16", "BPE",
]  # fmt: skip
_TOKENS = """
{{ }} {% %} {%- -%} {{- for in endfor if elif else endif set endset macro endmacro call endcall
filter block endblock loop loop( ns namespace( range( ** // % ~ | . [ ] ( ) : , == != < and or
not is defined none true recursive messages tools tojson join map('upper') 'a' 9 10**9 *10000
.split( .format( {0} %s .replace( length list sort unique batch( round( indent( ljust( self
caller() varargs [::-1] raise_exception( break continue
""".split()  # noqa: SIM905
_DEEPEST = 40


def mutated(data: bytes, rng: random.Random, most: int = 1 << 16) -> bytes:
    """Return a changed input."""
    for _ in range(1 + rng.randrange(3)):
        change = rng.choice((_json, _json, _text, _bytes))
        data = change(data, rng)
    return data[:most]


def _json(data: bytes, rng: random.Random) -> bytes:
    at = data.find(b"{") if data[:1] not in b"[" else 0
    at = 1 if data[:2] == b"J[" else at
    for start in (at, 0):
        try:
            value = json.loads(data[max(start, 0) :])
        except (ValueError, RecursionError):
            continue
        value = _changed(value, rng, 0)
        try:
            text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        except (ValueError, RecursionError):
            continue
        return data[: max(start, 0)] + text.encode("utf-8", "surrogatepass")
    return _text(data, rng)


def _changed(value: Any, rng: random.Random, level: int) -> Any:
    """Change one place in a JSON value."""
    if level < _DEEPEST and rng.random() < 0.85 and isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            return _changed_list(value, rng, level)
        key = rng.choice(list(value))
        if rng.random() < 0.8:
            return {**value, key: _changed(value[key], rng, level + 1)}
        name = rng.choice([key + "x", rng.choice(list(value)), str(rng.choice(_ODD)), key[:-1]])
        kept = {each: item for each, item in value.items() if each != key}
        return {**kept, name: value[key]} if rng.random() < 0.6 else kept
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + rng.choice((-1, 1, 64, -64, value, 2**32))
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return (
            value[:at]
            + rng.choice(("", "x", "\0", "(a+)+$", value, "\\", "\u0120", "\U0001f600"))
            + value[at:]
        )
    return rng.choice([*_ODD, [value], {"type": value}])


def _changed_list(value: list[Any], rng: random.Random, level: int) -> list[Any]:
    at = rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.7:
        return [*value[:at], _changed(value[at], rng, level + 1), *value[at + 1 :]]
    if kind < 0.8:
        return value[:at] + value[at + 1 :]
    return [*value[:at], rng.choice([value[at], rng.choice(value), rng.choice(_ODD)]), *value[at:]]


def _text(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", errors="surrogateescape")
    at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    kind = rng.random()
    if kind < 0.5:
        text = text[:at] + " " * rng.randrange(2) + rng.choice(_TOKENS) + " " * rng.randrange(2) + text[at:]
    elif kind < 0.65:
        text = text[:at] + text[min(to, at + 20) :]
    elif kind < 0.8:
        text = text[:to] + text[at:to] + text[to:]
    elif kind < 0.9:
        text = text[:at] + text[at:to] * rng.randrange(2, 50) + text[to:]
    else:
        text = text[:at] + chr(rng.choice((0, 10, 34, 0x301, 0x1F600, rng.randrange(0xD800)))) + text[at:]
    return text.encode("utf-8", "surrogateescape")


def _bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(1 + rng.randrange(4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(3)
        if kind == 0:
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 1:
            changed.insert(at, rng.randrange(256))
        elif len(changed) > 1:
            del changed[at : at + 1 + rng.randrange(8)]
        changed = changed or bytearray(b"\0")
    return bytes(changed)
