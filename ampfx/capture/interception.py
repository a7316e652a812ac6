"""Points of torch that a recording must see and that no torch-function mode reports.

Module calls (for paths and hooks), custom autograd Functions, the author's autocast and inference-mode
regions, and checkpoints. Each is patched once for the process while at least one recording runs, and acts only on the
thread that records: other threads run as always.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import _SingleLevelFunction

_local = threading.local()
_lock = threading.RLock()
_users = 0
_saved: dict[str, Any] = {}


def active() -> Any:
    """The capture that runs on this thread, None outside one."""
    capture = getattr(_local, "capture", None)
    return None if capture is None or capture.recorder._paused else capture


@contextlib.contextmanager
def intercepting(capture: Any) -> Iterator[None]:
    """While active, ``capture`` is told of module calls, Functions and regions on this thread."""
    global _users
    with _lock:
        if _users == 0:
            _install()
        _users += 1
    outer = getattr(_local, "capture", None)
    _local.capture = capture
    try:
        yield
    finally:
        _local.capture = outer
        with _lock:
            _users -= 1
            if _users == 0:
                _remove()


def _install() -> None:
    _saved["call"] = nn.Module.__call__
    _saved["enter"] = torch.autocast.__enter__
    _saved["exit"] = torch.autocast.__exit__
    _saved["inference"] = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    _saved["checkpoint"] = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    original_call, enter, leave = _saved["call"], _saved["enter"], _saved["exit"]
    original_checkpoint = _saved["checkpoint"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        capture = active()
        if capture is None:
            return original_call(module, *args, **kwargs)
        return capture.call_module(module, original_call, args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        capture = active()
        if capture is None:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        return capture.call_function(cls, args, kwargs)

    def autocast_enter(region: Any) -> Any:
        capture = active()
        if capture is None:
            return enter(region)
        capture.recorder.autocast_stack.append(bool(region._enabled))
        return region

    def autocast_exit(region: Any, *error: Any) -> Any:
        capture = active()
        if capture is None:
            return leave(region, *error)
        capture.recorder.autocast_stack.pop()
        return False

    inference_enter, inference_leave = _saved["inference"]

    def inference_mode_enter(region: Any) -> Any:
        """In a graph inference mode is a region without gradients: its tensors may be read outside."""
        if active() is None:
            return inference_enter(region)
        region._ampfx_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not region.mode)
        return None

    def inference_mode_exit(region: Any, *error: Any) -> Any:
        if active() is None:
            return inference_leave(region, *error)
        torch._C._set_grad_enabled(region._ampfx_grad)
        return None

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        capture = active()
        if capture is None:
            yield from original_checkpoint(function, *args, **kwargs)
            return
        with capture.checkpoint_region():
            yield

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = checkpoint  # type: ignore[assignment]
    nn.Module.__call__ = call  # type: ignore[method-assign]
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    torch.inference_mode.__enter__ = inference_mode_enter  # type: ignore[method-assign]
    torch.inference_mode.__exit__ = inference_mode_exit  # type: ignore[method-assign]
    torch.autocast.__enter__ = autocast_enter  # type: ignore[method-assign]
    torch.autocast.__exit__ = autocast_exit  # type: ignore[method-assign]


def _remove() -> None:
    nn.Module.__call__ = _saved["call"]  # type: ignore[method-assign]
    del _SingleLevelFunction.apply  # type: ignore[attr-defined]
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = _saved["checkpoint"]
    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = _saved["inference"]  # type: ignore[method-assign]
    torch.autocast.__enter__ = _saved["enter"]  # type: ignore[method-assign]
    torch.autocast.__exit__ = _saved["exit"]  # type: ignore[method-assign]
    _saved.clear()
