"""The pass that changes nothing and complains.

1. Every edge: what a node reads has the dtype that the node needs (:mod:`ampfx.argument_needs`), derived
   again from the rules, not from what an earlier pass noted.
2. Every node: the dtype that torch's promotion gives it from these inputs is the one decided.
3. With ``fake=True`` the whole graph runs on fake tensors: what torch itself computes is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import analyse_graph, facts_of, is_tuple_read
from ampfx.argument_needs import NATIVE_OPS, Need, is_opaque, reads, runs_composite
from ampfx.context import ConversionContext
from ampfx.dtypes import long_name
from ampfx.errors import VerifyError
from ampfx.fake_run import fake_dtypes
from ampfx.ops import FACTORIES, LIKE_OPS
from ampfx.passes.base import Pass
from ampfx.promotion import inferred_dtype
from ampfx.rewriting import all_current_dtypes, current_float
from ampfx.rule_table import OpClass


@dataclass(frozen=True)
class VerifyDtypes(Pass):
    """Prove the dtype of every edge.

    Args:
        fake: also run the graph on fake tensors (about 0.2 ms a node).

    Reads: the graph, ``meta["val"]``, ``meta["decision"]``.
    Writes: nothing.
    Ensures: the graph's dtypes are what the decisions say, or VerifyError names node and edge.
    """

    fake: bool = False

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        analyse_graph(gm)
        for node in gm.graph.nodes:
            if node.op == "output":
                self._output(node, ctx)
            elif node.op in ("call_function", "call_method"):
                if node.meta.get("cast"):
                    self._cast(node)
                elif "decision" in node.meta:
                    self._edges(node, ctx)
                    self._result(node, ctx)
        if self.fake:
            self._fake(gm)
        return False

    def _edges(self, node: Node, ctx: ConversionContext) -> None:
        decision, rule = node.meta["decision"], ctx.rule_of(node)
        for value, need in reads(node, rule, decision.dtype):
            wanted: torch.dtype | None = None
            if need is Need.FLOAT32:
                wanted = torch.float32
            elif need is Need.LOW:
                wanted = ctx.low_dtype
            elif need in (Need.SAME, Need.SATURATE) and not node.meta.get("given_dtype"):
                wanted = decision.dtype
            found = all_current_dtypes(value)
            if wanted is not None and not facts_of(value).tuple_valued and found != [wanted]:
                raise VerifyError(_edge_message(node, value, found, wanted))

    def _result(self, node: Node, ctx: ConversionContext) -> None:
        facts, rule, decision = facts_of(node), ctx.rule_of(node), node.meta["decision"]
        if decision.dtype is None or not facts.managed or facts.tuple_valued:
            return
        found = current_float(node)
        if found != decision.dtype:
            raise VerifyError(f"{_where(node)}: decided {long_name(decision.dtype)}, noted as {found}.")
        told = node.kwargs.get("dtype")
        if (
            node.meta.get("given_dtype")
            or told is not None
            or decision.kind == "author"
            or is_opaque(facts, rule)
        ):
            return
        if is_tuple_read(node) or runs_composite(node, rule):
            return
        natural = (
            facts.base in NATIVE_OPS or facts.base in LIKE_OPS or facts.base in FACTORIES or facts.in_place
        )
        if not natural and (rule is None or rule.cls in (OpClass.ALLOW, OpClass.DENY) or rule.keep):
            return  # all arguments have the dtype, that is what the edges proved
        promoted = inferred_dtype(node, facts, rule, current_float)
        if promoted != decision.dtype:
            raise VerifyError(
                f"{_where(node)}: torch computes it in {long_name(promoted)}, decided was "
                f"{long_name(decision.dtype)}. Reason of the decision: {decision.reason}"
            )

    @staticmethod
    def _cast(node: Node) -> None:
        dtype = node.args[1]
        if current_float(node) != dtype:
            raise VerifyError(f"{_where(node)}: casts to {dtype}, noted as {current_float(node)}.")

    @staticmethod
    def _output(node: Node, ctx: ConversionContext) -> None:
        for value, _ in reads(node, None, None):
            found = all_current_dtypes(value)
            if not facts_of(value).tuple_valued and found != [ctx.output_dtype]:
                raise VerifyError(_edge_message(node, value, found, ctx.output_dtype))

    @staticmethod
    def _fake(gm: GraphModule) -> None:
        for node, dtypes in fake_dtypes(gm):
            noted = all_current_dtypes(node)
            if dtypes != noted:
                inputs = (f"{v.name}: {_names(all_current_dtypes(v))}" for v in node.all_input_nodes)
                raise VerifyError(
                    f"{_where(node)}: torch gives {_names(dtypes)}, noted as {_names(noted)}. "
                    f"It reads {', '.join(inputs)}."
                )


def _edge_message(node: Node, value: Node, found: list[torch.dtype], wanted: torch.dtype) -> str:
    return (
        f"{_where(node)} reads {value.name} in {_names(found)} and needs {long_name(wanted)}. "
        "Run InsertCasts after every pass that changes decisions or edges."
    )


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(long_name(dtype) for dtype in dtypes) or "no tensor"


def _where(node: Node) -> str:
    place = [text for text in (node.meta.get("module_path"), node.meta.get("source")) if text]
    return f"{node.name} ({node.meta.get('op') or node.op}{', ' + ', '.join(place) if place else ''})"
