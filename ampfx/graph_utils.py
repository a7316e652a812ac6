"""Helpers over fx nodes that several passes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ampfx.dtypes import Region, TensorSpec
from ampfx.ops import schema_writes

DEFAULT_REGION = Region()

_IMPURE_OPS: set[str] = {"setitem", "_set_grad_enabled"}


def op_of(node: Node) -> str:
    """The canonical op name of a node, ``""`` for placeholders, attributes and outputs."""
    return str(node.meta.get("op", ""))


def region_of(node: Node) -> Region:
    """The region of the program that a node stands in."""
    region = node.meta.get("region", DEFAULT_REGION)
    assert isinstance(region, Region)
    return region


def register_impure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a runtime function as having a side effect: its nodes survive dead-code elimination."""
    _IMPURE_TARGETS.add(function)
    return function


_IMPURE_TARGETS: set[Any] = {torch._C._set_grad_enabled}


def is_impure(node: Node) -> bool:
    """Whether a node does something besides returning its value and must not be removed."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_function" and node.target in _IMPURE_TARGETS:
        return True
    op = op_of(node)
    if op in _IMPURE_OPS or "out" in node.kwargs:
        return True
    if "::" in op and (not specs(node) or schema_writes(node.target)):
        return True  # an operator of the user's that writes, or that is called for what it does
    return bool(node.meta.get("impure", False)) or (op.endswith("_") and not op.endswith("__"))


def specs(node: Node) -> list[TensorSpec]:
    """The tensors that a node produces, in order."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, TensorSpec)]


def spec(node: Node) -> TensorSpec | None:
    """The tensor that a node produces, None when it produces no tensor or several."""
    val = node.meta.get("val")
    return val if isinstance(val, TensorSpec) else None


def get_attribute(root: Any, target: str) -> Any:
    """The object that a ``get_attr`` node reads; names of the model win over those of a GraphModule."""
    value = getattr(root, "_ampfx_host", root)
    for part in target.split("."):
        value = getattr(value, part)
    return value
