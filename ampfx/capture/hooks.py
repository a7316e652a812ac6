"""Record a module that carries hooks: the hooks stay calls, what stands between them is recorded.

A hook is Python that the graph must not look into: it may log, count, or change what it is given. Each kind
of hook of a module becomes one node, which is given the tensors inside the arguments and returns those
inside what the hooks leave, both as flat tuples; their structure (:class:`Nested`)
goes with the node. The order is torch's: pre-hooks, inputs of backward hooks, the module itself, forward
hooks, outputs of backward hooks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ampfx import runtime
from ampfx.capture.inputs import is_output_leaf
from ampfx.capture.recorder import Recorder, source_line, to_plain
from ampfx.capture.structure import Structure, flatten, unflatten
from ampfx.errors import CaptureError

if TYPE_CHECKING:
    from ampfx.capture.capture import Capture

# Hooks of torch that compute a weight before each forward: they are part of the model's mathematics.
_WEIGHT_HOOKS = ("WeightNorm", "SpectralNorm")
_KINDS: dict[str, tuple[Any, Any]] = {
    "pre": (runtime.run_forward_pre_hooks, runtime.call_forward_pre_hooks),
    "forward": (runtime.run_forward_hooks, runtime.call_forward_hooks),
}


@dataclass(frozen=True)
class Nested:
    """A nested value without its tensors and traced numbers, to take it apart and put it together again."""

    structure: Structure

    @classmethod
    def of(cls, value: Any) -> tuple[Nested, list[Any]]:
        """The nested value around its leaves, and the leaves."""
        leaves: list[Any] = []
        return cls(flatten(value, is_output_leaf, leaves).without_leaves()), leaves

    @staticmethod
    def leaves(value: Any) -> tuple[Any, ...]:
        """The tensors inside ``value``."""
        return tuple(Nested.of(value)[1])

    def build(self, leaves: Any) -> Any:
        """The nested value around these leaves."""
        return unflatten(self.structure, leaves)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs around the forward of a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def call_hooked(capture: Capture, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of a module with hooks; returns its result."""
    recorder = capture.recorder
    if _only_weight_hooks(module):
        for hook in module._forward_pre_hooks.values():
            hook(module, args)
        return module.forward(*args, **kwargs)
    if module._backward_hooks and module._is_full_backward_hook is False:
        raise CaptureError(
            f"{path} ({type(module).__name__}, {source_line()}) carries a hook of the old kind register_backward_hook, "
            "which looks at single nodes of autograd: use register_full_backward_hook"
        )
    owner = recorder.module_node(path)
    if module._forward_pre_hooks:
        args, kwargs = _hook_node(recorder, "pre", owner, module, (args, kwargs))
    handle: fx.Node | None = None
    if module._backward_hooks or module._backward_pre_hooks:
        handle, args = _begin_backward(recorder, owner, args)
    result = module.forward(*args, **kwargs)
    if module._forward_hooks:
        result = _hook_node(recorder, "forward", owner, module, (args, kwargs, result))
    if handle is not None:
        nested, leaves = Nested.of(result)
        end = recorder._create(
            runtime.end_backward_hooks,
            (handle, recorder.to_fx(nested), *recorder.to_fx(tuple(leaves))),
            {},
            "call_function",
        )
        result = nested.build(_bind_parts(recorder, end, _aliases(recorder, leaves)))
    return result


def _hook_node(recorder: Recorder, kind: str, owner: fx.Node, module: nn.Module, value: tuple[Any, ...]) -> Any:
    """Run hooks of one kind on ``value`` and record them; returns what they leave of it."""
    function, plain_call = _KINDS[kind]
    nested, leaves = Nested.of(value)
    node = recorder._create(
        function, (owner, recorder.to_fx(nested), *recorder.to_fx(tuple(leaves))), {}, "call_function"
    )
    with recorder.paused():
        result = plain_call(module, *nested.build(to_plain(leaves)))
    nested, leaves = Nested.of(result)
    return nested.build(_bind_parts(recorder, node, leaves))


def _begin_backward(recorder: Recorder, owner: fx.Node, args: tuple[Any, ...]) -> tuple[fx.Node, tuple[Any, ...]]:
    """Only this module reads the tensors that its backward hooks are attached to: they are new ones."""
    nested, leaves = Nested.of(args)
    node = recorder._create(
        runtime.begin_backward_hooks,
        (owner, recorder.to_fx(nested), *recorder.to_fx(tuple(leaves))),
        {},
        "call_function",
    )
    handle = recorder._create(operator.getitem, (node, 0), {}, "call_function")
    handle.meta["val"] = None
    parts = _bind_parts(recorder, node, _aliases(recorder, leaves), first=1)
    return handle, nested.build(parts)


def _aliases(recorder: Recorder, leaves: list[Any]) -> list[Any]:
    with recorder.paused():
        return [leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _bind_parts(recorder: Recorder, node: fx.Node, leaves: list[Any], first: int = 0) -> list[Any]:
    """Make the tensors among ``leaves`` the parts of ``node``."""
    for index, leaf in enumerate(leaves, first):
        if isinstance(leaf, torch.Tensor):
            part = recorder._create(operator.getitem, (node, index), {}, "call_function")
            recorder.remember(leaf, part)
    node.meta["val"] = (None,) * first + tuple(recorder.spec_of(leaf) for leaf in leaves)
    return leaves


def _only_weight_hooks(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._backward_hooks or module._backward_pre_hooks) and all(
        type(hook).__name__ in _WEIGHT_HOOKS for hook in module._forward_pre_hooks.values()
    )
