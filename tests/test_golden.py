"""Expected texts: they are compared, and renewed only when asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from golden import assert_golden, write_renewed

SOURCE = '''\
from golden import assert_golden


def test_one():
    assert_golden("a × b\\n  c", """
        stale
        """)
    assert_golden("same", """
        same
        """)
    assert_golden("third", "x")
'''


def run(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("written_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_one()


def test_texts_are_compared_without_their_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFX_GOLDEN", raising=False)
    assert_golden("a\n  b", """
        a
          b
        """)
    with pytest.raises(AssertionError, match="make golden"):
        assert_golden("a", "b")


def test_literals_that_differ_are_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "written.py"
    path.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setenv("AMPFX_GOLDEN", "1")
    run(path)
    assert write_renewed() == [path]
    monkeypatch.delenv("AMPFX_GOLDEN")
    run(path)
    text = path.read_text(encoding="utf-8")
    assert "a × b\n          c" in text
    assert text.count("same") == 2
    assert "stale" not in text
