"""What a converted graph says about each of its nodes, as data that outlives the graph.

1. A node has a *role*: input, attribute, op, part (one result of an op that has several), cast or scale
   (both inserted by the passes).
2. Its ``dtype`` is that of its result; ``decided`` is what the assignment chose for it, which also says in
   which dtype an op reads that makes no float tensor.
3. ``chain`` leads to the node that is the cause; :func:`follow` walks it.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass, fields
from typing import Any, Literal, overload

import torch
from torch.fx import GraphModule, Node

from ampfx import grad_scaling
from ampfx.analysis import is_analysed, is_tuple_read, tensor_leaves
from ampfx.argument_needs import opaque_name
from ampfx.decisions import Decision
from ampfx.dtypes import TensorSpec, is_low, short_name
from ampfx.graph_utils import op_of
from ampfx.scale_nodes import ATTRIBUTE

Role = Literal["input", "attribute", "op", "part", "cast", "scale"]

ENTER = frozenset({grad_scaling.unscale, grad_scaling.unscale_cast, grad_scaling.unscale_written})
LEAVE = frozenset({grad_scaling.scale, grad_scaling.scale_cast})


@dataclass(frozen=True)
class NodeReport:
    """One node of a converted graph.

    Args:
        name: name of the node.
        op: canonical name of the operation; ``input`` and ``attribute`` for what is no operation.
        role: what sort of node it is.
        module_path: the module it stands in, ``""`` for the root.
        source: line of the model's code, ``""`` if unknown.
        dtype: dtype of the result as the printed graph has it (``bf16``), ``-`` if it makes no tensor.
        torch_dtype: the same as a ``torch.dtype``.
        shape: shape of the result for the example inputs; None unless it is one tensor.
        decided: dtype that the assignment chose, ``-`` where it left the node as it is.
        cls: ``allow``, ``deny``, ``infer``, ``clear``; ``input``, ``author``, ``cast``, ``scale`` and ``-``.
        kind: what sort of reason it is, see :data:`ampfx.decisions.Kind`; ``cast`` and ``scale`` beside.
        reason: one sentence.
        rule_source: where the rule comes from.
        cause: the node that the decision goes back to, ``""`` if there is none.
        chain: names from this node to the cause, both included.
        autocast_dtype: what ``torch.autocast`` gives the node, ``-`` where it decides nothing.
        target: the dotted name of an attribute (a parameter's or a buffer's).
    """

    name: str
    op: str
    role: Role
    module_path: str
    source: str
    dtype: str
    torch_dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    decided: str
    cls: str
    kind: str
    reason: str
    rule_source: str
    cause: str
    chain: tuple[str, ...]
    autocast_dtype: str
    target: str = ""

    @property
    def inserted(self) -> bool:
        """Whether a pass added the node."""
        return self.role in ("cast", "scale")

    @property
    def is_float32(self) -> bool:
        """Whether it is an operation that was decided to run in float32."""
        return self.role == "op" and self.decided == "f32"

    @property
    def is_low(self) -> bool:
        """Whether it is an operation that was decided to run low."""
        return self.role == "op" and self.decided in ("bf16", "f16")

    @property
    def raised(self) -> bool:
        """Whether ``torch.autocast`` would run this operation less precisely."""
        return self.is_float32 and self.autocast_dtype in ("bf16", "f16")

    @property
    def lowered(self) -> bool:
        """Whether ``torch.autocast`` would run this operation more precisely."""
        forced = self.kind == "override" and self.cls == "deny"  # what follows is simulated from there
        return self.is_low and (forced or self.autocast_dtype == "f32")

    def to_dict(self) -> dict[str, Any]:
        """The node as plain data."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["torch_dtype"] = None if self.torch_dtype is None else str(self.torch_dtype)
        data["shape"] = None if self.shape is None else list(self.shape)
        data["chain"] = list(self.chain)
        data["class"] = data.pop("cls")
        return {**data, "inserted": self.inserted}


