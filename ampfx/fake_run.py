"""Run a graph on tensors that have dtype and shape but no values."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ampfx.analysis import tensor_leaves
from ampfx.dtypes import TensorSpec
from ampfx.graph_utils import get_attribute


def fake_dtypes(gm: GraphModule) -> Iterator[tuple[Node, list[torch.dtype]]]:
    """The dtypes of each node's tensors as torch computes them.

    Nodes that cannot run without values (user code, data-dependent sizes) are taken as they are noted.
    """
    values: dict[Node, Any] = {}
    last_use: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for value in node.all_input_nodes:
            last_use[value] = node
    grad = torch.is_grad_enabled()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for node in gm.graph.nodes:
                if node.op == "output":
                    return
                ran, values[node] = _run_node(gm, node, values, mode)
                if ran:
                    yield node, _dtypes(values[node])
                for value in node.all_input_nodes:
                    if last_use[value] is node:
                        values.pop(value, None)
    finally:
        torch._C._set_grad_enabled(grad)


def _run_node(gm: GraphModule, node: Node, values: dict[Node, Any], mode: FakeTensorMode) -> tuple[bool, Any]:
    noted = node.meta.get("val")
    if node.op == "placeholder":
        return False, _made(noted)
    if node.op == "get_attr":
        value = get_attribute(gm, str(node.target))
        return False, mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
    if str(node.meta.get("op", "")).startswith("ampfx.runtime") and not node.meta.get("cast"):
        return False, _made(noted)
    args = map_arg(node.args, lambda value: values.get(value))
    kwargs = map_arg(node.kwargs, lambda value: values.get(value))
    try:
        if node.op == "call_method":
            return True, getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target is not operator.getitem, node.target(*args, **kwargs)
    except Exception:  # no value to look at: the noted specs stand in
        return False, _made(noted)


def _made(noted: Any) -> Any:
    if isinstance(noted, TensorSpec):
        made = torch.empty(noted.shape, dtype=noted.dtype, device=noted.device)
        return made.requires_grad_() if noted.requires_grad and torch.is_grad_enabled() else made
    if isinstance(noted, tuple | list):
        return [_made(item) for item in noted] if isinstance(noted, list) else tuple(map(_made, noted))
    return noted


def _dtypes(value: Any) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    if isinstance(value, tuple | list):
        return [dtype for item in value for dtype in _dtypes(item)]
    return [spec.dtype for spec in tensor_leaves(value)]
