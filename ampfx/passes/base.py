"""What a pass is, and how passes run.

A pass is a frozen dataclass whose fields are its options. ``run`` works in place on the captured graph
and returns whether it changed anything. It never assigns to a submodule or a parameter, and leaves
lint, dead-code elimination and recompilation to the manager. Called with a graph alone, as in a
``torch.fx`` ``PassManager``, a pass takes the settings that an earlier pass left on the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from ampfx.context import ConversionContext
from ampfx.graph_utils import is_impure

__all__ = ["ConversionContext", "Hook", "Pass", "PassManager", "context_of"]

_CONTEXT_KEY = "ampfx_context"


def context_of(gm: GraphModule) -> ConversionContext:
    """The settings that the passes of this graph share."""
    context = gm.meta.get(_CONTEXT_KEY)
    if context is None:
        context = gm.meta[_CONTEXT_KEY] = ConversionContext()
    assert isinstance(context, ConversionContext)
    return context


@dataclass(frozen=True)
class Pass:
    """One step on the way from the captured to the converted graph.

    Reads: what earlier passes must have written.
    Writes: what this pass adds.
    Ensures: what holds afterwards.
    """

    @property
    def name(self) -> str:
        """The name in printed stages."""
        return type(self).__name__

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        """Do the work in place; True if the graph changed."""
        raise NotImplementedError

    def __call__(self, gm: GraphModule) -> PassResult:
        """Run alone, as ``torch.fx`` calls a pass."""
        changed = self.run(gm, context_of(gm))
        if changed:
            tidy(gm)
            gm.recompile()
        return PassResult(gm, changed)


# Called after each pass: the pass, the graph, whether it changed, and the seconds it took.
Hook: TypeAlias = Callable[[Pass, GraphModule, bool, float], None]


def tidy(gm: GraphModule) -> None:
    """Remove what nothing reads, then check the graph's form."""
    gm.graph.eliminate_dead_code(is_impure_node=is_impure)
    gm.graph.lint()


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Args:
        passes: the passes.
        hook: called between passes; printing and timing use it.
    """

    passes: Sequence[Pass]
    hook: Hook | None = None

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        """Run all passes on a graph in place; code is generated once, at the end."""
        gm.meta[_CONTEXT_KEY] = ctx
        any_change = False
        for step in self.passes:
            start = time.perf_counter()
            changed = step.run(gm, ctx)
            if changed:
                tidy(gm)
            any_change |= changed
            if self.hook is not None:
                self.hook(step, gm, changed, time.perf_counter() - start)
        if any_change:
            gm.recompile()
        return any_change
