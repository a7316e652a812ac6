"""The pass that puts the loss scale into the graph; :mod:`ampfx.scale_nodes` says where and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from ampfx.context import ConversionContext
from ampfx.loss_scale import as_module_scale
from ampfx.passes.base import Pass
from ampfx.scale_nodes import embed_loss_scale


@dataclass(frozen=True)
class EmbedLossScale(Pass):
    """Multiply gradients by S where they enter the graph and by 1/S where they leave it.

    Reads: ``ctx.loss_scale``, ``meta["val"]``, ``meta["region"]``, inserted casts.
    Writes: ``scale`` and ``unscale`` nodes; the attribute ``_ampfx_loss_scale`` that they read.
    Ensures: every gradient that leaves is the float32 run's, whatever S is; without a loss scale, nothing.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        part = as_module_scale(ctx.loss_scale)
        if part is None or not part.enabled:
            return False
        return embed_loss_scale(gm, part)
