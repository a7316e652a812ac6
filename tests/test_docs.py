"""README and docs: their code runs, prints what they show, and names only what exists."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path

import pytest
from doc_blocks import DocError, run_page

import ampfx

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_code_runs_and_prints_what_the_page_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages may write files
    rewrite = os.environ.get("AMPFX_GOLDEN") == "1"
    page = path.read_text(encoding="utf-8")
    updated = run_page(page, page_id(path), rewrite=rewrite)
    if updated != page:
        path.write_text(updated, encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing, f"{page_id(path)} links to files that do not exist: {missing}"


def exists(dotted: str) -> bool:
    """Whether ``ampfx.a.b`` is an attribute, or a module, of the package."""
    try:
        functools.reduce(getattr, dotted.split(".")[1:], ampfx)
    except AttributeError:
        try:
            return importlib.util.find_spec(dotted) is not None
        except ModuleNotFoundError:
            module, _, name = dotted.rpartition(".")
            return exists(module) and hasattr(importlib.import_module(module), name)
    return True


def unknown_names(page: str) -> list[str]:
    return sorted({name for name in re.findall(r"\bampfx(?:\.[A-Za-z_]\w*)+", page) if not exists(name)})


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_pages_name_only_what_exists(path: Path) -> None:
    assert unknown_names(path.read_text(encoding="utf-8")) == []


def test_every_page_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index]
    assert [name for name in missing if name != "index.md"] == []


def test_these_checks_can_fail() -> None:
    good = "```python\nx = 1\n```\n\n```python\nprint(x, 'y')\n```\n```output\n1 ...\n```\n"
    assert run_page(good, "good") == good
    with pytest.raises(DocError, match=r"line 6: the page shows\n2\n"):
        run_page(good.replace("1 ...", "2"), "bad output")
    with pytest.raises(DocError, match=r"block at line 2 fails: NameError"):
        run_page(good.replace("x = 1", "x = z"), "bad code")
    with pytest.raises(DocError, match="follows no python block"):
        run_page("```output\n1\n```\n", "stray output")
    assert run_page(good.replace("1 ...", "2"), "old", rewrite=True) == good.replace("1 ...", "1 y")
    names = "`ampfx.AmpfxError`, `ampfx.measure.count_step` and ampfx.made_up(3)"
    assert unknown_names(names) == ["ampfx.made_up"]
