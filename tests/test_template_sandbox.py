"""Chat templates: hostile ones end in time, normal ones write what plain jinja2 writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hostile_templates import HOSTILE, SECONDS
from lily.chat import ChatTemplate
from lily.errors import CheckpointError
from lily.template_filters import FILTERS, TESTS
from lily.template_meter import LimitError, Meter
from lily.template_sandbox import Generation, TemplateSandbox

MEGABYTES = 1000
ARGUMENTS: dict[str, Any] = {"city": "Paris", "days": 2, "more": {"a": [1, None], "b": True, "c": 1.5}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a <city> & more, 'caf\u00e9'"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "What is the weather in Paris?\n\tAnd here: 100 % <b>?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne moment.", "tool_calls": [CALL]},
    {"role": "tool", "content": "18 \u00b0C", "tool_call_id": "1"},
    {"role": "assistant", "content": "18 degrees.", "reasoning_content": "It says so."},
    {"role": "user", "content": "Thanks"},
]
VALUES: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": [TOOL, TOOL],
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_generation_prompt": True,
    "names": ["b", "A", "c", "a"],
    "numbers": [3, 1, 2, 1],
    "nested": [{"n": 1, "of": [{"n": 2, "of": []}, {"n": 3, "of": [{"n": 4, "of": []}]}]}],
}


def plain_environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers, without limits."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def sandboxed(template: str, values: dict[str, Any] = VALUES, seconds: float = 2.0) -> str:
    sandbox = TemplateSandbox(seconds)
    return "".join(sandbox.pieces(sandbox.from_string(template), values))


@pytest.fixture(scope="module")
def outcomes() -> dict[int, tuple[float, str, int]]:
    """What became of the hostile templates, in a process of their own."""
    command = [sys.executable, str(Path(__file__).parent / "hostile_templates.py")]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    except subprocess.TimeoutExpired as error:
        lines = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
    return {index: (spent, error, size) for index, spent, error, size in map(json.loads, lines.splitlines())}


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_hostile__ends_in_time_and_in_little_memory(
    outcomes: dict[int, tuple[float, str, int]], index: int
) -> None:
    template, pattern = HOSTILE[index]
    assert index in outcomes, f"the process died, or hung, in or before {template[:200]}"
    spent, error, megabytes = outcomes[index]
    assert re.search(pattern, error) if pattern else not error
    assert spent < SECONDS + 3
    assert megabytes < MEGABYTES


def test_time__is_two_seconds_of_this_thread(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for i in range(100000) %}{% for j in range(100000) if j < 0 %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"cannot write the messages: it (ran longer than 2 s|computes too)"):
        ChatTemplate(tmp_path, {}).render([{"role": "user", "content": "a"}], None, None, False, {})


def test_budget__grows_with_the_input() -> None:
    """A template may gather the whole conversation in a variable: that is quadratic, but not hostile."""
    template = (
        "{% set ns = namespace(x='') %}"
        "{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}{{ ns.x }}"
    )
    messages = [{"role": "user", "content": "some text " * 400}] * 500
    assert len(sandboxed(template, {"messages": messages}, seconds=60)) == 2_000_000


def test_meter__keeps_refusing() -> None:
    meter = Meter(0)
    for _ in range(3):
        with pytest.raises(LimitError, match="computes too much"):
            meter.charge(1_000_000_000)
    with pytest.raises(LimitError, match="computes too much"):
        meter.charge(1)


def test_sandbox__renders_in_several_threads() -> None:
    sandbox = TemplateSandbox()
    template = sandbox.from_string("{% for i in range(2000) %}{{ x ~ i }}{% endfor %}")
    expected = {x: "".join(f"{x}{i}" for i in range(2000)) for x in "abcd"}
    found: dict[str, str] = {}

    def render(x: str) -> None:
        found[x] = "".join(sandbox.pieces(template, {"x": x}))

    threads = [threading.Thread(target=render, args=(x,)) for x in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


@pytest.mark.parametrize("name", ["wordwrap", "urlize", "pprint", "random", "xmlattr", "no_such"])
def test_filters__that_are_missing_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"No filter named '{name}'"):
        ChatTemplate(tmp_path, {"chat_template": f"{{{{ 'a' | {name} }}}}"})


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% autoescape true %}{% endautoescape %}", "autoescape is not for chat templates"),
        ("{% if a %}" * 50 + "{% endif %}" * 50, "nested too deeply"),
        ("{{ a" + " ~ a" * 24_000 + " }}{{ b }}" * 2_000, "larger than 100000"),
        ("{% for a in b %}" * 19 + "{{ a }}" * 12_000 + "{% endfor %}" * 19, "too long a program"),
    ],
)
def test_template__that_is_refused_before_it_runs(tmp_path: Path, template: str, error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        ChatTemplate(tmp_path, {"chat_template": template})


TEMPLATES = Path(__file__).parent / "templates"
SNIPPETS = (TEMPLATES / "snippets.txt").read_text(encoding="utf-8").splitlines()
STYLES = [path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja"))]  # of published ones


@pytest.mark.parametrize("template", [*SNIPPETS, *STYLES])
def test_normal__is_what_plain_jinja2_writes(template: str) -> None:
    expected = plain_environment().from_string(template).render(VALUES)
    assert sandboxed(template) == expected


def test_normal__uses_every_filter_and_test() -> None:
    """The snippets above leave none out."""
    text = " ".join([*SNIPPETS, *STYLES])
    used = set(re.findall(r"\|\s*(\w+)|map\('(\w+)'", text))
    assert {name for pair in used for name in pair} >= FILTERS.keys()
    symbols = {"==", "!=", ">", ">=", "<", "<=", "ne", "ge", "le", "lt", "greaterthan", "lessthan", "escaped"}
    named = {name for pair in re.findall(r"\bis (?:not )?(\w+)|, '(\w+)'|\('(\w+)'", text) for name in pair}
    assert named | symbols >= TESTS.keys()


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ missing.more }}",
        "{{ missing() }}",
        "{{ none | length }}",
        "{% for x in none %}{% endfor %}",
        "{{ [1] | join(attribute='a.b') | int + [] }}",
        "{{ 1 // 0 }}",
        "{{ 'a' is odd }}",
        "{{ [1, 'a'] | sort }}",
        "{{ 'abc' | truncate(-1) }}",
        "{{ '{} {}'.format(1) }}",
        "{{ '%d' % 'a' }}",
        "{{ {[]: 1} }}",
    ],
)
def test_normal__errors_are_those_of_plain_jinja2(template: str) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        plain_environment().from_string(template).render(VALUES)
    with pytest.raises(expected.type):
        sandboxed(template)
