"""What a conversion is asked for, handed to every pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ampfx.graph_utils import op_of
from ampfx.policy import Policy, resolve_policy
from ampfx.rule_table import Rule, RuleTable
from ampfx.rules import rules_for, variant

# Ops with a row for each way of being called; the others need no look at their arguments.
_CALLED_IN_SEVERAL_WAYS = frozenset({"getitem", "pad", "interpolate"})


@dataclass
class ConversionContext:
    """The settings of one conversion, and notes that the passes leave for the report.

    Args:
        low_dtype: float16 or bfloat16.
        device_type: device whose rules hold, ``"cpu"`` or ``"cuda"``.
        policy: policy or its name.
        objective: ``"casts"``, ``"speed"``, ``"memory"`` or ``"autocast"``.
        loss_scale: the loss scale to embed, None for none.
        output_dtype: dtype of outputs that the original gives in float32.
        unlisted: ops that stand in no rule, with the names of their nodes (written by the assignment).
        warnings: sentences for the user (written by the passes).
    """

    low_dtype: torch.dtype = torch.bfloat16
    device_type: str = "cpu"
    policy: Policy = field(default_factory=Policy)
    objective: str = "casts"
    loss_scale: Any = None
    output_dtype: torch.dtype = torch.float32
    unlisted: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = resolve_policy(self.policy)

    @functools.cached_property
    def rules(self) -> RuleTable:
        """The device's rules with the policy's own rows and op lists on top."""
        return self.policy.apply_to(rules_for(self.device_type))

    def rule_of(self, node: Node) -> Rule | None:
        """The rule of a node's operation, None if it stands in no list."""
        name = variant(node) if op_of(node) in _CALLED_IN_SEVERAL_WAYS else op_of(node)
        known = self._rule_cache
        if name not in known:
            known[name] = self.rules.find(name)
        return known[name]

    @functools.cached_property
    def _rule_cache(self) -> dict[str, Rule | None]:
        return {}
