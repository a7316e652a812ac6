"""Helpers for error messages about names that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ampfx.errors import PolicyError


def did_you_mean(name: str, known: Iterable[str], also: list[str] | None = None) -> str:
    """A sentence with the known names that look like ``name``, empty if none does."""
    close = difflib.get_close_matches(name, sorted(set(known) - {""}), n=3)
    names = list(dict.fromkeys([*(also or ()), *close]))[:3]
    return f" Did you mean {' or '.join(repr(item) for item in names)}?" if names else ""


def check_keys(data: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise if the data of a file has a key that nothing reads."""
    for key in data:
        if key not in known:
            near = did_you_mean(key, known)
            raise PolicyError(f"{key!r} is no setting of {what}.{near} Known: {', '.join(sorted(known))}.")
