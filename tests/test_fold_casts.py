"""Folding changes no bit and finds what is superfluous."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from graph_builder import build, casts
from test_assign import Weights
from torch.fx import GraphModule, Node

from ampfx.context import ConversionContext
from ampfx.passes import AssignPrecision, FoldCasts, InsertCasts
from ampfx.passes.base import tidy

LOW = torch.bfloat16


def converted(function: object) -> GraphModule:
    gm = build(Weights(function), torch.randn(4, 4))
    for step in (AssignPrecision(), InsertCasts()):
        step.run(gm, ConversionContext())
    return gm


def recast(gm: GraphModule, value: Node, dtype: torch.dtype) -> Node:
    """Put a cast behind a node as a careless pass would."""
    cast = next(iter(casts(gm)))
    users = list(value.users)
    with gm.graph.inserting_after(value):
        new = gm.graph.call_method("to", (value, dtype))
    new.meta = {**cast.meta, "val": value.meta["val"].with_dtype(dtype), "facts": value.meta["facts"]}
    for user in users:
        user.replace_input_with(value, new)
    return new


def named(gm: GraphModule, name: str) -> Node:
    found: Node = next(node for node in gm.graph.nodes if node.name == name)
    return found


def fold(gm: GraphModule) -> bool:
    changed = FoldCasts().run(gm, ConversionContext())
    tidy(gm)
    gm.recompile()
    return changed


def test_round_trips_through_float32_and_repeated_casts_go() -> None:
    gm = converted(lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.v))
    count = len(casts(gm))
    middle = recast(gm, named(gm, "tanh"), torch.float32)
    recast(gm, middle, LOW)
    recast(gm, named(gm, "linear"), LOW)  # does nothing
    x = torch.randn(4, 4)
    gm.recompile()
    before = gm(x)
    assert fold(gm)
    assert len(casts(gm)) == count
    assert torch.equal(gm(x), before)
    assert not fold(gm)


def test_a_rounding_stays() -> None:
    gm = converted(lambda m, x: torch.sin(x * 2.0))
    casts_before = converted(lambda m, x: F.linear(x, m.w))
    value = named(gm, "mul")
    source = next(iter(casts(casts_before)))
    users = list(value.users)
    with gm.graph.inserting_after(value):
        narrow = gm.graph.call_method("to", (value, LOW))
    with gm.graph.inserting_after(narrow):
        wide = gm.graph.call_method("to", (narrow, torch.float32))
    for node, dtype in ((narrow, LOW), (wide, torch.float32)):
        node.meta = {**source.meta, "val": value.meta["val"].with_dtype(dtype), "facts": value.meta["facts"]}
    for user in users:
        user.replace_input_with(value, wide)
    assert not fold(gm)


def test_an_authors_widening_does_not_stand_between_low_values() -> None:
    gm = converted(lambda m, x: F.linear(F.linear(x, m.w).float(), m.v))
    x = torch.randn(4, 4)
    gm.recompile()
    before = gm(x)
    assert fold(gm)
    assert "float" not in {node.meta["op"] for node in gm.graph.nodes}
    assert torch.equal(gm(x), before)


def test_gradients_keep_every_bit() -> None:
    gm = converted(lambda m, x: F.linear(F.linear(x, m.w).float(), m.v).float().sum())
    gm.recompile()
    folded = copy.deepcopy(gm)
    fold(folded)
    x = torch.randn(4, 4)
    for module in (gm, folded):
        module(x).backward()
    for one, other in zip(gm.parameters(), folded.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
