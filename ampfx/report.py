"""What runs in which precision in a converted graph, and why: as data, and as text.

``build_report`` reads a graph after its passes and keeps no reference to it, so a report can be stored,
compared and sent. ``str(report)`` is made for a terminal (:mod:`ampfx.report_text`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from ampfx.cast_report import CastReport, cast_reports
from ampfx.context import ConversionContext
from ampfx.coverage import Coverage, PartReport
from ampfx.dtypes import short_name
from ampfx.explanation import Explanation, UnknownNameError, explain
from ampfx.graph_utils import op_of
from ampfx.loss_scale import LossScale, ModuleScale
from ampfx.module_tree import ModuleReport, module_reports
from ampfx.node_report import NodeReport, NodeTable, node_table
from ampfx.printing import format_graph
from ampfx.products import graph_flops
from ampfx.report_text import format_report

__all__ = [
    "CastReport",
    "Coverage",
    "Explanation",
    "ModuleReport",
    "NodeReport",
    "NodeTable",
    "PartReport",
    "Report",
    "UnknownNameError",
    "build_report",
    "explain",
]


@dataclass(frozen=True)
class Report:
    """One converted graph, or all graphs of a model that is converted in parts.

    Args:
        title: the model's name.
        dtype: the low dtype (``bf16``, ``f16``).
        device: type of the device whose rules hold.
        policy: name of the policy.
        num_overrides: overrides of the policy.
        objective: what the assignment minimised.
        mode: ``train`` or ``eval``.
        inputs: the example inputs, in words.
        loss_scale: the loss scale, in words.
        coverage: share of the matrix-product FLOPs that runs in graphs, with the shares of modules and
            parameters and the reasons for the rest.
        nodes: all nodes, by position or name.
        cast_list: each conversion.
        modules: nodes and casts of each module and what is below it, outermost first.
        unlisted: ops that stand in no list, with the names of their nodes.
        opaque: custom functions, operators and hooks, which run in float32, with the names of their nodes.
        warnings: what the passes found worth a warning.
        notes: further remarks.
        graph_text: the printed graph.
        parts: the parts by path; a model captured whole is one, ``""``.
    """

    title: str
    dtype: str
    device: str
    policy: str
    num_overrides: int
    objective: str
    mode: str
    inputs: str
    loss_scale: str
    coverage: Coverage
    nodes: NodeTable
    cast_list: tuple[CastReport, ...]
    modules: tuple[ModuleReport, ...]
    unlisted: Mapping[str, tuple[str, ...]]
    opaque: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    graph_text: str
    parts: Mapping[str, PartReport] = field(default_factory=dict)

    @property
    def casts(self) -> int:
        """Casts in one forward pass: inserted ones, and those fused into scaling nodes."""
        return sum(cast.how in ("cast", "fused") for cast in self.cast_list)

    @property
    def cast_bytes(self) -> int:
        """Bytes that these casts read and write, for the example inputs."""
        return sum(cast.num_bytes for cast in self.cast_list if cast.how in ("cast", "fused"))

    @property
    def dtype_arguments(self) -> int:
        """Ops that convert while they read because they were told a dtype."""
        return sum(cast.how == "dtype argument" for cast in self.cast_list)

    @property
    def author_casts(self) -> int:
        """Casts that the model's author wrote and that do convert."""
        return sum(cast.how == "author" for cast in self.cast_list)

    @property
    def raised(self) -> tuple[NodeReport, ...]:
        """Operations that run more precisely than under ``torch.autocast``."""
        return tuple(node for node in self.nodes if node.raised)

    @property
    def lowered(self) -> tuple[NodeReport, ...]:
        """Operations that run less precisely than under ``torch.autocast``."""
        return tuple(node for node in self.nodes if node.lowered)

    def count_by_dtype(self) -> dict[str, int]:
        """Number of operations by the dtype decided for them; ``-`` counts those left as they are."""
        return dict(Counter(node.decided for node in self.nodes if node.role == "op").most_common())

    def count_by_class(self) -> dict[str, int]:
        """Number of operations by class, those left as they are not counted."""
        decided = (node.cls for node in self.nodes if node.role == "op" and node.decided != "-")
        return dict(Counter(decided).most_common())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "title": self.title,
            "dtype": self.dtype,
            "device": self.device,
            "policy": self.policy,
            "num_overrides": self.num_overrides,
            "objective": self.objective,
            "mode": self.mode,
            "inputs": self.inputs,
            "loss_scale": self.loss_scale,
            "coverage": self.coverage.to_dict(),
            "parts": [part.to_dict() for part in self.parts.values()],
            "casts": self.casts,
            "cast_bytes": self.cast_bytes,
            "dtype_arguments": self.dtype_arguments,
            "author_casts": self.author_casts,
            "by_dtype": self.count_by_dtype(),
            "by_class": self.count_by_class(),
            "raised": [node.name for node in self.raised],
            "lowered": [node.name for node in self.lowered],
            "unlisted": {op: list(names) for op, names in self.unlisted.items()},
            "opaque": {op: list(names) for op, names in self.opaque.items()},
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "nodes": [node.to_dict() for node in self.nodes],
            "cast_list": [cast.to_dict() for cast in self.cast_list],
            "modules": [module.to_dict() for module in self.modules],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return format_report(self)


