"""Infer rows: arithmetic that low precision neither speeds up by itself nor breaks.

Criterion: one rounding per element (or float32 accumulation inside the kernel). Such an op computes
in the widest of its inputs; casting for it is not worth while.
"""

from __future__ import annotations

from ampfx.rule_block import CPU_LIST, CUDA_LIST, KERNELS, PROMOTION, block, flatten
from ampfx.rule_table import OpClass, Rule

_ARITHMETIC = "elementwise arithmetic, one rounding"
_ACTIVATION = "activation, computed in float32 inside the kernel"
_STATISTICS = "its kernel takes low input with float32 parameters and computes statistics in float32"
_REDUCTION = "its kernel accumulates in float32, the result has the size of an element"
_POOL = "averages or selects few elements, accumulated in float32"
_WRITES = "writes values into a tensor of the same dtype"
_NOISE = "scales or drops elements"

SHARED: tuple[Rule, ...] = flatten(
    block(
        OpClass.INFER,
        "add* sub* mul* div* floor_divide* remainder* fmod* lerp* hypot* sqrt* exp2* sin* cos* atan* "
        "acosh* asinh* atanh* erf* erfc* sinc* logit* xlogy* heaviside copysign* nextafter* ldexp* frac* "
        "deg2rad* rad2deg* nan_to_num* logaddexp logaddexp2 diff gradient kron outer angle clamp* "
        "clamp_min* clamp_max* maximum minimum fmax fmin",
        _ARITHMETIC,
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "relu6* hardtanh* leaky_relu* elu* celu* selu* rrelu* gelu silu* mish* sigmoid* tanh* logsigmoid "
        "glu softsign hardswish* hardsigmoid* hardshrink softshrink tanhshrink threshold*",
        _ACTIVATION,
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "dropout* dropout1d* dropout2d* dropout3d* alpha_dropout* feature_dropout* feature_alpha_dropout* "
        "native_dropout",
        _NOISE,
        PROMOTION,
    ),
    block(OpClass.INFER, "mean var std var_mean std_mean logcumsumexp", _REDUCTION, PROMOTION),
    block(
        OpClass.INFER,
        "batch_norm instance_norm",
        _STATISTICS,
        KERNELS,
        keep=("running_mean", "running_var", "weight", "bias"),
        follow="input",
    ),
    block(
        OpClass.INFER,
        "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate_area",
        _POOL,
        PROMOTION,
    ),
    block(OpClass.INFER, "fold", "adds up overlapping windows", PROMOTION),
    block(
        OpClass.INFER,
        "where masked_fill* masked_scatter* index_fill* fill* fill_diagonal",
        "selects between values",
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "index_put* _index_put_impl scatter* index_add* scatter_reduce* index_reduce* put* select_scatter "
        "slice_scatter diagonal_scatter masked_index_put",
        _WRITES,
        PROMOTION,
    ),
    block(OpClass.INFER, "scatter_add*", "adds values up in a tensor of the same dtype", CUDA_LIST),
    block(OpClass.INFER, "index_copy*", _WRITES, CPU_LIST),
    block(OpClass.INFER, "addcmul* addcdiv* atan2* dot vdot", "all arguments in the widest dtype", CUDA_LIST),
    block(OpClass.INFER, "cross linalg_cross", "all arguments in the widest dtype", CUDA_LIST),
    block(
        OpClass.INFER,
        "embedding_bag",
        "sums rows of a float32 table; follows the table",
        PROMOTION,
        keep=("weight",),
        follow="weight",
        sums_backward=True,
    ),
    block(
        OpClass.INFER, "bernoulli* multinomial normal poisson", "draws numbers from probabilities", PROMOTION
    ),
)

CUDA: tuple[Rule, ...] = flatten(
    block(OpClass.INFER, "grid_sample", "all arguments in the widest dtype", CUDA_LIST),
    block(
        OpClass.INFER,
        "avg_pool3d adaptive_avg_pool3d",
        _POOL,
        PROMOTION,
    ),
    block(OpClass.INFER, "trace", _REDUCTION, PROMOTION),
)

CPU: tuple[Rule, ...] = flatten(
    block(
        OpClass.INFER,
        "acos* asin* cosh* erfinv* exp* expm1* log* log10* log2* log1p* reciprocal* rsqrt* sinh* square* "
        "tan* pow* softplus",
        "elementwise, computed in float32 inside the kernel",
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "layer_norm group_norm",
        _STATISTICS,
        KERNELS,
        keep=("weight", "bias"),
        follow="input",
    ),
    block(OpClass.INFER, "rms_norm", _STATISTICS, KERNELS, keep=("weight",), follow="input"),
    block(OpClass.INFER, "native_layer_norm", _REDUCTION, PROMOTION),
    block(
        OpClass.INFER,
        "norm frobenius_norm linalg_norm linalg_vector_norm linalg_matrix_norm dist renorm* "
        "cosine_similarity normalize pairwise_distance lp_pool1d lp_pool2d",
        _REDUCTION,
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "softmax log_softmax softmin gumbel_softmax logsumexp",
        "its kernel adds exponentials up in float32",
        PROMOTION,
    ),
    block(
        OpClass.INFER,
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
        "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
        "interpolate",
        "weighs few elements",
        PROMOTION,
        sums_backward=True,
    ),
)
