"""The methods and operators that a chat template may use on text and numbers, with the sizes they lead to.

Each check is called before the operation, with its arguments, and refuses what would become too large or take
too long. What has no check is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from lily.template_meter import ITEM, MAX_CHARS, LimitError, Meter

if TYPE_CHECKING:
    from jinja2.environment import Environment

# Markup escapes what it is joined with: < becomes &lt; and " becomes &#34;.
ESCAPED = 5
_WIDTH = re.compile(r"[0-9]+(?=[.hlLdiouxXeEfFgGcrsa])")
_NUMBER = re.compile(r"[0-9]+")
_ENCODINGS = {"utf-8", "utf8", "utf-16", "utf-32", "ascii", "latin-1", "latin1"}
_HANDLERS = {"strict", "ignore", "replace"}
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Check = Callable[..., None]


def _light(meter: Meter, text: str, *args: Any, **kwargs: Any) -> None:
    meter.weigh(args)
    meter.charge(len(text))


def _cased(meter: Meter, text: str) -> None:
    meter.room(3 * len(text))


def _padded(meter: Meter, text: str, width: int, fillchar: str = " ") -> None:
    meter.room(max(len(text), width))


def _tabs(meter: Meter, text: str, tabsize: int = 8) -> None:
    meter.room(len(text) + text.count("\t") * max(tabsize, 0))


def stripped(meter: Meter, text: str, chars: str | None = None) -> None:
    """Check strip: each character taken off is looked for among all others."""
    meter.charge(len(text) * (1 + len(chars or "") // 16))


def _from_the_right(meter: Meter, text: str, part: str | None = None, *args: Any, **kwargs: Any) -> None:
    # Python has a fast search forwards, and a naive one backwards.
    meter.charge(len(text) * (1 + len(part or "") // 4))


def replaced(meter: Meter, text: str, old: str, new: str, count: int = -1) -> None:
    """Check replace."""
    meter.charge(len(text))
    new = Markup.escape(new) if isinstance(text, Markup) else new
    found = text.count(old)
    found = found if count is None or count < 0 else min(found, count)
    meter.room(len(text) + found * (len(new) - len(old)))


def _split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    meter.charge(len(text))
    if sep is None:
        parts = len(text) // 2
    else:
        parts = text.count(sep)
        meter.charge(len(text) * (len(sep) // 16))
    meter.room_for_items(parts if maxsplit < 0 else min(parts, maxsplit))


def _rsplit(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    _from_the_right(meter, text, sep)
    _split(meter, text, sep, maxsplit)


def _lines(meter: Meter, text: str, keepends: bool = False) -> None:
    count_lines(meter, text)


def count_lines(meter: Meter, text: str) -> int:
    """Return how many lines a text has, at most."""
    meter.charge(len(text))
    lines = 1 + sum(text.count(each) for each in _LINE_BREAKS)
    meter.room_for_items(lines)
    return lines


def unescaped(meter: Meter, text: str) -> None:
    """Check striptags and unescape, which look at each tag and each entity."""
    meter.room_for_items(text.count("&") + text.count("<"))


def _joined(meter: Meter, text: str, items: list[Any]) -> None:
    factor = ESCAPED if isinstance(text, Markup) else 1
    meter.room(factor * (sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items)))


def _translated(meter: Meter, text: str, table: Mapping[int, Any]) -> None:
    longest = max((len(v) for v in table.values() if isinstance(v, str)), default=1)
    meter.charge(len(text) * 16)
    meter.room(len(text) * max(longest, 1))


def _made_table(meter: Meter, text: str, *args: Any) -> None:
    meter.room_for_items(sum(len(arg) for arg in args if isinstance(arg, (str, dict))))


def _encoded(meter: Meter, text: str | bytes, encoding: str = "utf-8", errors: str = "strict") -> None:
    if encoding.lower() not in _ENCODINGS or errors not in _HANDLERS:
        raise LookupError(f"unknown encoding {encoding[:40]!r} or error handler {errors[:40]!r}")
    meter.room(len(text) * 4)


def _looked_up(meter: Meter, values: Any, key: Any, default: Any = None) -> None:
    if type(key) is not str:
        meter.weigh(key)


def _compared(meter: Meter, values: Any, value: Any, *args: Any) -> None:
    meter.weigh(values)
    meter.weigh(value)


def _copied(meter: Meter, values: Any) -> None:
    meter.room_for_items(len(values))


def _free(meter: Meter, value: Any) -> None:
    pass


_OF_TEXT: dict[str, Check] = {
    **dict.fromkeys(("upper", "lower", "capitalize", "title", "swapcase", "casefold"), _cased),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), stripped),
    **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _light),
    **dict.fromkeys(("find", "index", "count", "partition"), _light),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _from_the_right),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **{name: _light for name in dir(str) if name.startswith("is")},
    "expandtabs": _tabs,
    "replace": replaced,
    "split": _split,
    "rsplit": _rsplit,
    "splitlines": _lines,
    "join": _joined,
    "translate": _translated,
    "maketrans": _made_table,
    "encode": _encoded,
    "unescape": unescaped,
    "striptags": unescaped,
}
_OF_TYPE: dict[type, dict[str, Check]] = {
    dict: {"get": _looked_up, "items": _free, "keys": _free, "values": _free, "copy": _copied},
    list: {"index": _compared, "count": _compared, "copy": _copied},
    tuple: {"index": _compared, "count": _compared},
    range: {"index": _compared, "count": _compared},
    bytes: {"decode": _encoded},
    int: {"bit_length": _free},
    float: {"is_integer": _free},
}


def call_method(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a built-in type after its check."""
    value, name = method.__self__, method.__name__
    if name == "maketrans":
        value = ""
    checks = _OF_TEXT if isinstance(value, str) else _OF_TYPE.get(type(value), {})
    check = checks.get(name)
    if check is None:
        raise LimitError(f"the method {name} of {type(value).__name__} is not for templates")
    if name == "join" and len(args) == 1:
        args = (meter.listed(args[0]),)
    check(meter, value, *args, **kwargs)
    return method(*args, **kwargs)


