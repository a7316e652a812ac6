"""Run the checkpointed parts of a graph under ``torch.utils.checkpoint``.

The recorder opens what the author checkpoints, so that every operation in it is assigned and can be
looked at; the nodes remember the region they stood in. When code is generated, each region becomes
one call again:

1. The region's nodes move into a graph of their own. Attributes that only the region reads move along,
   so that their casts are recomputed too; every other value from outside is an argument.
2. What is read outside afterwards is returned.
3. The call stands where the region's last node stood. A reader in between would have to come before
   its value; such a region stays open (its numbers are the same, its memory is kept).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx

from ampfx.graph_utils import region_of


class CheckpointedRegion:
    """A compiled region: called with the host of the attributes and the region's inputs."""

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"checkpoint_{number}"
        self.__module__ = __name__

    def __call__(self, host: Any, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(host, *inputs)
        return torch.utils.checkpoint.checkpoint(self.function, host, *inputs, use_reentrant=False)


def has_regions(graph: fx.Graph) -> bool:
    """Whether some node stands in a checkpointed region."""
    return any(region_of(node).opaque for node in graph.nodes)


def outline(graph: fx.Graph, compile_part: Callable[[fx.Graph], Callable[..., Any]]) -> fx.Graph:
    """A copy of ``graph`` in which every checkpointed region is one call.

    Args:
        graph: the flat graph; it is not changed.
        compile_part: makes a function ``(host, *inputs)`` of a region's graph.
    """
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        number = region_of(node).opaque
        if number:
            regions.setdefault(number, []).append(node)
    position = {node: index for index, node in enumerate(graph.nodes)}
    inside: dict[fx.Node, int] = {}
    for number, nodes in list(regions.items()):
        members = set(nodes)
        members |= _own_attributes(members)
        last = max(position[node] for node in nodes)
        early = any(position[user] < last and user not in members for node in members for user in node.users)
        if early:
            del regions[number]
        else:
            inside.update(dict.fromkeys(members, number))
    ends = {max(nodes, key=position.__getitem__): number for number, nodes in regions.items()}

    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in inside:
            if node in ends:
                members_in_order = sorted((n for n, k in inside.items() if k == ends[node]), key=position.__getitem__)
                _emit_region(result, members_in_order, copies, ends[node], compile_part)
        elif node.op == "output":
            result.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def _own_attributes(members: set[fx.Node]) -> set[fx.Node]:
    """The attribute reads, and what is computed from them alone, that only the region needs."""
    return {
        source
        for node in members
        for source in node.all_input_nodes
        if source.op == "get_attr" and all(user in members for user in source.users)
    }


def _emit_region(
    result: fx.Graph,
    members: Iterable[fx.Node],
    copies: dict[fx.Node, fx.Node],
    number: int,
    compile_part: Callable[[fx.Graph], Callable[..., Any]],
) -> None:
    members = list(members)
    member_set = set(members)
    part = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    inputs = dict.fromkeys(s for node in members for s in node.all_input_nodes if s not in member_set)
    for source in inputs:
        inner[source] = part.placeholder(source.name)
    for node in members:
        inner[node] = part.node_copy(node, inner.__getitem__)
    returned = [node for node in members if any(user not in member_set for user in node.users)]
    part.output(tuple(inner[node] for node in returned))
    host = result.get_attr("_ampfx_host_of_graph")
    region = CheckpointedRegion(compile_part(part), number)
    call = result.call_function(region, (host, *(copies[source] for source in inputs)))
    for index, node in enumerate(returned):
        copies[node] = result.call_function(operator.getitem, (call, index))
