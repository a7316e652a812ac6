"""The report as text for a terminal of 80 columns.

From the general to the particular: what was asked for; how many operations run in which dtype; the casts
and what they move; the float32 nodes by reason, largest group first; where the result differs from
``torch.autocast``; ops that nobody knows; warnings; the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ampfx.node_report import NodeReport, NodeTable
from ampfx.text_layout import byte_count, cut, listed, paragraph, plural

if TYPE_CHECKING:
    from ampfx.coverage import PartReport
    from ampfx.module_tree import ModuleReport
    from ampfx.report import Report

MAX_REASONS = 10
MAX_NODES = 5
MAX_MODULES = 20
MAX_PARTS = 8


def format_report(report: Report) -> str:
    """The report's text."""
    parts = (
        _header(report),
        _parts(report),
        _operations(report),
        _casts(report),
        _float32(report),
        _differences(report),
        _unknown(report),
        _remarks(report),
        _modules(report),
    )
    sections = ["\n".join(lines) for lines in map(list, parts) if lines]
    return "\n\n".join(sections)


def _header(report: Report) -> Iterator[str]:
    in_parts = _is_in_parts(report)
    kind = "mode, converted in parts" if in_parts else "graph"
    yield from paragraph(f"Mixed precision of {report.title}, {report.mode} {kind}", hang=2)
    overrides = f" with {plural(report.num_overrides, 'override')}" if report.num_overrides else ""
    yield from paragraph(
        f"low dtype {report.dtype} on {report.device}, policy {report.policy}{overrides}, "
        f"objective {report.objective}, loss scale {report.loss_scale}",
        2,
    )
    if report.inputs:
        yield from paragraph(f"recorded with {report.inputs}", 2, 4)
    if in_parts:
        share = report.coverage
        yield from paragraph(
            f"{share.flops:.1%} of the matrix-product FLOPs run converted, with {share.modules:.1%} of the modules "
            f"and {share.parameters:.1%} of the parameters",
            2,
        )
    else:
        yield "  100% of the operations stand in the graph"


def _is_in_parts(report: Report) -> bool:
    return any(part.state != "captured" for part in report.parts.values())


def _parts(report: Report) -> Iterator[str]:
    """What is no graph and why, then the largest graphs."""
    if not _is_in_parts(report):
        return
    total = sum(part.flops for part in report.parts.values()) or 1
    captured = [part for part in report.parts.values() if part.state == "captured"]
    yield f"Parts: {plural(len(captured), 'graph')}, {len(report.parts) - len(captured)} without"
    reasons: dict[tuple[str, str], list[PartReport]] = {}
    for part in report.parts.values():
        if part.state != "captured":
            reasons.setdefault((part.state, part.reason), []).append(part)
    for (state, reason), parts in reasons.items():
        names = listed((part.path or "the model itself" for part in parts), 3)
        share = sum(part.flops for part in parts) / total
        told = "" if state == "not called yet" else f" {reason}"
        yield from paragraph(f"- {state} ({share:.1%} of the FLOPs): {names}.{told}", 2, 4)
    largest = sorted(captured, key=lambda part: -part.flops)[:MAX_PARTS]
    for part in largest:
        calls = f", {plural(part.calls, 'call')}" if part.calls > 1 else ""
        share = part.flops / total
        yield from paragraph(f"- graph ({share:.1%}): {part.path}, {plural(part.operations, 'operation')}{calls}", 2, 4)
    yield from _left_out(len(captured) - len(largest), "smaller graph")


def _operations(report: Report) -> Iterator[str]:
    by_dtype = report.count_by_dtype()
    untouched = by_dtype.pop("-", 0)
    counts = [f"{count} {dtype}" for dtype, count in by_dtype.items()]
    if untouched:
        counts.append(f"{untouched} untouched (sizes, integers, other dtypes)")
    total = sum(node.role == "op" for node in report.nodes)
    yield f"Operations: {total}"
    yield from paragraph(f"dtype  {', '.join(counts) or 'none'}", 2, 9)
    classes = [f"{count} {cls}" for cls, count in report.count_by_class().items()]
    yield from paragraph(f"class  {', '.join(classes) or 'none'}", 2, 9)


def _casts(report: Report) -> Iterator[str]:
    yield f"Casts in one forward pass: {report.casts}, {byte_count(report.cast_bytes)} read and written"
    counts: dict[str, list[int]] = {}
    for cast in report.cast_list:
        if cast.how in ("cast", "fused"):
            back = cast.content == "back to float32"
            count = counts.setdefault(cast.content if back else f"{cast.content} to {cast.to_dtype}", [0, 0])
            count[0] += 1
            count[1] += cast.num_bytes
    for label, (number, size) in sorted(counts.items(), key=lambda item: -item[1][1]):
        yield f"  {number:5d}  {label:24s} {byte_count(size):>10s}"
    fused = sum(cast.how == "fused" for cast in report.cast_list)
    if fused:
        yield f"  {fused:5d}  of them fused into scaling nodes"
    if report.dtype_arguments:
        yield f"  {report.dtype_arguments:5d}  more convert while they read (dtype= arguments)"
    if report.author_casts:
        yield f"  {report.author_casts:5d}  more were written by the model's author"


