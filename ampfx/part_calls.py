"""Count, in one run of a model that is converted in parts, what its Python code itself computes.

Graphs know the matrix products in them; Python code must be watched. In the first run in each mode

1. the code between the graphs runs under a ``TorchDispatchMode`` that adds up the FLOPs of its matrix
   products (the formulas are PyTorch's), for each Python module by itself;
2. the mode is off while a part is captured or its graph runs; only the calls of each part are counted.

Later runs are not watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,  # has the attention kernels of other devices
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
}
_local = threading.local()


@dataclass
class PartCalls:
    """What was counted in one run.

    Args:
        calls: how often each part was called, by path.
        python_flops: FLOPs of matrix products outside graphs, by the path of the Python module.
    """

    calls: Counter[str] = field(default_factory=Counter)
    python_flops: Counter[str] = field(default_factory=Counter)


class _Watch(TorchDispatchMode):
    """Adds up the FLOPs of matrix products for the Python module that runs now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = PartCalls()
        self.owner: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in _FORMULAS:
            with self:  # in inference mode linear arrives as linear: look at what it does
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        if self.owner is not None and packet in _FORMULAS:
            with contextlib.suppress(Exception):  # a count is not worth an error in the user's model
                self.counts.python_flops[self.owner] += int(_FORMULAS[packet](*args, **kwargs, out_val=out))
        return out


@contextlib.contextmanager
def python_part(path: str, counts: dict[bool, PartCalls], training: bool) -> Iterator[None]:
    """Run the Python code of a module, watched if it is the first run in this mode.

    Args:
        path: path of the module.
        counts: receives what was counted, by mode, when the run began with this module.
        training: the mode.
    """
    watch: _Watch | None = getattr(_local, "watch", None)
    if watch is not None:
        with _owned(watch, path):
            yield
        return
    if training in counts:
        yield
        return
    watch = _local.watch = _Watch()
    try:
        with _owned(watch, path):
            yield
        counts[training] = watch.counts
    finally:
        _local.watch = None


@contextlib.contextmanager
def _owned(watch: _Watch, path: str) -> Iterator[None]:
    watch.counts.calls[path] += 1
    before, watch.owner = watch.owner, path
    try:
        with contextlib.nullcontext() if before is not None else watch:
            yield
    finally:
        watch.owner = before


_NOTHING = contextlib.nullcontext()


def captured_part(path: str) -> contextlib.AbstractContextManager[None]:
    """Run a part that is a graph, or becomes one, out of sight of the watch."""
    watch: _Watch | None = getattr(_local, "watch", None)
    return _NOTHING if watch is None or watch.owner is None else _unwatched(watch, path)


@contextlib.contextmanager
def _unwatched(watch: _Watch, path: str) -> Iterator[None]:
    watch.counts.calls[path] += 1
    before, watch.owner = watch.owner, None
    on_top = _get_current_dispatch_mode() is watch
    if on_top:
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if on_top:
            watch.__enter__()  # type: ignore[no-untyped-call]
        watch.owner = before

