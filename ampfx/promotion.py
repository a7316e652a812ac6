"""What ``torch.autocast`` would give each node: the simulation that the assignment starts from.

1. Inputs, parameters and buffers have the dtype they have; a dtype that the author wrote holds.
2. An op in autocast's lists has the dtype of its list.
3. Everything else follows its inputs: the argument that its rule follows, its first argument when it
   writes in place, or torch's own promotion (tensors with dimensions count before tensors without, and
   those before Python numbers, which never widen a float tensor).
4. Where the author switched autocast off, lists do not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import NodeFacts, facts_of, is_tuple_read, recorded_value
from ampfx.argument_needs import argument_nodes, gives_dtype, parameter_names
from ampfx.context import ConversionContext
from ampfx.dtypes import TensorSpec
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS
from ampfx.rule_table import Rule
from ampfx.rules import autocast_class, variant

_FLOAT32_CLASSES = ("fp32", "set_opt_dtype", "append_dtype", "banned")


def promoted(node: Node, dtype_of: Callable[[Node], torch.dtype | None]) -> torch.dtype:
    """The dtype that torch promotes a node's float tensors to; ``dtype_of`` says what each value is.

    float32 if the node reads no float tensor: that is torch's default dtype.
    """
    with_dims: torch.dtype | None = None
    without: torch.dtype | None = None
    for value in node.all_input_nodes:
        dtype = dtype_of(value)
        if dtype is None:
            continue
        if facts_of(value).ndim > 0 or facts_of(value).tuple_valued:
            with_dims = dtype if with_dims is None else torch.promote_types(with_dims, dtype)
        else:
            without = dtype if without is None else torch.promote_types(without, dtype)
    return with_dims or without or torch.float32


def float_dtype(node: Node, managed: torch.dtype | None) -> torch.dtype | None:
    """The dtype with which a value takes part in a promotion; ``managed`` is that of a managed one."""
    facts = facts_of(node)
    if facts.managed:
        return managed
    if facts.floating:
        spec = recorded_value(node)
        return spec.dtype if isinstance(spec, TensorSpec) else None
    return None


def followed_argument(node: Node, rule: Rule | None) -> Node | None:
    """The value whose dtype a node takes over, None if it is the widest input."""
    facts = facts_of(node)
    key: int | str | None = None
    if is_tuple_read(node) or facts.in_place or facts.base in LIKE_OPS:
        key = 0
    elif facts.base in ("to", "type_as") and node.op == "call_method":
        # x.to(other) and x.type_as(other) take the other's dtype, x.to(device) its own.
        if len(node.args) > 1 and isinstance(node.args[1], Node) and facts_of(node.args[1]).floating:
            return node.args[1]
        key = 0
    elif rule is not None and rule.follow:
        names = parameter_names(node, rule)
        position = names.index(rule.follow) if rule.follow in names else 0
        key = rule.follow if rule.follow in node.kwargs else position
    if key is None:
        return None
    if facts.in_place and "out" in node.kwargs:
        key = "out"
    try:
        value = node.args[key] if isinstance(key, int) else node.kwargs[key]
    except (IndexError, KeyError):
        return None
    return next(argument_nodes(value), None)


def inferred_dtype(
    node: Node, facts: NodeFacts, rule: Rule | None, dtype_of: Callable[[Node], torch.dtype | None]
) -> torch.dtype:
    """The dtype of an op that takes over what it reads."""
    followed = followed_argument(node, rule)
    if followed is not None and (facts.base not in AUTHOR_CASTS or facts_of(followed).managed):
        dtype = dtype_of(followed)
        if dtype is not None:
            return dtype
    return promoted(node, dtype_of)


def simulate_autocast(
    gm: GraphModule, ctx: ConversionContext, forced_low: frozenset[Node] = frozenset()
) -> dict[Node, torch.dtype]:
    """The dtype that autocast gives each managed value.

    Args:
        forced_low: nodes that an override of the policy makes low, as if autocast listed them.
    """
    simulated: dict[Node, torch.dtype] = {}

    def dtype_of(value: Node) -> torch.dtype | None:
        return float_dtype(value, simulated.get(value, torch.float32))

    lists: dict[str, str | None] = {}
    for node in gm.graph.nodes:
        facts = facts_of(node)
        if not facts.managed:
            continue
        if node.op in ("placeholder", "get_attr"):
            simulated[node] = torch.float32
            continue
        if node in forced_low:
            simulated[node] = ctx.low_dtype
            continue
        op = variant(node)
        if op not in lists:
            lists[op] = autocast_class(op, ctx.device_type)
        simulated[node] = _simulate_node(node, facts, ctx, lists[op], dtype_of)
    return simulated


def _simulate_node(
    node: Node,
    facts: NodeFacts,
    ctx: ConversionContext,
    autocast: str | None,
    dtype_of: Callable[[Node], torch.dtype | None],
) -> torch.dtype:
    low = ctx.low_dtype
    if node.meta.get("cast"):
        return torch.float32
    if gives_dtype(node) or facts.base in FACTORIES:
        return torch.float32  # managed: float32 is what was recorded
    rule = ctx.rule_of(node)
    if facts.region.autocast is not False and not facts.in_place and not is_tuple_read(node):
        if autocast == "lower":
            return low
        if autocast in _FLOAT32_CLASSES:
            return torch.float32
        if autocast == "promote":
            wide = any(dtype_of(value) == torch.float32 for value in node.all_input_nodes)
            return torch.float32 if wide else low
    dtype = inferred_dtype(node, facts, rule, dtype_of)
    # A managed value is float32 or low: wider or other inputs of the author's were float32 together.
    return low if dtype == low else torch.float32