def _float32(report: Report) -> Iterator[str]:
    groups: dict[tuple[str, str], list[NodeReport]] = {}
    for node in report.nodes:
        if node.is_float32:
            cause = report.nodes.get(node.cause)
            why = general_reason(cause) if cause is not None else ""
            groups.setdefault((general_reason(node), why), []).append(node)
    if not groups:
        yield "Nothing runs in float32."
        return
    yield f"Operations in float32, by reason: {sum(map(len, groups.values()))}"
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    for (reason, _), nodes in ordered[:MAX_REASONS]:
        yield from paragraph(f"{len(nodes):5d}  {reason}", 2, 9)
        yield from paragraph(_example(nodes, report.nodes), 9, 11)
    yield from _left_out(len(ordered) - MAX_REASONS, "more reason")


def general_reason(node: NodeReport) -> str:
    """The reason without the names of neighbours, so that nodes of like reason stand together."""
    if len(node.chain) < 2:
        return node.reason
    neighbour = node.chain[1].rpartition(":")[2]  # without the part it stands in
    for said, instead in (
        (f"reads {neighbour} in ", "reads a value in "),
        (f"one result of {neighbour}", "one result of an op in float32"),
        (f" as {neighbour} is:", " as what it reads is:"),
        (f" as its reader {neighbour} is:", " as its reader is:"),
    ):
        if said in node.reason:
            return node.reason.replace(said, instead)
    return node.reason


def _example(nodes: Sequence[NodeReport], table: NodeTable) -> str:
    first = nodes[0]
    text = f"e.g. {_placed(first)}"
    cause = table.get(first.cause)
    if cause is not None and cause.name != first.name and cause.kind != "cut":
        text += f", because of {cause.name}: {cause.reason}"
    return text


def _placed(node: NodeReport) -> str:
    place = ", ".join(item for item in (node.module_path, node.source) if item)
    return f"{node.name} ({place})" if place else node.name


def _differences(report: Report) -> Iterator[str]:
    raised, lowered = report.raised, report.lowered
    if raised:
        yield f"More precise than under torch.autocast: {len(raised)}"
        for node in raised[:MAX_NODES]:
            yield from paragraph(f"{_placed(node)}: {node.reason}", 2, 4)
        yield from _left_out(len(raised) - MAX_NODES, "more")
    if lowered:
        yield f"Less precise than under torch.autocast: {len(lowered)}"
        asked = [node.name for node in lowered if node.kind == "override"]
        chosen = [node.name for node in lowered if node.kind != "override"]
        if asked:
            yield from paragraph(f"{listed(asked, 8)}: overrides ask for it", 2, 4)
        why = "they only move values, and all that read them take them low"
        if report.policy != "autocast":
            why = f"policy {report.policy} allows it"
        if chosen:
            yield from paragraph(f"{listed(chosen, 8)}: {why}", 2, 4)


def _unknown(report: Report) -> Iterator[str]:
    yield from _ops("Ops in no list, run in the widest of their inputs", report.unlisted)
    yield from _ops("Code that cannot be looked into, run in float32", report.opaque)


def _ops(heading: str, ops: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if ops:
        yield f"{heading}: {len(ops)}"
        for op, names in ops.items():
            yield from paragraph(f"{op}: {listed(names)}", 2, 4)


def _remarks(report: Report) -> Iterator[str]:
    for heading, sentences in (("Warnings", report.warnings), ("Notes", report.notes)):
        if sentences:
            yield f"{heading}: {len(sentences)}"
            for sentence in sentences:
                yield from paragraph(f"- {sentence}", 2, 4)


def _modules(report: Report) -> Iterator[str]:
    shown = _largest(report.modules)
    if len(report.modules) < 2:
        return
    yield f"{'Module':44s}{'ops':>7s}{report.dtype:>7s}{'f32':>7s}{'casts':>7s}"
    for module in shown:
        name = module.path.rpartition(".")[2] or report.title
        label = cut(f"{'  ' * min(module.depth, 12)}{name}", 43)
        yield f"{label:44s}{module.nodes:7d}{module.low:7d}{module.float32:7d}{module.casts:7d}"
    yield from _left_out(len(report.modules) - len(shown), "smaller module")


def _largest(modules: Sequence[ModuleReport]) -> list[ModuleReport]:
    """The largest modules in their order; none stands there without those around it."""
    order = sorted(range(len(modules)), key=lambda i: (-modules[i].nodes, modules[i].depth, i))
    return [modules[index] for index in sorted(order[:MAX_MODULES])]


def _left_out(count: int, noun: str) -> Iterator[str]:
    if count > 0:
        yield f"  and {count} more" if noun == "more" else f"  and {plural(count, noun)}"
