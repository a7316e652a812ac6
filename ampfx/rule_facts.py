"""Facts about single ops that hold on every device: parameters, ``dtype=``, float16 hazards.

``PARAMS`` has the order of the positional parameters, for ops where a rule names an argument.
``FP16_HAZARDS`` says where float16's range (largest 65504, smallest 6e-8) breaks an op although
its kernel computes in float32 inside: the result itself does not fit, or a small one becomes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_NORM_PARAMS = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "use_input_stats",
    "momentum",
    "eps",
)
_RECURRENT = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

PARAMS: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "bilinear": ("input1", "input2", "weight", "bias"),
    "scaled_dot_product_attention": _ATTENTION,
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "instance_norm": _NORM_PARAMS,
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "embedding_bag": ("input", "weight", "offsets", "max_norm", "norm_type"),
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn_tanh": _RECURRENT,
    "rnn_relu": _RECURRENT,
    "lstm_cell": _CELL,
    "gru_cell": _CELL,
    "rnn_tanh_cell": _CELL,
    "rnn_relu_cell": _CELL,
    "pad": ("input", "pad", "mode", "value"),
    "interpolate": ("input", "size", "scale_factor", "mode"),
    "where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask", "value"),
    "setitem": ("input", "index", "value"),
    "getitem": ("input", "index"),
    "copy": ("input", "src"),
    "index_put": ("input", "indices", "values", "accumulate"),
    "index_copy": ("input", "dim", "index", "source"),
    "index_add": ("input", "dim", "index", "source"),
    "index_fill": ("input", "dim", "index", "value"),
    "scatter": ("input", "dim", "index", "src"),
    "scatter_add": ("input", "dim", "index", "src"),
    "scatter_reduce": ("input", "dim", "index", "src", "reduce"),
    "masked_scatter": ("input", "mask", "source"),
    "type_as": ("input", "other"),
    "to": ("input",),
    "expand_as": ("input", "other"),
    "view_as": ("input", "other"),
    "reshape_as": ("input", "other"),
}

# Callables that share a name with another one and order their parameters differently.
PARAMS_BY_TARGET: Mapping[Callable[..., Any], tuple[str, ...]] = {
    torch.embedding: ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    torch.embedding_bag: ("weight", "input", "offsets", "scale_grad_by_freq", "mode"),
    torch.batch_norm: (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
    ),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}

# With a packed sequence the recurrent functions take the batch sizes second; then the list of weights
# stands at this position.
PACKED_WEIGHTS_AT = 3
PACKED_RECURRENT: tuple[str, ...] = ("input", "batch_sizes", *_RECURRENT[1:])

# Other names of one and the same parameter.
PARAM_SYNONYMS: Mapping[str, str] = {"self": "input", "x": "input"}

_TAKE_DTYPE = (
    "sum nansum prod cumsum cumprod mean nanmean softmax log_softmax softmin norm linalg_norm "
    "linalg_vector_norm linalg_matrix_norm zeros_like ones_like empty_like full_like rand_like "
    "randn_like randint_like new_zeros new_ones new_empty new_full new_empty_strided new_tensor"
)
DTYPE_ARG: frozenset[str] = frozenset(_TAKE_DTYPE.split())

_SQUARES = "squares pass 65504 from 256 on, and are 0 below 2e-4"
_SMALL = "the result of a large or small argument does not fit float16"
_SUMS = "a sum over many elements passes 65504"
_EPS = "eps is 0 in float16: 0/0 for an all-zero row"
_LOG = "an argument that underflowed to 0 gives -inf"

_HAZARD_BLOCKS: tuple[tuple[str, str], ...] = (
    (
        "square var var_mean local_response_norm lp_pool1d lp_pool2d lp_pool3d gaussian_nll_loss",
        _SQUARES,
    ),
    (
        "pow float_power exp exp2 expm1 sinh cosh tan",
        "passes 65504 for moderate arguments: exp from 11.1 on",
    ),
    ("rsqrt reciprocal", "passes 65504 for small arguments, of which eps is 0"),
    ("sum nansum nanmean cumsum trapezoid trapz cumulative_trapezoid", _SUMS),
    ("prod cumprod", "a product of many elements passes 65504 or underflows to 0"),
    (
        "norm norm_except_dim linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm "
        "dist pairwise_distance pdist cdist renorm std std_mean",
        "the sum under the root passes 65504, small differences underflow",
    ),
    ("normalize cosine_similarity", _EPS),
    ("logsumexp logcumsumexp logaddexp logaddexp2", _SUMS),
    ("log log2 log10 log1p logit xlogy entr", _LOG),
    ("gumbel_softmax", "exponential noise that underflowed to 0 gives infinite logits"),
    ("erfinv digamma lgamma polygamma", _SMALL),
    ("addcdiv", "small divisors and their eps are 0"),
)

FP16_HAZARDS: Mapping[str, str] = {op: reason for ops, reason in _HAZARD_BLOCKS for op in ops.split()}
