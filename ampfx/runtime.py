"""Functions that captured graphs call when they run.

Everything a graph does that is not a torch operation goes through one of these, by name, so that a
printed graph can be read and a pickled one can be loaded: guards, writes to module attributes,
hooks, custom autograd Functions, and casts that saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from ampfx.errors import NotCapturedError
from ampfx.graph_utils import register_impure


class GuardFailure(Exception):
    """A guard of a graph does not hold in this run: the graph must not be used for it."""

    def __init__(self, expected: object, found: object, where: str = "") -> None:
        super().__init__(f"expected {expected!r}, found {found!r}" + (f" at {where}" if where else ""))
        self.expected, self.found, self.where = expected, found, where


@register_impure
def guard(value: Any, expected: Any, where: str = "") -> None:
    """Stop the run when ``value`` is not what the graph was captured for."""
    if isinstance(expected, list) and isinstance(value, list):
        same = value == expected
    elif isinstance(expected, bool) and torch.compiler.is_compiling():
        # Dynamo can branch on a comparison of symbolic sizes but not compare it with True.
        same = expected if value else not expected
        if not same:
            raise NotCapturedError(
                f"torch.compile: the graph was captured where {where} gave {expected}. Call the converted module "
                "once with such inputs before compiling, or compile without fullgraph=True"
            )
    else:
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
    if not same and not (value != value and expected != expected):
        raise GuardFailure(expected, value, where)


@register_impure
def guard_length(values: Sequence[Any], expected: int, where: str = "") -> None:
    """Stop the run when an operation returns another number of tensors than it did in the capture."""
    if len(values) != expected:
        raise GuardFailure(expected, len(values), where)


@register_impure
def guard_tensor(value: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Stop the run when a tensor that left for numpy holds other numbers than in the capture."""
    if value.shape != expected.shape or not torch.equal(value.detach().cpu(), expected):
        raise GuardFailure("the recorded values", "others", where)


@register_impure
def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Store a value on a module as the model's own code does in its forward."""
    if isinstance(value, torch.Tensor) and name in module._buffers:
        old = module._buffers[name]
        if old is not None and old.dtype != value.dtype and old.dtype == torch.float32:
            value = value.to(old.dtype)
    setattr(module, name, value)


def read_attribute(module: Any, path: str) -> Any:
    """Read a tensor that a module keeps inside another object: ``"state.h"``, ``"cache[0]"``."""
    value = module
    for part in path.replace("]", "").replace("[", ".[").split("."):
        if part.startswith("["):
            key: Any = part[1:]
            value = value[int(key)] if isinstance(value, (list, tuple)) else value[key.strip("'")]
        elif part:
            value = getattr(value, part)
    return value


@register_impure
def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call a custom ``autograd.Function``: its own backward is kept."""
    return function.apply(*args)


@register_impure
def run_forward_pre_hooks(module: nn.Module, nested: Any, *leaves: Any) -> tuple[Any, ...]:
    """Run a module's forward pre-hooks; returns the tensors of the arguments they leave."""
    return tuple(nested.leaves(call_forward_pre_hooks(module, *nested.build(leaves))))


def call_forward_pre_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward pre-hooks; returns the arguments they leave."""
    for hook_id, hook in tuple(module._forward_pre_hooks.items()):
        if hook_id in module._forward_pre_hooks_with_kwargs:
            result: Any = hook(module, args, kwargs)
            if result is not None:
                args, kwargs = result
        else:
            result = hook(module, args)
            if result is not None:
                args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


@register_impure
def run_forward_hooks(module: nn.Module, nested: Any, *leaves: Any) -> tuple[Any, ...]:
    """Run a module's forward hooks; returns the tensors of the output they leave."""
    return tuple(nested.leaves(call_forward_hooks(module, *nested.build(leaves))))


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Run a module's forward hooks; returns the output they leave."""
    for hook_id, hook in tuple(module._forward_hooks.items()):
        if hook_id in module._forward_hooks_with_kwargs:
            changed: Any = hook(module, args, kwargs, result)
        else:
            changed = hook(module, args, result)
        if changed is not None:
            result = changed
    return result


@register_impure
def begin_backward_hooks(module: nn.Module, nested: Any, *leaves: Any) -> tuple[Any, ...]:
    """Attach a module's full backward hooks to its inputs; returns the handle and the inputs' tensors."""
    full, _ = module._get_backward_hooks()
    handle = BackwardHook(module, full, module._get_backward_pre_hooks())
    args = handle.setup_input_hook(nested.build(leaves))
    return handle, *nested.leaves(args)


@register_impure
def end_backward_hooks(handle: Any, nested: Any, *leaves: Any) -> tuple[Any, ...]:
    """Attach a module's full backward hooks to its output; returns the output's tensors."""
    return tuple(nested.leaves(handle.setup_output_hook(nested.build(leaves))))


@register_impure
def attach_hook(tensor: torch.Tensor, method: str, *args: Any) -> torch.Tensor:
    """Call ``register_hook``, ``retain_grad`` or the like on a tensor; returns the tensor."""
    if tensor.requires_grad:
        getattr(tensor, method)(*args)
    return tensor


def cast_saturated(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast so that a finite value beyond the range of ``dtype`` becomes its largest, not infinity.

    Masks hold such values (``-1e9``, ``finfo(float32).min``); a row of minus infinities would turn
    a softmax into NaN. Infinities stay.
    """
    info = torch.finfo(dtype)
    clamped = tensor.clamp(info.min, info.max)
    return torch.where(tensor.isinf(), tensor, clamped).to(dtype)
