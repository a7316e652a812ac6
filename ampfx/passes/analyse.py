"""The pass that finds out what the others need to know."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from ampfx.analysis import analyse_graph
from ampfx.passes.base import ConversionContext, Pass


@dataclass(frozen=True)
class Analyse(Pass):
    """Write down which values are managed, share memory, are written in place and carry gradients.

    Reads: ``meta["op"]``, ``meta["val"]``, ``meta["region"]``.
    Writes: ``meta["facts"]``.
    Ensures: every node has facts; they describe the graph as recorded, in float32.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        analyse_graph(gm)
        return False
