"""An environment for chat templates, which are programs from the internet: bounded in time and in memory.

jinja2's sandbox keeps a template from Python's internals, but lets it compute without end. Here every loop,
call, filter, operator and piece of text that is written goes past the meter of its rendering
(`template_meter`), with the size it is going to have. That is done where the template is compiled: its syntax
tree is rewritten so that what jinja2 leaves to Python goes through functions of this module.
"""

from __future__ import annotations

import datetime
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from lily import template_filters, template_methods
from lily.template_meter import ITEM, MAX_BITS, SECONDS, LimitError, Meter, Paced

# Names of the functions below in the table of filters; the blank keeps templates from writing them.
_PACE, _COST, _WRITE, _ADD, _CONCAT, _GUARD, _CONTAINER, _MADE, _SPREAD = (
    f"lily {name}"
    for name in ("pace", "cost", "write", "add", "concat", "guard", "container", "made", "spread")
)
# What these give is text, and has been counted.
_TEXTS = {_CONCAT, "join", "lower", "string", "tojson", "trim", "upper"}
_MAX_FORMAT = 1000
_MAX_LEVELS = 100
_MAX_NESTING = 30
_MAX_PROGRAM = 50_000
_LONG = 4096
_BLOCKS = (
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.With,
    nodes.AssignBlock,
)


