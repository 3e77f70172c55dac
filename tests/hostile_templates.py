"""Chat templates that try to run without end, fill the memory or get at Python, and a child process for them.

    python tests/hostile_templates.py [index ...]

prints a line of JSON for each: index, seconds of processor time, the error, and megabytes so far.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from lily.chat import ChatTemplate

_LOOP = "{% for i in range(100000) %}"
_END = "{% endfor %}"
_FOREVER = _LOOP * 3 + "{body}" + _END * 3
_NS = "{% set ns = namespace(x=messages[0].content, l=[], t=(), d={}) %}"
_BIG = (
    _NS + "{% for i in range(24) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
)  # refused; a smaller one below
_LARGE = "{% set big = 'a' * 15000000 %}"
_DAG = _NS + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
_DAG_OF_TUPLES = _NS + "{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
_DEEP = _NS + "{% for i in range(30000) %}{% set ns.t = (ns.t,) %}{% endfor %}"
_MANY = "{% set many = [big] * 100000 %}"

SECONDS = 0.4
TIME = f"longer than {SECONDS} s|computes too much"
SIZE = "more than 16000000 characters|more than 1000000 elements|computes too much"
DEEP = "nested too deeply|more than 1000000 elements|longer"
BITS = "more than 65536 bits"

# An unsafe attribute is undefined: nothing is written, and whoever goes on from there gets an error.
NOTHING = "^$"

# (template, a pattern of the reason, or "" if it is written)
HOSTILE: list[tuple[str, str]] = [
    # Loops and calls.
    (_FOREVER.replace("{body}", ""), TIME),
    (_FOREVER.replace("{body}", "{% set x = i * i %}"), TIME),
    (_LOOP + "{% for j in range(100000) if j < 0 %}" + _END * 2, TIME),
    (_LOOP + "{% for j in range(100000) %}{% else %}a{% endfor %}" + _END, TIME),
    (_LOOP + "{% for j in range(100000) %}{{ loop.length }}{{ loop.last }}" + _END * 2, TIME),
    ("{% for a in [0, 1] recursive %}{{ loop([0, 1]) }}{% endfor %}", "RecursionError|" + TIME),
    (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        TIME,
    ),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    (
        "{% macro f(n) %}{% if n %}{{ caller() }}{% call f(n - 1) %}{{ caller() }}{{ caller() }}{% endcall %}"
        "{% endif %}{% endmacro %}{% call f(60) %}a{% endcall %}",
        TIME + "|RecursionError|No caller|undefined",
    ),
    ("{% block a %}{% if messages %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}", "RecursionError"),
    (_LOOP + "{{ range(100000) | sum }}" + _END, TIME),
    (_LOOP + "{{ range(100000) | map('string') | join | length }}" + _END, TIME),
    (_LOOP + "{{ range(100000) | select('odd') | list | length }}" + _END, TIME),
    (
        "{% set ns = namespace(x=range(90000)) %}{% for i in range(100) %}{% set ns.x = ns.x | map('abs') %}"
        "{% endfor %}{{ ns.x | list | length }}",
        TIME,
    ),
    (
        "{% set ns = namespace(x=[]) %}"
        + _LOOP
        + "{% set ns.x = ns.x | map('abs') %}"
        + _END
        + "{{ ns.x | list }}",
        "RecursionError|" + TIME,
    ),
    ("{% for i in range(100000) %}{% set x = range(100000) | list %}{% endfor %}", TIME),
    (_LARGE + _LOOP + "{% if 'b' in big %}{% endif %}" + _END, TIME),
    (_LARGE + _LOOP + "{% if big.count('a') %}{% endif %}" + _END, TIME),
    (_LARGE + _LOOP + "{% if big.isalpha() %}{% endif %}" + _END, TIME),
    (_LARGE + "{% set other = big ~ 'b' %}" + _LOOP + "{% if big ~ 'a' == other %}{% endif %}" + _END, TIME),
    (_LARGE + "{{ big.rfind('b' ~ 'a' * 7000000) }}", "computes too much"),
    (_LARGE + "{{ big.rsplit('b' ~ 'a' * 7000000) }}", "computes too much"),
    (_LARGE + "{{ big.strip('b' * 7000000 ~ 'a') }}", "computes too much"),
    (_LARGE + "{{ big | trim('b' * 7000000 ~ 'a') }}", "computes too much"),
    ("{{ dict(range(0, 2305843009213693951 * 90000, 2305843009213693951) | batch(2)) }}", TIME + "|Value"),
    ("{{ range(0, 2305843009213693951 * 90000, 2305843009213693951) | unique | list | length }}", TIME),
    # Text.
    ("{{ 'a' * 10**9 }}", SIZE),
    ("{{ 10**9 * 'a' }}", SIZE),
    (_BIG + "{{ ns.x | length }}", SIZE),
    (_NS + _LOOP + "{% set ns.x = ns.x ~ ns.x %}" + _END, SIZE),
    (_NS + _LOOP + "{% set ns.x = ns.x + 'a' * 1000000 %}" + _END, SIZE),
    (_NS + _LOOP + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}" + _END, SIZE),
    (_NS + _LOOP + "{% set ns.l = ns.l + ['a' * 1000000] %}" + _END, SIZE),
    (_NS + _LARGE + _LOOP + "{% set ns.l = [ns.l, big[1:]] %}" + _END, SIZE + "|longer"),
    (_NS + _LARGE + _LOOP + "{% set ns.l = [ns.l, big | upper] %}" + _END, SIZE + "|longer"),
    (_NS + _LARGE + _LOOP + "{% set ns.l = [ns.l, big.upper()] %}" + _END, SIZE + "|longer"),
    (_NS + "{% set c %}" + _LOOP + "a" * 2000 + _END + "{% endset %}", SIZE),
    (_LOOP + "{{ 'x' * 1000 }}" + _END, SIZE),
    ("{% filter upper %}" + _LOOP * 2 + "a" * 500 + _END * 2 + "{% endfilter %}", SIZE),
    ("{{ '%1000000000d' % 1 }}", SIZE),
    ("{{ '%.1000000000f' % 1.5 }}", SIZE),
    ("{{ '%*d' % (1000000000, 1) }}", SIZE),
    ("{{ '%(a)1000000000s' % {'a': 1} }}", SIZE),
    ("{{ '%1000000000d' | format(1) }}", SIZE),
    ("{{ '%1000000000d' is odd }}", "TypeError"),
    ("{{ '%1000000000d' is divisibleby 3 }}", "TypeError"),
    (_LARGE + "{{ '%s%s' % (big, big) }}", SIZE),
    ("{{ '{:1000000000}'.format(1) }}", SIZE),
    ("{{ '{:{}}'.format('x', 10**9) }}", SIZE),
    ("{{ '{:.{}f}'.format(1.5, 10**9) }}", SIZE),
    ("{{ ('{0}' * 5000000).format('a') | length }}", TIME),
    (_LARGE + "{{ ('{0}' * 5000).format(big) | length }}", SIZE),
    ("{{ ('{:1000000000}' | safe).format(1) }}", SIZE),
    *((f"{{{{ 'a'.{name}(10**9) }}}}", SIZE) for name in ("center", "ljust", "rjust", "zfill")),
    ("{{ '\t'.expandtabs(10**9) }}", SIZE),
    ("{{ 'a' | center(10**9) }}", SIZE),
    (_LARGE + "{{ big.replace('a', 'a' * 1000) }}", SIZE),
    (_LARGE + "{{ big.replace('', 'a' * 1000) }}", SIZE),
    (_LARGE + "{{ big | replace('a', 'a' * 1000) }}", SIZE),
    (_LARGE + _MANY + "{{ ''.join(many) }}", SIZE),
    (_LARGE + "{{ big.join('a' * 1000) }}", SIZE),
    (_LARGE + _MANY + "{{ many | join }}", SIZE),
    (_LARGE + "{{ big.translate({97: big}) | length }}", SIZE),
    (_LARGE + "{{ big.encode('punycode') }}", "LookupError"),
    (_LARGE + "{{ big.encode('ascii', 'namereplace') }}", "LookupError"),
    ("{{ (10).to_bytes(10**9, 'big') }}", "method to_bytes of int is not for templates"),
    (_LARGE + _MANY + "{{ many }}", SIZE),
    (_LARGE + _MANY + "{{ many | string | length }}", SIZE),
    (_LARGE + _MANY + "{{ many | tojson }}", SIZE),
    (_LARGE + _MANY + "{{ many | sort | length }}", SIZE),
    (_LARGE + _MANY + "{{ many | unique | list | length }}", SIZE),
    (_LARGE + _MANY + "{{ '%s' % (many,) }}", SIZE),
    (_LARGE + _MANY + "{{ '{}'.format(many) }}", SIZE),
    (_LARGE + _MANY + "{{ many ~ '' }}", SIZE),
    (_LARGE + _MANY + "{{ raise_exception(many) }}", SIZE),
    (_LARGE + "{% set m = [(big | e).upper] * 100000 %}{{ m }}", SIZE),
    (_LARGE + "{{ big | list | length }}", SIZE),
    (_LARGE + "{{ big | map('upper') | list | length }}", SIZE + "|longer"),
    (_LARGE + "{{ (big | replace('a', 'a ')).split() | length }}", SIZE),
    (_LARGE + "{{ big.split('a') | length }}", SIZE),
    (_LARGE + "{{ big.replace('a', '\n').splitlines() | length }}", SIZE),
    (_LARGE + "{{ big | wordcount }}", SIZE),
    (_LARGE + "{{ big | title }}", SIZE),
    ("{{ '\u0390' * 15000000 | upper | length }}", ""),
    (_LARGE + "{{ big | replace('a', '<') | e | length }}", SIZE),
    (_LARGE + "{{ (big | safe) + '<' * 15000000 }}", SIZE),
    (_LARGE + "{{ 'a\na' | indent(big) | indent(big) }}", SIZE),
    ("{{ 'a\na' | indent(10**9) }}", SIZE),
    ("{{ ('&lt;' * 3000000) | striptags }}", SIZE),
    ("{{ (('&lt;' * 3000000) | safe).unescape() }}", SIZE),
    ("{{ [1] | tojson(indent=10**9) }}", SIZE),
    (_LARGE + "{{ [1, 2] | tojson(separators=(big * 1, big)) }}", SIZE),
    ("{{ strftime_now('%c' * 1000000) }}", "date format"),
    ("{{ strftime_now('%1000000000d') | length }}", "|cannot|refuses"),
    # Containers.
    ("{{ [0] * 10**9 }}", SIZE),
    (_NS + _LOOP + "{% set ns.l = ns.l + ns.l + [1] %}" + _END, SIZE),
    (_NS + _LOOP + _LOOP + "{% set ns.l = [ns.l, {}, {}, {}, {}, {}, {}] %}" + _END * 2, TIME),
    (_NS + _LOOP + _LOOP + "{% set ns.d = {'a': ns.d, 'b': 1} %}" + _END * 2, TIME),
    ("{{ [1] | batch(10**9, 'x') | list | length }}", SIZE),
    ("{{ [1] | slice(10**9) | list | length }}", SIZE),
    ("{{ [[1]] * 1000 | sum(start=[]) }}", "TypeError|cannot"),
    ("{{ ([range(1000) | list] * 100000) | sum(start=[]) | length }}", SIZE),
    (_LARGE + "{{ namespace(*big) }}", SIZE),
    (_LARGE + "{% macro f() %}{{ varargs | length }}{% endmacro %}{{ f(*big) }}", SIZE),
    (_DAG + "{{ ns.l }}", DEEP),
    (_DAG + "{{ ns.l | tojson }}", DEEP),
    (_DAG + "{{ ns.l ~ '' }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{{ ns.l == ms.l }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{{ ns.l in [ms.l] }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{{ ns.l is eq(ms.l) }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{{ [ns.l].index(ms.l) }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{{ [ns.l, ms.l] | sort | length }}", DEEP),
    (_DAG + _DAG.replace("ns", "ms") + "{% for i in [1] %}{{ loop.changed(ns.l) }}{% endfor %}", DEEP),
    (_DAG + "{{ (1)[ns.l] + 1 }}", DEEP),
    (_DAG + "{{ ns }}", DEEP),
    (_DAG_OF_TUPLES + "{{ {ns.t: 1} }}", DEEP),
    (_DAG_OF_TUPLES + "{{ {}[ns.t] }}", DEEP),
    (_DAG_OF_TUPLES + "{{ {}.get(ns.t) }}", DEEP),
    (_DAG_OF_TUPLES + "{{ ns.t in {} }}", DEEP),
    (_DAG_OF_TUPLES + "{{ [ns.t] | unique | list | length }}", DEEP),
    (_DAG_OF_TUPLES + "{{ dict([(ns.t, 1)]) }}", DEEP),
    (_DEEP + "{{ {ns.t: 1} }}", DEEP),
    (_DEEP + "{{ ns.t }}", DEEP),
    (_DEEP + "{{ ns.t | tojson }}", DEEP),
    # Numbers.
    ("{{ 9**9**9**9**9**9 }}", BITS),
    ("{{ 2 ** 100000000 }}", BITS),
    ("{{ (10**9999) ** 1000 }}", BITS),
    (_LOOP + "{% set x = (10**9000) * (10**9000) % 7 %}" + _END, TIME),
    (
        "{% set ns = namespace(x=2) %}" + _LOOP + "{% set ns.x = ns.x * ns.x %}" + _END,
        BITS,
    ),
    ("{{ 5 | round(-1000000000) }}", "round to"),
    ("{{ 5.5 | round(1000000000, 'ceil') }}", "round to"),
    ("{{ ('9' * 10000000) | int }}", "a number of more than 1000 characters"),
    ("{{ ('f' * 10000000) | int(0, 16) }}", "a number of more than 1000 characters"),
    ("{{ ('9' * 10000000) | float }}", "a number of more than 1000 characters"),
    # Python behind the template.
    ("{{ ''.__class__ }}", NOTHING),
    ("{{ ''['__class__'] }}", NOTHING),
    ("{{ '' | attr('__class__') }}", NOTHING),
    ("{{ [''] | map(attribute='__class__') | list | string }}", ""),
    ("{{ '{0.__class__}'.format('') }}", NOTHING),
    ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe|undefined"),
    ("{{ '{a.__class__}'.format_map({'a': 1}) }}", NOTHING),
    ("{% set f = '{0.__class__}'.format %}{{ f('') }}", NOTHING),
    ("{{ ('{0.__class__}' | e).format('') }}", NOTHING),
    ("{{ messages.append(1) }}", "refuses"),
    ("{{ dict.update(messages[0], {'a': 1}) }}", "refuses|not for templates"),
    ("{{ raise_exception.__globals__ }}", NOTHING),
    ("{{ self._TemplateReference__context }}", NOTHING),
    ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ("{{ lipsum() }}", "'lipsum' is undefined"),
    ("{{ ['a'] | map('wordwrap') | list }}", "No filter named 'wordwrap'"),
    ("{{ (range(3) | map('string')).throw(1) }}", "method throw of generator is not for templates"),
]


def main() -> None:
    """Run the templates in order."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    chosen = [int(index) for index in sys.argv[1:]] or range(len(HOSTILE))
    for index in chosen:
        template = ChatTemplate(Path("nowhere"), {"chat_template": HOSTILE[index][0]})
        template._sandbox._seconds = SECONDS
        start = time.process_time()
        try:
            template.render([{"role": "user", "content": "What is it?"}], None, None, False, {})
            error = ""
        except ValueError as caught:
            error = str(caught)
        print(json.dumps([index, time.process_time() - start, error, peak()]), flush=True)


def peak() -> int:
    """Most megabytes this process has had; getrusage() counts those of the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
