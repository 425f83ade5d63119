"""Chat templates that would take all time or memory are refused, and not run to their end."""

# ruff: noqa: E501

import pytest

pytest.importorskip("jinja2")

from graphtrain.data.prepare.chat_templates import find_template, template_names
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.errors import DataError

CHAT = Conversation(
    ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello to you."})
)
GROW = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = STEP %}{% endfor %}"

# Each would take more than a gigabyte, or minutes.
ENDLESS = {
    "binary operator": "{{ 'a' * 10**10 }}",
    "number": "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "concatenation": GROW.replace("STEP", "n.s ~ n.s"),
    "sum of strings": GROW.replace("STEP", "n.s + n.s"),
    "list of a list twice": GROW.replace("STEP", "[n.s, n.s]"),
    "tuple of a tuple twice": GROW.replace("STEP", "(n.s, n.s)"),
    "dictionary": GROW.replace("STEP", "{1: n.s, 2: n.s}"),
    "captured block": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
    "namespaces": GROW.replace("STEP", "namespace(a=n.s, b=n.s)") + "{{ n.s }}",
    "macro that calls itself": "{% macro m(n) %}{% if n > 0 %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "indent": "{{ ('\n' * 1000000)|indent(100000, true) }}",
    "replace": "{% set x = 'a' * 100000 %}{{ x|replace('a', x)|replace('a', x) }}",
    "replacem": "{% set x = 'a' * 100000 %}{{ x.replace('a', x).replace('a', x) }}",
    "join": "{% set x = 'a' * 1000000 %}{{ range(99999)|join(x) }}",
    "joinm": "{% set x = 'a' * 1000000 %}{{ x.join(x) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(1000000) }}",
    "pct": "{{ '%10000000000d' % 1 }}",
    "pctstar": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "formatn": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "formatf": "{{ '%10000000000d'|format(1) }}",
    "format0": "{% set x = 'a' * 1000000 %}{{ ('{0}' * 100000).format(x) }}",
    "bytes": "{{ (1).to_bytes(10000000000) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loopsr": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "out": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "cmp": "{% set x = 'a' * 10000000 %}{% set y = x ~ '' %}{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "inop": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "slice": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "sum": "{{ ([['a'] * 1000] * 10000)|sum(start=[])|length }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "mapf": "{{ range(99999)|map('string')|map('center', 100000)|list|length }}",
    "cat": "{{ " + "~".join(["('a'*1000000)"] * 1000) + " }}",
    "urlize": "{{ ('http://a.b ' * 100000)|urlize }}",
    "tojson": "{{ messages|tojson(indent=1000000000) }}",
    "wordwrap": "{{ ('a' * 1000000)|wordwrap(1) }}",
    "splits": "{% for i in range(99999) %}{% set x = ('a ' * 100000).split() %}{% endfor %}",
    "cycle": "{% set c = cycler('a' * 10000000) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "filterblock": "{% filter center(10000000000) %}a{% endfilter %}",
}
UNFIT = {
    "nested too deeply": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too many blocks": "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "long": "a" * 3_000_000,
    "digits": "{{ " + "9" * 5000 + " }}",
}


def render(tmp_path, template):
    (tmp_path / "hostile.jinja").write_text(template)
    found = find_template(str(tmp_path / "hostile.jinja"), ByteTokenizer())
    return found.render(CHAT, "answers", "chats.jsonl:1")


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_too_much_is_refused(tmp_path, name):
    with pytest.raises(DataError, match=r"chats.jsonl:1: .*(builds too much|as a value)"):
        render(tmp_path, ENDLESS[name])


@pytest.mark.parametrize("name", UNFIT)
def test_a_template_that_cannot_be_compiled_is_refused(tmp_path, name):
    with pytest.raises(DataError, match=r"cannot be compiled|the limit"):
        render(tmp_path, UNFIT[name])


@pytest.mark.parametrize("name", template_names())
def test_a_long_conversation_is_within_the_limits(name):
    turn = ({"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y" * 5000})
    chat = Conversation(turn * 200)
    rendered = find_template(name, ByteTokenizer()).render(chat, "answers", "chats.jsonl:1")
    assert rendered.text.count("y") >= 1_000_000
    assert len(rendered.spans) == 200
