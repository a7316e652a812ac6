"""Which dtype each argument of a node must have, given the dtype that the node runs in.

Most operations want all their tensors in one dtype. The exceptions are what this page knows: arguments
that a rule keeps, operations that promote their inputs themselves in one kernel, in-place writes,
comparisons, and operations that only look at a shape.

An operation that promotes natively is left to do so: a low tensor plus a float32 tensor is the same
number whether the low one is cast first or inside the kernel, and the copy is saved.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from ampfx.analysis import NodeFacts, facts_of, is_tuple_read, recorded_value
from ampfx.dtypes import TensorSpec
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS, QUERY_OPS, author_dtype, indexes_with_tensor
from ampfx.rule_table import OpClass, Rule
from ampfx.rules import parameters_of
from ampfx.runtime import apply_function


class Need(enum.Enum):
    """What an argument must be."""

    SAME = "the node's dtype"
    NATIVE = "any dtype whose promotion gives the node's dtype"
    SATURATE = "the node's dtype, finite values stay finite"
    KEEP = "as it is"
    FLOAT32 = "float32"
    LOW = "the low dtype"


def words(text: str) -> frozenset[str]:
    """Names written in one string."""
    return frozenset(text.split())


# Operations that promote tensors of different float dtypes themselves (checked against the kernels by
# tests/test_argument_needs.py).
NATIVE_OPS: frozenset[str] = words(
    """
    add sub mul div pow maximum minimum fmax fmin atan2 remainder fmod floor_divide hypot copysign where cat
    stack addcmul addcdiv clamp clamp_min clamp_max logaddexp logaddexp2 xlogy hstack vstack dstack
    column_stack eq ne lt le gt ge logical_and logical_or logical_xor
    """
)
# In-place operations that take any float dtype in their other arguments.
NATIVE_WRITES: frozenset[str] = NATIVE_OPS | {"copy", "fill", "masked_fill", "zero"}

# Arguments that only lend their shape or dtype.
_LENT: frozenset[str] = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})

# autograd must find the very tensors that the results were computed from.
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)


def gives_dtype(node: Node) -> bool:
    """Whether the author wrote this node's dtype (and not one of our passes)."""
    return not node.meta.get("given_dtype", False) and author_dtype(node) is not None


def converts(node: Node) -> bool:
    """Whether an author's cast names a dtype or a tensor to take it from; ``x.to(device)`` does not."""
    if author_dtype(node) is not None:
        return True
    other = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
    return isinstance(other, Node) and facts_of(other).floating


def is_opaque(facts: NodeFacts, rule: Rule | None) -> bool:
    """Whether a node is code that cannot be looked into: a custom Function, operator or hook."""
    return rule is None and ("." in facts.op or "::" in facts.op)


def opaque_name(node: Node) -> str:
    """The name of such code: a custom Function's class, the operator, the function."""
    if node.target is apply_function and node.args:
        function: Any = node.args[0]
        if isinstance(function, Node):  # an object that the graph holds as an attribute
            return str(function.meta.get("holds", function.name))
        return str(getattr(function, "__name__", function))
    return facts_of(node).op.removeprefix("ampfx.runtime.")