class NodeTable(Sequence[NodeReport]):
    """The nodes of a graph in its order; ``table["linear"]`` finds one by its name."""

    def __init__(self, nodes: Sequence[NodeReport]) -> None:
        self._by_name = {node.name: node for node in nodes}
        self._nodes = tuple(nodes)

    @overload
    def __getitem__(self, key: int | str) -> NodeReport: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[NodeReport, ...]: ...
    def __getitem__(self, key: int | str | slice) -> NodeReport | tuple[NodeReport, ...]:
        return self._by_name[key] if isinstance(key, str) else self._nodes[key]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeReport]:
        return iter(self._nodes)

    def __contains__(self, item: object) -> bool:
        return item in self._by_name if isinstance(item, str) else item in self._nodes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeTable) and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(self._nodes)

    def __repr__(self) -> str:
        return f"NodeTable of {len(self)} nodes"

    def get(self, name: str) -> NodeReport | None:
        """The node of this name, None if there is none."""
        return self._by_name.get(name)

    def keys(self) -> KeysView[str]:
        """The names in order."""
        return self._by_name.keys()

    def values(self) -> ValuesView[NodeReport]:
        """The nodes in order."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, NodeReport]:
        """Names and nodes in order."""
        return self._by_name.items()


def node_table(gm: GraphModule) -> NodeTable:
    """The nodes of a converted graph, its output left out."""
    return NodeTable([_report(node) for node in gm.graph.nodes if node.op != "output"])


def follow(nodes: NodeTable, name: str) -> tuple[NodeReport, ...]:
    """The nodes from this one to the cause of its dtype."""
    steps: dict[str, NodeReport] = {}
    node = nodes.get(name)
    while node is not None and node.name not in steps:
        steps[node.name] = node
        node = nodes.get(node.chain[1]) if len(node.chain) > 1 else None
    return tuple(steps.values())


def _report(node: Node) -> NodeReport:
    role = _role(node)
    value = node.meta.get("val")
    spec = value if isinstance(value, TensorSpec) else None
    decision = _decision(node, role)
    dtype = spec.dtype if spec is not None else _common_dtype(value)
    op = {"input": "input", "attribute": "attribute"}.get(role) or _op_name(node)
    return NodeReport(
        name=node.name,
        op=op,
        role=role,
        module_path=str(node.meta.get("module_path") or ""),
        source=str(node.meta.get("source") or ""),
        dtype=short_name(dtype),
        torch_dtype=dtype,
        shape=None if spec is None else tuple(int(size) for size in spec.shape),
        decided=short_name(decision.dtype),
        cls=decision.cls,
        kind=role if role in ("cast", "scale") else decision.kind,
        reason=decision.reason,
        rule_source=decision.source,
        cause=decision.cause,
        chain=decision.chain or (node.name,),
        autocast_dtype=short_name(decision.autocast_dtype),
        target=str(node.target) if node.op == "get_attr" else "",
    )


def _op_name(node: Node) -> str:
    return opaque_name(node) if is_analysed(node) else op_of(node).removeprefix("ampfx.runtime.")


def _role(node: Node) -> Role:
    if node.op == "placeholder":
        return "input"
    if is_scale_node(node) or (node.op == "get_attr" and node.target == ATTRIBUTE):
        return "scale"
    if node.op == "get_attr":
        return "attribute"
    if node.meta.get("cast"):
        return "cast"
    return "part" if is_analysed(node) and is_tuple_read(node) else "op"


def is_scale_node(node: Node) -> bool:
    """Whether the pass that embeds the loss scale added this node."""
    if node.target in ENTER or node.target in LEAVE:
        return True
    source = node.args[0] if node.args and op_of(node) == "getitem" else None
    return isinstance(source, Node) and source.target in ENTER


def _decision(node: Node, role: Role) -> Decision:
    decision = node.meta.get("decision")
    if isinstance(decision, Decision):
        return decision
    if role != "scale":
        return Decision(None, "-", "no pass has decided about it", kind="untouched")
    return Decision(None, "scale", _scale_reason(node), "", node.name, (node.name,))


def _scale_reason(node: Node) -> str:
    if node.op == "get_attr":
        return "the loss scale S"
    target, values = node.target, list(node.all_input_nodes[1:])
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and source.target in ENTER:  # one result of an unscale call
        index = node.args[1]
        arguments = _entered(source)
        target = source.target
        values = [arguments[index]] if isinstance(index, int) and index < len(arguments) else []
    names = ", ".join(_spoken(value) for value in values[:2]) + (", ..." if len(values) > 2 else "")
    if target in LEAVE:
        cast = f" leaves in {short_name(_common_dtype(node.meta.get('val')))}, and"
        does = "is multiplied by S"
        return f"{names}{cast if target is grad_scaling.scale_cast else ':'} its gradient {does}"
    cast = f" enters in {short_name(_common_dtype(node.meta.get('val')))}, and"
    return f"{names}{cast if target is grad_scaling.unscale_cast else ':'} its gradient is divided by S"


def _entered(call: Node) -> list[Node]:
    """The values that an unscale call hands on, in order."""
    first = 2 if call.target is grad_scaling.unscale_cast else 1
    return [value for value in call.args[first:] if isinstance(value, Node)]


def _spoken(node: Node) -> str:
    return str(node.target) if node.op == "get_attr" else node.name


def _common_dtype(value: Any) -> torch.dtype | None:
    """The dtype of several tensors: a low one if there is one, else the first floating, else the first."""
    dtypes = [leaf.dtype for leaf in tensor_leaves(value)]
    for choice in (is_low, lambda dtype: dtype.is_floating_point):
        found = next((dtype for dtype in dtypes if choice(dtype)), None)
        if found is not None:
            return found
    return dtypes[0] if dtypes else None