def build_report(
    gm: GraphModule,
    ctx: ConversionContext,
    *,
    title: str,
    mode: str = "train",
    inputs: str = "",
    notes: Sequence[str] = (),
) -> Report:
    """The report of a converted graph.

    Args:
        gm: the graph after its passes.
        ctx: the conversion's settings and the passes' notes.
        title: the model's name.
        mode: ``train`` or ``eval``.
        inputs: the example inputs, in words.
        notes: further remarks for the reader.
    """
    nodes = node_table(gm)
    casts = cast_reports(gm)
    operations = sum(node.role == "op" for node in nodes)
    return Report(
        title=title,
        dtype=short_name(ctx.low_dtype),
        device=ctx.device_type,
        policy=ctx.policy.name,
        num_overrides=len(ctx.policy.overrides),
        objective=ctx.objective,
        mode=mode,
        inputs=inputs,
        loss_scale=describe_loss_scale(ctx.loss_scale),
        coverage=Coverage(1.0),
        nodes=nodes,
        cast_list=casts,
        modules=module_reports(nodes, casts),
        unlisted=_unlisted(gm, ctx, nodes),
        opaque=_by_op(node for node in nodes if node.kind == "opaque" and node.role == "op"),
        warnings=tuple(dict.fromkeys(ctx.warnings)),
        notes=tuple(notes),
        graph_text=format_graph(gm),
        parts={"": PartReport("", "captured", operations=operations, flops=graph_flops(gm.graph))},
    )


def _unlisted(gm: GraphModule, ctx: ConversionContext, nodes: NodeTable) -> dict[str, tuple[str, ...]]:
    """Ops in no list; the context may serve several graphs, of which this is one."""
    ops: dict[str, str] = {node.name: op_of(node) for node in gm.graph.nodes if _is_call(node)}
    noted = {name for op, names in ctx.unlisted.items() for name in names if ops.get(name) == op}
    return _by_op(node for node in nodes if node.name in noted or node.kind == "unlisted")


def _is_call(node: Node) -> bool:
    return node.op in ("call_function", "call_method")


def _by_op(nodes: Iterable[NodeReport]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(node.op, []).append(node.name)
    return {op: tuple(names) for op, names in found.items()}


def describe_loss_scale(loss_scale: Any) -> str:
    """A loss scale in words."""
    group = loss_scale.group if isinstance(loss_scale, ModuleScale) else loss_scale
    if not isinstance(group, LossScale):
        return "none"
    if group.dynamic:
        return "dynamic"
    return f"static {group.get():g}" if group.enabled else "disabled"
