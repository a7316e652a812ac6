"""The precision rules of a device, and how they relate to ``torch.autocast``.

1. :func:`rules_for` gives the table of a device: rows that hold everywhere, joined with rows that
   hold there (CPU and CUDA differ: softmax, layer_norm and exp are float32 on CUDA only).
2. :func:`rule_of` finds the row of a node, which may depend on how the op is called
   (:func:`variant`: ``x[0]`` moves values, ``x[index]`` adds gradients up in its backward).
3. :func:`autocast_class` says what autocast does to an op, composites included: what happens inside
   ``F.cross_entropy`` decides about ``cross_entropy``.
4. :data:`DIFFERENCES` are the places where table and autocast differ, all towards more precision.

``python -m ampfx.rules`` prints the tables as Markdown (docs/rules.md).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ampfx import rules_allow, rules_clear, rules_deny, rules_infer
from ampfx.autocast_lists import policy_by_name
from ampfx.errors import PolicyError
from ampfx.ops import canonical_op, indexes_with_tensor, is_in_place
from ampfx.rule_facts import PACKED_RECURRENT, PACKED_WEIGHTS_AT, PARAM_SYNONYMS, PARAMS_BY_TARGET
from ampfx.rule_table import OpClass, Rule, RuleTable

__all__ = [
    "DEVICES",
    "DIFFERENCES",
    "Difference",
    "OpClass",
    "Rule",
    "RuleTable",
    "autocast_class",
    "bind",
    "parameters_of",
    "rule_of",
    "rules_for",
    "variant",
]

DEVICES: tuple[str, ...] = ("cuda", "cpu")
_FILES = (rules_allow, rules_deny, rules_infer, rules_clear)

_RECURRENT_OPS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

# Short names of autocast's policies.
_POLICIES: Mapping[str, str] = {
    "lower_precision_fp": "lower",
    "fp32": "fp32",
    "fp32_set_opt_dtype": "set_opt_dtype",
    "fp32_append_dtype": "append_dtype",
    "promote": "promote",
    "banned": "banned",
}

# Ops that are no operator of their own for the dispatcher: what the operators inside amount to.
_COMPOSITES: Mapping[str, Mapping[str, str | None]] = {
    "cuda": {
        "cross_entropy": "fp32",
        "interpolate": "fp32",
        "softmin": "set_opt_dtype",
        "gumbel_softmax": "fp32",
        "normalize": "fp32",
        "pairwise_distance": "fp32",
        "local_response_norm": "fp32",
        "lp_pool1d": "fp32",
        "lp_pool2d": "fp32",
        "lp_pool3d": "fp32",
        "gaussian_nll_loss": "fp32",
        "multilabel_soft_margin_loss": "fp32",
        "square": "fp32",
        "trapezoid": "set_opt_dtype",
        "trapz": "set_opt_dtype",
        "cumulative_trapezoid": "set_opt_dtype",
        "norm_except_dim": "append_dtype",
        "affine_grid": "lower",
        "cov": "lower",
        "corrcoef": "lower",
        "linalg_matrix_power": "lower",
        "linalg_norm": "set_opt_dtype",
        "lstm": "lower",
        "gru": "lower",
        "rnn_tanh": "lower",
        "rnn_relu": "lower",
    },
    "cpu": {
        "local_response_norm": "fp32",
        "lp_pool3d": "fp32",
        "pad_reflect": "fp32",
        "pad_replicate": "fp32",
        "lstm": "lower",
        "rnn_tanh": "lower",
        "rnn_relu": "lower",
        "rnn_tanh_cell": "lower",
        "rnn_relu_cell": "lower",
        "inner": "lower",
        "affine_grid": "lower",
        "cov": "lower",
        "corrcoef": "lower",
        "linalg_matrix_power": "lower",
        "adaptive_max_pool3d_with_indices": "fp32",
        "fractional_max_pool2d_with_indices": "fp32",
        "fractional_max_pool3d_with_indices": "fp32",
        "max_unpool1d": "fp32",
        "einsum": "lower",
        "chain_matmul": "lower",
        "linalg_multi_dot": "lower",
        "tensordot": "lower",
    },
}


def device_key(device_type: str) -> str:
    """The rules that a device uses: its own, or CUDA's for other accelerators.

    Raises:
        PolicyError: not the name of a device type.
    """
    if device_type in DEVICES:
        return device_type
    if device_type in ("xpu", "mtia", "maia", "hpu", "mps", "privateuseone"):
        return "cuda"  # their autocast lists are CUDA's, but for a handful of entries
    raise PolicyError(f"No precision rules for device type {device_type!r}. Known: {', '.join(DEVICES)}.")


@functools.cache
def rules_for(device_type: str) -> RuleTable:
    """The rules that hold on a device, ``"cuda"`` or ``"cpu"``."""
    device = device_key(device_type)
    shared = RuleTable((row for file in _FILES for row in file.SHARED), name="shared")
    rows: list[Rule] = []
    for file in _FILES:
        rows.extend(file.CUDA if device == "cuda" else file.CPU)
    return shared + RuleTable(rows, name=device)


def variant(node: Node) -> str:
    """The name of the row for this call: the op's own, or that of the way it is called."""
    op = str(node.meta.get("op") or canonical_op(node))
    if op == "getitem" and indexes_with_tensor(node):
        return "getitem_index"
    if op == "pad":
        mode = _argument(node, 2, "mode")
        if mode in ("reflect", "replicate", "circular"):
            return f"pad_{mode}"
    if op == "interpolate" and _argument(node, 3, "mode") == "area":
        return "interpolate_area"
    return op


