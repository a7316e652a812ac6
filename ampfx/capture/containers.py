"""Lists, dicts, sets and plain objects that modules hold: what is in them can change under a graph."""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

DEPTH = 4
# Vocabularies and tables: only their length is watched.
_LARGE = 256
# The standard library's objects (loggers, locks, files) change all the time; these are made to hold values.
_HOLDERS = frozenset({"types", "collections", "argparse"})


def is_plain_object(value: Any) -> bool:
    """Whether a value keeps its state in attributes that code may change (a configuration, a cache)."""
    if not isinstance(getattr(value, "__dict__", None), dict) or callable(value):
        return False
    if isinstance(value, (nn.Module, torch.Tensor, type, enum.Enum, types.ModuleType)):
        return False
    package = type(value).__module__.partition(".")[0]
    return package != "torch" and (package in _HOLDERS or package not in sys.stdlib_module_names)


def containers(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The lists, dicts, sets and plain objects in ``value``, itself included."""
    if isinstance(value, (list, dict, set)) or is_plain_object(value):
        yield value
    elif not isinstance(value, tuple):
        return
    if depth > 0 and not isinstance(value, set) and not _is_large(value):
        for item in value if isinstance(value, tuple) else content(value):
            yield from containers(item, depth - 1)


def content(container: Any) -> list[Any]:
    """What a container holds, in order: a shallow copy. Of a large one its length."""
    if _is_large(container):
        return [len(container)]
    if isinstance(container, (list, set)):
        return list(container)
    inner = container if isinstance(container, dict) else vars(container)
    return [*inner, *inner.values()]


@contextlib.contextmanager
def unchanged(value: Any) -> Iterator[None]:
    """What runs inside leaves the containers in ``value`` as they were."""
    before = [(container, content(container)) for container in containers(value)]
    try:
        yield
    finally:
        for container, saved in before:
            now = content(container)
            if len(now) != len(saved) or any(a is not b for a, b in zip(now, saved, strict=True)):
                refill(container, saved)


def refill(container: Any, saved: list[Any]) -> None:
    """Bring a container back to a :func:`content` of it."""
    if _is_large(container):
        return
    if isinstance(container, list):
        container[:] = saved
        return
    if isinstance(container, set):
        container.clear()
        container.update(saved)
        return
    inner = container if isinstance(container, dict) else vars(container)
    half = len(saved) // 2
    inner.clear()
    inner.update(zip(saved[:half], saved[half:], strict=True))


def _is_large(value: Any) -> bool:
    return isinstance(value, (list, dict, set, tuple)) and len(value) > _LARGE
