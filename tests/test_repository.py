"""Rules that hold for the repository as a whole: layers of imports, public names, words, docstrings."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ampfx

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("ampfx", "bench", "examples", "tests")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".html", ".json", ".yml", ".typed", ""}
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}

PUBLIC_NAMES = {
    "AmpfxError",
    "CaptureError",
    "ConvertedModule",
    "Explanation",
    "GuardError",
    "LossScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "NotCapturedError",
    "OptionError",
    "Override",
    "Policy",
    "PolicyError",
    "Report",
    "VerifyError",
    "convert",
}

# Lowest first. A module of the package imports from its own layer or from lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    # what everything may use
    ("errors", "dtypes", "ops", "graph_utils", "near_misses", "text_layout", "user_warning"),
    # measuring any model; uses nothing else of the package
    ("measure", "step_time", "part_calls"),
    # rules are rows; no graph in them
    ("autocast_lists", "rule_facts", "rule_table", "rule_block"),
    ("rules_allow", "rules_deny", "rules_infer", "rules_clear"),
    ("rules", "rules_doc"),
    # what the user asks for, and what was decided
    ("overrides", "policy_check", "policy", "blocks"),
    ("decisions", "printing"),
    # loss scaling outside the graph
    ("loss_scale", "grad_scaling", "gradients", "skip", "optimizer", "traced_scale"),
    # recording a run, and what recorded graphs call
    ("checkpoints", "runtime", "capture", "graph_view", "parts"),
    # what torch.compile sees of it
    ("compiled_call", "traced_guards"),
    # what passes share
    ("context", "cut", "analysis", "composites"),
    ("argument_needs", "variables", "rewriting", "fake_run", "hazards", "promotion"),
    ("pins", "cast_costs", "cast_maker", "told_dtypes", "scale_nodes"),
    ("passes.base",),
    # the passes: they never import each other
    (
        "passes.analyse",
        "passes.assign",
        "passes.insert_casts",
        "passes.fold_casts",
        "passes.embed_loss_scale",
        "passes.verify",
    ),
    ("passes",),
    # the converted module and what it tells
    ("coverage", "products", "node_report", "cast_report", "module_tree", "explanation", "report_text", "report"),
    ("options", "graph_entry", "parts_report", "converted", "convert"),
    # torch.compile's other way in
    ("dynamo_graph", "dynamo_coverage", "backend"),
)

# Packages that are used in few places, so that the rest can be read, and imported, without them.
ONLY_IN = {
    "networkx": {"cut"},
    "sklearn": set(),
}

# Written in pieces, so that this file passes its own check.
FORBIDDEN_WORDS = re.compile(
    "|".join(
        (
            r"/(wo" r"rk|fa" r"rm|ro" r"ot)/",
            r"\bsub" r"agents?\b",
            r"py" r"pi\.org",
            r"python" r"hosted",
            r"download\.py" r"torch",
            r"/opt/py" r"pi",
        )
    ),
    re.IGNORECASE,
)


def code_files() -> list[Path]:
    return sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def text_files(root: Path) -> Iterator[Path]:
    """Every text file of the repository, links left out."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or path.name in NOT_OURS or path.name.endswith(("_cache", ".egg-info")):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield path


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- public names -----------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert set(ampfx.__all__) == PUBLIC_NAMES
    assert len(ampfx.__all__) == len(PUBLIC_NAMES)


def test_every_public_name_exists_and_is_documented() -> None:
    undocumented = [name for name in ampfx.__all__ if not getattr(getattr(ampfx, name), "__doc__", None)]
    assert undocumented == []


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {project['version']}" in changelog


# --- layers -----------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """``passes.analyse`` for ampfx/passes/analyse.py, ``capture`` for ampfx/capture/__init__.py."""
    parts = path.relative_to(ROOT / "ampfx").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that code imports when it runs, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                yield from (alias.name for alias in inner.names)
            elif isinstance(inner, ast.ImportFrom) and inner.module is not None:
                yield inner.module
                if inner.module in ("ampfx", "ampfx.passes"):  # from ampfx import cut
                    yield from (f"{inner.module}.{alias.name}" for alias in inner.names)


