"""The pass that writes the decisions into the graph.

1. Walk the nodes in order. What a node reads is compared with what it needs (:mod:`ampfx.argument_needs`).
2. What is in another dtype is read through a cast (:mod:`ampfx.cast_maker`), or the op is told its dtype
   and converts by itself (:mod:`ampfx.told_dtypes`). An op that promotes natively to its decided dtype is
   left to do so.
3. Where a written storage has another dtype than the op that makes it, one cast begins the storage, and
   every alias follows it.
4. Outputs leave in the dtype that the original gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import analyse_graph, facts_of, is_tuple_read
from ampfx.argument_needs import (
    NATIVE_OPS,
    Need,
    argument,
    argument_needs,
    argument_nodes,
    map_argument,
    runs_composite,
)
from ampfx.cast_maker import CastMaker
from ampfx.context import ConversionContext
from ampfx.decisions import Decision
from ampfx.dtypes import long_name
from ampfx.ops import LIKE_OPS, indexes_with_tensor
from ampfx.passes.base import Pass
from ampfx.rewriting import current_dtype, current_float, with_dtype
from ampfx.rule_table import Rule
from ampfx.told_dtypes import tell_dtype, wrap_composite


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Add the casts that the decisions need.

    Reads: ``meta["decision"]``, ``meta["entry_dtype"]``, ``meta["facts"]``.
    Writes: nodes with ``meta["cast"]``; ``meta["val"]`` in new dtypes, ``meta["val_float32"]`` as recorded.
    Ensures: every node reads what it needs to run in the dtype of its decision.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        analyse_graph(gm)
        casts = CastMaker(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op == "output":
                _rewrite_output(node, ctx, casts)
                continue
            if node.meta.get("cast"):
                casts.remember(node)
            elif node.op in ("call_function", "call_method") and "decision" in node.meta:
                _rewrite(node, ctx, casts)
            _begin_storage(node, casts)
            casts.passed(node)
        return casts.changed


def _rewrite(node: Node, ctx: ConversionContext, casts: CastMaker) -> None:
    facts, rule = facts_of(node), ctx.rule_of(node)
    decision: Decision = node.meta["decision"]
    if not tell_dtype(node, rule, decision.dtype, ctx, casts):
        _cast_arguments(node, rule, decision.dtype, ctx, casts)
    if runs_composite(node, rule):
        wrap_composite(node, ctx, casts)
    if facts.managed and decision.dtype is not None:
        recorded = node.meta.setdefault("val_float32", node.meta.get("val"))
        node.meta["val"] = with_dtype(recorded, decision.dtype)


def _cast_arguments(
    node: Node, rule: Rule | None, dtype: torch.dtype | None, ctx: ConversionContext, casts: CastMaker
) -> None:
    if facts_of(node).op == "setitem" and indexes_with_tensor(node):
        _cast_indexed_write(node, casts)
        return
    needs = dict(argument_needs(node, facts_of(node), rule, dtype))
    native, with_dims = _native_target(node, needs, dtype)
    targets: Mapping[Need, torch.dtype | None] = {
        Need.SAME: dtype,
        Need.SATURATE: dtype,
        Need.NATIVE: native,
        Need.FLOAT32: torch.float32,
        Need.LOW: ctx.low_dtype,
        Need.KEEP: _widest_target(node, rule) if dtype is None else None,
    }
    args, kwargs, changed = list(node.args), dict(node.kwargs), False
    for key, need in needs.items():
        target = targets[need]
        if target is None:
            continue
        dims_only = need is Need.NATIVE and with_dims
        old = argument(node, key)
        new = map_argument(old, _caster(casts, node, target, need is Need.SATURATE, dims_only))
        if new is old:
            continue
        changed = True
        if isinstance(key, int):
            args[key] = new
        else:
            kwargs[key] = new
    if changed:  # assigning arguments is not free
        node.args, node.kwargs = tuple(args), kwargs


def _cast_indexed_write(node: Node, casts: CastMaker) -> None:
    """``x[mask] = values`` converts nothing, where ``x[:3] = values`` does."""
    target, index, values = node.args
    written = current_float(target) if isinstance(target, Node) else None
    if written is not None:
        new = map_argument(values, _caster(casts, node, written, saturate=False, dims_only=False))
        node.args = (target, index, new)


def _caster(casts: CastMaker, reader: Node, dtype: torch.dtype, saturate: bool, dims_only: bool) -> Any:
    def cast(value: Node) -> Any:
        if dims_only and facts_of(value).ndim == 0:
            return value  # beside tensors with dimensions a scalar decides nothing
        return casts.as_dtype(value, dtype, reader, saturate)

    return cast


def _native_target(
    node: Node, needs: Mapping[int | str, Need], dtype: torch.dtype | None
) -> tuple[torch.dtype | None, bool]:
    """The dtype to cast to before a native promotion, None where that gives the right dtype by itself;
    and whether tensors with dimensions decide it."""
    values = [
        value
        for key, need in needs.items()
        if need is Need.NATIVE
        for value in argument_nodes(argument(node, key))
        if current_float(value) is not None
    ]
    with_dims = any(facts_of(value).ndim > 0 for value in values)
    result: torch.dtype | None = None
    for value in values:
        if facts_of(value).ndim > 0 or not with_dims:
            found = current_float(value)
            assert found is not None
            result = found if result is None else torch.promote_types(result, found)
    return (None if result == dtype else dtype), with_dims


def _widest_target(node: Node, rule: Rule | None) -> torch.dtype | None:
    """For an op that makes no float tensor but wants its inputs alike: the widest of them."""
    facts = facts_of(node)
    if (
        facts.base in NATIVE_OPS
        or facts.base in LIKE_OPS
        or facts.in_place
        or rule is None
        or is_tuple_read(node)
    ):
        return None
    found = {current_dtype(value) for value in node.all_input_nodes if facts_of(value).managed}
    return torch.float32 if len(found) > 1 else None


def _begin_storage(node: Node, casts: CastMaker) -> None:
    """Step 3: the cast at which a written storage begins."""
    dtype = node.meta.pop("entry_dtype", None)
    if dtype is None:
        return
    facts, users = facts_of(node), list(node.users)
    cast = casts.make(node, dtype, node, facts.region, after=node)
    cast.meta["entry"] = True
    cast.meta["facts"].group = facts.group
    cast.meta["decision"] = Decision(
        dtype,
        "cast",
        f"{node.name} is written into later, where it is {long_name(dtype)}",
        cause=node.name,
        chain=(cast.name, node.name),
    )
    for user in users:
        user.replace_input_with(node, cast)
    node.meta["facts"] = replace(facts, group=0)


def _rewrite_output(node: Node, ctx: ConversionContext, casts: CastMaker) -> None:
    cast = _caster(casts, node, ctx.output_dtype, saturate=False, dims_only=False)
    args = tuple(map_argument(arg, cast) for arg in node.args)
    if any(new is not old for new, old in zip(args, node.args, strict=True)):
        node.args = args
