"""The casts of a converted graph: where they stand, what they convert, how many bytes they move.

A cast reads every element once and writes it once. It is counted here, for one forward pass, if it is

1. a node that a pass inserted;
2. a conversion fused into an unscale or scale node, one for each value that it converts.

Told apart from these, since they move no bytes of their own or are not ours: ops that convert while they
read (``dtype=`` arguments), and casts that the model's author wrote and that do convert. What a kernel
converts inside is not in the graph and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ampfx import grad_scaling
from ampfx.dtypes import TensorSpec, is_low, short_name
from ampfx.graph_utils import get_attribute, op_of, spec
from ampfx.node_report import ENTER, LEAVE
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS
from ampfx.rewriting import current_float

Content = Literal["weights", "activations", "back to float32"]
How = Literal["cast", "fused", "dtype argument", "author"]


@dataclass(frozen=True)
class CastReport:
    """One conversion.

    Args:
        node: the node that converts.
        value: what it converts: a node's name, or the dotted name of a parameter.
        from_dtype: dtype that is read.
        to_dtype: dtype that is written.
        num_bytes: bytes read and written for the example inputs; 0 for a ``dtype=`` argument.
        content: what is converted.
        how: by an inserted cast, fused into a scaling node, by a ``dtype=`` argument, or by the author.
        module_path: the module it stands in; for a fused cast of a parameter, the one that owns it.
    """

    node: str
    value: str
    from_dtype: str
    to_dtype: str
    num_bytes: int
    content: Content
    how: How
    module_path: str

    def to_dict(self) -> dict[str, Any]:
        """The cast as plain data."""
        return asdict(self)


def cast_reports(gm: GraphModule) -> tuple[CastReport, ...]:
    """All conversions between floating dtypes in a graph, in its order."""
    return tuple(
        _cast(gm, node, value, before, after, how)
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
        for value, before, after, how in _conversions(node)
    )


def _conversions(node: Node) -> Iterator[tuple[Node, TensorSpec, torch.dtype, How]]:
    """What a node converts: the value, its spec, the new dtype, and how."""
    if node.target is grad_scaling.unscale_cast:
        to_dtype = node.args[1]
        for value in node.args[2:]:
            yield from _conversion(value, to_dtype, "fused")
    elif node.target is grad_scaling.scale_cast:
        yield from _conversion(node.args[2], node.args[1], "fused")
    elif node.meta.get("cast"):
        yield from _conversion(node.args[0], node.args[1], "cast")
    elif op_of(node) in AUTHOR_CASTS and node.args:
        yield from _conversion(node.args[0], current_float(node), "author")
    elif node.meta.get("given_dtype") and op_of(node) not in FACTORIES and op_of(node) not in LIKE_OPS:
        yield from _told(node, node.kwargs.get("dtype"))


def _told(node: Node, dtype: Any) -> Iterator[tuple[Node, TensorSpec, torch.dtype, How]]:
    for value in node.all_input_nodes:
        for found in _conversion(value, dtype, "dtype argument"):
            yield found
            return


def _conversion(value: Any, dtype: Any, how: How) -> Iterator[tuple[Node, TensorSpec, torch.dtype, How]]:
    found = spec(value) if isinstance(value, Node) else None
    if found is None or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return
    if found.dtype.is_floating_point and found.dtype != dtype:
        yield value, found, dtype, how


def _cast(
    gm: GraphModule, node: Node, value: Node, before: TensorSpec, after: torch.dtype, how: How
) -> CastReport:
    origin = _origin(value)
    content: Content = "back to float32"
    if is_low(after):
        content = "weights" if _is_weight(gm, origin) else "activations"
    place = str(node.meta.get("module_path") or "")
    if how == "fused" and origin.op == "get_attr":
        place = str(origin.target).rpartition(".")[0]  # one call serves the parameters of several modules
    moved = int(before.numel) * (before.dtype.itemsize + after.itemsize)
    return CastReport(
        node=node.name,
        value=str(origin.target) if origin.op == "get_attr" else origin.name,
        from_dtype=short_name(before.dtype),
        to_dtype=short_name(after),
        num_bytes=0 if how == "dtype argument" else moved,
        content=content,
        how=how,
        module_path=place,
    )


def _origin(value: Node) -> Node:
    """The value behind scaling nodes, which hand it on as it is."""
    while True:
        if value.target in LEAVE:
            source = value.args[-1]
        elif op_of(value) == "getitem" and isinstance(value.args[0], Node) and value.args[0].target in ENTER:
            call, index = value.args[0], value.args[1]
            first = 2 if call.target is grad_scaling.unscale_cast else 1
            source = call.args[first + index] if isinstance(index, int) else None
        else:
            return value
        if not isinstance(source, Node):
            return value
        value = source


def _is_weight(gm: GraphModule, node: Node) -> bool:
    if node.op != "get_attr":
        return False
    try:
        return isinstance(get_attribute(gm, str(node.target)), nn.Parameter)
    except AttributeError:
        return False
