"""Why a node, or the nodes of a module, have the dtype they have: as sentences and as data.

1. A name is looked up among the nodes, then among the modules, then among the parameters and buffers.
2. From a node the chain of reasons is followed, neighbour by neighbour, to the rule, override or hazard
   that is the cause.
3. A module is summed up, and each of its float32 operations gives its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import GraphModule

from ampfx.cast_report import CastReport, cast_reports
from ampfx.context import ConversionContext
from ampfx.dtypes import short_name
from ampfx.errors import AmpfxError
from ampfx.near_misses import did_you_mean
from ampfx.node_report import NodeReport, NodeTable, follow, node_table
from ampfx.text_layout import listed, paragraph, plural

MAX_LINES = 40
MAX_STEPS = 12

_CAUSES = {
    "rule": "the rule for {op}",
    "override": "an override of the policy",
    "neighbour": "what {name} reads",
    "hazard": "a hazard of low precision",
    "author": "the dtype that the model's author wrote",
    "region": "the author's region without autocast",
    "cut": "the fewest bytes in casts",
    "unlisted": "that {op} is in no list",
    "input": "the dtype that inputs, parameters and buffers have",
    "opaque": "that {op} cannot be looked into",
    "gradient": "that the model's forward differentiates itself",
    "default": "torch's default dtype: {name} reads no tensor",
    "cast": "a cast for its reader",
    "scale": "the loss scale",
}


class UnknownNameError(AmpfxError, LookupError):
    """No node, module, parameter or buffer of the graph has this name."""


@dataclass(frozen=True)
class Explanation:
    """Why one node, or a module's nodes, have their dtype.

    Args:
        what: the name that was asked for.
        found: what has this name.
        nodes: the node; a module's nodes, in the graph's order.
        steps: a node's chain of reasons, from the node to the cause; empty for a module.
        casts: the conversions in a module, or of a node's result.
        low: the low dtype (``bf16``, ``f16``).
        policy: name of the policy.
        also: nodes of a module that has the same name as the node.
        notes: what in or around a module is no graph, and why.
    """

    what: str
    found: Literal["node", "module"]
    nodes: tuple[NodeReport, ...]
    steps: tuple[NodeReport, ...]
    casts: tuple[CastReport, ...]
    low: str
    policy: str
    also: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cause(self) -> NodeReport | None:
        """The node that a node's dtype goes back to; None for a module."""
        return self.steps[-1] if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return {
            "what": self.what,
            "found": self.found,
            "text": str(self),
            "nodes": [node.to_dict() for node in self.nodes],
            "steps": [_step(node) for node in self.steps],
            "casts": [cast.to_dict() for cast in self.casts],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = _node_lines(self) if self.found == "node" else _module_lines(self)
        return "\n".join(lines)


def explain(gm: GraphModule, ctx: ConversionContext, what: str) -> Explanation:
    """Why a node has its dtype, or what the nodes of a module run in.

    Args:
        gm: a converted graph.
        ctx: the conversion's settings.
        what: name of a node, path of a module (``""`` for the whole model), or dotted name of a parameter
            or buffer.

    Raises:
        UnknownNameError: nothing has this name.
    """
    return explain_nodes(node_table(gm), cast_reports(gm), short_name(ctx.low_dtype), ctx.policy.name, what)


def explain_nodes(
    nodes: NodeTable, cast_list: Sequence[CastReport], low: str, policy: str, what: str
) -> Explanation:
    """The same from what a report knows: ``low`` is the low dtype, ``policy`` the policy's name."""
    node = nodes.get(what)
    inside = tuple(item for item in nodes if _is_in(item, what))
    if node is None and inside:
        casts = tuple(cast for cast in cast_list if _below(cast.module_path, what))
        return Explanation(what, "module", inside, (), casts, low, policy)
    if node is None:
        node = next((item for item in nodes if item.target == what), None)
    if node is None:
        raise UnknownNameError(_unknown(nodes, what))
    also = tuple(item.name for item in inside if item.role == "op")
    value = node.target or node.name
    casts = tuple(cast for cast in cast_list if cast.value == value and cast.num_bytes)
    return Explanation(what, "node", (node,), follow(nodes, node.name), casts, low, policy, also)


def _below(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _is_in(node: NodeReport, module: str) -> bool:
    return node.role not in ("input", "attribute") and _below(node.module_path, module)


def _unknown(nodes: NodeTable, what: str) -> str:
    modules = [".".join(path[: n + 1]) for path in _paths(nodes) for n in range(len(path))]
    targets = [node.target for node in nodes if node.role == "attribute"]
    near = did_you_mean(what, [*nodes.keys(), *modules, *targets])
    hint = "" if near else " report().nodes lists the nodes, print(report()) the modules."
    return f"No node, module, parameter or buffer of the graph is named {what!r}.{near}{hint}"


def _paths(nodes: NodeTable) -> set[tuple[str, ...]]:
    return {tuple(node.module_path.split(".")) for node in nodes if node.module_path}


def _step(node: NodeReport) -> dict[str, Any]:
    return {
        "node": node.name,
        "op": node.op,
        "dtype": _runs_in(node),
        "class": node.cls,
        "kind": node.kind,
        "reason": node.reason,
        "rule_source": node.rule_source,
        "module_path": node.module_path,
        "source": node.source,
    }


def _runs_in(node: NodeReport) -> str:
    return node.decided if node.decided != "-" else node.dtype


# ---------------------------------------------------------------------- sentences


def _node_lines(explanation: Explanation) -> Iterator[str]:
    (node,) = explanation.nodes
    yield from paragraph(" ".join(_sentences(explanation, node)))
    steps = [f"- {step.name} is {_runs_in(step)}: {step.reason}" for step in explanation.steps[1:]]
    if len(steps) > MAX_STEPS:
        left_out = plural(len(steps) - MAX_STEPS + 1, "more step")
        steps[MAX_STEPS - 3 : -2] = [f"  ... {left_out}"]
    for step in steps:
        yield from paragraph(step, 2, 4)
    cause = explanation.cause
    if cause is not None and cause.kind != "untouched":
        words = _CAUSES.get(cause.kind, cause.kind).format(op=cause.op, name=cause.name)
        source = f" ({cause.rule_source})" if cause.kind == "rule" and cause.rule_source else ""
        yield from paragraph(f"The cause is {words}{source}.")


def _sentences(explanation: Explanation, node: NodeReport) -> Iterator[str]:
    name = f"{node.name} ({node.target})" if node.target else node.name
    if node.decided == "-":
        yield (
            f"{name} is left as it is: {node.reason}." if node.role != "scale" else f"{name}: {node.reason}."
        )
    elif node.role in ("input", "attribute", "part"):
        yield f"{name} is {node.decided}: {node.reason}."
    elif node.role == "cast":
        yield f"{name} is a cast to {node.dtype}: {node.reason}."
    else:
        yield f"{name} runs in {node.decided} ({node.cls}): {node.reason}."
    place = [f"in {node.module_path}"] if node.module_path else []
    place += [f"at {node.source}"] if node.source else []
    if place:
        yield f"It stands {' '.join(place)}."
    yield from _compared(explanation, node)
    if explanation.casts:
        names = listed(dict.fromkeys(f"{cast.node} ({cast.to_dtype})" for cast in explanation.casts))
        yield f"It is cast in {names}."
    if explanation.also:
        yield f"A module has this name too, with {listed(explanation.also)}."


def _compared(explanation: Explanation, node: NodeReport) -> Iterator[str]:
    if node.role != "op" or "-" in (node.decided, node.autocast_dtype):
        return
    if node.lowered and node.kind == "override":
        yield "torch.autocast keeps it in f32."
    elif node.lowered and explanation.policy == "autocast":
        yield "torch.autocast keeps it in f32; here it only moves values that all readers take low."
    elif node.lowered:
        yield f"torch.autocast keeps it in f32; policy {explanation.policy} does not."
    elif node.raised:
        yield f"torch.autocast would run it in {node.autocast_dtype}."
    else:
        yield "torch.autocast does the same."


def _module_lines(explanation: Explanation) -> Iterator[str]:
    for note in explanation.notes:
        yield from paragraph(note, hang=2)
    operations = [node for node in explanation.nodes if node.role == "op"]
    if not operations and explanation.notes:
        return
    float32 = [node for node in operations if node.is_float32]
    low = [node for node in operations if node.is_low]
    casts = [cast for cast in explanation.casts if cast.how in ("cast", "fused")]
    rest = len(operations) - len(low) - len(float32)
    others = f", {rest} left as they are" if rest else ""
    yield from paragraph(
        f"{explanation.what or 'The model'} has {plural(len(operations), 'operation')}: "
        f"{len(low)} in {explanation.low}, {len(float32)} in f32{others}; {plural(len(casts), 'cast')}."
    )
    if low:
        yield from paragraph(f"In {explanation.low}: {listed(_names(low), 8)}.", hang=2)
    if float32:
        yield "In f32:"
        for node in float32[:MAX_LINES]:
            source = f" ({node.source})" if node.source else ""
            yield from paragraph(f"- {node.name}{source}: {node.reason}", 2, 4)
        if len(float32) > MAX_LINES:
            yield f"  and {len(float32) - MAX_LINES} more"


def _names(nodes: Sequence[NodeReport]) -> list[str]:
    return [node.name for node in nodes]
