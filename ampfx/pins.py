"""What is decided before anything is weighed: pins, each with its reason.

In this order, the first that applies:

1. what the graph fixes: inputs, parameters and buffers, a dtype that the author wrote;
2. overrides of the policy;
3. regions in which the author switched autocast off, and code that cannot be looked into;
4. deny rules and hazards;
5. allow rules, unless only positions and constants flow in;
6. infer, clear and unlisted ops: float32 where autocast computes them so, or where what they read is
   float32 here. Left free are those that autocast runs low, and those that only move values.

Pins that come from a danger (an overflow, an override) go on to every op that takes the dtype of its
inputs: a value that is float32 because float16 cannot hold it must not be cast for a sum.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import NodeFacts, facts_of, is_part_of_unknown, is_tuple_read, recorded_value, tensor_leaves
from ampfx.argument_needs import (
    gives_dtype,
    is_moves,
    is_opaque,
    opaque_name,
    reads_other_float,
    words,
)
from ampfx.context import ConversionContext
from ampfx.decisions import Kind
from ampfx.dtypes import long_name
from ampfx.hazards import constant_hazard, large_buffers, logarithm_hazards, square_hazard
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS, QUERY_OPS
from ampfx.promotion import float_dtype, followed_argument, inferred_dtype, simulate_autocast
from ampfx.rule_table import OpClass, Rule
from ampfx.variables import Variables

# Pins to float32 that the rules alone do not explain: also the relaxed policy passes them on.
_DANGERS: frozenset[Kind] = frozenset({"hazard", "override", "region", "author", "opaque", "gradient"})
# Made from a number alone: the low form is the cast of the float32 form, bit by bit.
CONSTANT_FACTORIES: frozenset[str] = words(
    "zeros ones eye full zeros_like ones_like full_like new_zeros new_ones new_full"
)
_LISTED_ELSEWHERE: frozenset[str] = FACTORIES | LIKE_OPS | AUTHOR_CASTS


@dataclass(slots=True)
class Pin:
    """Why a variable is pinned, or why it would be float32 if it did not only move values."""

    low: bool
    kind: Kind
    reason: str
    source: str = ""
    parent: Node | None = None


@dataclass
class Pins:
    """The outcome.

    Args:
        variables: the pinned variables, with the pin that won.
        nodes: the pin of each node, where it has one.
        nominal: nodes whose value is float32 unless its readers all take it low.
        demands: float32 pins of nodes that make no managed value but read some.
        autocast: what autocast gives each managed value.
    """

    variables: dict[Hashable, Pin] = field(default_factory=dict)
    nodes: dict[Node, Pin] = field(default_factory=dict)
    nominal: dict[Node, Pin] = field(default_factory=dict)
    demands: dict[Node, Pin] = field(default_factory=dict)
    autocast: dict[Node, torch.dtype] = field(default_factory=dict)


class Pinner:
    """Collects the pins of a graph, see the module's list."""

    def __init__(self, gm: GraphModule, ctx: ConversionContext, variables: Variables) -> None:
        self.gm, self.ctx, self.variables = gm, ctx, variables
        self.low, self.low_name = ctx.low_dtype, long_name(ctx.low_dtype)
        self.buffers = large_buffers(gm, self.low)
        self.logarithms = logarithm_hazards(gm, ctx.rule_of)
        self.relaxed = ctx.policy.name == "relaxed"
        self.pins = Pins()

    def run(self) -> Pins:
        """All pins of the graph."""
        overrides = self._overrides()
        forced = {node: pin for node, pin in overrides.items() if pin.low}
        self.pins.autocast = simulate_autocast(self.gm, self.ctx, frozenset(forced))
        differentiated = self._differentiated()
        inferred: list[Node] = []
        for node in self.gm.graph.nodes:
            if node.op == "output":
                continue
            facts = facts_of(node)
            pin = self._fixed(node, facts) or overrides.get(node) or differentiated.get(node)
            if pin is None and node.op not in ("placeholder", "get_attr"):
                pin = self._by_rule(node, facts)
            if pin is not None and pin.kind == "opaque":
                self._pin_written(node, facts)
            if not facts.managed:
                if pin is not None and not pin.low:
                    self.pins.demands[node] = pin
            elif pin is not None:
                self._pin(node, pin)
            else:
                inferred.append(node)
        if self.ctx.objective == "autocast":
            self._as_autocast(inferred)
        else:
            for node in inferred:
                self._infer(node)
        return self.pins

    # ------------------------------------------------------------------ steps 1 to 5

    def _fixed(self, node: Node, facts: NodeFacts) -> Pin | None:
        if node.op == "placeholder":
            return Pin(False, "input", "an input has the dtype that it arrives in")
        if node.op == "get_attr":
            return Pin(False, "input", "parameters and buffers stay float32")
        if is_part_of_unknown(node):
            return Pin(False, "opaque", "a hook gives it")
        if node.meta.get("cast"):
            return Pin(facts.dtype == self.low, "author", "a cast")
        if facts.managed and gives_dtype(node) and not is_tuple_read(node):
            return Pin(False, "author", "the author wrote dtype float32")
        if facts.managed and facts.dtype is None:
            return Pin(False, "author", "its values have different dtypes")
        return None

    def _overrides(self) -> dict[Node, Pin]:
        found: dict[Node, Pin] = {}
        if not self.ctx.policy.overrides:
            return found
        for node in self.gm.graph.nodes:
            if node.op not in ("call_function", "call_method") or is_tuple_read(node):
                continue
            for override in self.ctx.policy.overrides:  # later ones win
                dtype = override.dtype_for(node, self.low)
                if dtype is not None:
                    reason = override.reason or f"{override} asks for {long_name(dtype)}"
                    found[node] = Pin(dtype != torch.float32, "override", reason, "policy")
        return found

    def _differentiated(self) -> dict[Node, Pin]:
        """Values that forward itself differentiates: autograd must find these very tensors."""
        found: dict[Node, Pin] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and node.target in (torch.autograd.grad, torch.autograd.backward):
                for value in (node, *node.all_input_nodes):
                    found[value] = Pin(False, "gradient", f"{node.name} differentiates in forward")
        return found

    def _by_rule(self, node: Node, facts: NodeFacts) -> Pin | None:
        if facts.base in QUERY_OPS or is_tuple_read(node):
            return None
        rule = self.ctx.rule_of(node)
        if facts.region.autocast is False and (facts.managed or rule is not None):
            return Pin(False, "region", "the author switched autocast off here")
        if is_opaque(facts, rule):
            if not facts.managed and not any(facts_of(value).managed for value in node.all_input_nodes):
                return None  # a guard of a size, say
            return Pin(False, "opaque", f"{opaque_name(node)} cannot be looked into")
        hazard = self._hazard(node, facts, rule)
        if hazard is not None:
            return Pin(False, "hazard", hazard)
        base = rule if rule is not None and not facts.in_place else self.ctx.rules.find(facts.base)
        if base is not None and base.cls is OpClass.DENY:
            return Pin(False, "rule", base.reason, base.source)
        if not facts.managed:
            if any(spec.dtype.is_complex for spec in tensor_leaves(recorded_value(node))):
                return Pin(False, "rule", "complex numbers are made from float32")
            return None
        if reads_other_float(node):
            return Pin(False, "author", "reads a tensor to which the author gave another float dtype")
        if rule is not None and rule.cls is OpClass.ALLOW:
            if not any(facts_of(value).trained for value in node.all_input_nodes):
                reason = f"only positions and constants flow in, and {self.low_name} would round them"
                return Pin(False, "hazard", reason, rule.source)
            return Pin(True, "rule", rule.reason, rule.source)
        return None

    def _hazard(self, node: Node, facts: NodeFacts, rule: Rule | None) -> str | None:
        if facts.managed:
            sentence = constant_hazard(node, self.low) or square_hazard(node, self.low)
            sentence = sentence or self.logarithms.get(node)
            if sentence is not None:
                return sentence
        if self.low == torch.float16:
            row = rule or self.ctx.rules.find(facts.base)
            if row is not None and row.fp16_hazard:
                return row.fp16_hazard
        if self.buffers and (rule is None or not rule.saturate):
            return next((self.buffers[v] for v in node.all_input_nodes if v in self.buffers), None)
        return None

    # ------------------------------------------------------------------ step 6

    def _as_autocast(self, inferred: list[Node]) -> None:
        for node in inferred:
            danger = self._from_inputs(node, facts_of(node), self.ctx.rule_of(node))
            if danger is not None and danger.kind in _DANGERS:
                self._pin(node, danger)
                continue
            low = self.pins.autocast[node] == self.low
            self._pin(node, Pin(low, "neighbour", "as torch.autocast computes it"))

    def _infer(self, node: Node) -> None:
        facts, rule = facts_of(node), self.ctx.rule_of(node)
        if rule is None and not is_tuple_read(node) and facts.base not in _LISTED_ELSEWHERE:
            self.ctx.unlisted.setdefault(facts.op, []).append(node.name)
        pin = self._from_inputs(node, facts, rule)
        if pin is None:
            return
        self.pins.nominal[node] = pin
        if is_tuple_read(node):
            return  # shares its producer's variable
        if not facts.group and (is_moves(node, rule) or facts.base in CONSTANT_FACTORIES):
            return
        inferred = rule is not None and rule.cls in (OpClass.INFER, OpClass.CLEAR)
        if self.relaxed and inferred and pin.kind not in _DANGERS:
            del self.pins.nominal[node]
            return
        self._pin(node, pin)

    def _from_inputs(self, node: Node, facts: NodeFacts, rule: Rule | None) -> Pin | None:
        """Float32 because of what the node reads, None where it may be low."""

        def dtype_of(value: Node) -> torch.dtype | None:
            return float_dtype(value, self.low if self._may_be_low(value) else torch.float32)

        if inferred_dtype(node, facts, rule, dtype_of) == torch.float32:
            parent = self._float32_input(node, followed_argument(node, rule))
            if parent is None:
                return self._from_no_managed(node)
            above = self._pin_of(parent)
            kind: Kind = above.kind if above is not None and above.kind in _DANGERS else "neighbour"
            return Pin(False, kind, f"reads {parent.name} in float32", parent=parent)
        scalar = self._dangerous_scalar(node) if facts.base not in LIKE_OPS else None
        if scalar is not None:
            return Pin(
                False, "hazard", f"reads {scalar.name}, which {self.low_name} may not hold", parent=scalar
            )
        if self.pins.autocast[node] == torch.float32:
            return Pin(False, "neighbour", "torch.autocast computes it in float32")
        return None

    def _dangerous_scalar(self, node: Node) -> Node | None:
        """A tensor without dimensions that decides no promotion, but is float32 because of a danger."""
        for value in node.all_input_nodes:
            facts = facts_of(value)
            if facts.managed and facts.ndim == 0 and not facts.tuple_valued:
                pin = self._pin_of(value)
                if pin is not None and not pin.low and pin.kind == "hazard":
                    return value
        return None

    def _may_be_low(self, value: Node) -> bool:
        if value in self.pins.nominal:
            return False
        pin = self.pins.variables.get(self.variables.value_variable(value))
        return pin is None or pin.low

    def _pin_of(self, value: Node) -> Pin | None:
        return self.pins.nominal.get(value) or self.pins.variables.get(self.variables.value_variable(value))

    def _from_no_managed(self, node: Node) -> Pin:
        """Float32 although no float32 tensor is read."""
        for value in node.all_input_nodes:
            if any(spec.dtype.is_complex for spec in tensor_leaves(recorded_value(value))):
                reason = f"reads {value.name}, whose complex numbers are pairs of float32"
                return Pin(False, "neighbour", reason, parent=value)
        if node.all_input_nodes:
            return Pin(False, "default", "reads no float32 tensor, so torch's default dtype holds")
        return Pin(False, "default", "made in torch's default dtype")

    def _float32_input(self, node: Node, followed: Node | None) -> Node | None:
        """The value that makes a node float32; ``followed`` is the one whose dtype the node takes."""
        if followed is not None and facts_of(followed).managed and not self._may_be_low(followed):
            return followed
        wide = [v for v in node.all_input_nodes if facts_of(v).managed and not self._may_be_low(v)]
        # A computed value explains more than a parameter.
        computed = (value for value in wide if value.op not in ("get_attr", "placeholder"))
        return next(computed, wide[0] if wide else None)

    def _pin_written(self, node: Node, facts: NodeFacts) -> None:
        """Code that cannot be looked into reads float32; what it writes into must be that very tensor."""
        for value in facts.writes:
            if facts_of(value).managed:
                group = self.variables.value_variable(value)
                known = self.pins.variables.get(group)
                if known is None or known.low:
                    reason = f"{node.name} writes into it"
                    self.pins.variables[group] = Pin(False, "opaque", reason, parent=node)

    def _pin(self, node: Node, pin: Pin) -> None:
        self.pins.nodes[node] = pin
        variable = self.variables.op_variable(node)
        known = self.pins.variables.get(variable)
        # In a group float32 wins, for each member has a reason that low cannot meet.
        if known is None or (known.low and not pin.low):
            self.pins.variables[variable] = pin
        if not pin.low and node in self.variables.roots:
            # What is written into has the dtype in which it was made.
            group = self.variables.value_variable(node)
            known = self.pins.variables.get(group)
            if known is None or known.low:
                reason = f"{node.name} makes it in float32"
                self.pins.variables[group] = Pin(False, pin.kind, reason, pin.source, node)
