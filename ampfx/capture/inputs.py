"""The arguments of a call: which leaves vary, their names, copies of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ampfx.capture.structure import Structure, flatten, unflatten
from ampfx.capture.symbols import is_traced


def is_input_leaf(value: Any) -> bool:
    """The leaves of the inputs that vary from call to call: tensors and numbers."""
    return isinstance(value, torch.Tensor) or type(value) in (int, float) or is_traced(value)


def is_output_leaf(value: Any) -> bool:
    """The leaves of a result that the graph computes."""
    return is_traced(value) or isinstance(value, torch.Tensor)


def copy_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call with copies of their tensors."""
    leaves: list[Any] = []
    structure = flatten((args, kwargs), is_input_leaf, leaves)
    return unflatten(structure, copy_leaves(leaves))


def copy_leaves(leaves: list[Any]) -> list[Any]:
    """Copies of the input tensors, so that a recorded in-place write does not reach the caller's."""
    copies: dict[int, Any] = {}
    result = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            result.append(leaf)
            continue
        if id(leaf) not in copies:
            copy = leaf.detach().clone()
            # Inside torch.func's transforms requires_grad_() is refused; there the transform tracks the gradient.
            if leaf.requires_grad and not torch._C._are_functorch_transforms_active():
                copy.requires_grad_()
                if not leaf.is_leaf and torch.is_grad_enabled():
                    copy = copy.clone()  # not a leaf: in-place writes are allowed on it
            copies[id(leaf)] = copy
        result.append(copies[id(leaf)])
    return result


def leaf_names(structure: Structure, forward: Callable[..., Any]) -> list[str]:
    """Names of the leaves of ``(args, kwargs)``, for placeholders."""
    names: list[str] = []

    def walk(part: Structure, name: str) -> None:
        if part.kind is None:
            names.append(name or "x")
            return
        keys: Any = [key for key in part.keys if key != "__dict__"] or range(len(part.children))
        for key, child in zip(keys, part.children, strict=True):
            suffix = "".join(ch if ch.isalnum() else "_" for ch in str(key))
            walk(child, f"{name}_{suffix}" if name else suffix)

    args, kwargs = structure.children
    for name, child in zip(_positional_names(forward, len(args.children)), args.children, strict=True):
        walk(child, name)
    for key, child in zip(kwargs.keys, kwargs.children, strict=True):
        walk(child, "".join(ch if ch.isalnum() else "_" for ch in str(key)))
    return names


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return names + [f"arg{index}" for index in range(len(names), count)]
