"""How much of a model runs converted, and what each of its parts is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PartState = Literal["captured", "python", "not called yet"]


@dataclass(frozen=True, eq=False, repr=False)
class Coverage(float):
    """The share of a model's matrix-product FLOPs that runs in converted graphs; a float with details.

    Args:
        flops: that share, 1.0 for a model that was captured whole.
        modules: share of the modules.
        parameters: share of the elements of parameters.
        reasons: why the rest is not converted, by the path of the part (``""`` is the model itself).
    """

    flops: float
    modules: float = 1.0
    parameters: float = 1.0
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __new__(cls, flops: float, *args: Any, **kwargs: Any) -> Coverage:
        return float.__new__(cls, flops)

    def to_dict(self) -> dict[str, Any]:
        """The shares and reasons as plain data."""
        return {
            "flops": self.flops,
            "modules": self.modules,
            "parameters": self.parameters,
            "reasons": dict(self.reasons),
        }


@dataclass(frozen=True)
class PartReport:
    """One part of a model that is converted in parts, or a whole model.

    Args:
        path: its path, ``""`` for the model itself.
        state: ``captured`` as a graph; ``python`` (its children are parts of their own); ``not called yet``.
        reason: why it is not a graph, empty if it is.
        operations: operations of its graph.
        flops: FLOPs of its own matrix products in one forward pass of the model, for the example inputs.
            Where it never ran, they are estimated from its parameters.
        calls: how often one forward pass calls it.
    """

    path: str
    state: PartState
    reason: str = ""
    operations: int = 0
    flops: int = 0
    calls: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The part as plain data."""
        return asdict(self)
