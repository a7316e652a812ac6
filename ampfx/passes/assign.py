"""The pass that decides the dtype of every node and changes no edge.

1. Pins: what rules, author, overrides and hazards leave no choice about (:mod:`ampfx.pins`).
2. The minimum cut over the rest: the assignment with the fewest bytes in casts (:mod:`ampfx.cast_costs`).
3. One :class:`~ampfx.decisions.Decision` per node, whose chain leads to the cause.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import analyse_graph, facts_of, is_tuple_read
from ampfx.argument_needs import argument_nodes
from ampfx.cast_costs import CutBuilder
from ampfx.context import ConversionContext
from ampfx.cut import min_cut_assignment
from ampfx.decisions import Decision, Kind, chain_through
from ampfx.dtypes import long_name
from ampfx.passes.base import Pass
from ampfx.pins import Pin, Pinner, Pins
from ampfx.rule_table import OpClass, Rule
from ampfx.variables import Variables


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """Write a decision on every node.

    Reads: ``meta["facts"]`` (made if missing), the policy and rules of the context.
    Writes: ``meta["decision"]``; ``meta["entry_dtype"]`` where a storage that is written into has another
        dtype than the operation that makes it; ``ctx.unlisted``.
    Ensures: no node is less precise than under ``torch.autocast``, but for operations that only move values
        and whose readers are all low; of the assignments that allow this, none casts fewer bytes.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        if any(node.meta.get("cast") for node in gm.graph.nodes):
            return False  # decided already: the decisions were followed
        analyse_graph(gm)
        variables = Variables(gm)
        pins = Pinner(gm, ctx, variables).run()
        for node, pin in pins.nodes.items():
            if pin.kind == "override" and not pin.low:
                node.meta["composite"] = False
        low = min_cut_assignment(CutBuilder(gm, ctx, variables, pins).build())
        _Writer(gm, ctx, variables, pins, low).write()
        return False


