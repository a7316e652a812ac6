"""The cut problem of a graph: which casts each assignment would need, and the bytes they move.

1. A value that its readers want in the other dtype costs one cast: it reads and writes every element, once
   forward and once more backward where a gradient flows.
2. The cast is shared by the readers of one value *version* in one region: not across an in-place write, and
   not across the border of a no_grad or checkpointed part.
3. An operation that promotes natively, or that takes ``dtype=``, needs no forward cast of a low input;
   only its gradient is cast back, for itself.
4. An op that only moves values may be lower than autocast has it if every reader takes it low: an
   implication.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import facts_of, is_tuple_read
from ampfx.argument_needs import Need, reads
from ampfx.context import ConversionContext
from ampfx.cut import CutLink, CutProblem, CutValue
from ampfx.ops import LIKE_OPS, QUERY_OPS
from ampfx.pins import Pins
from ampfx.variables import Variables

# Stand for readers that are decided for good: outputs and opaque code, and arguments that must be low.
FLOAT32, LOW = "float32", "low"
_BYTES_PER_ELEMENT = 2 + 4  # one side is read, the other written


class CutBuilder:
    """Builds the cut problem of a pinned graph."""

    def __init__(self, gm: GraphModule, ctx: ConversionContext, variables: Variables, pins: Pins) -> None:
        self.gm, self.ctx, self.variables, self.pins = gm, ctx, variables, pins
        self.problem = CutProblem(pins={FLOAT32: False, LOW: True})
        for name, pin in pins.variables.items():
            self.problem.pins[name] = pin.low
        # (value, region, version) → its readers that share a cast, and those that promote natively.
        self._shared: dict[tuple[Node, bool, int, int], list[Hashable]] = {}
        self._native: dict[tuple[Node, bool, int, int], list[Hashable]] = {}
        self._versions: dict[int, int] = {}
        self._read: set[Node] = set()
        self._blocked: set[Node] = set()

    def build(self) -> CutProblem:
        """The problem; values that lie between decided variables are left out."""
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            self._add_reads(node)
            facts = facts_of(node)
            for written in facts.writes:
                group = facts_of(written).group
                self._versions[group] = self._versions.get(group, 0) + 1
        self._add_values()
        self._add_group_entries()
        for node in self.pins.nominal:
            variable = self.variables.op_variable(node)
            unread = node not in self._read and not is_tuple_read(node)
            if not self._decided(variable) and (node in self._blocked or unread):
                self.problem.implications.append((variable, FLOAT32))
        for node in self.gm.graph.nodes:
            if node.op != "output" and facts_of(node).managed:
                variable = self.variables.op_variable(node)
                if variable not in self.problem.pins:
                    self.problem.variables[variable] = None
        return self.problem

    def _decided(self, variable: Hashable) -> bool:
        return variable in self.problem.pins

    def _add_reads(self, node: Node) -> None:
        facts = facts_of(node)
        rule = self.ctx.rule_of(node) if node.op != "output" else None
        reader, dtype = self._reader(node)
        dtype_arg = rule is not None and rule.dtype_arg
        # A tensor that is float32 for good makes an operation promote natively.
        found = list(reads(node, rule, dtype))
        native = any(need is Need.NATIVE and self._is_float32(value) for value, need in found)
        for value, need in found:
            target = reader
            if need is Need.KEEP:
                if is_tuple_read(node):
                    self._read.add(value)
                elif facts.base not in QUERY_OPS and facts.base not in LIKE_OPS:
                    self._blocked.add(value)
                continue
            if need is Need.FLOAT32:
                target = FLOAT32
            elif need is Need.LOW:
                target = LOW
            self._read.add(value)
            if value in self.pins.nominal:
                self._imply(value, target)
            version = self._versions.get(facts_of(value).group, 0)
            key = (value, facts.region.grad, facts.region.opaque, version)
            spares = (need is Need.NATIVE and native) or (dtype_arg and need is Need.SAME)
            (self._native if spares else self._shared).setdefault(key, []).append(target)

    def _reader(self, node: Node) -> tuple[Hashable, torch.dtype | None]:
        """The variable that decides in which dtype a node reads, and a dtype if it reads in any."""
        if node.op == "output":
            return (FLOAT32 if self.ctx.output_dtype != self.ctx.low_dtype else LOW), torch.float32
        if facts_of(node).managed:
            return self.variables.op_variable(node), self.ctx.low_dtype
        if node in self.pins.demands:
            return FLOAT32, torch.float32
        return FLOAT32, None

    def _is_float32(self, value: Node) -> bool:
        pin = self.pins.variables.get(self.variables.value_variable(value))
        return pin is not None and not pin.low and facts_of(value).ndim > 0

    def _imply(self, value: Node, target: Hashable) -> None:
        variable = self.variables.op_variable(value)
        if self._decided(variable):
            return
        if self.problem.pins.get(target) is False:
            self._blocked.add(value)
        elif not self._decided(target):
            self.problem.implications.append((variable, target))

    def _add_values(self) -> None:
        for key in {**self._shared, **self._native}:
            value = key[0]
            owner = self.variables.value_variable(value)
            # A decided reader still matters where another is free: its cast is there to be shared.
            readers = (*self._shared.get(key, ()), *self._native.get(key, ()))
            if self._decided(owner) and all(map(self._decided, readers)):
                continue
            shared = _distinct(self._shared.get(key, ()))
            native = _distinct(self._native.get(key, ()))
            weight, backward = self._weights(value, key[1])
            if shared:
                self.problem.values.append(CutValue(owner, shared, weight, 0 if native else weight))
            if native:
                self.problem.values.append(CutValue(owner, _distinct((*shared, *native)), 0, weight))
                self.problem.links.extend(CutLink(owner, reader, backward, 0) for reader in native)

    def _add_group_entries(self) -> None:
        for root in self.variables.roots:
            operation, group = self.variables.op_variable(root), self.variables.value_variable(root)
            weight, _ = self._weights(root, facts_of(root).region.grad)
            self.problem.values.append(CutValue(operation, (group,), weight, weight))

    def _weights(self, value: Node, grad: bool) -> tuple[int, int]:
        """Bytes of a cast, and the part of it that a native promotion does not save."""
        facts = facts_of(value)
        one_way = max(facts.numel, 1) * _BYTES_PER_ELEMENT
        backward = one_way if facts.requires_grad and grad else 0
        return one_way + backward, backward


def _distinct(names: Iterable[Hashable]) -> tuple[Hashable, ...]:
    return tuple(dict.fromkeys(names))
