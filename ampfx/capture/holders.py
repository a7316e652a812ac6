"""The tensors that exist before a recorded run, where they are held, and what the run did to them.

A tensor that a recorded operation reads is either the result of another one or was there before:
a parameter, a buffer, a plain attribute of a module, something inside another object that a module
holds, or a global. :class:`HeldTensors` knows which, so that the graph reads it from its place each
time instead of freezing the value. It also brings back the values that the recorded run overwrote.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DEPTH = 4


@dataclass(frozen=True)
class Holder:
    """Where a tensor is held.

    Args:
        attribute: dotted path from the root, for parameters, buffers and attributes of modules.
        owner: path of the module that holds an object with the tensor inside.
        path: where in that module: ``"state.h"``, ``"cache[0]"``.
    """

    attribute: str | None = None
    owner: str | None = None
    path: str | None = None


class HeldTensors:
    """The tensors alive when a recording starts.

    Args:
        root: the module to capture. Names are its own dotted names, the first one of tied tensors.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._holders: dict[int, tuple[torch.Tensor, Holder]] = {}
        self._collected = False
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._by_storage: dict[int, list[torch.Tensor]] | None = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._nested_scanned = False
        for path, module in root.named_modules():
            prefix = f"{path}." if path else ""
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        self._hold(tensor, Holder(attribute=prefix + name))
        for path, module in root.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    self._hold(value, Holder(attribute=prefix + name))
        with torch.no_grad():
            for module in root.modules():
                for tensor in module._buffers.values():
                    if tensor is not None:
                        self._save(tensor)

    def _hold(self, tensor: torch.Tensor, holder: Holder) -> None:
        known = self._holders.setdefault(id(tensor), (tensor, holder))
        if known[0] is tensor and known[1] is holder and self._by_storage is not None:
            self._by_storage.setdefault(_storage(tensor), []).append(tensor)

    def _save(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._saved:
            self._saved[id(tensor)] = (tensor, tensor.detach().clone(), _version(tensor))

    def find(self, tensor: torch.Tensor) -> Holder | None:
        """Where ``tensor`` is held; None when it did not exist before the recording."""
        known = self._holders.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        if not self._nested_scanned:
            self._nested_scanned = True
            self._scan_nested()
            known = self._holders.get(id(tensor))
            if known is not None and known[0] is tensor:
                return known[1]
        if self._is_new(tensor):
            return None
        self._hold(tensor, Holder())
        return Holder()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Tell what is made while this is active from what was there before.

        The garbage collector keeps young objects apart. Everything older leaves the youngest generation here, and
        nothing leaves it until the end: a look there, at need, is cheap, where a walk over all objects of a large
        program is not.
        """
        enabled = gc.isenabled()
        gc.collect(0)
        gc.disable()
        self._collected = False
        gc.callbacks.append(self._note_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note_collection)
            if enabled:
                gc.enable()

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        self._collected = True

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made during the recording; after a collection in it nobody knows, so yes."""
        return self._collected or any(item is tensor for item in gc.get_objects(generation=0))

    def _scan_nested(self) -> None:
        for path, module in self.root.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_") or isinstance(value, (list, tuple)):
                    for inner, tensor in _tensors_inside(value, name, _DEPTH):
                        self._hold(tensor, Holder(owner=path, path=inner))

    def protect(self, tensor: torch.Tensor) -> None:
        """Keep the value of every tensor that shares memory with one that an operation is about to overwrite."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for held in self._held_by_storage().get(_storage(tensor), ()):
                self._save(held)

    def _held_by_storage(self) -> dict[int, list[torch.Tensor]]:
        """The model's tensors by their memory: ``p.data`` and ``p.detach()`` are written in their stead."""
        if self._by_storage is None:
            self._by_storage = {}
            for held, _ in self._holders.values():
                self._by_storage.setdefault(_storage(held), []).append(held)
        return self._by_storage

    def protect_generator(self, generator: torch.Generator) -> None:
        """Keep the state of a random generator that an operation is about to draw from."""
        if not any(known is generator for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))

    def restore(self) -> None:
        """Bring back every value that the recorded run overwrote."""
        for generator, state in self._generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, value, version in self._saved.values():
                if _version(tensor) != version or not same_values(tensor, value):
                    write_back(tensor, value)

    def changed(self) -> list[str]:
        """Names of the held tensors that the recorded run wrote to."""
        names = []
        for tensor, _, version in self._saved.values():
            if _version(tensor) != version:
                known = self._holders.get(id(tensor))
                names.append(known[1].attribute or "?" if known is not None else "?")
        return names


def same_values(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; False where that cannot be asked (no values, under vmap)."""
    try:
        return torch.equal(tensor, value)
    except (RuntimeError, NotImplementedError):
        return False


def write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its old value, unseen by autograd; torch.func's transforms let nobody look behind a tensor."""
    (tensor if torch._C._are_functorch_transforms_active() else tensor.data).copy_(value)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without one storage
        return -id(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _tensors_inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth <= 0 or isinstance(value, (nn.Module, str, bytes, type)) or value is None:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _tensors_inside(item, f"{path}['{key}']", depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_inside(item, f"{path}[{index}]", depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, item in vars(value).items():
            yield from _tensors_inside(item, f"{path}.{name}", depth - 1)
