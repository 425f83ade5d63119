"""Line numbers of keys, against documents whose lines are known because we wrote them."""

import string
import tomllib

import hypothesis.strategies as st
from hypothesis import given

from graphtrain.config.lines import line_numbers
from graphtrain.config.render import dotted, toml

names = st.text(string.ascii_letters + "-_0 .=[]#\"'{é", min_size=1, max_size=4)
scalars = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.datetimes(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)
tricky = st.sampled_from(
    [
        '"""\n[no.table]\nkey = 1 # "" \\""" """',
        '"""""""a"""',
        '["""one quote more"""", "]", 1]',
        "'''\nit''s = [\n'''''",
        "['''one quote more'''', ']', 1]",
        "'a\\'",
        "1979-05-27 07:32:00-08:00",
        "+1_000.5e-3",
        '[ # [x]\n  1, "]", # ]\n  [2,\n3], {a.b = "}", c = [{}]},\n]',
    ]
)
texts = values.map(toml).filter(lambda text: "\r" not in text) | tricky
comments = st.sampled_from(["", " # [a]", "  # key = '", ' # """', "\n", "\n\n# [[b]]\n"])
tables = st.dictionaries(
    st.lists(names, min_size=1, max_size=2).map(tuple),
    st.tuples(st.dictionaries(names, st.tuples(texts, comments), max_size=4), comments),
    max_size=4,
)


@given(tables, st.booleans())
def test_every_key_has_its_line(content, windows):
    written, expected = "", {}
    for table, (settings, after) in content.items():
        expected[table] = written.count("\n") + 1
        written += f"[ {dotted(table[:1])}{'.'.join(['', *map(toml, table[1:])])} ]{after}\n"
        for name, (text, comment) in settings.items():
            expected[(*table, name)] = written.count("\n") + 1
            written += f"  {dotted((name,))} = {text}{comment}\n"
    try:
        tomllib.loads(written)
    except tomllib.TOMLDecodeError:
        return  # a table that is also a setting of another
    found = line_numbers(written.replace("\n", "\r\n") if windows else written)
    assert {path: found.get(path) for path in expected} == expected
    assert all(path in tomllib_paths(tomllib.loads(written)) for path in found)


def tomllib_paths(value, path=()):
    """Every key path that the real parser sees outside arrays."""
    if not isinstance(value, dict):
        return {path}
    return {path}.union(*(tomllib_paths(inner, (*path, name)) for name, inner in value.items()))


def test_dotted_keys_inline_tables_and_repeated_headers():
    text = """\
a.b . "c.d" = 1
e = { f = 2, g = { h.i = [ 3 ] } }  # j = 4

[ k . 'l' ]
m = [
  { n = 5 },
  "o = 6",
]
p = 7
[[q]]
r = 8
[[q]]
r = 9"""
    assert line_numbers(text) == {
        ("a", "b", "c.d"): 1,
        ("e",): 2,
        ("e", "f"): 2,
        ("e", "g"): 2,
        ("e", "g", "h", "i"): 2,
        ("k", "l"): 4,
        ("k", "l", "m"): 5,
        ("k", "l", "p"): 9,
        ("q",): 10,
        ("q", "r"): 11,
        ("q", "0"): 10,
        ("q", "0", "r"): 11,
        ("q", "1"): 12,
        ("q", "1", "r"): 13,
    }
    assert line_numbers("") == {}
