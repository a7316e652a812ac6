"""Guards on values in a form that a traced program can hold.

A guard that asks a tensor for a Python value cannot be traced: the value is not there yet. In the program
that ``torch.compile`` makes it becomes an assertion on the device, which raises in the run that violates it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampfx import runtime

_READS = frozenset(["__bool__", "item", "__int__", "__float__", "__index__"])


def assert_value(value: torch.Tensor, expected: Any, where: str) -> None:
    """Raise in the run whose tensor does not hold the value of the capture."""
    torch._assert_async(
        (value == expected).all(), f"the graph was captured for {expected!r} at {where or 'an unknown line'}"
    )


def with_assertions(graph: fx.Graph) -> fx.Graph | None:
    """A copy of a graph in which guards on values are assertions; None where it has none of that kind."""
    guards = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target is runtime.guard and _is_read(node.args[0])
    ]
    if not guards:
        return None
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in guards:
            read, expected, *where = node.args
            assert isinstance(read, fx.Node)
            value = read.args[0]
            assert isinstance(value, fx.Node)
            made[node] = copy.call_function(assert_value, (made[value], expected, where[0] if where else ""))
        elif _is_read(node) and all(user in guards for user in node.users):
            continue
        elif node.op == "output":
            copy.output(fx.node.map_arg(node.args[0], made.__getitem__))
        else:
            made[node] = copy.node_copy(node, made.__getitem__)
    return copy


def _is_read(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in _READS
