"""Which guards depend on the shapes of the inputs alone.

The outcome of such a guard is the same for every run with the same input shapes, so it is checked
once for each. Guards on values (``if x.mean() > 0``) are checked in every run.

1. A tensor's shape is *data-dependent* if an operation that picks elements by value, or a number read
   from a tensor, had a part in it.
2. A guard is a shape guard if everything it is computed from is arithmetic on sizes of tensors whose
   shape is not data-dependent, and on number inputs.
"""

from __future__ import annotations

from torch import fx

from ampfx import runtime
from ampfx.dtypes import TensorSpec
from ampfx.graph_utils import op_of

_GUARDS = frozenset({runtime.guard, runtime.guard_length, runtime.guard_tensor})
# Operations whose result's shape depends on values.
_PICKS_BY_VALUE = frozenset(
    {
        "nonzero",
        "masked_select",
        "unique",
        "unique_consecutive",
        "argwhere",
        "repeat_interleave",
        "bincount",
        "histogram",
        "torch.functional.unique",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
        "resize_as_",
        "set_",
    }
)
_NUMBERS_FROM_VALUES = frozenset(["item", "tolist", "is_nonzero", "equal", "allclose", "contains", "is_contiguous"])


def is_guard(node: fx.Node) -> bool:
    """Whether a node is a guard."""
    return node.op == "call_function" and node.target in _GUARDS


def value_guards(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """The guards of a graph, as those on shapes and those on values."""
    tainted: set[fx.Node] = set()
    shape_guards: set[fx.Node] = set()
    data_guards: set[fx.Node] = set()
    for node in graph.nodes:
        if is_guard(node):
            clean = node.target is not runtime.guard_tensor and node.all_input_nodes[0] not in tainted
            (shape_guards if clean else data_guards).add(node)
        elif any(source in tainted for source in node.all_input_nodes) or _starts_taint(node):
            tainted.add(node)
    return shape_guards, data_guards


def _starts_taint(node: fx.Node) -> bool:
    op = op_of(node)
    if op in _NUMBERS_FROM_VALUES:
        return True
    if op == "where":
        return len(node.args) == 1
    if op in _PICKS_BY_VALUE:
        return True
    if op in ("getitem", "setitem"):
        return any(_is_mask(part) for part in _index_parts(node))
    if node.target is runtime.apply_function or "hook" in op:
        return True
    makes_number = node.meta.get("val") is None and node.op in ("call_function", "call_method")
    return (
        makes_number
        and any(isinstance(source.meta.get("val"), TensorSpec) for source in node.all_input_nodes)
        and op not in ("size", "numel", "dim", "stride", "guard_length", "_set_grad_enabled", "set_attribute")
    )


def _index_parts(node: fx.Node) -> list[object]:
    index = node.args[1] if len(node.args) > 1 else None
    return list(index) if isinstance(index, (tuple, list)) else [index]


def _is_mask(part: object) -> bool:
    if not isinstance(part, fx.Node):
        return False
    spec = part.meta.get("val")
    return isinstance(spec, TensorSpec) and str(spec.dtype) in ("torch.bool", "torch.uint8")