def rule_of(table: RuleTable, node: Node) -> Rule | None:
    """The row for a node, None for an op that no row knows."""
    return table.find(variant(node))


def parameters_of(rule: Rule, args: Sequence[Any], target: Any = None) -> tuple[str, ...]:
    """The names of a call's positional arguments, as far as the row knows them.

    Namesakes with another order (``torch.batch_norm``) are told by ``target``, recurrent layers over a
    packed sequence by where their list of weights stands.
    """
    at = PACKED_WEIGHTS_AT
    if rule.op in _RECURRENT_OPS and len(args) > at and isinstance(args[at], list | tuple):
        return PACKED_RECURRENT
    if not rule.params or not callable(target):
        return rule.params
    return PARAMS_BY_TARGET.get(target, rule.params)


def bind(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None) -> dict[str, Any]:
    """The arguments of a call by name, as far as the row knows the names.

    Args:
        rule: the row of the op.
        args: positional arguments, ``self`` first.
        kwargs: keyword arguments.
        target: the callable, for namesakes with another order (``torch.batch_norm``).
    """
    bound = dict(zip(parameters_of(rule, args, target), args, strict=False))
    bound.update({PARAM_SYNONYMS.get(name, name): value for name, value in kwargs.items()})
    return bound


def autocast_class(op: str, device_type: str) -> str | None:
    """What ``torch.autocast`` does to an op on a device.

    Returns:
        ``"lower"``, ``"fp32"``, ``"set_opt_dtype"``, ``"append_dtype"``, ``"promote"``, ``"banned"``, or
        None: it runs in the dtypes that arrive. In-place forms are always None.
    """
    device = device_key(device_type)
    if is_in_place(op):
        return None
    if op in _COMPOSITES[device]:
        return _COMPOSITES[device][op]
    policy = _policies(device).get(op)
    return None if policy is None else _POLICIES[policy]


@functools.cache
def _policies(device: str) -> Mapping[str, str]:
    return {canonical_op(name): policy for name, policy in policy_by_name(device).items()}


def expected_classes(autocast: str | None) -> tuple[OpClass, ...]:
    """The classes that agree with what autocast does."""
    if autocast == "lower":
        return (OpClass.ALLOW,)
    if autocast in ("fp32", "set_opt_dtype", "append_dtype", "banned"):
        return (OpClass.DENY,)
    return (OpClass.INFER, OpClass.CLEAR)


@dataclass(frozen=True)
class Difference:
    """An op whose class is not the one that follows from autocast's lists.

    ``dtype`` is the low dtype that it holds for, None for both.
    """

    op: str
    device: str
    dtype: torch.dtype | None
    autocast: str | None
    ours: OpClass
    reason: str


# Ops that are denied here although autocast leaves them alone, or lowers the products inside, on at
# least one device. A test holds that these and the float16 hazards are all there is.
_MORE_PRECISE: tuple[tuple[str, str], ...] = (
    (
        "sum cumsum cumprod nansum nanmean trapezoid trapz cumulative_trapezoid",
        "sums and products over many elements, float32 in one list or the other",
    ),
    (
        "ctc_loss gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss "
        "nll_loss_nd",
        "losses, of which the lists name most",
    ),
    (rules_deny.SOLVERS + " nuclear_norm pdist", "no low-precision kernel: autocast fails there"),
    (rules_deny.FOURIER, "no low-precision complex numbers"),
    (
        rules_deny.SPECIAL + " lgamma_ digamma_ polygamma_ mvlgamma_ igamma_ igammac_ i0_",
        "kernels are missing or inexact",
    ),
    (
        "histc histogram histogramdd quantile nanquantile fake_quantize_per_tensor_affine "
        "fake_quantize_per_channel_affine",
        "no low-precision kernel: autocast fails there",
    ),
    ("affine_grid", "sampling positions lose pixels in low precision"),
    ("cov corrcoef linalg_matrix_power", "products inside would run low, and their errors add up"),
    ("_weight_norm norm_except_dim", "a weight made from float32 parameters by a sum of squares"),
    ("float_power", "computes in float64 whatever comes in"),
)


def _differences() -> Iterator[Difference]:
    for device in DEVICES:
        table = rules_for(device)
        for ops, reason in _MORE_PRECISE:
            for op in ops.split():
                autocast = autocast_class(op, device)
                if table[op].cls not in expected_classes(autocast):
                    yield Difference(op, device, None, autocast, table[op].cls, reason)
        for rule in table.values():
            if rule.fp16_hazard and rule.cls is not OpClass.DENY:
                autocast = autocast_class(rule.op, device)
                yield Difference(rule.op, device, torch.float16, autocast, OpClass.DENY, rule.fp16_hazard)


def _argument(node: Node, position: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else None)


DIFFERENCES: tuple[Difference, ...] = tuple(_differences())


if __name__ == "__main__":
    from ampfx.rules_doc import rules_markdown

    print(rules_markdown(), end="")
