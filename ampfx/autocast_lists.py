"""What ``torch.autocast`` does to which operator, for CUDA and CPU: plain data.

The names are those of the dispatcher, overloads included, as ``torch`` 2.13 registers them on the
keys AutocastCUDA and AutocastCPU; a test compares them with the installed torch.

* ``lower_precision_fp``: every floating argument (not float64) is cast to the low dtype.
* ``fp32``: every low-precision argument is cast to float32.
* ``fp32_set_opt_dtype``: called with ``dtype=float32`` unless the caller gave a dtype.
* ``fp32_append_dtype``: redirected to the overload with a dtype, float32.
* ``promote``: every argument is cast to the widest of them.
* ``banned``: raises inside an enabled region.

An operator in no list runs in the dtypes that arrive. In-place and ``out=`` forms are in no list.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _names(text: str) -> tuple[str, ...]:
    return tuple("aten::" + name for name in text.split())


_CUDA: Mapping[str, tuple[str, ...]] = {
    "lower_precision_fp": _names(
        """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
        mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
        cudnn_convolution_transpose
        """
    ),
    "fp32": _names(
        """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
        logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa
        """
    ),
    "fp32_set_opt_dtype": _names(
        """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
        """
    ),
    "fp32_append_dtype": _names(
        """
        norm.Scalar norm.ScalarOpt_dim
        """
    ),
    "promote": _names(
        """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
        """
    ),
    "banned": _names(
        """
        binary_cross_entropy
        """
    ),
}

_CPU: Mapping[str, tuple[str, ...]] = {
    "lower_precision_fp": _names(
        """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm
        addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
        scaled_dot_product_attention _native_multi_head_attention
        """
    ),
    "fp32": _names(
        """
        avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar
        nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d
        _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky cholesky_inverse
        cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d
        adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
        poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div
        multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2
        fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft
        fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve
        linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv
        linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine
        geqrf _lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d
        adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd
        linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex
        """
    ),
    "fp32_set_opt_dtype": (),
    "fp32_append_dtype": (),
    "promote": _names(
        """
        stack cat index_copy
        """
    ),
    "banned": (),
}

AUTOCAST_LISTS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({"cuda": _CUDA, "cpu": _CPU})

# Registered with a kernel of its own: casts inputs and weights to float16 and re-flattens the weights.
OUTSIDE_THE_LISTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cuda": ("aten::_cudnn_rnn",), "cpu": ()}
)


def policy_by_name(device_type: str) -> dict[str, str]:
    """The list that an operator's plain name (no namespace, no overload) stands in."""
    lists = AUTOCAST_LISTS[device_type]
    return {
        operator.removeprefix("aten::").partition(".")[0]: policy
        for policy, operators in lists.items()
        for operator in operators
    }
