"""The filters and tests that a chat template may use: jinja2's own, behind checks of what they will cost.

Filters that chat templates have no use for are left out (those that make HTML, random, pprint, wordwrap).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Undefined
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import _PassArg, pass_context

from lily import template_methods
from lily.template_meter import ITEM, LimitError, Meter

Run = Callable[..., Any]
# Checks what a filter gets, and returns it, perhaps as a list of what an iterator had.
Check = Callable[..., Any]
_MAX_NUMBER = 1000
_MAX_ATTRIBUTE = 1000
_MAX_PRECISION = 400
_LONG = 4096


def _text(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    return value if isinstance(value, str) else meter.text(value)


def _cased(meter: Meter, value: Any) -> Any:
    text = _text(meter, value)
    meter.room(3 * len(text))
    return text


def _words(meter: Meter, value: Any) -> Any:
    text = _text(meter, value)
    meter.room_for_items(len(text) // 2)
    return text


def _centred(meter: Meter, value: Any, width: int = 80) -> Any:
    text = _text(meter, value)
    meter.room(max(len(text), width))
    return text


def _escaped(meter: Meter, value: Any) -> Any:
    text = _text(meter, value)
    meter.room(len(text) + 4 * sum(text.count(each) for each in "&<>'\""))
    return text


def _trimmed(meter: Meter, value: Any, chars: str | None = None) -> Any:
    text = _text(meter, value)
    template_methods.stripped(meter, text, chars)
    return text


def _stripped(meter: Meter, value: Any) -> Any:
    text = _text(meter, value)
    template_methods.unescaped(meter, text)
    return text


def _replaced(meter: Meter, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = meter.text(value)
    template_methods.replaced(meter, text, meter.text(old), meter.text(new), -1 if count is None else count)
    return text


def _indented(
    meter: Meter, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"indent needs a text, not {type(value).__name__}")
    lines = template_methods.count_lines(meter, value)
    meter.room(len(value) + (lines + 1) * (len(width) if isinstance(width, str) else width))
    return value


def _cut(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"truncate needs a text, not {type(value).__name__}")
    return value


def _formatted(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    text = _text(meter, value)
    template_methods.check_printf(meter, text, kwargs or args)
    return text


def _number(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, (str, bytes)) and len(value) > _MAX_NUMBER:
        raise LimitError(f"a number of more than {_MAX_NUMBER} characters")
    return value


def _rounded(meter: Meter, value: Any, precision: int = 0, method: str = "common") -> Any:
    if not -_MAX_PRECISION <= precision <= _MAX_PRECISION:
        raise LimitError(f"round to {precision} digits")
    return value


def _check_name(name: object) -> None:
    # The name of an attribute has parts, each of which is looked up for every element.
    if isinstance(name, str) and len(name) > _MAX_ATTRIBUTE:
        raise LimitError(f"a name of more than {_MAX_ATTRIBUTE} characters")


def _lazy(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    for name in (*args[:1], kwargs.get("attribute")):
        _check_name(name)
    return meter.counted(value) if not isinstance(value, Undefined) and value else value


def _weighed(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, Undefined):
        return value
    items = meter.listed(value)
    meter.weigh(items)
    for name in (*args, kwargs.get("attribute")):
        if isinstance(name, str):
            meter.charge(len(items) * ITEM * (1 + name.count(".") + name.count(",")))
    return items


def _mapping(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    meter.weigh(value)
    return value


def _collected(meter: Meter, value: Any) -> Any:
    return value if isinstance(value, Undefined) else meter.listed(value)


def _sliced(meter: Meter, value: Any, slices: int, *args: Any, **kwargs: Any) -> Any:
    meter.room_for_items(slices)
    return _collected(meter, value)


def _batched(meter: Meter, value: Any, linecount: int, *args: Any, **kwargs: Any) -> Any:
    meter.room_for_items(linecount)
    return _collected(meter, value)


_CHECKS: dict[str, Check | None] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "reverse")),
    **dict.fromkeys(("capitalize", "lower", "upper"), _cased),
    **dict.fromkeys(("title", "wordcount"), _words),
    **dict.fromkeys(("e", "escape", "forceescape"), _escaped),
    **dict.fromkeys(("safe", "string"), _text),
    **dict.fromkeys(("float", "int"), _number),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("groupby", "max", "min", "sort", "unique"), _weighed),
    "batch": _batched,
    "center": _centred,
    "dictsort": _mapping,
    "format": _formatted,
    "indent": _indented,
    "list": _collected,
    "replace": _replaced,
    "round": _rounded,
    "slice": _sliced,
    "striptags": _stripped,
    "trim": _trimmed,
    "truncate": _cut,
}


def _bounded(run: Run, check: Check | None) -> Run:
    wanted = _PassArg.from_obj(run)

    @pass_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.meter
        if check is not None:
            value = check(meter, value, *args, **kwargs)
        if wanted is _PassArg.context:
            return meter.made(run(context, value, *args, **kwargs))
        if wanted is _PassArg.eval_context:
            return meter.made(run(context.eval_ctx, value, *args, **kwargs))
        if wanted is _PassArg.environment:
            return meter.made(run(context.environment, value, *args, **kwargs))
        return meter.made(run(value, *args, **kwargs))

    return bounded


@pass_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    meter: Meter = context.meter
    _check_name(attribute)
    items = meter.listed(value)
    if attribute is not None:
        items = [*meter.counted(map(make_attrgetter(context.environment, attribute), items))]
    by = meter.text(d)
    length = len(by) * len(items)
    texts = []
    for item in items:
        text = meter.text(item)
        length += len(text)
        meter.room(length)
        texts.append(text)
    return str(meter.made(by.join(texts)))


@pass_context
def _sum(context: Any, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    _check_name(attribute)
    items: Iterable[Any] = context.meter.counted(value)
    if attribute is not None:
        items = map(make_attrgetter(context.environment, attribute), items)
    if isinstance(start, (str, bytes)):
        raise TypeError("sum() can't sum text")
    for item in items:
        start = context.environment.call_binop(context, "+", start, item)
    return start


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML.
    meter: Meter = context.meter
    encode = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    weight = meter.weigh(value, encode)
    each = sum(map(len, separators)) if separators else 0
    if indent is not None:
        each += 1 + weight.nesting * (len(indent) if isinstance(indent, str) else max(indent, 0))
    meter.room(weight.chars + weight.nodes * each)
    return str(
        meter.made(
            json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        )
    )


def _guarded(run: Run, numbers: bool) -> Run:
    wanted = _PassArg.from_obj(run)

    @pass_context
    def guarded(context: Any, *args: Any) -> Any:
        for arg in args:
            guard(context, arg)
            if numbers and isinstance(arg, (str, bytes)):
                raise TypeError(f"not a number but {type(arg).__name__}")
        return run(context.environment, *args) if wanted is _PassArg.environment else run(*args)

    return guarded


@pass_context
def guard(context: Context, value: Any) -> Any:
    """Count what comparing a value, or using it as a key, costs, and return it."""
    kind = type(value)
    if kind is str:
        if len(value) > _LONG:
            context.meter.charge(len(value))  # type: ignore[attr-defined]
    elif kind is not int and kind is not bool and value is not None:
        context.meter.weigh(value)  # type: ignore[attr-defined]
    return value


FILTERS: dict[str, Run] = {
    **{name: _bounded(JINJA_FILTERS[name], check) for name, check in _CHECKS.items()},
    "join": _join,
    "sum": _sum,
    "tojson": _tojson,
}
_NUMBERS = ("odd", "even", "divisibleby")
_HARMLESS = {
    *("defined", "undefined", "none", "boolean", "false", "true", "integer", "float", "string", "mapping"),
    *("number", "sequence", "iterable", "callable", "sameas", "escaped", "filter", "test"),
}
_TESTS: dict[str, Run] = JINJA_TESTS  # type: ignore[assignment]
TESTS: dict[str, Run] = {
    name: run if name in _HARMLESS else _guarded(run, name in _NUMBERS) for name, run in _TESTS.items()
}
