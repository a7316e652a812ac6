"""Take nested arguments and results apart into leaves, and put them together again.

Like ``torch.utils._pytree``, but objects that nobody registered (dataclasses, model outputs,
batches with tensors in attributes) are opened as well: a tensor hidden in an argument must become
an input of the graph, never a constant.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from collections.abc import Callable
from typing import Any

import torch

LEAF_TYPES = (torch.Tensor, int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The shape of a nested value.

    Args:
        kind: the type at this level; None for a leaf that varies, the type of the constant else.
        keys: dict keys or attribute names, in order.
        children: the structures below.
        constant: the value itself where this level is a constant leaf.
    """

    kind: Any
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    constant: Any = None
    template: Any = dataclasses.field(default=None, compare=False, hash=False)

    def without_leaves(self) -> Structure:
        """The same structure, its templates rid of the leaves that they were made with and would keep alive."""
        template = None if self.template is None else _build(self, itertools.repeat(None))
        children = tuple(child.without_leaves() for child in self.children)
        return dataclasses.replace(self, children=children, template=template)


LEAF = Structure(None)


def flatten(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any], depth: int = 8) -> Structure:
    """Append the varying leaves of ``value`` to ``leaves`` and return its structure.

    Args:
        value: any nested value.
        is_leaf: which values vary from call to call; all others are part of the structure.
        leaves: receives the leaves in order.
        depth: how deep unregistered objects are opened.
    """
    if is_leaf(value):
        leaves.append(value)
        return LEAF
    kind = type(value)
    if (
        value is None
        or kind in (str, int, float, bool, bytes, complex)
        or issubclass(kind, (torch.dtype, torch.device, enum.Enum))
    ):
        return Structure(kind, constant=value)
    if isinstance(value, dict):
        keys = tuple(value)
        children = tuple(flatten(value[key], is_leaf, leaves, depth) for key in keys)
        template = None if kind is dict else value
        return Structure(kind, keys, children, template=template)
    if isinstance(value, (list, tuple)):
        children = tuple(flatten(item, is_leaf, leaves, depth) for item in value)
        return Structure(kind, children=children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = tuple(field.name for field in dataclasses.fields(value))
        children = tuple(flatten(getattr(value, key), is_leaf, leaves, depth) for key in keys)
        return Structure(kind, keys, children, template=value)
    if (
        depth > 0
        and hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, (type, torch.nn.Module))
    ):
        names = tuple(vars(value))
        inner: list[Any] = []
        children = tuple(flatten(vars(value)[name], is_leaf, inner, depth - 2) for name in names)
        if inner:
            leaves.extend(inner)
            return Structure(kind, ("__dict__", *names), children, template=value)
    return Structure(kind, constant=_Constant(value))


class _Constant:
    """A value compared by equality where it has one, by identity else."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except Exception:  # an equality that does not answer is no equality
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))


def constant_of(structure: Structure) -> Any:
    """The value of a level that is a constant."""
    constant = structure.constant
    return constant.value if isinstance(constant, _Constant) else constant


def unflatten(structure: Structure, leaves: Any) -> Any:
    """Build the nested value of ``structure`` around ``leaves`` (an iterator, or any iterable)."""
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Any) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    if not structure.children and not structure.keys:
        if issubclass(kind, (dict, list, tuple)) and structure.constant is None:
            return kind() if not hasattr(kind, "_fields") else kind(*())
        return constant_of(structure)
    values = [_build(child, leaves) for child in structure.children]
    if structure.keys and structure.keys[0] == "__dict__":
        result = copy.copy(structure.template)
        vars(result).update(zip(structure.keys[1:], values, strict=True))
        return result
    if issubclass(kind, dict):
        return _build_dict(kind, structure, values)
    if issubclass(kind, tuple):
        if hasattr(kind, "_fields"):
            return kind(*values)
        if kind is tuple:
            return tuple(values)
        return kind(values)
    if issubclass(kind, list):
        return values if kind is list else kind(values)
    result = copy.copy(structure.template)  # a dataclass
    for name, item in zip(structure.keys, values, strict=True):
        object.__setattr__(result, name, item)
    return result


def _build_dict(kind: type, structure: Structure, values: list[Any]) -> Any:
    pairs = dict(zip(structure.keys, values, strict=True))
    if kind is dict:
        return pairs
    if dataclasses.is_dataclass(kind):  # model outputs: a dict and a dataclass in one
        fields = {field.name for field in dataclasses.fields(kind)}
        if set(pairs) <= fields:
            return kind(**pairs)
    result = copy.copy(structure.template)
    for key, item in pairs.items():
        result[key] = item
    return result
