"""The pass that removes casts which cancel, repeat or do nothing.

Only what is neutral bit by bit, forward and backward:

1. a cast to the dtype that its input has;
2. low → float32 → the same low: widening is exact, so the value before is the value after. The other way
   round, float32 → low → float32, rounds, and stays;
3. a cast of a cast through a dtype that holds the first exactly;
4. a second cast of one value to one dtype in one region.

The author's own casts stay; one may lose its last reader. Values whose memory is written into are left
alone: between two casts the value may have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import analyse_graph, facts_of
from ampfx.argument_needs import gives_dtype
from ampfx.context import ConversionContext
from ampfx.passes.base import Pass
from ampfx.rewriting import current_float
from ampfx.runtime import cast_saturated


@dataclass(frozen=True)
class FoldCasts(Pass):
    """Remove casts that are not needed.

    Reads: ``meta["cast"]``, ``meta["val"]``, ``meta["facts"]``.
    Writes: nothing new.
    Ensures: no inserted cast can be left out without changing a bit of a value or gradient.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        analyse_graph(gm)
        changed = False
        known: dict[tuple[Node, torch.dtype, bool, int, bool], Node] = {}
        for node in list(gm.graph.nodes):
            if not node.meta.get("cast") or node.meta.get("entry"):
                continue
            replacement = _shorter(node)
            if replacement is None:
                replacement = _earlier(node, known)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                gm.graph.erase_node(node)
                changed = True
        return changed


def _shorter(cast: Node) -> Node | None:
    """Steps 1 to 3: what the cast may read instead, or be replaced by."""
    value, dtype = cast.args[0], cast.args[1]
    assert isinstance(value, Node)
    assert isinstance(dtype, torch.dtype)
    if current_float(value) == dtype:
        return value
    while _is_cast(value) and not facts_of(value).group:
        before = value.args[0]
        if not isinstance(before, Node) or facts_of(before).group or facts_of(before).tuple_valued:
            break
        first, middle = current_float(before), current_float(value)
        if first is None or middle is None or torch.promote_types(first, middle) != middle:
            break  # the inner cast rounds
        if first == dtype:
            return before
        if cast.target is cast_saturated:
            break
        value = before
        cast.update_arg(0, value)
    return None


def _is_cast(node: Node) -> bool:
    """A cast of ours or of the author's that only converts."""
    if node.meta.get("cast"):
        return node.target is not cast_saturated
    return (
        node.op == "call_method" and node.target in ("float", "half", "bfloat16", "to") and gives_dtype(node)
    )


def _earlier(cast: Node, known: dict[tuple[Node, torch.dtype, bool, int, bool], Node]) -> Node | None:
    """Step 4: an earlier cast of the same value to the same dtype."""
    value, dtype = cast.args[0], cast.args[1]
    assert isinstance(value, Node)
    assert isinstance(dtype, torch.dtype)
    if facts_of(value).group:
        return None
    region = facts_of(cast).region
    key = (value, dtype, region.grad, region.opaque, cast.target is cast_saturated)
    if key in known:
        return known[key]
    known[key] = cast
    return None
