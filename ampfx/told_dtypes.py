"""Operations that can be told their dtype, so that no input needs a cast.

1. Factories and ``*_like``, ``new_*`` ops get ``dtype=``; ``x.type_as(y)`` and ``x.to(y)`` become
   ``x.to(dtype)``.
2. Reductions that take ``dtype=`` convert while they read: told so when no other reader needs the cast.
3. Recurrent cells run under autocast for the one call, see :mod:`ampfx.composites`.

Each marks the node with ``meta["given_dtype"]``: this dtype is ours, not the author's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ampfx.analysis import facts_of, is_tuple_read
from ampfx.argument_needs import (
    NATIVE_OPS,
    Need,
    argument,
    argument_needs,
    argument_nodes,
    converts,
    gives_dtype,
)
from ampfx.cast_maker import CastMaker
from ampfx.composites import run_composite
from ampfx.context import ConversionContext
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS
from ampfx.promotion import followed_argument
from ampfx.rewriting import current_dtype, current_float
from ampfx.rule_table import Rule


def tell_dtype(
    node: Node, rule: Rule | None, dtype: torch.dtype | None, ctx: ConversionContext, casts: CastMaker
) -> bool:
    """Tell the op its dtype where it can be told; True if its arguments need no cast then."""
    facts = facts_of(node)
    if dtype is None or not facts.managed or gives_dtype(node) or is_tuple_read(node) or facts.in_place:
        return False
    if facts.base in FACTORIES:
        natural: torch.dtype | None = torch.float32
    elif facts.base in LIKE_OPS or (facts.base in ("to", "type_as") and converts(node)):
        followed = followed_argument(node, rule)
        natural = current_float(followed) if followed is not None else None
    else:
        return _tell_reduction(node, rule, dtype, ctx, casts)
    told = node.kwargs.get("dtype") or natural
    if told == dtype:
        return True
    if facts.base in AUTHOR_CASTS:
        node.target, node.args, node.kwargs = "to", (node.args[0], dtype), {}
        node.meta["given_dtype"] = True
        casts.changed = True
    else:
        _give(node, casts, dtype=dtype)
    return True


def wrap_composite(node: Node, ctx: ConversionContext, casts: CastMaker) -> None:
    """Let a recurrent cell run its products low inside."""
    if node.target is run_composite:
        return
    _give(node, casts, function=facts_of(node).op, device_type=ctx.device_type, dtype=ctx.low_dtype)
    node.target = run_composite


def _give(node: Node, casts: CastMaker, **kwargs: Any) -> None:
    node.kwargs = {**node.kwargs, **kwargs}
    node.meta["given_dtype"] = True
    casts.changed = True


def _tell_reduction(
    node: Node, rule: Rule | None, dtype: torch.dtype, ctx: ConversionContext, casts: CastMaker
) -> bool:
    # A positional None may be the dtype.
    if rule is None or not rule.dtype_arg or dtype != torch.float32 or None in node.args:
        return False
    if node.kwargs.get("dtype") is not None:
        return True  # told in an earlier run
    value = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(value, Node) or not facts_of(value).managed or current_dtype(value) != ctx.low_dtype:
        return False
    if casts.has_cast(value, dtype) or any(_needs_cast(user, value, dtype, ctx) for user in value.users):
        return False
    _give(node, casts, dtype=dtype)
    return True


def _needs_cast(user: Node, value: Node, dtype: torch.dtype, ctx: ConversionContext) -> bool:
    """Whether a reader needs a cast of the value that a reduction could share."""
    decision = user.meta.get("decision")
    if decision is None or decision.dtype != dtype or user.meta.get("cast"):
        return False
    rule, facts = ctx.rule_of(user), facts_of(user)
    if rule is None or rule.dtype_arg or facts.base in NATIVE_OPS:
        return False
    return any(
        need is Need.SAME and value in argument_nodes(argument(user, key))
        for key, need in argument_needs(user, facts, rule, dtype)
    )
