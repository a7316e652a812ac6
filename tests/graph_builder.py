"""Canonical graphs for the passes' tests, recorded from a function or module on real tensors.

A few lines of the idea behind ``ampfx.capture``, so that the passes can be tested without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from ampfx.context import ConversionContext
from ampfx.dtypes import Region, TensorSpec
from ampfx.graph_utils import is_impure
from ampfx.ops import canonical_op
from ampfx.passes import Analyse, AssignPrecision, FoldCasts, InsertCasts, PassManager, VerifyDtypes

PASSES = (Analyse(), AssignPrecision(), InsertCasts(), FoldCasts(), VerifyDtypes(fake=True))


class Builder(TorchFunctionMode):
    """Records every torch call as a node."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root, self.graph = root, fx.Graph()
        self.nodes: dict[int, Node] = {}
        self.alive: list[Any] = []
        self.storages: dict[int, int] = {}
        self.grad, self.opaque = True, 0
        self.autocast: bool | None = None
        self.held = {id(t): n for n, t in (*root.named_parameters(), *root.named_buffers())}

    def describe(self, node: Node, value: Any) -> None:
        node.meta.update(
            op=canonical_op(node),
            val=self.spec(value),
            module_path="",
            module_types=(),
            module_stack=(),
            source="",
            region=Region(self.grad, self.autocast, self.opaque),
        )
        self.remember(node, value)

    def remember(self, node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.nodes[id(value)] = node
            self.alive.append(value)

    def spec(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            address = value.untyped_storage().data_ptr() or id(value)
            storage = self.storages.setdefault(address, len(self.storages) + 1)
            return TensorSpec(value.dtype, tuple(value.shape), value.requires_grad, value.device, storage)
        if isinstance(value, tuple | list):
            return tuple(self.spec(item) for item in value)
        return value

    def to_fx(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                if id(value) not in self.held:
                    self.held[id(value)] = f"constant{len(self.held)}"
                    self.root.register_buffer(self.held[id(value)], value, persistent=False)
                node = self.graph.get_attr(self.held[id(value)])
                self.describe(node, value)
                node.meta["region"] = Region()
            return self.nodes[id(value)]
        if isinstance(value, tuple | list):
            items = [self.to_fx(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {key: self.to_fx(item) for key, item in value.items()}
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("dim", "size", "is_floating_point"):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            fx_args, fx_kwargs = self.to_fx(args), self.to_fx(kwargs)
            if getattr(torch.Tensor, name, None) is func and not name.startswith("__"):
                node = self.graph.call_method(name, fx_args, fx_kwargs)
            elif getattr(torch.Tensor, name, None) is func:
                import operator

                target = getattr(operator, name.replace("__r", "__"), None) or getattr(operator, name)
                node = self.graph.call_function(target, fx_args, fx_kwargs)
            else:
                node = self.graph.call_function(func, fx_args, fx_kwargs)
            value = func(*args, **kwargs)
            self.describe(node, value)
            if isinstance(value, tuple | list):
                import operator

                for index, item in enumerate(value):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    self.describe(part, item)
            return value

    @contextlib.contextmanager
    def region(
        self, *, grad: bool | None = None, autocast: bool | None = None, opaque: int = 0
    ) -> Iterator[None]:
        """Mark what is recorded meanwhile as a region of the author's."""
        saved = self.grad, self.autocast, self.opaque
        if grad is not None:
            self.switch_grad(grad)
        self.autocast = autocast if autocast is not None else self.autocast
        self.opaque = opaque
        yield
        if grad is not None:
            self.switch_grad(saved[0])
        self.grad, self.autocast, self.opaque = saved

    def switch_grad(self, grad: bool) -> None:
        self.describe(self.graph.call_function(torch._C._set_grad_enabled, (grad,)), None)
        torch._C._set_grad_enabled(grad)
        self.grad = grad


# The builder of the recording that runs, for functions that mark regions.
current: list[Builder] = []


def build(function: Any, *inputs: Any) -> GraphModule:
    """The canonical graph of a module or function on these inputs."""
    root = function if isinstance(function, nn.Module) else nn.Module()
    builder = Builder(root)
    for index, value in enumerate(inputs):
        node = builder.graph.placeholder(f"x{index}" if len(inputs) > 1 else "x")
        builder.describe(node, value)
    current.append(builder)
    try:
        forward = function.forward if isinstance(function, nn.Module) else function
        with builder:
            result = forward(*inputs)
    finally:
        current.pop()
    node = builder.graph.output(builder.to_fx(result))
    node.meta.update(op="", val=builder.spec(result))
    builder.graph.eliminate_dead_code(is_impure_node=is_impure)
    return GraphModule(root, builder.graph)


def convert(
    function: Any, *inputs: Any, low: torch.dtype = torch.bfloat16, device: str = "cpu", **options: Any
) -> GraphModule:
    """The graph after all passes, verified."""
    gm = build(function, *inputs)
    PassManager(PASSES).run(gm, ConversionContext(low_dtype=low, device_type=device, **options))
    return gm


def decisions(gm: GraphModule) -> dict[str, torch.dtype | None]:
    """Decided dtype by node name, inserted casts left out."""
    return {
        node.name: node.meta["decision"].dtype
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
        and not node.meta.get("cast")
        and "decision" in node.meta
    }


def casts(gm: GraphModule) -> list[Node]:
    """The inserted casts."""
    return [node for node in gm.graph.nodes if node.meta.get("cast")]
