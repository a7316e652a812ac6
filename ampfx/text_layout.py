"""Text for a terminal of 80 columns: paragraphs, cells of tables, byte counts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80


def paragraph(text: str, indent: int = 0, hang: int | None = None) -> list[str]:
    """The lines of a text, none longer than the terminal; ``hang`` indents all but the first."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hang is None else hang),
        break_on_hyphens=False,
    )


def cut(text: str, width: int, *, left: bool = False) -> str:
    """The text with its end, or its beginning, replaced by dots where it is too long."""
    if len(text) <= width:
        return text
    return f"...{text[len(text) - width + 3 :]}" if left else f"{text[: width - 3]}..."


def listed(names: Iterable[str], most: int = 4) -> str:
    """Some names and how many are left out: ``a, b, c and 12 more``."""
    known = list(names)
    shown = ", ".join(known[:most])
    return f"{shown} and {len(known) - most} more" if len(known) > most else shown


def byte_count(count: int) -> str:
    """``512 B``, ``1.5 kB``, ``20.3 MB``."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