def argument_needs(
    node: Node, facts: NodeFacts, rule: Rule | None, dtype: torch.dtype | None
) -> Iterator[tuple[int | str, Need]]:
    """The need of each top-level argument, by position or keyword.

    Args:
        dtype: the dtype that the node runs in; None where it does not matter to the node.
    """
    keys: list[int | str] = [*range(len(node.args)), *node.kwargs]
    base = facts.base
    if (
        base in QUERY_OPS
        or base in LIKE_OPS
        or base in FACTORIES
        or node.target in _AUTOGRAD
        or is_tuple_read(node)
        or (base in AUTHOR_CASTS and node.op == "call_method" and converts(node))
    ):
        yield from ((key, Need.KEEP) for key in keys)
        return
    if gives_dtype(node):
        # view(dtype) reads the bits, everything else converts.
        need = Need.FLOAT32 if base == "view" else Need.KEEP
        yield from ((key, need) for key in keys)
        return
    if is_opaque(facts, rule):
        yield from ((key, Need.FLOAT32) for key in keys)
        return
    names = parameter_names(node, rule)
    keep: frozenset[str] = frozenset(rule.keep) if rule is not None else frozenset()
    saturate: frozenset[str] = frozenset(rule.saturate) if rule is not None else frozenset()
    written = facts.in_place
    native = base in (NATIVE_WRITES if written else NATIVE_OPS)
    native = native or (facts.op == "setitem" and not indexes_with_tensor(node))
    indifferent = dtype is None
    composite = runs_composite(node, rule)
    for key in keys:
        name = key if isinstance(key, str) else (names[key] if key < len(names) else "")
        lent = base in _LENT and key in (1, "other")
        target = key == "out" or (written and key == 0 and "out" not in node.kwargs)
        if composite and name in keep:
            yield key, Need.SAME  # the state: what the cell returns has its dtype
        elif name in keep or lent or target:
            yield key, Need.KEEP
        elif composite:
            yield key, Need.LOW
        elif name in saturate:
            yield key, Need.SATURATE
        elif indifferent or (native and written):
            yield key, Need.KEEP
        elif native:
            yield key, Need.NATIVE
        else:
            yield key, Need.SAME


def parameter_names(node: Node, rule: Rule | None) -> tuple[str, ...]:
    """The names of a call's positional arguments, as far as they are known."""
    return () if rule is None else parameters_of(rule, node.args, node.target)


def runs_composite(node: Node, rule: Rule | None) -> bool:
    """Whether a node runs low inside while its state keeps its dtype (a recurrent cell)."""
    if rule is None or not rule.composite:
        return False
    return bool(node.meta.get("composite", facts_of(node).region.autocast is not False))


def argument(node: Node, key: int | str) -> Any:
    """The argument at a position or keyword."""
    return node.args[key] if isinstance(key, int) else node.kwargs[key]


def argument_nodes(value: Any) -> Iterator[Node]:
    """The nodes inside an argument, in order, with repeats."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from argument_nodes(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from argument_nodes(item)
    elif isinstance(value, slice):
        for item in (value.start, value.stop, value.step):
            if isinstance(item, Node):
                yield item


def map_argument(value: Any, change: Callable[[Node], Any]) -> Any:
    """An argument with every node inside it replaced; itself where nothing changes."""
    if isinstance(value, Node):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_argument(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: map_argument(item, change) for key, item in value.items()}
    return value


def reads(node: Node, rule: Rule | None, dtype: torch.dtype | None) -> Iterator[tuple[Node, Need]]:
    """Every managed value that a node reads, with what it must be.

    Scalars (tensors without dimensions) beside tensors with dimensions never decide a promotion, so a
    natively promoting operation takes them as they are.
    """
    if node.op == "output":
        for value in argument_nodes(node.args):
            if facts_of(value).managed:
                yield value, Need.SAME
        return
    facts = facts_of(node)
    found = [
        (value, need)
        for key, need in argument_needs(node, facts, rule, dtype)
        for value in argument_nodes(argument(node, key))
        if facts_of(value).managed
    ]
    if any(need is Need.NATIVE for _, need in found) and has_dimensions(node, found):
        found = [
            (value, Need.KEEP if need is Need.NATIVE and facts_of(value).ndim == 0 else need)
            for value, need in found
        ]
    yield from found


def has_dimensions(node: Node, found: list[tuple[Node, Need]]) -> bool:
    """Whether one of the values that a native operation promotes has dimensions."""
    return any(need is Need.NATIVE and facts_of(value).ndim > 0 for value, need in found)


def reads_other_float(node: Node) -> bool:
    """Whether a node reads a floating tensor whose dtype is the author's (float64, an author's float16)."""
    for value in node.all_input_nodes:
        recorded = recorded_value(value)
        if (
            isinstance(recorded, TensorSpec)
            and recorded.shape != ()
            and recorded.dtype.is_floating_point
            and recorded.dtype != torch.float32
        ):
            return True
    return False


def is_moves(node: Node, rule: Rule | None) -> bool:
    """Whether a node only moves values, forward and backward, so that a cast commutes with it bit by bit."""
    if rule is None or not rule.moves or facts_of(node).in_place:
        return False
    if is_tuple_read(node):
        return True
    return rule.cls in (OpClass.CLEAR, OpClass.INFER)