def layer_of(module: str) -> int | None:
    """The layer of a module: that of its own name, or else of the package it is in."""
    while module:
        for layer, names in enumerate(LAYERS):
            if module in names:
                return layer
        module = module.rpartition(".")[0]
    return None


def violations(module: str, tree: ast.Module) -> list[str]:
    """What is wrong with a module's imports, as sentences."""
    found = []
    own = layer_of(module)
    if own is None:
        found.append(f"{module} stands in no layer: add it to LAYERS")
    for name in imports(tree):
        top = name.partition(".")[0]
        if top in ONLY_IN and module not in ONLY_IN[top]:
            found.append(f"{module} imports {top}")
        other = name.removeprefix("ampfx.")
        if top != "ampfx" or other == "ampfx" or own is None:
            continue
        layer = layer_of(other)
        if layer is not None and layer > own:
            found.append(f"{module} imports {other} from a higher layer")
        if is_pass(module) and is_pass(other) and module != other:
            found.append(f"the pass {module} imports the pass {other}")
    return found


def is_pass(module: str) -> bool:
    return module.startswith("passes.") and module not in ("passes.base", "passes.manager")


PACKAGE_FILES = [path for path in sorted((ROOT / "ampfx").rglob("*.py")) if path.parent.name != "__pycache__"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=relative)
def test_imports_go_downward(path: Path) -> None:
    module = module_name(path)
    if module:  # the package itself re-exports from everywhere
        assert violations(module, ast.parse(path.read_text(encoding="utf-8"))) == []


def test_the_layers_name_only_modules_that_exist() -> None:
    modules = {module_name(path) for path in PACKAGE_FILES}
    names = [name for layer in LAYERS for name in layer]
    assert [name for name in names if name not in modules] == []
    assert len(names) == len(set(names))


def unlisted(page: str) -> list[str]:
    """The modules that the table of files in docs/design.md does not name."""
    files = set(re.findall(r"([\w]+\.py)`", page.partition("## Where is what")[2]))
    return sorted(relative(path) for path in PACKAGE_FILES if path.name not in {*files, "__init__.py"})


def test_the_design_says_where_every_module_stands() -> None:
    assert unlisted((ROOT / "docs" / "design.md").read_text(encoding="utf-8")) == []
    assert "ampfx/cut.py" in unlisted("## Where is what\n`errors.py`")


def test_the_import_check_can_fail() -> None:
    assert violations("errors", ast.parse("import ampfx.passes.assign")) == [
        "errors imports passes.assign from a higher layer"
    ]
    assert violations("errors", ast.parse("def f():\n    from ampfx import convert")) == [
        "errors imports convert from a higher layer"
    ]
    assert violations("errors", ast.parse("import networkx as nx")) == ["errors imports networkx"]
    assert violations("unheard_of", ast.parse("")) == ["unheard_of stands in no layer: add it to LAYERS"]
    assert violations("passes.assign", ast.parse("from ampfx.passes.verify import VerifyDtypes")) == [
        "the pass passes.assign imports the pass passes.verify"
    ]
    hint = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ampfx.convert import convert"
    assert violations("errors", ast.parse(hint)) == []


# --- texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", code_files(), ids=relative)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{relative(path)} has no module docstring"


def test_no_text_names_where_or_how_it_was_made() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in text_files(ROOT)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN_WORDS.search(line)
    ]
    assert found == []


def test_the_word_check_can_fail() -> None:
    for text in ("see /wo" "rk/notes", "a sub" "agent", "https://PyPI" ".org/simple", "/ro" "ot/x"):
        assert FORBIDDEN_WORDS.search(text), text
    for text in ("the framework/module", "pip install torch", "derivative works/"):
        assert not FORBIDDEN_WORDS.search(text), text
    names = {relative(path) for path in text_files(ROOT)}
    assert {"README.md", "Makefile", ".ci/run", "ampfx/errors.py", "pyproject.toml"} <= names


def test_the_link_to_the_passes_leads_into_the_package() -> None:
    assert (ROOT / "passes").resolve() == ROOT / "ampfx" / "passes"
