"""Known numerical dangers of low precision, found in the graph: each pins a node to float32.

1. *Constants*: a Python number in a call that the low dtype cannot hold (``masked_fill(-1e9)`` in
   float16), or that it rounds to zero (an eps of 1e-12).
2. *Buffers* whose finite values are beyond the low range pin their readers.
3. *Squares* in float16: ``x * x``. The rules name the ops (``pow``, ``square``) themselves.
4. *Logarithms of probabilities*: a sigmoid near 1 rounds to 1 and its logarithm is lost.

Each function returns a sentence, or None where there is no danger.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ampfx.analysis import facts_of
from ampfx.argument_needs import argument_nodes, words
from ampfx.dtypes import long_name
from ampfx.graph_utils import get_attribute
from ampfx.rule_table import OpClass, Rule

# Ops whose numbers are no values: sizes, axes, probabilities, or an eps that their kernels use in float32.
_NO_VALUES: frozenset[str] = words(
    """
    layer_norm group_norm batch_norm instance_norm rms_norm native_layer_norm getitem view reshape
    transpose permute unsqueeze squeeze flatten unflatten expand repeat chunk split narrow select slice
    cat stack sum mean softmax log_softmax embedding dropout feature_dropout alpha_dropout conv1d conv2d
    conv3d linear unfold fold roll tile max_pool1d max_pool2d avg_pool1d avg_pool2d interpolate
    gather scatter index_select topk sort argmax size arange index_put index_add one_hot diagonal
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu gelu silu relu tanh sigmoid contiguous clone
    detach
    """
)
# Whole numbers are values here; elsewhere they are sizes, axes or counts.
_WHOLE_VALUES: frozenset[str] = words(
    """
    add sub mul div masked_fill clamp clamp_min clamp_max where maximum minimum fill full full_like pow lerp
    """
)
# Here a number near zero keeps a result away from zero.
_EPS_OPS: frozenset[str] = words("add sub clamp clamp_min maximum threshold normalize cosine_similarity")

_SIGMOIDS: frozenset[str] = frozenset({"sigmoid", "softmax", "hardsigmoid", "softmin"})
_LOGARITHMS: frozenset[str] = words(
    "log log2 log10 log1p binary_cross_entropy nll_loss logit kl_div xlogy poisson_nll_loss gaussian_nll_loss"
)
# Between a sigmoid and its logarithm stand moves and these: clamp(p, eps, 1 - eps), 1 - p, p + eps.
_BETWEEN: frozenset[str] = words("add sub clamp clamp_min clamp_max mul div neg where masked_fill")


def constant_hazard(node: Node, low: torch.dtype) -> str | None:
    """A number in the call that the low dtype cannot hold."""
    facts = facts_of(node)
    if facts.base in _NO_VALUES or not facts.managed:
        return None
    eps_like = facts.base in _EPS_OPS
    for key, given in (*enumerate(node.args), *node.kwargs.items()):
        value = given.meta.get("number") if isinstance(given, Node) else given
        if type(value) is float or (type(value) is int and facts.base in _WHOLE_VALUES):
            hazard = _number_hazard(value, low, eps_like or key == "eps")
            if hazard is not None:
                return hazard
    return None


def _number_hazard(value: Any, low: torch.dtype, eps_like: bool) -> str | None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value == 0:
        return None
    info = torch.finfo(low)
    size = abs(float(value))
    if size > info.max:
        return f"the constant {value:g} is beyond the largest {long_name(low)}, {info.max:g}"
    if size < info.smallest_normal * info.eps:
        return f"the constant {value:g} rounds to 0 in {long_name(low)}"
    if eps_like and size < info.smallest_normal:
        return (
            f"the constant {value:g} is below the smallest normal {long_name(low)}, {info.smallest_normal:g}"
        )
    return None


def square_hazard(node: Node, low: torch.dtype) -> str | None:
    """A value times itself in float16."""
    if low != torch.float16 or facts_of(node).base != "mul" or len(node.args) < 2:
        return None
    if isinstance(node.args[0], Node) and node.args[0] is node.args[1]:
        return "the square of a value above 255 is infinite in float16"
    return None


def large_buffers(gm: GraphModule, low: torch.dtype) -> dict[Node, str]:
    """Buffers and constants with finite values beyond the low range."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr" or not facts_of(node).managed:
            continue
        try:
            value = get_attribute(gm, str(node.target))
        except AttributeError:
            continue
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.is_meta:
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            continue  # a parameter that torch.func replaced; its values cannot be looked at
        sentence = _large_values(value.detach(), low)
        if sentence is not None:
            found[node] = f"reads {node.target}, {sentence}"
    return found


def _large_values(value: torch.Tensor, low: torch.dtype) -> str | None:
    if value.numel() == 0 or type(value) is not torch.Tensor:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        finite = value[value.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
    if largest > torch.finfo(low).max:
        return f"whose value {largest:g} is beyond the largest {long_name(low)}"
    return None


def logarithm_hazards(gm: GraphModule, rule_of: Any) -> dict[Node, str]:
    """Sigmoids and softmaxes whose result reaches a logarithm, each with its reason."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        facts = facts_of(node) if node.op != "output" else None
        if facts is None or facts.base not in _LOGARITHMS or not node.args:
            continue
        waiting = list(argument_nodes(node.args[0]))
        seen: set[Node] = set(waiting)
        while waiting:
            value = waiting.pop()
            base = facts_of(value).base
            if base in _SIGMOIDS:
                found[value] = (
                    f"its result reaches {node.name}: near 1 it would round to 1 before the logarithm"
                )
                continue
            if not _passes_on(value, base, rule_of(value)):
                continue
            for earlier in value.all_input_nodes:
                if earlier not in seen and facts_of(earlier).managed:
                    seen.add(earlier)
                    waiting.append(earlier)
    return found


def _passes_on(node: Node, base: str, rule: Rule | None) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return (
        base in _BETWEEN
        or (rule is not None and (rule.moves or rule.cls is OpClass.CLEAR))
        or base in ("float", "to")
    )
