"""One variable for every dtype that can be chosen.

A node's result is one variable, except that

1. the results of one operation with several, and their ``getitem`` nodes, are one variable;
2. all values that live in a storage which some node writes into are one variable, the *group*: a write
   must reach every alias, so no alias may be a cast of another.

The operation that makes the storage of such a group keeps a variable of its own: it may compute low
while the group is float32 (a matrix product whose result is written into later), with one cast where the
group begins. ``op_variable`` is what an operation computes in, ``value_variable`` what its readers see.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch.fx import GraphModule, Node

from ampfx.analysis import NodeFacts, facts_of, is_tuple_read, recorded_value, tensor_leaves
from ampfx.ops import FACTORIES, LIKE_OPS


class Variables:
    """The variables of an analysed graph."""

    def __init__(self, gm: GraphModule) -> None:
        self._parent: dict[Hashable, Hashable] = {}
        self._op: dict[Node, Hashable] = {}
        self.roots: dict[Node, None] = {}
        written = {facts_of(node).group for node in gm.graph.nodes} - {0}
        begun: set[int] = set()
        for node in gm.graph.nodes:
            facts = facts_of(node)
            if node.op == "output" or not facts.managed:
                continue
            if is_tuple_read(node):
                self._union(node, node.args[0])
            if not facts.group:
                continue
            storages = {spec.storage for spec in tensor_leaves(recorded_value(node))} & written
            if self._begins_group(node, facts, storages, begun):
                self.roots[node] = None
                self._op[node] = ("op", node)
            for storage in storages:
                self._union(node, ("storage", storage))
            begun |= storages

    @staticmethod
    def _begins_group(node: Node, facts: NodeFacts, storages: set[int], begun: set[int]) -> bool:
        """Whether a node makes the storage of a group, in a way that a cast can stand behind."""
        if node.op not in ("call_function", "call_method") or facts.tuple_valued or is_tuple_read(node):
            return False
        if facts.in_place or facts.base in FACTORIES or facts.base in LIKE_OPS:
            return False  # factories are simply told the group's dtype
        return not (storages & begun)

    def value_variable(self, node: Node) -> Hashable:
        """The variable of the value that readers of the node see."""
        return self._find(node)

    def op_variable(self, node: Node) -> Hashable:
        """The variable of what the node computes."""
        own = self._op.get(node)
        return self._find(node) if own is None else own

    def _find(self, name: Hashable) -> Hashable:
        parent = self._parent.get(name, name)
        if parent is name or parent == name:
            return name
        root = self._find(parent)
        self._parent[name] = root
        return root

    def _union(self, a: Hashable, b: Hashable) -> None:
        root_a, root_b = self._find(a), self._find(b)
        if root_a != root_b:
            self._parent[root_a] = root_b
