"""What the assignment decides about one node, and why.

A :class:`Decision` is data: the passes after the assignment, the printer and the report read it and
nothing else. ``chain`` leads from the node to the node that is the cause, so that *why is this float32?*
has an answer that can be followed step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ampfx.dtypes import long_name

Kind = Literal[
    "rule",  # the op's own row in the table
    "override",  # an override of the policy
    "neighbour",  # the dtype of what the node reads
    "hazard",  # a known numerical danger of low precision
    "author",  # the model's author wrote a dtype
    "region",  # the author switched autocast off here
    "cut",  # the minimum cut chose the cheaper side
    "unlisted",  # the op is in no list
    "input",  # an input, parameter or buffer, with the dtype it has
    "opaque",  # code that cannot be looked into
    "gradient",  # the forward itself differentiates here
    "default",  # made from no tensor, in torch's default dtype
    "untouched",  # no float32 tensor is concerned
]

# Chains of a deep residual stream would grow with the depth of the model: both ends are kept.
MAX_CHAIN = 12


@dataclass(frozen=True, slots=True)
class Decision:
    """The dtype of one node's result, with its reason.

    Args:
        dtype: dtype of the float32 tensors that the node makes (or reads, where it makes none);
            None when the node is left as it is.
        cls: ``allow``, ``deny``, ``infer`` or ``clear``; ``input``, ``author`` and ``-`` beside the rules.
        reason: one sentence.
        source: where the rule comes from, ``""`` if no rule is concerned.
        cause: name of the node that the decision goes back to, ``""`` if there is none.
        chain: names from this node to the cause, both included.
        kind: what sort of reason it is.
        autocast_dtype: what ``torch.autocast`` gives the node.
    """

    dtype: torch.dtype | None
    cls: str
    reason: str
    source: str = ""
    cause: str = ""
    chain: tuple[str, ...] = ()
    kind: Kind = "rule"
    autocast_dtype: torch.dtype | None = None

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data."""
        return {
            "dtype": None if self.dtype is None else long_name(self.dtype),
            "class": self.cls,
            "reason": self.reason,
            "source": self.source,
            "cause": self.cause,
            "chain": list(self.chain),
            "kind": self.kind,
            "autocast_dtype": None if self.autocast_dtype is None else long_name(self.autocast_dtype),
        }


def chain_through(name: str, parent: Decision | None) -> tuple[str, ...]:
    """The chain of a node whose reason is another node's decision; long chains keep both ends."""
    if parent is None:
        return (name,)
    chain = (name, *parent.chain)
    if len(chain) > MAX_CHAIN:
        chain = (*chain[: MAX_CHAIN - 1], chain[-1])
    return chain
