"""Graphs as text, the same on every machine.

One line per node::

    name: dtype[shape] = op(args)  # class: reason

Tests, documents, the report and error messages use this printer. No paths, no addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampfx.decisions import Decision
from ampfx.dtypes import TensorSpec, short_name

_WIDTH = 80


def format_graph(graph: Graph | GraphModule, *, reasons: bool = True, width: int = _WIDTH) -> str:
    """The graph's nodes, one a line.

    Args:
        reasons: append class and reason of each node's decision.
        width: reasons that would pass this column are cut off; 0 for no limit.
    """
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    return "\n".join(format_node(node, reasons=reasons, width=width) for node in graph.nodes)


def format_node(node: Node, *, reasons: bool = True, width: int = _WIDTH) -> str:
    """One node's line."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    line = f"{node.name}{_type(node)} = {_call(node)}"
    decision = node.meta.get("decision")
    if not reasons or not isinstance(decision, Decision) or decision.dtype is None:
        return line
    if node.op in ("placeholder", "get_attr"):
        return line
    note = f"{line}  # {decision.cls}: {decision.reason}"
    if width and len(note) > width:
        room = width - len(line) - len(f"  # {decision.cls}: ") - 3
        if room < 12:
            return f"{line}  # {decision.cls}"
        note = f"{line}  # {decision.cls}: {decision.reason[:room].rstrip()}..."
    return note


def format_stage(name: str, graph: Graph | GraphModule, changed: bool) -> str:
    """The graph under a heading that says which pass made it."""
    return f"# after {name}{'' if changed else ' (edges unchanged)'}\n{format_graph(graph)}"


def format_value(value: Any) -> str:
    """``bf16[16, 4]``; several in brackets; empty for values that are no tensors."""
    if isinstance(value, TensorSpec):
        return f"{short_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        parts = [format_value(item) for item in value]
        return f"({', '.join(parts)})" if any(parts) else ""
    return ""


def _type(node: Node) -> str:
    text = format_value(node.meta.get("val"))
    return f": {text}" if text else ""


def _call(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"self.{node.target}"
    named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")
    op = str(node.meta.get("op") or named).removeprefix("ampfx.runtime.")
    return f"{op}({', '.join(_arguments(node))})"


def _arguments(node: Node) -> Iterator[str]:
    yield from map(_argument, node.args)
    for name, value in node.kwargs.items():
        yield f"{name}={_argument(value)}"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        parts = ["" if part is None else _argument(part) for part in (value.start, value.stop)]
        return ":".join(parts if value.step is None else [*parts, _argument(value.step)])
    if value is Ellipsis:
        return "..."
    if isinstance(value, bool | int | float | complex | str | type(None)):
        return repr(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", type(value).__name__)
