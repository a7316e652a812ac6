"""The loss scale of a graph that a compiler traces.

A compiler knows the tensors that are inputs of its graph. So S, 1/S and the overflow flag become inputs
of the graph that a backend hands on, and an object made of them inside the graph stands for the module's
:class:`ampfx.loss_scale.ModuleScale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampfx.loss_scale import ModuleScale

PER_DEVICE = 4


@dataclass(frozen=True)
class TracedReplica:
    """S, 1/S, the number one and the flag on one device."""

    scale: Tensor
    inv_scale: Tensor
    one: Tensor
    flag: Tensor


class TracedScale:
    """What the scaling functions ask of a loss scale, answered with the inputs of a graph."""

    traced = True

    def __init__(self, devices: Sequence[torch.device], *tensors: Tensor) -> None:
        starts = range(0, len(tensors), PER_DEVICE)
        replicas = (TracedReplica(*tensors[start : start + PER_DEVICE]) for start in starts)
        self._replicas = dict(zip(devices, replicas, strict=True))

    def replica(self, device: torch.device) -> TracedReplica:
        """S and 1/S on ``device``."""
        return self._replicas[device]

    def scale_for(self, device: torch.device) -> Tensor:
        """S on ``device``."""
        return self._replicas[device].scale

    def inv_scale_for(self, device: torch.device) -> Tensor:
        """1/S on ``device``."""
        return self._replicas[device].inv_scale

    def flag_for(self, device: torch.device) -> Tensor:
        """The overflow flag on ``device``."""
        return self._replicas[device].flag

    def prepare_traced(self, device: torch.device) -> bool:
        """Nothing is left to prepare."""
        return device in self._replicas

    def note_backward(self, device: torch.device) -> None:
        """A traced backward is not counted one by one."""


def scale_inputs(scale: ModuleScale, devices: Sequence[torch.device]) -> list[Tensor]:
    """The tensors that a graph takes after its other inputs."""
    found: list[Tensor] = []
    for device in devices:
        replica = scale.replica(device)
        found += [replica.scale, replica.inv_scale, replica.one, scale.flag_for(device)]
    return found


def lift_scale(graph: fx.Graph, attribute: str, devices: Sequence[torch.device]) -> bool:
    """Make the loss scale that a graph reads an object made of further inputs; False if it reads none."""
    readers = [node for node in graph.nodes if node.op == "get_attr" and node.target == attribute]
    if not readers:
        return False
    last: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            last = node
    inputs: list[fx.Node] = []
    for index in range(len(devices) * PER_DEVICE):
        with graph.inserting_after(inputs[-1] if inputs else last) if last is not None else graph.inserting_before():
            inputs.append(graph.placeholder(f"ampfx_scale_{index}"))
        inputs[-1]._dynamo_source = None
    with graph.inserting_after(inputs[-1]):
        made = graph.call_function(TracedScale, (tuple(devices), *inputs))
    for node in readers:
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return True
