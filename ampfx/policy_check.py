"""Does everything in a policy match something? A pattern without effect is a mistake."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ampfx.errors import PolicyError
from ampfx.near_misses import did_you_mean
from ampfx.ops import base_op, canonical_op
from ampfx.overrides import Override, module_paths
from ampfx.rule_table import OpClass

if TYPE_CHECKING:
    from ampfx.policy import Policy


def check_matches(
    policy: Policy,
    nodes: Iterable[Node],
    known_ops: Collection[str] = (),
    paths: Collection[str] = (),
    types: Collection[type] = (),
    low: torch.dtype | None = None,
) -> list[str]:
    """Complain about what in a policy matched nothing.

    Args:
        policy: the policy.
        nodes: all nodes of the graph, or of all graphs of a model.
        known_ops: ops with a rule.
        paths: paths of the model's modules, for near misses.
        types: classes of the model's modules, for near misses.
        low: the low dtype of the conversion, to check the dtypes that overrides ask for.

    Returns:
        Warnings: ops in the policy's lists that exist, but not in this model.

    Raises:
        PolicyError: an override that selects no node, or an op that nobody knows.
    """
    calls = [node for node in nodes if node.op in ("call_function", "call_method", "call_module")]
    present = {base_op(str(node.meta.get("op") or canonical_op(node))) for node in calls}
    for index, override in enumerate(policy.overrides):
        if low is not None:
            override.resolve_dtype(low)
        if not any(override.matches(node) for node in calls):
            all_paths = set(paths) | {path for node in calls for path in module_paths(node)}
            all_types = {*types, *(kind for node in calls for kind in node.meta.get("module_types", ()))}
            hint = _why_nothing(override, calls, present | set(known_ops), all_paths, all_types)
            raise PolicyError(
                f"{override} (number {index + 1} in the policy) selects no node of this model.{hint}"
            )
    warnings: list[str] = []
    for cls in OpClass:
        for op in getattr(policy, cls.value):
            if base_op(op) in present:
                continue
            if op not in known_ops and base_op(op) not in known_ops:
                near = did_you_mean(op, present | set(known_ops))
                raise PolicyError(
                    f"The policy's {cls.value}= names the op {op!r}, which is neither known nor in this "
                    f"model.{near}"
                )
            warnings.append(f"The policy's {cls.value}= names {op!r}, but this model does not use it.")
    return warnings


def _why_nothing(
    override: Override,
    nodes: list[Node],
    ops: Collection[str],
    paths: Collection[str],
    types: Collection[type],
) -> str:
    """Which selector is at fault, with near misses."""
    alone = {
        name: any(Override(**{name: value}).matches(node) for node in nodes)
        for name, value in override.selectors()
        if value is not None
    }
    if len(alone) > 1 and all(alone.values()):
        return f" Each of {', '.join(alone)} selects nodes, but no node has them all."
    if alone.get("op") is False:
        return f" No node has the op {override.op!r}.{did_you_mean(str(override.op), ops)}"
    if alone.get("module") is False:
        assert override.module is not None
        near = did_you_mean(override.module, paths, also=_same_end(override.module, paths))
        return (
            f" No operation runs inside a module {override.module!r}.{near} "
            "Parts are matched from the root; '**' skips parts."
        )
    if alone.get("module_type") is False:
        wanted = override.module_type
        name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        names = sorted({kind.__name__ for kind in types})
        return f" No operation runs inside a module of type {name!r}.{did_you_mean(name, names)}"
    if alone.get("node") is False:
        near = did_you_mean(str(override.node), [node.name for node in nodes])
        return f" No node is named {override.node!r}.{near}"
    return " The predicate was false for every node."


def _same_end(pattern: str, paths: Collection[str]) -> list[str]:
    last = pattern.rpartition(".")[2]
    return sorted(path for path in paths if path and fnmatchcase(path.rpartition(".")[2], last))[:3]
