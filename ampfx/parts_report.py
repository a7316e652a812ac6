"""One report over the graphs of a model that is converted in parts.

1. The parts are walked from the model downwards: a graph, Python code with parts below it, or not called yet.
2. Each graph gives a report of its own; names of nodes get the part's path (``encoder.0:linear``), and what
   is counted is added up.
3. Coverage weighs the parts: FLOPs of graphs from their nodes' shapes, those of Python code as they were
   counted in a run, those of parts that never ran in proportion to their matrices' elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ampfx.cast_report import CastReport
from ampfx.coverage import Coverage, PartReport
from ampfx.dtypes import short_name
from ampfx.explanation import Explanation, UnknownNameError, explain_nodes
from ampfx.graph_entry import GraphEntry
from ampfx.module_tree import module_reports
from ampfx.node_report import NodeReport, NodeTable
from ampfx.part_calls import PartCalls
from ampfx.parts import has_own_forward
from ampfx.products import graph_flops
from ampfx.report import Report, build_report, describe_loss_scale

if TYPE_CHECKING:
    from ampfx.converted import Conversion

NOT_CALLED = "it has not been called yet, so there is no graph of it"


@dataclass(frozen=True)
class _Part:
    """A converted module below the model, or the model itself."""

    path: str
    module: nn.Module
    conversion: Conversion
    entry: GraphEntry | None

    @property
    def state(self) -> Any:
        if self.entry is not None:
            return "captured"
        return "not called yet" if self.conversion.python_reason is None else "python"

    @property
    def reason(self) -> str:
        return "" if self.entry is not None else self.conversion.python_reason or NOT_CALLED


def report_in_parts(root: nn.Module, kind: type[nn.Module]) -> Report:
    """The report of a converted module that stays Python.

    Args:
        root: the converted module.
        kind: class of converted modules.
    """
    parts = list(_walk(root, kind, ""))
    reports = [(part, _part_report(part)) for part in parts if part.entry is not None]
    nodes = NodeTable([node for part, report in reports for node in _renamed_nodes(part.path, report.nodes)])
    casts = tuple(cast for part, report in reports for cast in _renamed_casts(part.path, report))
    operations = {part.path: report.parts[""].operations for part, report in reports}
    coverage, table = _coverage(parts, operations, root.training)
    conversion: Conversion = root._ampfx  # type: ignore[assignment]
    options = conversion.options
    return Report(
        title=conversion.original.__name__,
        dtype=short_name(options.dtype),
        device=options.device_type,
        policy=options.policy.name,
        num_overrides=len(options.policy.overrides),
        objective=options.objective,
        mode="train" if root.training else "eval",
        inputs="",
        loss_scale=describe_loss_scale(conversion.scale),
        coverage=coverage,
        nodes=nodes,
        cast_list=casts,
        modules=module_reports(nodes, casts),
        unlisted=_joined((part.path, report.unlisted) for part, report in reports),
        opaque=_joined((part.path, report.opaque) for part, report in reports),
        warnings=tuple(dict.fromkeys(text for _, report in reports for text in report.warnings)),
        notes=(),
        graph_text="\n\n".join(f"# {part.path}\n{report.graph_text}" for part, report in reports),
        parts=table,
    )


def explain_in_parts(root: nn.Module, kind: type[nn.Module], what: str) -> Explanation:
    """Why a node of some part, or each node of a module, has its dtype.

    Args:
        root: a converted module that stays Python.
        kind: class of converted modules.
        what: name of a node (``encoder.0:linear``), path of a module, or dotted name of a parameter.

    Raises:
        UnknownNameError: nothing has this name.
    """
    report = report_in_parts(root, kind)
    modules = {path for path, _ in root.named_modules(remove_duplicate=False)}
    notes = tuple(_notes(report.parts, what)) if what in modules else ()
    try:
        found = explain_nodes(report.nodes, report.cast_list, report.dtype, report.policy, what)
    except UnknownNameError:
        if not notes:
            raise
        return Explanation(what, "module", (), (), (), report.dtype, report.policy, notes=notes)
    return replace(found, notes=notes) if found.found == "module" else found


def _notes(parts: Mapping[str, PartReport], what: str) -> Iterator[str]:
    """What is no graph in a module or, where none of the parts is inside it, around it."""
    inside = [part for part in parts.values() if not what or part.path == what or part.path.startswith(f"{what}.")]
    around = [part for part in parts.values() if not part.path or what.startswith(f"{part.path}.")]
    for part in inside or around[-1:]:
        if part.state != "captured":
            does = "stays Python" if part.state == "python" else "is no graph"
            yield f"{part.path or 'The model itself'} {does}: {part.reason}"


# ---------------------------------------------------------------------- the parts


def _walk(module: nn.Module, kind: type[nn.Module], path: str, seen: set[int] | None = None) -> Iterator[_Part]:
    """The converted modules, each before those below it; a shared one once."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, kind):
        conversion: Conversion = module._ampfx  # type: ignore[assignment]
        entry = _entry(conversion, module.training)
        yield _Part(path, module, conversion, entry)
        if entry is not None or conversion.python_reason is None:
            return
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, kind, f"{path}.{name}" if path else name, seen)


