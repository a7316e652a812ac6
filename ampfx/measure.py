"""Exact counts of what one training step does: casts and their bytes, kernels, bytes saved for backward.

Method:

1. A ``TorchDispatchMode`` sees every operation that PyTorch dispatches while the step runs: forward,
   backward (on whichever thread autograd runs it) and optimizer step.
2. An operation that copies a floating tensor into another floating dtype is a cast. Its cost is the
   bytes that it reads plus the bytes that it writes.
3. Every operation that is neither a view nor a bare allocation counts as one kernel.
4. Saved-tensor hooks see every tensor that autograd saves for backward. Each storage counts once,
   with its full size, and storages of parameters do not count: they live anyway.

The numbers depend on nothing but the program, so tests may assert them. A conversion done inside
another kernel (``softmax(x, dtype=...)`` on CUDA, a mixed-dtype multiplication) is no separate copy
and is not counted as a cast.

This is part of the package, not of ``bench/``, because the demo, the tests and users who want the numbers of
their own model all import it. It knows nothing of converted models: a plain module, one under
``torch.autocast`` and a converted one are counted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Not marked as views by their schemas, but nothing runs on the device for them.
_NO_KERNEL = {
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
    aten.resize_,
    aten.set_,
    aten._local_scalar_dense,
}

# Namespaces of operations that mark or ask something and compute nothing.
_NO_DEVICE_WORK = {"profiler", "prim"}


@dataclass(frozen=True)
class StepCounts:
    """What one training step did.

    Args:
        casts: floating copies that changed the dtype.
        cast_bytes: bytes that those copies read and wrote.
        kernels: operations that did work on the device, casts included.
        saved_bytes: storage that autograd kept for backward, parameters left out.
    """

    casts: int
    cast_bytes: int
    kernels: int
    saved_bytes: int


def count_step(step: Callable[[], object], model: nn.Module | None = None, *, warmup: int = 1) -> StepCounts:
    """Count what one call of ``step`` does.

    Args:
        step: runs forward, backward and the optimizer's step once.
        model: the module being trained; its parameters do not count as saved for backward.
        warmup: calls made before the one that is counted, so that lazily made things (optimizer
            state, captured graphs) exist.

    Returns:
        The counts of the last call.
    """
    for _ in range(warmup):
        step()
    saved = _SavedStorages(model)
    counter = _DispatchCounter()
    with counter, torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
        step()
    return StepCounts(counter.casts, counter.cast_bytes, counter.kernels, saved.num_bytes)


class _DispatchCounter(TorchDispatchMode):
    """Counts casts and kernels among the dispatched operations (steps 1 to 3)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0
        self.cast_bytes = 0
        self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in _NO_KERNEL or func.namespace in _NO_DEVICE_WORK):
            self.kernels += 1
        for source, target in _copies(func, args, result):
            if source.dtype != target.dtype and source.is_floating_point() and target.is_floating_point():
                self.casts += 1
                self.cast_bytes += target.numel() * (source.element_size() + target.element_size())
        return result


def _copies(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of source and target of an operation that does nothing but copy."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        yield args[0], result
    elif packet is aten.copy_:
        yield args[1], args[0]
    elif packet is aten._foreach_copy_:
        yield from zip(args[1], args[0], strict=True)


class _SavedStorages:
    """The distinct storages that autograd saved (step 4).

    The storages are kept alive until the count is over: an address freed and used again would
    otherwise look like one storage saved twice.
    """

    def __init__(self, model: nn.Module | None) -> None:
        parameters = model.parameters() if model is not None else ()
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages.setdefault(storage.data_ptr(), storage)
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
