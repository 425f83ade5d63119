"""The line of a model that made an operation, from stacks of any program."""

from pathlib import Path

import pytest

from lowering.tracing import source_lines
from lowering.tracing.source_lines import model_line

ROOT = Path(source_lines.__file__).parents[2]
LIBRARY = "/usr/lib/python3.11/site-packages/jax/_src/api.py"


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(source_lines, "_helpers", set(source_lines._helpers))
    monkeypatch.setattr(source_lines, "_packages", list(source_lines._packages))
    yield
    source_lines._own.cache_clear()


def test_the_innermost_line_outside_libraries_and_lowering_is_reported():
    helper = str(ROOT / "lowering/tracing/constrain.py")
    stack = [(LIBRARY, 1), (helper, 2), ("/home/me/net.py", 3), ("/home/me/train.py", 4)]
    assert model_line(stack) == "/home/me/net.py:3"
    assert model_line([(LIBRARY, 1), ("<frozen runpy>", 2)]) == ""


def test_a_module_that_declares_itself_reports_its_callers():
    stack = [("/home/me/product.py", 3), ("/home/me/net.py", 4)]
    assert model_line(stack) == "/home/me/product.py:3"
    source_lines.report_callers("/home/me/product.py")
    assert model_line(stack) == "/home/me/net.py:4"
    assert model_line(stack[:1]) == "/home/me/product.py:3"  # better than no line


def test_a_declared_package_is_reported_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(source_lines, "_ROOT", Path("/usr/lib/python3.11/site-packages"))
    source_lines._own.cache_clear()
    stack = [("/usr/lib/python3.11/site-packages/product/net.py", 7), (LIBRARY, 1)]
    assert model_line(stack) == ""
    source_lines.report_callers("/usr/lib/python3.11/site-packages/product/dot.py")
    source_lines.report_package("product")
    inner = ("/usr/lib/python3.11/site-packages/product/dot.py", 5)
    assert model_line([inner, *stack]) == "product/net.py:7"