class _Writer:
    """Step 3: turns sides into decisions with reasons."""

    def __init__(
        self,
        gm: GraphModule,
        ctx: ConversionContext,
        variables: Variables,
        pins: Pins,
        low: dict[Hashable, bool],
    ) -> None:
        self.gm, self.ctx, self.variables, self.pins, self.low = gm, ctx, variables, pins, low
        self.low_name = long_name(ctx.low_dtype)

    def write(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                continue
            facts = facts_of(node)
            node.meta["decision"] = self._managed(node) if facts.managed else self._unmanaged(node)
            node.meta.pop("entry_dtype", None)
            if node in self.variables.roots:
                group = self.low.get(self.variables.value_variable(node), False)
                if group != self.low.get(self.variables.op_variable(node), False):
                    node.meta["entry_dtype"] = self._dtype(group)

        self._extend_chains()

    def _extend_chains(self) -> None:
        """Follow readers: what is explained by a later node was decided before that node was."""
        decided = {node.name: node for node in self.gm.graph.nodes}
        for node in reversed(self.gm.graph.nodes):
            decision = node.meta.get("decision")
            if decision is None or len(decision.chain) < 2:
                continue
            above = decided[decision.chain[1]].meta.get("decision")
            if above is None or node.name in above.chain:
                continue
            chain = chain_through(node.name, above)
            if chain != decision.chain:
                node.meta["decision"] = replace(decision, chain=chain, cause=chain[-1])

    def _dtype(self, low: bool) -> torch.dtype:
        return self.ctx.low_dtype if low else torch.float32

    def _unmanaged(self, node: Node) -> Decision:
        pin = self.pins.demands.get(node)
        if pin is None:
            return Decision(None, "-", "no float32 tensor is made here", kind="untouched")
        rule = self.ctx.rule_of(node)
        return Decision(
            torch.float32,
            _class_name(node, rule, pin.kind),
            pin.reason,
            pin.source,
            node.name,
            (node.name,),
            pin.kind,
        )

    def _managed(self, node: Node) -> Decision:
        low = self.low.get(self.variables.op_variable(node), False)
        autocast = self.pins.autocast.get(node)
        rule = self.ctx.rule_of(node) if node.op in ("call_function", "call_method") else None
        pin = self._pin(node, low)
        if pin is not None:
            return self._from_pin(node, pin, low, rule, autocast)
        parent, reason = self._neighbour(node, low)
        above = parent.meta.get("decision") if parent is not None else None
        if above is not None:
            chain = chain_through(node.name, above)
        else:
            chain = (node.name,) if parent is None else (node.name, parent.name)
        kind: Kind = "cut"
        if rule is None and not is_tuple_read(node):
            kind, reason = "unlisted", f"{facts_of(node).op} is in no list; {reason}"
        source = rule.source if rule is not None else ""
        return Decision(
            self._dtype(low), _class_name(node, rule, kind), reason, source, chain[-1], chain, kind, autocast
        )

    def _pin(self, node: Node, low: bool) -> Pin | None:
        """The pin that explains a node's side, None where the cut chose it."""
        own = self.pins.nodes.get(node)
        if own is not None and own.low == low:
            return own
        if is_tuple_read(node):
            producer = node.args[0]
            assert isinstance(producer, Node)
            return Pin(low, "neighbour", f"one result of {producer.name}", parent=producer)
        won = self.pins.variables.get(self.variables.op_variable(node))
        if won is not None and won.low == low:
            return Pin(
                low,
                won.kind,
                f"shares memory that is written into, and there {won.reason}",
                won.source,
                won.parent,
            )
        nominal = self.pins.nominal.get(node)
        return nominal if nominal is not None and not low else None

    def _from_pin(
        self, node: Node, pin: Pin, low: bool, rule: Rule | None, autocast: torch.dtype | None
    ) -> Decision:
        kind: Kind = pin.kind
        above = pin.parent.meta.get("decision") if pin.parent is not None else None
        if pin.parent is not None:
            kind = "neighbour"
        chain = chain_through(node.name, above)
        source = pin.source or (rule.source if rule is not None else "")
        reason = pin.reason
        if rule is None and kind == "neighbour" and not is_tuple_read(node):
            kind, reason = "unlisted", f"{facts_of(node).op} is in no list; {reason}"
        return Decision(
            self._dtype(low), _class_name(node, rule, kind), reason, source, chain[-1], chain, kind, autocast
        )

    def _neighbour(self, node: Node, low: bool) -> tuple[Node | None, str]:
        """A neighbour on the same side, and the sentence that names it."""
        other = "float32" if low else self.low_name
        name = self.low_name if low else "float32"
        for value in argument_nodes((node.args, node.kwargs)):
            known = value.meta.get("decision")
            if known is not None and node.name in known.chain:
                continue  # it is explained by this node
            if facts_of(value).managed and self.low.get(self.variables.value_variable(value), False) == low:
                return value, f"{name} as {value.name} is: {other} would move no fewer bytes in casts"
        for user in _readers(node):
            if user.op == "output":
                if not low:
                    return (
                        None,
                        "its result leaves in float32, and a cast before it would move no fewer bytes",
                    )
            elif facts_of(user).managed and self.low.get(self.variables.op_variable(user), False) == low:
                return (
                    user,
                    f"{name} as its reader {user.name} is: {other} would move no fewer bytes in casts",
                )
        return None, f"{name}: {other} would move no fewer bytes in casts"


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, or one of several results."""
    for user in node.users:
        if is_tuple_read(user):
            yield from _readers(user)
        else:
            yield user


def _class_name(node: Node, rule: Rule | None, kind: Kind) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if kind == "author":
        return "author"
    if kind == "hazard" and rule is not None and rule.cls is not OpClass.DENY:
        return "deny"
    if rule is not None:
        return str(rule.cls)
    return "clear" if is_tuple_read(node) else "infer"
