"""Say which heavy modules of a compiled model never reached a graph.

``torch.compile`` runs in plain Python what Dynamo cannot capture, and nobody notices: a recurrent layer, or
a break inside a loop, makes Dynamo leave out a whole forward. Under the backend those modules would stay
float32 in silence.

1. While Dynamo works, the compiled model is found on the stack (the backend is not told which it is).
2. Parameters that arrive in a graph are noted: those that converted operations read, and those that are only
   read inside what stays float32.
3. Recurrent layers are named at once if torch's settings keep them out of graphs.
4. At the second call of the model everything that can reach a graph has done so. Heavy modules that have not are
   watched during that call; those that run, as Python, are named. Once for each model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

from ampfx.user_warning import warn_user

HEAVY = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
BACKEND = "ampfx"
_SHOWN = 8


@dataclass
class Seen:
    """What is known about one compiled model.

    Args:
        parameters: ids of the parameters that converted operations read.
        unconverted: ids of those in graphs that nothing converted reads.
        named: modules that a warning has named.
    """

    parameters: set[int] = field(default_factory=set)
    unconverted: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


_models: weakref.WeakKeyDictionary[nn.Module, Seen] = weakref.WeakKeyDictionary()


class _Callbacks(list[Callable[[CallbackArgs], None]]):
    """Callbacks of Dynamo of which one outlives ``torch._dynamo.reset()``: nobody would register it again."""

    def clear(self) -> None:
        super().clear()
        self.append(_after_compilation)


def watch_compilations() -> None:
    """Be told when Dynamo has looked at a piece of code, whether or not it made a graph of it."""
    if not isinstance(callback_handler.end_callbacks, _Callbacks):
        callback_handler.end_callbacks = _Callbacks([*callback_handler.end_callbacks, _after_compilation])


def note_graph(parameters: Iterable[nn.Parameter], converted: Iterable[nn.Parameter]) -> None:
    """A graph reads ``parameters``, and what is converted in it reads ``converted``."""
    inside, reached = {id(parameter) for parameter in parameters}, {id(parameter) for parameter in converted}
    for model in _compiled_models():
        seen = _seen(model)
        seen.parameters |= reached
        seen.unconverted |= inside - reached


def _after_compilation(_: CallbackArgs) -> None:
    for model in _compiled_models():
        _seen(model)


def _seen(model: OptimizedModule) -> Seen:
    inner = model._orig_mod
    if inner not in _models:
        _models[inner] = Seen()
        _name_recurrent(inner, _models[inner])
        _check_at_next_call(model, _models[inner])
    return _models[inner]


def _compiled_models() -> Iterator[OptimizedModule]:
    """The models on the stack that this backend compiles."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            model = frame.f_locals.get("self")
            if isinstance(model, OptimizedModule) and is_compiled_here(model):
                yield model
        frame = frame.f_back  # type: ignore[assignment]


_CALL: Any = OptimizedModule.__call__.__code__


def is_compiled_here(model: Any) -> bool:
    """Whether ``model`` is what ``torch.compile(..., backend="ampfx")`` returns."""
    if not isinstance(model, OptimizedModule):
        return False
    callback: Any = model.dynamo_ctx.callback
    if not callable(callback):
        return False
    backend: Any = innermost_backend(callback)
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", ""))
    return bool(name == BACKEND)


def _name_recurrent(model: nn.Module, seen: Seen) -> None:
    if torch._dynamo.config.allow_rnn:
        return
    names = [path for path, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    if names:
        seen.named.update(names)
        warn_user(
            f'torch.compile(backend="ampfx"): {_listed(names)} of {type(model).__name__} never reach a graph and run '
            "in float32. Dynamo skips code that runs recurrent layers, with all that it computes itself: set "
            "torch._dynamo.config.allow_rnn = True, or use ampfx.convert, which captures them."
        )


def _check_at_next_call(model: OptimizedModule, seen: Seen) -> None:
    forward: Callable[..., Any] = model.forward
    reference = weakref.ref(model._orig_mod)

    def check_once(*args: Any, **kwargs: Any) -> Any:
        model.forward = forward
        inner = reference()
        missing = {} if inner is None else _missing(inner, seen)
        if inner is None or not missing:
            return forward(*args, **kwargs)
        ran = {path for path, module in missing.items() if _has(module, seen.unconverted)}
        handles = [
            module.register_forward_pre_hook(_note_call(ran, path))
            for path, module in missing.items()
            if path not in ran
        ]
        try:
            return forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            _name_missing(inner, seen, [path for path in missing if path in ran])

    model.forward = check_once


def _note_call(ran: set[str], path: str) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile it
    def note(*_: Any) -> None:
        ran.add(path)

    return note


def _missing(model: nn.Module, seen: Seen) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, HEAVY)
        and path not in seen.named
        and any(True for _ in module.parameters())
        and not _has(module, seen.parameters)
    }


def _name_missing(model: nn.Module, seen: Seen, names: list[str]) -> None:
    if names:
        seen.named.update(names)
        warn_user(
            f'torch.compile(backend="ampfx"): {_listed(names)} of {type(model).__name__} never reached a converted '
            "graph and run in float32. Dynamo leaves out code that it cannot capture (TORCH_LOGS=graph_breaks shows "
            "where), and all of a forward that breaks inside a loop; branches of torch.cond stay float32. "
            "ampfx.convert captures such models."
        )


def _has(module: nn.Module, found: set[int]) -> bool:
    return any(id(parameter) in found for parameter in module.parameters())


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
