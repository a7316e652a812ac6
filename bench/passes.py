"""Seconds of each pass on a synthetic transformer graph: ``python -m bench.passes [nodes ...]``.

The graph is written down, not recorded, so that only the passes are measured. One thread.
"""

from __future__ import annotations

import operator
import sys
import time

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ampfx.context import ConversionContext
from ampfx.dtypes import Region, TensorSpec
from ampfx.ops import canonical_op
from ampfx.passes import DEFAULT_PASSES, PassManager
from ampfx.passes.base import Pass

_B, _T, _D, _H = 4, 64, 64, 4


class _Writer:
    """Writes a canonical graph node by node."""

    def __init__(self) -> None:
        self.graph, self.root = Graph(), nn.Module()
        self.storage = 0
        self.parameter = nn.Parameter(torch.empty(1))

    def note(
        self, node: Node, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, base: Node | None = None
    ) -> Node:
        if base is None:
            self.storage += 1
        storage = self.storage if base is None else base.meta["val"].storage
        spec = TensorSpec(dtype, shape, True, torch.device("cpu"), storage)
        node.meta.update(
            op=canonical_op(node), val=spec, region=Region(), module_path="layer", source="model.py:1"
        )
        return node

    def weight(self, *shape: int) -> Node:
        name = f"w{self.storage}"
        self.root.register_parameter(name, self.parameter)
        return self.note(self.graph.get_attr(name), shape)

    def call(
        self, target: object, *args: object, shape: tuple[int, ...] = (_B, _T, _D), base: Node | None = None
    ) -> Node:
        return self.note(self.graph.call_function(target, args), shape, base=base)  # type: ignore[arg-type]

    def method(self, name: str, *args: object, shape: tuple[int, ...], base: Node | None = None) -> Node:
        return self.note(self.graph.call_method(name, args), shape, base=base)  # type: ignore[arg-type]

    def layer(self, x: Node) -> Node:
        """A pre-norm layer of 46 nodes, half of them parameters and views."""
        heads = (_B, _H, _T, _D // _H)
        z = self.call(torch.nn.functional.layer_norm, x, (_D,), self.weight(_D), self.weight(_D))
        parts = []
        for _ in range(3):
            p = self.call(torch._C._nn.linear, z, self.weight(_D, _D), self.weight(_D))
            p = self.method("view", p, _B, _T, _H, _D // _H, shape=(_B, _T, _H, _D // _H), base=p)
            parts.append(self.method("transpose", p, 1, 2, shape=heads, base=p))
        q, k, v = parts
        k = self.method("transpose", k, 2, 3, shape=(_B, _H, _D // _H, _T), base=k)
        scores = self.call(torch.matmul, q, k, shape=(_B, _H, _T, _T))
        scores = self.call(operator.mul, scores, 0.25, shape=(_B, _H, _T, _T))
        scores = self.call(torch.softmax, scores, -1, shape=(_B, _H, _T, _T))
        scores = self.call(torch.nn.functional.dropout, scores, 0.1, shape=(_B, _H, _T, _T))
        y = self.call(torch.matmul, scores, v, shape=heads)
        y = self.method("transpose", y, 1, 2, shape=(_B, _T, _H, _D // _H), base=y)
        y = self.method("reshape", y, _B, _T, _D, shape=(_B, _T, _D))
        y = self.call(torch._C._nn.linear, y, self.weight(_D, _D), self.weight(_D))
        x = self.call(operator.add, x, y)
        z = self.call(torch.nn.functional.layer_norm, x, (_D,), self.weight(_D), self.weight(_D))
        wide = (_B, _T, 4 * _D)
        h = self.call(torch._C._nn.linear, z, self.weight(4 * _D, _D), self.weight(4 * _D), shape=wide)
        h = self.call(torch._C._nn.gelu, h, shape=wide)
        h = self.call(torch.nn.functional.dropout, h, 0.1, shape=wide)
        h = self.call(torch._C._nn.linear, h, self.weight(_D, 4 * _D), self.weight(_D))
        return self.call(operator.add, x, h)


def transformer(num_nodes: int) -> GraphModule:
    """A stack of layers with about ``num_nodes`` nodes."""
    writer = _Writer()
    x = writer.note(writer.graph.placeholder("x"), (_B, _T, _D))
    while len(writer.graph.nodes) < num_nodes:
        x = writer.layer(x)
    out = writer.graph.output((x,))
    out.meta.update(op="", val=None)
    return GraphModule(writer.root, writer.graph)


def main(sizes: list[int]) -> None:
    """Print one line per pass and size."""
    torch.set_num_threads(1)
    for size in sizes:
        for policy in ("autocast", "relaxed"):
            gm = transformer(size)
            count = len(gm.graph.nodes)
            print(f"{count} nodes, {policy}, one thread, torch {torch.__version__}")

            def show(step: Pass, _: GraphModule, changed: bool, seconds: float) -> None:
                print(f"  {step.name:<16} {seconds:7.3f} s{'  (changed)' if changed else ''}")

            start = time.perf_counter()
            PassManager(DEFAULT_PASSES, show).run(gm, ConversionContext(policy=policy))  # type: ignore[arg-type]
            total = time.perf_counter() - start
            casts = sum(1 for node in gm.graph.nodes if node.meta.get("cast"))
            print(f"  {'all':<16} {total:7.3f} s, {casts} casts\n")


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [10_000, 50_000])
