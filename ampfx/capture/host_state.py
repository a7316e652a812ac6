"""The state of a module that a graph was captured for.

A graph bakes in what the forward reads from its modules besides tensors: ``training`` flags, plain
attributes (``self.p``), which hooks and submodules there are, which parameters need gradients and in
which dtype they are. :class:`HostState` remembers all of it and tells, fast, whether it still holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
        self._any_skip = bool(skip)
        self._dicts = [vars(module) for _, module in self._modules]
        self._children = [d["_modules"] for d in self._dicts if d["_modules"]]
        self._parameters = [d["_parameters"] for d in self._dicts if d["_parameters"]]
        self._hooks = [d[store] for d in self._dicts[1:] for store in _HOOK_STORES]
        self._objects = self._plain_objects()
        self.capture()

    def _plain_objects(self) -> list[dict[str, Any]]:
        """``vars`` of the objects that modules hold and that are no modules or tensors (configurations)."""
        seen: dict[int, dict[str, Any]] = {}
        for module_dict in self._dicts:
            for name, value in module_dict.items():
                if (
                    name.startswith("_ampfx")
                    or name in _HOOK_STORES
                    or isinstance(value, (nn.Module, torch.Tensor, type))
                ):
                    continue
                inner = getattr(value, "__dict__", None)
                if isinstance(inner, dict) and not callable(value):
                    seen.setdefault(id(value), inner)
        return list(seen.values())

    def capture(self) -> None:
        """Take the snapshot anew."""
        self._plain = [d for index, d in enumerate(self._dicts) if index and not self._skip[index]]
        self._filtered = [
            (d, self._skip[index]) for index, d in enumerate(self._dicts) if not index or self._skip[index]
        ]
        self._values = self._now()
        self._child_values = [child for store in self._children for child in store.values()]
        self._parameter_values = self._parameter_state()
        self._hook_counts = [len(store) for store in self._hooks]
        self._detailed = self._details()

    def _now(self) -> Any:
        """The values of all attributes, in one sweep: this runs at every call."""
        filtered = [
            [_kind(value) if name in skip else value for name, value in d.items() if not name.startswith("_ampfx")]
            for d, skip in self._filtered
        ]
        plain = [list(d.values()) for d in self._plain]
        return filtered, plain, [list(inner.values()) for inner in self._objects]

    def _parameter_state(self) -> list[Any]:
        return [
            parameter is not None and (parameter.requires_grad, parameter.dtype)
            for store in self._parameters
            for parameter in store.values()
        ]

    def _details(self) -> list[Any]:
        """Attributes by what a graph can depend on: plain values themselves, tensors by dtype and shape."""
        none: frozenset[str] = frozenset()
        skips = [*self._skip, *[none] * len(self._objects)]
        return [
            {
                name: _kind(value) if name in skip else _plain(value)
                for name, value in values.items()
                if not name.startswith("_ampfx") and name not in _HOOK_STORES
            }
            for values, skip in zip([*self._dicts, *self._objects], skips, strict=True)
        ]

    def matches(self) -> bool:
        """Whether everything is as it was."""
        if self._parameter_state() != self._parameter_values:
            return False
        if list(map(len, self._hooks)) != self._hook_counts:
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


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.dim(), value.device)
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
