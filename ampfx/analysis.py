"""What the assignment has to know about each node of a captured graph.

The facts hold for the graph as it was recorded, in float32, and stay true while casts are inserted.

1. *Managed*: the node makes a tensor that was float32. Only managed values ever change their dtype.
2. *Aliases*: values with equal ``TensorSpec.storage`` share memory. Where some node writes into such a
   group, the whole group must have one dtype, and a cast of a member is good only until the next write.
3. *Origin*: whether a float input or a parameter flows into the node. What is computed from positions,
   integers and buffers alone is cheap and often needs its precision.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ampfx.dtypes import Region, TensorSpec, is_low
from ampfx.graph_utils import get_attribute, op_of, region_of
from ampfx.ops import base_op, is_in_place, written_arguments


@dataclass(slots=True)
class NodeFacts:
    """What is known about one node.

    Args:
        op: canonical name of the operation, ``""`` for inputs, attributes and the output.
        base: the operation behind an in-place name.
        managed: the node makes a float32 tensor.
        floating: it makes a floating tensor of any dtype (not complex).
        tuple_valued: it makes several values.
        numel: elements of the managed tensors.
        ndim: dimensions of the tensor, 0 for scalars and tuples.
        requires_grad: a gradient flows through it.
        trained: a float input or a parameter flows into it.
        region: the region it stands in.
        group: storage that some node writes into and that this node's value lives in, 0 if none.
        writes: the nodes whose values this node writes into.
        in_place: the node's own value is its first argument or its ``out=``.
    """

    op: str
    base: str
    managed: bool
    floating: bool
    tuple_valued: bool
    numel: int
    ndim: int
    requires_grad: bool
    trained: bool
    region: Region
    dtype: torch.dtype | None
    group: int = 0
    writes: tuple[Node, ...] = ()
    in_place: bool = False


def facts_of(node: Node) -> NodeFacts:
    """The facts of a node; the graph must have been analysed."""
    facts = node.meta.get("facts")
    assert isinstance(facts, NodeFacts), f"{node.name} was not analysed"
    return facts


def is_analysed(node: Node) -> bool:
    """Whether :func:`analyse_graph` has seen this node."""
    return "facts" in node.meta


def recorded_value(node: Node) -> Any:
    """The value's specs as they were recorded, whatever the passes made of them since."""
    return node.meta["val_float32"] if "val_float32" in node.meta else node.meta.get("val")


def tensor_leaves(value: Any) -> Iterator[TensorSpec]:
    """The tensors in a node's value; much faster than a general pytree walk."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensor_leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensor_leaves(item)


def analyse_graph(gm: GraphModule) -> None:
    """Write ``meta["facts"]`` on every node that has none yet."""
    written: set[int] = set()
    fresh: list[Node] = []
    for node in gm.graph.nodes:
        if "facts" in node.meta:
            continue
        facts = _node_facts(gm, node)
        node.meta["facts"] = facts
        fresh.append(node)
        for target in facts.writes:
            for spec in tensor_leaves(recorded_value(target)):
                written.add(spec.storage)
    if not written:
        return
    for node in fresh:
        if node.op == "output":
            continue
        for spec in tensor_leaves(recorded_value(node)):
            if spec.storage in written:
                facts_of(node).group = spec.storage
                break


def _node_facts(gm: GraphModule, node: Node) -> NodeFacts:
    value = recorded_value(node)
    leaves = list(tensor_leaves(value)) if node.op != "output" else []
    managed = [leaf for leaf in leaves if leaf.dtype == torch.float32]
    op = op_of(node)
    calls = node.op in ("call_function", "call_method")
    writes = written_arguments(node) if calls else ()
    single = value if isinstance(value, TensorSpec) else None
    return NodeFacts(
        op=op,
        base=base_op(op),
        managed=bool(managed),
        floating=any(leaf.dtype.is_floating_point for leaf in leaves),
        tuple_valued=single is None and bool(leaves),
        numel=sum(leaf.numel for leaf in managed),
        ndim=len(single.shape) if single is not None else 0,
        requires_grad=any(leaf.requires_grad for leaf in managed),
        trained=_is_trained(gm, node, leaves),
        region=region_of(node),
        dtype=single.dtype if single is not None else (torch.float32 if managed else None),
        writes=writes,
        in_place=bool(writes) and (is_in_place(op) or "out" in node.kwargs),
    )


def _is_trained(gm: GraphModule, node: Node, leaves: list[TensorSpec]) -> bool:
    if node.op == "placeholder":
        return any(leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in leaves)
    if node.op == "get_attr":
        if not leaves:
            return False
        try:
            return isinstance(get_attribute(gm, str(node.target)), nn.Parameter)
        except AttributeError:
            return leaves[0].requires_grad
    if node.op == "output":
        return False
    # Data-dependent integers (an index found by argmax) are positions, not values.
    if leaves and not any(leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in leaves):
        return False
    return any("facts" in arg.meta and facts_of(arg).trained for arg in node.all_input_nodes)


def is_tuple_read(node: Node) -> bool:
    """Whether a node picks one result of an operation that has several."""
    if node.target is not operator.getitem or not node.args or not isinstance(node.args[0], Node):
        return False
    return isinstance(recorded_value(node.args[0]), tuple | list)


def is_part_of_unknown(node: Node) -> bool:
    """Whether a node picks a tensor from something whose parts are not known (the arguments of a hook)."""
    if node.target is not operator.getitem or not node.args or not isinstance(node.args[0], Node):
        return False
    return recorded_value(node.args[0]) is None and facts_of(node).managed


def author_low(facts: NodeFacts) -> bool:
    """Whether the author made this tensor low precision."""
    return is_low(facts.dtype)
