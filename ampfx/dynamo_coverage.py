"""Say which heavy modules of a compiled model never reached a graph.

``torch.compile`` runs in plain Python what Dynamo cannot capture, and nobody notices: a recurrent layer, or
a break inside a loop, makes Dynamo leave out a whole forward. Under the backend those modules would stay
float32 in silence.

1. While Dynamo works, the compiled model is found on the stack (the backend is not told which it is).
2. Parameters that arrive in a graph are noted.
3. Recurrent layers are named at once if torch's settings keep them out of graphs. At the second call of the
   model, what heavy modules have had no parameter in any graph are named. Once for each model.
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
        named: modules that a warning has named.
    """

    parameters: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


_models: weakref.WeakKeyDictionary[nn.Module, Seen] = weakref.WeakKeyDictionary()


def watch_compilations() -> None:
    """Be told when Dynamo has looked at a piece of code, whether or not it made a graph of it."""
    if _after_compilation not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_after_compilation)


def note_graph(parameters: Iterable[nn.Parameter]) -> None:
    """A graph over these parameters was converted."""
    found = {id(parameter) for parameter in parameters}
    for model in _compiled_models():
        _seen(model).parameters |= found


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
    """At the next call everything that can reach a graph has had its chance."""
    forward: Callable[..., Any] = model.forward
    reference = weakref.ref(model._orig_mod)

    def check_once(*args: Any, **kwargs: Any) -> Any:
        model.forward = forward
        inner = reference()
        if inner is not None:
            _name_missing(inner, seen)
        return forward(*args, **kwargs)

    model.forward = check_once


def _name_missing(model: nn.Module, seen: Seen) -> None:
    names = [
        path
        for path, module in model.named_modules()
        if isinstance(module, HEAVY) and path not in seen.named and _is_missing(module, seen.parameters)
    ]
    if names:
        seen.named.update(names)
        warn_user(
            f'torch.compile(backend="ampfx"): {_listed(names)} of {type(model).__name__} never reached a converted '
            "graph and run in float32. Dynamo leaves out code that it cannot capture (TORCH_LOGS=graph_breaks shows "
            "where), and all of a forward that breaks inside a loop; branches of torch.cond stay float32. "
            "ampfx.convert captures such models."
        )


def _is_missing(module: nn.Module, reached: set[int]) -> bool:
    parameters = [id(parameter) for parameter in module.parameters()]
    return bool(parameters) and not any(parameter in reached for parameter in parameters)


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