def _entry(conversion: Conversion, training: bool) -> GraphEntry | None:
    entries = conversion.entries
    return next((entry for entry in entries if entry.training == training), entries[0] if entries else None)


def _part_report(part: _Part) -> Report:
    assert part.entry is not None
    return build_report(part.entry.view, part.entry.context, title=part.entry.title)


# ---------------------------------------------------------------------- names


def _joined(groups: Iterable[tuple[str, Mapping[str, Sequence[str]]]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for path, ops in groups:
        for op, names in ops.items():
            found[op] = (*found.get(op, ()), *(f"{path}:{name}" for name in names))
    return found


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _renamed_nodes(path: str, nodes: NodeTable) -> Iterator[NodeReport]:
    for node in nodes:
        yield replace(
            node,
            name=f"{path}:{node.name}",
            module_path=_dotted(path, node.module_path),
            cause=f"{path}:{node.cause}" if node.cause else "",
            chain=tuple(f"{path}:{name}" for name in node.chain),
            target=_dotted(path, node.target) if node.target else "",
        )


def _renamed_casts(path: str, report: Report) -> Iterator[CastReport]:
    targets = {node.target for node in report.nodes if node.target}
    for cast in report.cast_list:
        value = _dotted(path, cast.value) if cast.value in targets else f"{path}:{cast.value}"
        yield replace(cast, node=f"{path}:{cast.node}", value=value, module_path=_dotted(path, cast.module_path))


# ---------------------------------------------------------------------- coverage


def _coverage(
    parts: Sequence[_Part], operations: Mapping[str, int], training: bool
) -> tuple[Coverage, dict[str, PartReport]]:
    counts = _counts(parts[0].conversion, training)
    calls = {part.path: max(1, counts.calls[part.conversion.prefix]) if counts else 1 for part in parts}
    flops = {part.path: calls[part.path] * graph_flops(part.entry.view.graph) for part in parts if part.entry}
    known = sum(flops.values())
    matrices = sum(_matrix_elements(part) for part in parts if part.entry is not None)
    per_element = known / matrices if known and matrices else 1.0
    for part in parts:
        if part.entry is None:
            if part.state == "python" and counts:
                flops[part.path] = counts.python_flops[part.conversion.prefix]
            else:
                flops[part.path] = round(_matrix_elements(part) * per_element)
    table = {
        part.path: PartReport(
            path=part.path,
            state=part.state,
            reason=part.reason,
            operations=operations.get(part.path, 0),
            flops=flops[part.path],
            calls=calls[part.path],
        )
        for part in parts
    }
    modules = _share((part.entry is not None, len(_modules(part))) for part in parts)
    seen: set[int] = set()
    parameters = _share((part.entry is not None, _elements(part, seen)) for part in parts)
    share = _share((part.entry is not None, flops[part.path]) for part in parts)
    reasons = {part.path: part.reason for part in parts if part.entry is None}
    if not any(flops.values()):
        share = parameters
    return Coverage(share, modules, parameters, reasons), table


def _counts(conversion: Conversion, training: bool) -> PartCalls | None:
    counts = conversion.part_calls
    return counts.get(training) or counts.get(not training)


def _share(weights: Iterable[tuple[bool, int]]) -> float:
    converted = total = 0
    for inside, weight in weights:
        converted += weight * inside
        total += weight
    return converted / total if total else 1.0


def _modules(part: _Part) -> list[nn.Module]:
    """The modules that can be called and belong to a part: all below it, or itself if others are its parts."""
    if part.state == "python":
        return [part.module]
    return [module for module in part.module.modules() if has_own_forward(module)]


def _parameters(part: _Part) -> Iterator[nn.Parameter]:
    return part.module.parameters(recurse=part.state != "python")


def _elements(part: _Part, seen: set[int]) -> int:
    """Elements of a part's parameters; a tied one counts where it is met first."""
    count = 0
    for parameter in _parameters(part):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            count += parameter.numel()
    return count


def _matrix_elements(part: _Part) -> int:
    return sum(parameter.numel() for parameter in _parameters(part) if parameter.dim() > 1)

