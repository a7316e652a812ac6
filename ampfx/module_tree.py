"""Counts for each module of a converted model, what is below it included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ampfx.cast_report import CastReport
from ampfx.node_report import NodeTable


@dataclass(frozen=True)
class ModuleReport:
    """One module with all that is below it.

    Args:
        path: its path, ``""`` for the whole model.
        nodes: its operations.
        low: those that run low.
        float32: those that run in float32; what is left makes no float tensor.
        casts: casts that one forward pass runs in it.
        cast_bytes: the bytes that they read and write.
    """

    path: str
    nodes: int
    low: int
    float32: int
    casts: int
    cast_bytes: int

    @property
    def depth(self) -> int:
        """Modules around it."""
        return self.path.count(".") + 1 if self.path else 0

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        return asdict(self)


def module_reports(nodes: NodeTable, casts: Sequence[CastReport]) -> tuple[ModuleReport, ...]:
    """The modules, each before what is below it, in the order in which they first run."""
    counts: dict[str, list[int]] = {"": [0, 0, 0, 0, 0]}
    for node in nodes:
        if node.role == "op":
            for path in _around(node.module_path):
                count = counts.setdefault(path, [0, 0, 0, 0, 0])
                count[0] += 1
                count[1] += node.is_low
                count[2] += node.is_float32
    for cast in casts:
        if cast.how in ("cast", "fused"):
            for path in _around(cast.module_path):
                count = counts.setdefault(path, [0, 0, 0, 0, 0])
                count[3] += 1
                count[4] += cast.num_bytes
    below: dict[str, list[str]] = {}
    for path in counts:
        if path:
            below.setdefault(path.rpartition(".")[0], []).append(path)
    return tuple(ModuleReport(path, *counts[path]) for path in _in_order("", below))


def _in_order(path: str, below: dict[str, list[str]]) -> Iterator[str]:
    stack = [path]
    while stack:
        here = stack.pop()
        yield here
        stack.extend(reversed(below.get(here, [])))


def _around(path: str) -> Iterator[str]:
    """The root, and each module on the way to this one."""
    yield ""
    parts = path.split(".") if path else []
    for index in range(len(parts)):
        yield ".".join(parts[: index + 1])
