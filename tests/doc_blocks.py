"""Runs the code of a Markdown page and compares what it prints with what the page shows.

The convention: every block fenced as ``python`` is run, in order, and the blocks of a page share one
namespace. A block fenced as ``output`` shows what the ``python`` block before it prints. In an
``output`` block, ``...`` stands for any text, also over several lines. Other fences are not run.

With the environment variable ``AMPFX_GOLDEN=1`` (``make golden``) outputs that differ are rewritten.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^```(python|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class DocError(AssertionError):
    """The code of a page fails, or prints something else than the page shows."""


@dataclass
class Block:
    """A ``python`` block: its code, the line it starts at, and the output shown after it.

    ``shown`` is None where the page shows none; ``span`` is the place of the shown text in the page.
    """

    code: str
    line: int
    shown: str | None = None
    span: tuple[int, int] = (0, 0)


def blocks(page: str) -> Iterator[Block]:
    """The ``python`` blocks of a page, in order."""
    block: Block | None = None
    for fence in _FENCE.finditer(page):
        line = page.count("\n", 0, fence.start()) + 2
        if fence[1] == "python":
            if block is not None:
                yield block
            block = Block(fence[2], line)
        elif block is None or block.shown is not None:
            raise DocError(f"line {line}: an output block that follows no python block")
        else:
            block.shown, block.span = fence[2], fence.span(2)
    if block is not None:
        yield block


def run_page(page: str, name: str, *, rewrite: bool = False) -> str:
    """Run a page's code and return the page, with its outputs brought up to date if ``rewrite``.

    Raises:
        DocError: code fails, or (unless ``rewrite``) a shown output is not what the code prints.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    replacements: list[tuple[tuple[int, int], str]] = []
    for block in blocks(page):
        printed = _run(block, name, namespace)
        if block.shown is None or _matches(block.shown, printed):
            continue
        if not rewrite:
            raise DocError(
                f"{name}, line {block.line}: the page shows\n{block.shown}\nbut the code prints\n{printed}\n"
                "If the new text is right, run `make golden`."
            )
        replacements.append((block.span, printed))
    for (start, end), text in reversed(replacements):
        page = page[:start] + text + page[end:]
    return page


def _run(block: Block, name: str, namespace: dict[str, object]) -> str:
    # Empty lines in front make tracebacks point at the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, name, "exec")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
    except Exception as error:
        raise DocError(f"{name}: the block at line {block.line} fails: {error!r}") from error
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def _matches(shown: str, printed: str) -> bool:
    pattern = re.escape(shown.strip("\n")).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, printed.strip("\n"), re.DOTALL) is not None
