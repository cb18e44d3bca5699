"""A template that would loop for days or write terabytes is refused soon."""

from __future__ import annotations

import resource

import pytest

from specops.text import template_limits
from specops.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "x" * 10_000}]
LONG, LARGE, MUCH = "takes too long", "makes too large a value", "says too much"
NAMESPACE = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"
)
HOSTILE = {
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": LONG,
    "{% for a in range(100000) %}{{ range(100000) | sort | length }}{% endfor %}": LONG,
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ 'b' in x }}{% endfor %}": LONG,
    "{% set c = cycler(1) %}{% for i in range(100000) %}{{ c.next() }}{% endfor %}": LONG,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": LONG,
    "{% for i in range(10**9) %}{% endfor %}": LARGE,
    "{{ 10 ** (10 ** 10) }}": LARGE,
    NAMESPACE.replace("START", "9").replace("NEXT", "ns.x * ns.x"): LARGE,
    NAMESPACE.replace("START", "'a'").replace("NEXT", "ns.x + ns.x"): LARGE,
    NAMESPACE.replace("START", "'a'").replace("NEXT", "ns.x ~ ns.x"): LARGE,
    NAMESPACE.replace("START", "'a' * 100").replace("NEXT", "[ns.x, ns.x]"): LARGE,
    NAMESPACE.replace("START", "'a' * 100").replace("NEXT", "{'a': ns.x, 'b': ns.x}"): LARGE,
    NAMESPACE.replace("START", "'a' * 100").replace("NEXT", "dict(a=ns.x, b=ns.x)"): LARGE,
    "{{ 'a' * 10**10 }}": LARGE,
    "{{ [0] * 10**10 }}": LARGE,
    "{{ 'a'.center(10**10) }}": LARGE,
    "{{ 'a' | center(10**9) }}": LARGE,
    "{{ ('\n' * 100000) | indent(100000) }}": LARGE,
    "{{ range(100000) | list | tojson(indent=10000) }}": LARGE,
    "{{ range(100000) | join('b' * 100000) }}": LARGE,
    "{{ ('b' * 100000).join('a' * 100000) }}": LARGE,
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}": LARGE,
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}": LARGE,
    "{{ range(100000) | map('center', 10000) | list }}": LARGE,
    "{{ lipsum(n=10**6) }}": LARGE,
    "{{ '%1000000000d' % 1 }}": "format may make too much",
    "{{ '%*d' % (1000000000, 1) }}": "format may make too much",
    "{{ '%1000000000d' | format(1) }}": "format may make too much",
    "{{ '{:1000000000}'.format(1) }}": "format may make too much",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}": "translate may make too much",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}": MUCH,
    "{% set y %}{% for i in range(100000) %}" + "text " * 2000 + "{% endfor %}{% endset %}": MUCH,
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_that_does_too_much_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.1 if HOSTILE[source] is LONG else 60.0
    monkeypatch.setattr(template_limits, "_SECONDS", seconds)
    template = ChatTemplate(source, {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=HOSTILE[source]):
        template.render(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 100_000, "{% for i in x %}" * 30 + "{% endfor %}" * 30]
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        ChatTemplate(source, {})


def test_a_conversation_of_a_mebibyte_is_within_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_limits, "_SECONDS", 60.0)  # the test machine may be slow
    source = """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{{ m.role }}: {{ m.content | trim | replace('x', 'yy') }}{{ '\n' * 2 }}{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}/{{ ns.n * 10000 }}
{{ ('%s %5.1f' % ('a', 2)) ~ '{:>4}'.format(1) ~ messages[-1:] | map(attribute='role') | join }}"""
    many = [{"role": ("assistant", "user")[i % 2], "content": " x" * 32} for i in range(16_000)]
    text = ChatTemplate(source, {}).render(many)
    assert text.splitlines()[-2:] == ["8000/160000000", "a   2.0   1user"]
