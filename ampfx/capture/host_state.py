"""The state of a module that a graph was captured for.

A graph bakes in what the forward reads from its modules besides tensors: ``training`` flags, plain
attributes (``self.p``), which hooks and submodules there are, which parameters need gradients, their dtypes
and shapes; and what it reads from outside (:mod:`ampfx.capture.outer_names`). :class:`HostState` remembers
all of it and tells, fast, whether it still holds:

1. one sweep compares every attribute, and the contents of every list, dict, set and plain object that
   attributes hold, with what they were, mostly by identity;
2. where that finds a difference, the attributes are compared by what a graph can depend on: plain values
   by value, tensors by dtype and shape, and those that the forward itself assigns without their shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ampfx.capture.attributes import STORES
from ampfx.capture.containers import DEPTH, containers, content, is_plain_object
from ampfx.capture.outer_names import OuterNames

_HOOK_STORES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HostState:
    """A snapshot of a module tree.

    Args:
        root: the module.
        ignored: ``(module path, attribute)`` that the forward itself assigns.
    """

    def __init__(self, root: nn.Module, ignored: tuple[tuple[str, str], ...] = ()) -> None:
        skip: dict[str, set[str]] = {}
        for path, name in ignored:
            skip.setdefault(path, set()).add(name)
        self._modules: list[tuple[str, nn.Module]] = list(root.named_modules())
        self._skip = [frozenset(skip.get(path, ())) for path, _ in self._modules]
        self._dicts = [vars(module) for _, module in self._modules]
        self._children = [d["_modules"] for d in self._dicts if d["_modules"]]
        self._parameters = [d["_parameters"] for d in self._dicts if d["_parameters"]]
        self._buffers = [
            (d["_buffers"], skip_here) for d, skip_here in zip(self._dicts, self._skip, strict=True) if d["_buffers"]
        ]
        self._classes = [vars(cls) for cls in _user_classes(self._modules)]
        self._hooks = [d[store] for d in self._dicts[1:] for store in _HOOK_STORES]
        self._outer = OuterNames(_user_classes(self._modules))
        self.capture()

    def capture(self) -> None:
        """Take the snapshot anew."""
        self._plain = [d for index, d in enumerate(self._dicts) if index and not self._skip[index]]
        self._filtered = [
            (d, self._skip[index]) for index, d in enumerate(self._dicts) if not index or self._skip[index]
        ]
        self._containers = list(self._all_containers())
        self._values = self._now()
        self._child_values = [child for store in self._children for child in store.values()]
        self._parameter_values = self._parameter_state()
        self._buffer_values = self._buffer_state()
        self._hook_counts = [len(store) for store in self._hooks]
        self._detailed = self._details()
        self._outer.capture()

    def _all_containers(self) -> Iterator[Any]:
        seen: set[int] = set()
        for values, skip in zip(self._dicts, self._skip, strict=True):
            for name, value in values.items():
                if name in STORES or name in skip or _is_bookkeeping(name):
                    continue
                for container in containers(value):
                    if id(container) not in seen:
                        seen.add(id(container))
                        yield container

    def _now(self) -> Any:
        """The values of all attributes, in one sweep: this runs at every call."""
        filtered = [
            [_kind(value) if name in skip else value for name, value in d.items() if not _is_bookkeeping(name)]
            for d, skip in self._filtered
        ]
        plain = [list(d.values()) for d in self._plain]
        classes = [list(d.values()) for d in self._classes]
        return filtered, plain, classes, list(map(content, self._containers))

    def _parameter_state(self) -> list[Any]:
        return [
            parameter is not None and (parameter.requires_grad, parameter.dtype, parameter.shape)
            for store in self._parameters
            for parameter in store.values()
        ]

    def _buffer_state(self) -> list[Any]:
        return [
            buffer is not None and (buffer.dtype, len(buffer.shape) if name in skip else buffer.shape)
            for store, skip in self._buffers
            for name, buffer in store.items()
        ]

    def _details(self) -> list[Any]:
        """Attributes by what a graph can depend on: plain values themselves, tensors by dtype and shape."""
        modules = [
            {
                name: _kind(value) if name in skip else _plain(value)
                for name, value in values.items()
                if not _is_bookkeeping(name) and name not in STORES
            }
            for values, skip in zip(self._dicts, self._skip, strict=True)
        ]
        return modules + [{name: _plain(value, 1) for name, value in d.items()} for d in self._classes]

    def matches(self) -> bool:
        """Whether everything is as it was."""
        if self._parameter_state() != self._parameter_values or self._buffer_state() != self._buffer_values:
            return False
        if list(map(len, self._hooks)) != self._hook_counts or not self._outer.matches():
            return False
        # Modules compare by identity.
        if [child for store in self._children for child in store.values()] != self._child_values:
            return False
        try:
            if self._now() == self._values:
                return True
        except (RuntimeError, ValueError, TypeError):  # tensors do not answer ==
            pass
        try:
            if self._details() != self._detailed:
                return False
        except (RuntimeError, ValueError, TypeError):
            return False
        self.capture()
        return True


def _user_classes(modules: list[tuple[str, nn.Module]]) -> list[type]:
    """The classes of modules that are the user's: their attributes and methods can be changed."""
    classes: dict[type, None] = {}
    for kind in {type(module): None for _, module in modules}:
        for cls in kind.__mro__:
            if cls.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc", "ampfx"):
                classes[cls] = None
    return list(classes)


def _is_bookkeeping(name: str) -> bool:
    """Whether an attribute is this package's, or what torch.compile notes on a module."""
    return name.startswith("_ampfx") or name in ("_is_torch_compile", "_compiled_call_impl")


def _kind(value: Any) -> Any:
    """What of an attribute that the forward assigns a graph depends on: not its value."""
    if isinstance(value, torch.Tensor):
        grad = torch.is_grad_enabled() and value.requires_grad
        return ("tensor", value.dtype, value.dim(), value.device, grad)
    if type(value) in (list, tuple):
        return [_kind(item) for item in value]
    if type(value) is dict:
        return {key: _kind(item) for key, item in value.items()}
    return value


def _plain(value: Any, depth: int = DEPTH) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.shape, value.device)
    if depth <= 0:
        return value
    if type(value) in (list, tuple):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return (type(value), {key: _plain(item, depth - 1) for key, item in value.items()}, list(value))
    if isinstance(value, set):
        return set(value)
    if is_plain_object(value):
        return (type(value), {name: _plain(item, depth - 1) for name, item in vars(value).items()})
    return value
