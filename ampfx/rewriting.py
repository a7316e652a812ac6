"""The dtypes of a graph while casts are written into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ampfx.analysis import tensor_leaves
from ampfx.dtypes import TensorSpec


def with_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A recorded value's specs with its float32 tensors, the managed ones, in another dtype."""
    if isinstance(value, TensorSpec):
        return value.with_dtype(dtype) if value.dtype == torch.float32 else value
    if isinstance(value, tuple | list):
        if all(not isinstance(item, TensorSpec | tuple | list | dict) for item in value):
            return value
        items = [with_dtype(item, dtype) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: with_dtype(item, dtype) for key, item in value.items()}
    return value


def current_dtype(node: Node) -> torch.dtype | None:
    """The dtype of the one tensor that a node makes, as the graph now stands."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, TensorSpec) else None


def current_float(node: Node) -> torch.dtype | None:
    """Like :func:`current_dtype`, None for tensors that are not floating."""
    dtype = current_dtype(node)
    return dtype if dtype is not None and dtype.is_floating_point else None


def all_current_dtypes(node: Node) -> list[torch.dtype]:
    """The dtypes of all tensors that a node makes."""
    return [spec.dtype for spec in tensor_leaves(node.meta.get("val"))]
