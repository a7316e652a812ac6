"""Allow rows: products on matrix units.

Criterion: the op multiplies and adds over a long axis, the hardware does this several times faster
in low precision, and accumulates in float32 inside.
"""

from __future__ import annotations

from ampfx.rule_block import BOTH_LISTS, CPU_LIST, CUDA_LIST, KERNELS, PROMOTION, block, flatten
from ampfx.rule_table import OpClass, Rule

_PRODUCT = "matrix product, accumulated in float32"
_CONVOLUTION = "convolution, accumulated in float32"
_RECURRENT = "matrix products of a recurrent layer"
_STATE = "its products run low inside; the state keeps its dtype over the steps"

SHARED: tuple[Rule, ...] = flatten(
    block(OpClass.ALLOW, "linear matmul mm bmm addmm* addbmm* baddbmm*", _PRODUCT, BOTH_LISTS),
    block(
        OpClass.ALLOW,
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution",
        _CONVOLUTION,
        BOTH_LISTS,
    ),
    block(
        OpClass.ALLOW,
        "scaled_dot_product_attention",
        "matrix products; its softmax runs in float32 inside",
        BOTH_LISTS,
        saturate=("attn_mask",),
    ),
    block(OpClass.ALLOW, "prelu", "autocast lowers it: input and slope must have one dtype", BOTH_LISTS),
    block(OpClass.ALLOW, "einsum chain_matmul linalg_multi_dot", "composed of matrix products", BOTH_LISTS),
    block(OpClass.ALLOW, "lstm rnn_tanh rnn_relu", _RECURRENT, BOTH_LISTS),
)

CUDA: tuple[Rule, ...] = flatten(
    block(
        OpClass.ALLOW,
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention",
        "fused kernel of matrix products",
        CUDA_LIST,
    ),
    block(OpClass.ALLOW, "mv addmv* addr*", "matrix-vector product, accumulated in float32", CUDA_LIST),
    block(OpClass.ALLOW, "linalg_vecdot", "autocast lowers it", CUDA_LIST),
    block(OpClass.ALLOW, "gru", _RECURRENT, CUDA_LIST),
    block(OpClass.ALLOW, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", "fused recurrent cell", CUDA_LIST),
    block(
        OpClass.ALLOW, "convolution cudnn_convolution cudnn_convolution_transpose", _CONVOLUTION, CUDA_LIST
    ),
    block(
        OpClass.INFER, "tensordot inner bilinear", "autocast promotes its arguments to the widest", CUDA_LIST
    ),
    block(OpClass.INFER, "_addmm_activation", "in no list of this device", PROMOTION),
)

CPU: tuple[Rule, ...] = flatten(
    block(
        OpClass.ALLOW,
        "mkldnn_rnn_layer _native_multi_head_attention",
        "fused kernel of matrix products",
        CPU_LIST,
    ),
    block(OpClass.ALLOW, "linalg_vecdot", "autocast lowers it", CPU_LIST),
    block(OpClass.ALLOW, "_addmm_activation", _PRODUCT, CPU_LIST),
    block(OpClass.ALLOW, "tensordot inner", "composed of matrix products", CPU_LIST),
    block(OpClass.ALLOW, "rnn_tanh_cell rnn_relu_cell", _RECURRENT, CPU_LIST),
    block(OpClass.INFER, "convolution", "autocast lowers conv1d to conv3d, not this one", PROMOTION),
    block(OpClass.INFER, "mv addmv* addr*", "matrix-vector products gain little here", PROMOTION),
    block(OpClass.INFER, "bilinear", "composed of products and sums that autocast leaves alone", PROMOTION),
    block(
        OpClass.INFER,
        "gru lstm_cell gru_cell",
        _STATE,
        KERNELS,
        keep=("hx",),
        follow="hx",
        composite=True,
    ),
)
