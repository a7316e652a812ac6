"""Deny rows: what needs float32's mantissa or range.

Criterion: the op adds up many terms into one result, is a loss, grows or shrinks its argument
strongly, solves a system, or has no kernel in low precision.
"""

from __future__ import annotations

from ampfx.rule_block import BOTH_LISTS, CPU_LIST, CUDA_LIST, KERNELS, block, flatten, in_place
from ampfx.rule_table import OpClass, Rule

_LOSS = "a loss: few numbers, from which every gradient starts"
_GROWS = "strongly growing or singular function"
_DISTANCE = "sum of powers under a root"
_NORM = "statistics over many elements"
_RESIZE = "its backward adds gradients up"
_SOLVER = "decomposition or solver: has no low-precision kernel"
_FOURIER = "complex numbers are float32 pairs"
_SPECIAL = "special function: low-precision kernels are missing or inexact"
_NO_KERNEL = "has no low-precision kernel on every device"

SOLVERS = (
    "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals "
    "linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor "
    "linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex "
    "linalg_lu_solve linalg_matrix_exp linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet "
    "linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv "
    "linalg_tensorsolve linalg_vander cholesky cholesky_inverse cholesky_solve inverse pinverse lu "
    "lu_solve lu_unpack geqrf orgqr ormqr qr svd svd_lowrank pca_lowrank lobpcg triangular_solve logdet "
    "_lu_with_info _linalg_eigh _linalg_svd"
)
FOURIER = (
    "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 "
    "fft_rfftn fft_irfftn fft_hfft fft_ihfft fft_hfft2 fft_ihfft2 fft_hfftn fft_ihfftn stft istft complex "
    "polar view_as_complex"
)
SPECIAL = (
    "lgamma digamma polygamma mvlgamma igamma igammac i0 special_i0e special_i1 special_i1e "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_entr "
    "special_erfcx special_ndtr special_ndtri special_log_ndtr special_xlog1py special_zeta"
)

SHARED: tuple[Rule, ...] = flatten(
    block(OpClass.DENY, "prod", "product of many elements", BOTH_LISTS),
    block(OpClass.DENY, "sum cumsum cumprod*", "sum or product over many elements", CUDA_LIST),
    block(
        OpClass.DENY,
        "nansum nanmean trapezoid trapz cumulative_trapezoid",
        "sum of many elements",
        "as sum",
    ),
    block(OpClass.DENY, "float_power", "computes in float64 by definition", KERNELS),
    block(OpClass.DENY, "linalg_matrix_power", "powers of a matrix grow", "as pow"),
    block(
        OpClass.DENY,
        "cross_entropy nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
        "poisson_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss "
        "multilabel_margin_loss soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits",
        _LOSS,
        BOTH_LISTS,
    ),
    block(
        OpClass.DENY,
        "binary_cross_entropy",
        "log of a probability near 0 or 1; on CUDA autocast refuses it",
        BOTH_LISTS,
    ),
    block(
        OpClass.DENY,
        "ctc_loss gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss",
        _LOSS,
        "as the losses in the lists",
    ),
    block(OpClass.DENY, "cdist", _DISTANCE, BOTH_LISTS),
    block(OpClass.DENY, "pdist", _DISTANCE, CUDA_LIST),
    block(
        OpClass.DENY,
        SOLVERS,
        _SOLVER,
        CPU_LIST + "; " + KERNELS,
    ),
    block(
        OpClass.DENY,
        FOURIER,
        _FOURIER,
        CPU_LIST + "; " + KERNELS,
    ),
    block(
        OpClass.DENY,
        SPECIAL,
        _SPECIAL,
        KERNELS,
    ),
    in_place(OpClass.DENY, "lgamma digamma polygamma mvlgamma igamma igammac i0", _SPECIAL, KERNELS),
    block(
        OpClass.DENY,
        "quantile nanquantile histc histogram histogramdd fake_quantize_per_tensor_affine "
        "fake_quantize_per_channel_affine corrcoef cov",
        _NO_KERNEL,
        CPU_LIST + "; " + KERNELS,
    ),
    block(
        OpClass.DENY,
        "affine_grid",
        "sampling positions: low precision moves pixels",
        "as positions; in no autocast list",
    ),
    block(
        OpClass.DENY,
        "_weight_norm norm_except_dim",
        "makes a weight from float32 parameters by a sum of squares",
        "as norm",
    ),
)

CUDA: tuple[Rule, ...] = flatten(
    block(
        OpClass.DENY,
        "acos* asin* cosh* erfinv* exp* expm1* log* log10* log2* log1p* reciprocal* rsqrt* sinh* square* "
        "tan* pow* softplus",
        _GROWS,
        CUDA_LIST,
    ),
    block(OpClass.DENY, "layer_norm native_layer_norm rms_norm group_norm", _NORM, CUDA_LIST),
    block(OpClass.DENY, "local_response_norm", "powers of a sum of squares", "pow in " + CUDA_LIST),
    block(
        OpClass.DENY,
        "norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm dist renorm* "
        "cosine_similarity normalize pairwise_distance lp_pool1d lp_pool2d lp_pool3d",
        _DISTANCE,
        CUDA_LIST,
    ),
    block(
        OpClass.DENY, "softmax log_softmax softmin gumbel_softmax logsumexp", "sum of exponentials", CUDA_LIST
    ),
    block(
        OpClass.DENY,
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
        "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
        "interpolate",
        _RESIZE,
        CUDA_LIST,
    ),
)

CPU: tuple[Rule, ...] = flatten(
    block(
        OpClass.DENY,
        "avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices "
        "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
        "fractional_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d grid_sample "
        "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback trace",
        "has no low-precision kernel on this device",
        CPU_LIST,
    ),
    block(
        OpClass.DENY,
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d "
        "pad_reflect pad_replicate",
        "repeats elements: its backward adds gradients up",
        CPU_LIST,
    ),
    block(
        OpClass.DENY, "local_response_norm", "pools in three dimensions inside", "avg_pool3d in " + CPU_LIST
    ),
    block(OpClass.DENY, "lp_pool3d", "pools in three dimensions inside", "avg_pool3d in " + CPU_LIST),
    block(OpClass.DENY, "nuclear_norm", _SOLVER, KERNELS),
    block(OpClass.DENY, "multilabel_margin_loss_forward", _LOSS, CPU_LIST),
)