class Generation(Extension):
    """{% generation %} marks training targets; for a prompt its body is plain text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> nodes.Node:
        """Return the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class MeteredContext(Context):
    """The variables of one rendering, and its meter."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        """Return a context with further variables."""
        context = super().derived(locals)
        context.meter = self.meter  # type: ignore[attr-defined]
        return context


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates with the conventions of transformers.

    Source: transformers chat_template_utils.py: _compile_jinja_template.

    Args:
        seconds: Processor time of one rendering.
    """

    context_class = MeteredContext
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # What is constant would be computed while compiling, without a meter.
            optimized=False,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        self._seconds = seconds
        self.filters = {**template_filters.FILTERS, **_HOOKS}
        self.tests = dict(template_filters.TESTS)
        del self.globals["lipsum"]
        self.globals.update(
            dict=_dict, namespace=_namespace, raise_exception=_raise_exception, strftime_now=_strftime_now
        )

    def pieces(self, template: jinja2.Template, values: Mapping[str, Any]) -> Iterator[str]:
        """Render a template piece by piece.

        Raises:
            LimitError: It computes too much, or uses what it may not.
            Exception: A template may raise anything.
        """
        context = template.new_context(dict(values))
        context.meter = Meter(_size(values), self._seconds)  # type: ignore[attr-defined]
        return template.root_render_func(context)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _check_program(tree)
        _Instrument().visit(tree)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what a template calls; its arguments may have any names."""
        meter: Meter = __context.meter
        kind = type(__obj)
        if kind is types.BuiltinMethodType or (kind is types.MethodType and isinstance(__obj.__self__, str)):
            if not isinstance(__obj.__self__, types.ModuleType):
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                return meter.made(template_methods.call_method(meter, __obj, args, kwargs))
        elif kind is template_methods.BoundFormat:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return meter.made(__obj.run(__self, meter, args, kwargs))
        elif kind is LoopContext and len(args) == 1:
            args = (Paced(meter, args[0]),)
        elif kind is types.MethodType and isinstance(__obj.__self__, LoopContext):
            for arg in args:  # loop.changed compares them
                template_filters.guard(__context, arg)
        elif kind in _UNBOUND:
            raise LimitError(f"{__obj.__name__} is not for templates")
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute with two values, unless the result would be too large."""
        meter: Meter = context.meter  # type: ignore[attr-defined]
        if operator == "+":
            _check_sum(meter, left, right)
        elif operator == "*":
            _check_product(meter, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            template_methods.check_printf(meter, left, right)
        elif not isinstance(left, (int, float)):
            meter.weigh(left)
            meter.weigh(right)
        return meter.made(self.binop_table[operator](left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an element up; an error message may contain the key, and a tuple is hashed."""
        if type(argument) is str or type(argument) is int:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                return super().getitem(obj, argument)
        Meter(0).weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        """Return what formats with limits if a template asks for the method format of a text."""
        if not isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            return None
        if value.__name__ not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        return template_methods.BoundFormat(value.__self__, value.__name__ == "format_map")


_UNBOUND = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)


def _size(values: Mapping[str, Any]) -> int:
    """Return about how large the input is."""
    size = 0
    level = [*values.values()]
    for _ in range(_MAX_LEVELS):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        size += 16 * len(level)
        level = below
    return size


def _check_sum(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        escaped = type(left) is not type(right)
        meter.room((len(left) + len(right)) * (template_methods.ESCAPED if escaped else 1))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        meter.room_for_items(len(left) + len(right))


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int):
            if isinstance(one, (str, bytes)):
                meter.room(len(one) * other)
            elif isinstance(one, (list, tuple)):
                meter.room_for_items(len(one) * max(other, 0))
            elif isinstance(one, int) and one.bit_length() + other.bit_length() > MAX_BITS + 1:
                raise LimitError(f"a number of more than {MAX_BITS} bits")


def _check_power(left: Any, right: Any) -> None:
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and abs(left) > 1 and left.bit_length() * right > MAX_BITS:
        raise LimitError(f"a number of more than {MAX_BITS} bits")


@pass_context
def _pace(context: Any, items: Iterable[Any], cost: int) -> Paced:
    return Paced(context.meter, items, cost)


@pass_context
def _cost(context: Any, cost: int) -> None:
    context.meter.charge(cost)


@pass_context
def _write(context: Any, value: Any) -> Any:
    if isinstance(value, str):
        context.meter.charge(len(value))
    elif not isinstance(value, int):
        context.meter.weigh(value, repr)
    return value


@pass_context
def _add(context: Any, values: list[Any], written: bool) -> Any:
    """Return a + b + c ..., at once if all are text."""
    length = 0
    for value in values:
        if type(value) is not str:
            break
        length += len(value)
    else:
        context.meter.room(length)
        return context.meter.made("".join(values))
    result = values[0]
    for value in values[1:]:
        result = context.environment.call_binop(context, "+", result, value)
    return _write(context, result) if written else result


@pass_context
def _concat(context: Any, values: list[Any]) -> Any:
    meter: Meter = context.meter
    texts = []
    length = 0
    for value in values:
        text = value if type(value) is str else meter.text(value)
        length += len(text)
        texts.append(text)
    meter.room(length)
    return meter.made("".join(texts))


@pass_context
def _container(context: Any, value: Any) -> Any:
    """Count what looking for something in a container costs."""
    kind = type(value)
    if kind is str:
        if len(value) > _LONG:
            context.meter.charge(len(value))
    elif kind is range:
        context.meter.room_for_items(len(value))
    elif kind is not dict:
        context.meter.weigh(value)
    return value


@pass_context
def _made(context: Any, value: Any) -> Any:
    return context.meter.made(value)


@pass_context
def _spread(context: Any, value: Any) -> Any:
    """Count the arguments of f(*value) or f(**value)."""
    return value if isinstance(value, dict) else context.meter.listed(value)


_HOOKS: dict[str, Callable[..., Any]] = {
    _PACE: _pace,
    _COST: _cost,
    _WRITE: _write,
    _ADD: _add,
    _CONCAT: _concat,
    _GUARD: template_filters.guard,
    _CONTAINER: _container,
    _MADE: _made,
    _SPREAD: _spread,
}


@pass_context
def _dict(context: Any, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Make a dict pair by pair: numbers can be chosen so that their hashes collide."""
    if len(args) > 1:
        raise TypeError(f"dict expected at most 1 argument, got {len(args)}")
    result: dict[Any, Any] = {}
    for arg in args:
        for key, value in context.meter.counted(arg.items() if isinstance(arg, dict) else arg):
            result[template_filters.guard(context, key)] = value
    return {**result, **kwargs}


@pass_context
def _namespace(context: Any, *args: Any, **kwargs: Any) -> Namespace:
    return Namespace(_dict(context, *args, **kwargs))


@pass_context
def _raise_exception(context: Any, message: object) -> None:
    raise jinja2.TemplateError(context.meter.text(message))


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_FORMAT:
        raise LimitError(f"a date format of more than {_MAX_FORMAT} characters")
    return datetime.datetime.now().strftime(form)


def _check_program(tree: nodes.Node) -> None:
    # The compiler looks at the body of a block again for each block around it.
    work = 0
    found: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while found:
        node, level = found.pop()
        level += isinstance(node, _BLOCKS)
        work += 1 + level
        if level > _MAX_NESTING or work > _MAX_PROGRAM:
            what = "blocks are nested too deeply" if level > _MAX_NESTING else "it is too long a program"
            raise jinja2.TemplateSyntaxError(what, node.lineno)
        found += [(child, level) for child in node.iter_child_nodes()]


def _body_cost(node: nodes.Node) -> int:
    """Return what one pass of a body costs that no operation counts: its text, and what is built in place."""
    cost = ITEM
    for found in node.find_all((nodes.TemplateData, nodes.List, nodes.Tuple, nodes.Dict)):
        if isinstance(found, nodes.TemplateData):
            cost += len(found.data)
        else:
            cost += ITEM * (1 + len(found.items)) * (3 if isinstance(found, nodes.Dict) else 1)  # type: ignore[attr-defined]
    return cost


def _hooked(name: str, node: nodes.Node | None, lineno: int, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=lineno)


class _Instrument(NodeTransformer):
    """Rewrites the syntax tree of a template so that what it does counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        cost = nodes.Const(_body_cost(node), lineno=node.lineno)
        self.generic_visit(node)
        node.iter = _hooked(_PACE, node.iter, node.lineno, cost)
        if node.recursive:  # calls of the loop do not come by its iterable
            node.body.insert(0, nodes.ExprStmt(_hooked(_COST, cost, node.lineno), lineno=node.lineno))
        return node

    def _visit_body(self, node: Any) -> nodes.Node:
        cost = nodes.Const(_body_cost(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hooked(_COST, cost, node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _visit_body  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        written: list[nodes.Expr] = []
        for child in node.nodes:
            expr = self._added(child, True) if isinstance(child, nodes.Add) else self.visit(child)
            text = isinstance(expr, nodes.Const) and isinstance(expr.value, str)
            counted = isinstance(expr, nodes.Filter) and (expr.name in _TEXTS or expr.name == _ADD)
            if not (text or counted or isinstance(expr, nodes.TemplateData)):
                expr = _hooked(_WRITE, expr, node.lineno)
            written.append(expr)
        node.nodes = written
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        return self._added(node, False)

    def _added(self, node: nodes.Expr, written: bool) -> nodes.Filter:
        operands: list[nodes.Expr] = []
        last = node
        while isinstance(last, nodes.Add):
            operands.append(last.right)
            last = last.left
        values = [self.visit(operand) for operand in (last, *reversed(operands))]
        return _hooked(
            _ADD,
            nodes.List(values, lineno=node.lineno),
            node.lineno,
            nodes.Const(written, lineno=node.lineno),
        )

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _hooked(_MADE, node.filter, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _hooked(_CONCAT, nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        hooks: list[str | None] = [None] * len(operands)
        for index, operand in enumerate(node.ops):
            left, right = operands[index], operands[index + 1]
            if operand.op not in ("in", "notin"):
                if not isinstance(left, nodes.Const) and not isinstance(right, nodes.Const):
                    hooks[index] = hooks[index] or _GUARD
                    hooks[index + 1] = _GUARD
            elif not _is_constant(right):
                hooks[index] = None if isinstance(left, nodes.Const) else hooks[index] or _GUARD
                hooks[index + 1] = _CONTAINER
        for index, hook in enumerate(hooks):
            if hook is not None:
                operands[index] = _hooked(hook, operands[index], node.lineno)
        node.expr = operands[0]
        for operand, expr in zip(node.ops, operands[1:], strict=True):
            operand.expr = expr
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _hooked(_MADE, node, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _hooked(_GUARD, node.key, node.lineno)
        return node

    def _visit_arguments(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        for name in ("dyn_args", "dyn_kwargs"):
            spread = getattr(node, name)
            if spread is not None:
                setattr(node, name, _hooked(_SPREAD, spread, node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Call = visit_Filter = visit_Test = _visit_arguments  # noqa: N815

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise jinja2.TemplateSyntaxError("autoescape is not for chat templates", node.lineno)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)