class BoundFormat:
    """The method format or format_map of a text, bound to it; only the environment calls it."""

    def __init__(self, text: str, mapping: bool) -> None:
        self._text = text
        self._mapping = mapping

    def run(self, environment: Environment, meter: Meter, args: Any, kwargs: Mapping[str, Any]) -> str:
        """Format, with every field counted."""
        if self._mapping:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            args, kwargs = (), args[0]
        text = self._text
        if isinstance(text, Markup):
            formatter: _Formatter = _EscapeFormatter(environment, escape=text.escape)
        else:
            formatter = _Formatter(environment)
        formatter.meter = meter
        return type(text)(formatter.vformat(text, args, kwargs))


class _Formatter(SandboxedFormatter):
    meter: Meter

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        self.meter.charge(ITEM + len(field_name))
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is None:
            return value
        self.meter.weigh(value, repr)
        return self.meter.made(super().convert_field(value, conversion))

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.meter.room(sum(_number(digits) for digits in _NUMBER.findall(format_spec)))
        if not isinstance(value, str):
            self.meter.weigh(value, repr)
        return self.meter.made(super().format_field(value, format_spec))


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else MAX_CHARS + 1


def check_printf(meter: Meter, form: str | bytes, args: Any) -> None:
    """Check form % args: widths, precisions, and the arguments."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    fields = text.count("%")
    if not fields:
        return
    each = sum(_number(digits) for digits in _WIDTH.findall(text)) + 400
    if "*" in text:
        values = args if isinstance(args, tuple) else (args,)
        each += sum(min(abs(value), MAX_CHARS) for value in values if isinstance(value, int))
    content = meter.weigh(args, repr).chars * (fields if isinstance(args, Mapping) else 1)
    factor = ESCAPED if isinstance(form, Markup) else 1
    meter.room(factor * (len(text) + each * fields + content))
