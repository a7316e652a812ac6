"""Expected texts inside tests, and their renewal.

``assert_golden(actual, '''...''')`` compares a text with the literal in the test, whose indentation does
not count. With ``AMPFX_GOLDEN=1`` (``make golden``) a literal that differs is rewritten in the test's
file when the run is over, and the test passes: read the diff as you read code.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from pathlib import Path

# File to its new literals: (first line, column, last line, column), text.
_edits: dict[Path, dict[tuple[int, int, int, int], str]] = {}


def assert_golden(actual: str, expected: str) -> None:
    """Assert that a text equals the literal, or note the literal for renewal."""
    actual, expected = actual.strip("\n"), textwrap.dedent(expected).strip("\n")
    if actual != expected and os.environ.get("AMPFX_GOLDEN") == "1":
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        _note(Path(frame.f_back.f_code.co_filename), frame.f_back.f_lineno, actual)
        return
    assert actual == expected, "the text changed; if the new one is right, run `make golden`"


def _note(path: Path, line: int, text: str) -> None:
    """Find the literal of the call at a line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "assert_golden" and node.lineno <= line <= (node.end_lineno or line):
            literal = node.args[1]
            if not isinstance(literal, ast.Constant):
                raise TypeError(f"{path.name}:{line}: assert_golden needs a string literal second")
            span = (literal.lineno, literal.col_offset, literal.end_lineno or 0, literal.end_col_offset or 0)
            _edits.setdefault(path, {})[span] = f'"""\n{textwrap.indent(text, " " * 8)}\n        """'
            return
    raise LookupError(f"{path.name}:{line}: no call of assert_golden found here")


def write_renewed() -> list[Path]:
    """Rewrite the noted literals, from the last of a file to the first; returns the files."""
    for path, edits in _edits.items():
        lines = path.read_bytes().splitlines(keepends=True)  # ast counts columns in bytes
        for (first, start, last, end), text in sorted(edits.items(), reverse=True):
            lines[first - 1 : last] = [lines[first - 1][:start] + text.encode() + lines[last - 1][end:]]
        path.write_bytes(b"".join(lines))
    written = list(_edits)
    _edits.clear()
    return written
