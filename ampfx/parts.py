"""Convert the parts of a model whose whole cannot be one graph.

A module that cannot be captured (its forward branches on values in endless ways, draws from numpy's
generator, keeps Python state) or must not be (block-wise conversion) stays Python, and its children are
converted, each by itself, in the converted copy: the largest that can be captured become graphs, the
others stay Python in turn.

1. The copy gets a container of children of its own; parameters and buffers stay the user's objects in the
   user's containers, under the same names.
2. Parts take and hand on float32, with true gradients: their loss scaling begins and ends at their own border.
3. What the Python code itself computes runs under ``torch.autocast`` in bfloat16, and in float32 where
   gradients are scaled in the parts: in float16 they would underflow between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ampfx.capture.structure import Structure, flatten, unflatten
from ampfx.dtypes import is_low


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module can be called (ModuleList and ModuleDict cannot)."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def convert_children(
    root: nn.Module, convert_part: Callable[[nn.Module, str], nn.Module], known: dict[int, nn.Module], prefix: str = ""
) -> None:
    """Give ``root`` converted children.

    Args:
        root: a copy whose ``_modules`` may be replaced.
        convert_part: makes a converted module of a child, given its dotted path.
        known: parts by the ``id`` of the module they were made of: what is shared stays shared.
        prefix: dotted path of ``root``.
    """
    children: dict[str, nn.Module | None] = {}
    for name, child in vars(root)["_modules"].items():
        path = f"{prefix}.{name}" if prefix else name
        children[name] = None if child is None else _part(child, path, convert_part, known)
    vars(root)["_modules"] = children


def _part(
    child: nn.Module, path: str, convert_part: Callable[[nn.Module, str], nn.Module], known: dict[int, nn.Module]
) -> nn.Module:
    if id(child) not in known:
        if has_own_forward(child):
            known[id(child)] = convert_part(child, path)
        else:
            container = known[id(child)] = shallow_copy(child)
            convert_children(container, convert_part, known, path)
    return known[id(child)]


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the attributes and containers of another."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def run_python(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_type: str,
    dtype: torch.dtype | None,
) -> Any:
    """Run a forward that stays Python.

    Args:
        forward: the forward.
        args: its arguments.
        kwargs: its keyword arguments.
        device_type: device of ``torch.autocast``.
        dtype: what its own matrix products compute in; None for float32.
    """
    if dtype is None:
        with torch.autocast(device_type, enabled=False):
            return forward(*args, **kwargs)
    with torch.autocast(device_type, dtype=dtype):
        result = forward(*args, **kwargs)
    leaves: list[Any] = []
    structure = flatten(result, lambda value: isinstance(value, torch.Tensor), leaves)
    if not any(is_low(leaf.dtype) for leaf in leaves):
        return result
    return unflatten(structure, [leaf.float() if leaf.dtype == dtype else leaf for leaf in leaves])


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], structure: Structure, leaves: list[Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The inputs of a part, with those in float32 that the Python code around it computed low."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.dtype == dtype for leaf in leaves):
        return args, kwargs, leaves
    leaves = [leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype else leaf for leaf in leaves]
    args, kwargs = unflatten(structure, leaves)
    return args, kwargs, leaves


def parts_below(module: nn.Module, kind: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """The converted parts below a module, outermost first, with their paths."""
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = f"{path}.{name}" if path else name
        if isinstance(child, kind):
            yield inner, child
        else:
            yield from parts_below(child, kind, inner)
