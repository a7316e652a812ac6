"""One small call per op, to see what the installed torch does with it.

A sample takes a :class:`Make`, which makes its tensors: ``m.t(2, 3)`` floating in the dtype under
test (values in 0.1..0.9), ``m.p(2, 3)`` float32 like a parameter, ``m.i(2)`` integer zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Make:
    dtype: torch.dtype
    device: str = "cpu"
    grad: bool = False

    def t(self, *shape: int) -> torch.Tensor:
        return self._uniform(shape, self.dtype)

    def p(self, *shape: int) -> torch.Tensor:
        return self._uniform(shape, torch.float32)

    def i(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def b(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=self.device)

    def _uniform(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = torch.rand(shape, device=self.device) * 0.8 + 0.1
        return values.to(dtype).requires_grad_(self.grad)


Sample = Callable[[Make], Any]
SAMPLES: dict[str, Sample] = {}


def _unary(names: str, *shape: int) -> None:
    for name in names.split():
        function = next(
            getattr(owner, name)
            for owner in (F, torch, torch.Tensor)
            if getattr(owner, name, None) is not None
        )
        SAMPLES[name] = lambda m, function=function: function(m.t(*(shape or (2, 3))))


def _prefixed(prefix: str, owner: Any, names: str, *shape: int) -> None:
    for name in names.split():
        function = getattr(owner, name)
        SAMPLES[f"{prefix}_{name}"] = lambda m, function=function: function(m.t(*shape))


_unary(
    "neg positive abs relu sqrt square exp2 sin cos atan asinh atanh erf erfc sinc logit frac deg2rad "
    "rad2deg nan_to_num relu6 hardtanh leaky_relu elu celu selu rrelu gelu silu mish sigmoid tanh "
    "logsigmoid softsign hardswish hardsigmoid hardshrink softshrink tanhshrink dropout alpha_dropout "
    "feature_alpha_dropout mean var std acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal "
    "rsqrt sinh tan softplus sum nansum prod nanmean floor ceil round trunc sign sgn flatten ravel t "
    "clone detach contiguous tril triu fliplr flipud rot90 isnan isinf isfinite max min amax amin argmax "
    "median count_nonzero zeros_like ones_like empty_like rand_like randn_like isposinf isneginf signbit "
    "logical_not any all diag atleast_3d unique nonzero squeeze norm normalize lgamma digamma i0 "
    "bernoulli std_mean var_mean nanmedian argsort msort adjoint mode"
)
_prefixed("special", torch.special, "i0e i1 i1e entr erfcx ndtr ndtri log_ndtr bessel_j0 bessel_j1", 2, 3)
_prefixed(
    "linalg",
    torch.linalg,
    "cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor lu_factor_ex "
    "matrix_exp matrix_rank pinv qr slogdet svd svdvals norm vector_norm matrix_norm",
    3,
    3,
)
_prefixed(
    "fft", torch.fft, "fft ifft fft2 ifft2 fftn ifftn rfft rfft2 rfftn irfft irfft2 irfftn hfft ihfft", 4, 4
)


def _binary(names: str) -> None:
    for name in names.split():
        function = getattr(torch, name)
        SAMPLES[name] = lambda m, function=function: function(m.t(2, 3), m.t(2, 3))


_binary(
    "add sub mul div floor_divide remainder fmod hypot atan2 xlogy heaviside copysign nextafter logaddexp "
    "logaddexp2 maximum minimum fmax fmin eq ne lt le gt ge isclose logical_and logical_or logical_xor "
    "pow float_power kron inner igamma igammac dist"
)

_IMAGE = (2, 3, 4, 4)
_VOLUME = (2, 3, 4, 4, 4)


def _weights(m: Make, gates: int) -> list[torch.Tensor]:
    return [m.p(3 * gates, 5), m.p(3 * gates, 3), m.p(3 * gates), m.p(3 * gates)]


def _rnn(name: str, gates: int) -> Sample:
    def call(m: Make) -> Any:
        state = m.t(1, 2, 3)
        hx = (state, m.t(1, 2, 3)) if name == "lstm" else state
        weights = [w.to(m.dtype) for w in _weights(m, gates)]
        return getattr(torch, name)(m.t(4, 2, 5), hx, weights, True, 1, 0.0, True, False, False)

    return call


def _cell(name: str, gates: int) -> Sample:
    def call(m: Make) -> Any:
        hx = (m.t(2, 3), m.t(2, 3)) if name == "lstm_cell" else m.t(2, 3)
        return getattr(torch, name)(m.t(2, 5), hx, *[w.to(m.dtype) for w in _weights(m, gates)])

    return call


SAMPLES.update(
    {
        "linear": lambda m: F.linear(m.t(2, 3), m.t(4, 3), m.t(4)),
        "matmul": lambda m: torch.matmul(m.t(2, 3), m.t(3, 4)),
        "mm": lambda m: torch.mm(m.t(2, 3), m.t(3, 4)),
        "bmm": lambda m: torch.bmm(m.t(2, 2, 3), m.t(2, 3, 4)),
        "addmm": lambda m: torch.addmm(m.t(2, 4), m.t(2, 3), m.t(3, 4)),
        "addbmm": lambda m: torch.addbmm(m.t(2, 4), m.t(2, 2, 3), m.t(2, 3, 4)),
        "baddbmm": lambda m: torch.baddbmm(m.t(2, 2, 4), m.t(2, 2, 3), m.t(2, 3, 4)),
        "mv": lambda m: torch.mv(m.t(2, 3), m.t(3)),
        "addmv": lambda m: torch.addmv(m.t(2), m.t(2, 3), m.t(3)),
        "addr": lambda m: torch.addr(m.t(2, 3), m.t(2), m.t(3)),
        "outer": lambda m: torch.outer(m.t(2), m.t(3)),
        "dot": lambda m: torch.dot(m.t(3), m.t(3)),
        "vdot": lambda m: torch.vdot(m.t(3), m.t(3)),
        "linalg_vecdot": lambda m: torch.linalg.vecdot(m.t(2, 3), m.t(2, 3)),
        "linalg_multi_dot": lambda m: torch.linalg.multi_dot([m.t(2, 3), m.t(3, 4), m.t(4, 2)]),
        "chain_matmul": lambda m: torch.chain_matmul(m.t(2, 3), m.t(3, 4), m.t(4, 2)),
        "einsum": lambda m: torch.einsum("ab,cb->ac", m.t(2, 3), m.t(4, 3)),
        "tensordot": lambda m: torch.tensordot(m.t(2, 3), m.t(3, 4), 1),
        "bilinear": lambda m: F.bilinear(m.t(2, 3), m.t(2, 4), m.t(5, 3, 4), m.t(5)),
        "conv1d": lambda m: F.conv1d(m.t(2, 3, 8), m.t(4, 3, 3), m.t(4)),
        "conv2d": lambda m: F.conv2d(m.t(2, 3, 8, 8), m.t(4, 3, 3, 3), m.t(4)),
        "conv3d": lambda m: F.conv3d(m.t(*_VOLUME), m.t(4, 3, 3, 3, 3)),
        "conv_tbc": lambda m: torch.conv_tbc(m.t(8, 2, 3), m.t(3, 3, 4), m.t(4)),
        "conv_transpose1d": lambda m: F.conv_transpose1d(m.t(2, 3, 8), m.t(3, 4, 3)),
        "conv_transpose2d": lambda m: F.conv_transpose2d(m.t(2, 3, 8, 8), m.t(3, 4, 3, 3)),
        "conv_transpose3d": lambda m: F.conv_transpose3d(m.t(*_VOLUME), m.t(3, 4, 3, 3, 3)),
        "convolution": lambda m: torch.convolution(
            m.t(2, 3, 8, 8), m.t(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
        "scaled_dot_product_attention": lambda m: F.scaled_dot_product_attention(
            m.t(2, 2, 3, 4), m.t(2, 2, 3, 4), m.t(2, 2, 3, 4)
        ),
        "prelu": lambda m: F.prelu(m.t(2, 3), m.t(3)),
        "lstm": _rnn("lstm", 4),
        "gru": _rnn("gru", 3),
        "rnn_tanh": _rnn("rnn_tanh", 1),
        "rnn_relu": _rnn("rnn_relu", 1),
        "lstm_cell": _cell("lstm_cell", 4),
        "gru_cell": _cell("gru_cell", 3),
        "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
        "rnn_relu_cell": _cell("rnn_relu_cell", 1),
        "cumsum": lambda m: m.t(2, 3).cumsum(0),
        "cumprod": lambda m: m.t(2, 3).cumprod(0),
        "logcumsumexp": lambda m: m.t(2, 3).logcumsumexp(0),
        "logsumexp": lambda m: m.t(2, 3).logsumexp(0),
        "softmax": lambda m: F.softmax(m.t(2, 3), -1),
        "log_softmax": lambda m: F.log_softmax(m.t(2, 3), -1),
        "softmin": lambda m: F.softmin(m.t(2, 3), -1),
        "gumbel_softmax": lambda m: F.gumbel_softmax(m.t(2, 3)),
        "cross_entropy": lambda m: F.cross_entropy(m.t(2, 3), m.i(2)),
        "nll_loss": lambda m: F.nll_loss(m.t(2, 3), m.i(2)),
        "mse_loss": lambda m: F.mse_loss(m.t(2, 3), m.t(2, 3).detach()),
        "l1_loss": lambda m: F.l1_loss(m.t(2, 3), m.t(2, 3).detach()),
        "smooth_l1_loss": lambda m: F.smooth_l1_loss(m.t(2, 3), m.t(2, 3).detach()),
        "huber_loss": lambda m: F.huber_loss(m.t(2, 3), m.t(2, 3).detach()),
        "kl_div": lambda m: F.kl_div(m.t(2, 3), m.t(2, 3).detach(), reduction="sum"),
        "poisson_nll_loss": lambda m: F.poisson_nll_loss(m.t(2, 3), m.t(2, 3).detach()),
        "gaussian_nll_loss": lambda m: F.gaussian_nll_loss(m.t(2, 3), m.t(2, 3), m.t(2, 3)),
        "cosine_embedding_loss": lambda m: F.cosine_embedding_loss(m.t(2, 3), m.t(2, 3), m.i(2) + 1),
        "hinge_embedding_loss": lambda m: F.hinge_embedding_loss(m.t(2, 3), m.i(2, 3) + 1),
        "margin_ranking_loss": lambda m: F.margin_ranking_loss(m.t(2), m.t(2), m.i(2) + 1),
        "multi_margin_loss": lambda m: F.multi_margin_loss(m.t(2, 3), m.i(2)),
        "multilabel_margin_loss": lambda m: F.multilabel_margin_loss(m.t(2, 3), m.i(2, 3)),
        "multilabel_soft_margin_loss": lambda m: F.multilabel_soft_margin_loss(m.t(2, 3), m.t(2, 3).detach()),
        "soft_margin_loss": lambda m: F.soft_margin_loss(m.t(2, 3), m.i(2, 3) + 1),
        "triplet_margin_loss": lambda m: F.triplet_margin_loss(m.t(2, 3), m.t(2, 3), m.t(2, 3)),
        "binary_cross_entropy_with_logits": lambda m: F.binary_cross_entropy_with_logits(
            m.t(2, 3), m.t(2, 3).detach()
        ),
        "binary_cross_entropy": lambda m: F.binary_cross_entropy(m.t(2, 3), m.t(2, 3).detach()),
        "ctc_loss": lambda m: F.ctc_loss(m.t(5, 2, 4).log_softmax(-1), m.i(2, 2) + 1, (5, 5), (2, 2)),
        "cdist": lambda m: torch.cdist(m.t(2, 3), m.t(4, 3)),
        "pdist": lambda m: F.pdist(m.t(3, 3)),
        "cosine_similarity": lambda m: F.cosine_similarity(m.t(2, 3), m.t(2, 3)),
        "pairwise_distance": lambda m: F.pairwise_distance(m.t(2, 3), m.t(2, 3)),
        "renorm": lambda m: torch.renorm(m.t(2, 3), 2, 0, 1.0),
        "nuclear_norm": lambda m: torch.nuclear_norm(m.t(3, 3)),
        "layer_norm": lambda m: F.layer_norm(m.t(2, 3), (3,), m.p(3), m.p(3)),
        "rms_norm": lambda m: F.rms_norm(m.t(2, 3), (3,), m.p(3)),
        "group_norm": lambda m: F.group_norm(m.t(2, 4, 3), 2, m.p(4), m.p(4)),
        "native_layer_norm": lambda m: torch.native_layer_norm(m.t(2, 3), (3,), None, None, 1e-5),
        "batch_norm": lambda m: F.batch_norm(
            m.t(2, 3, 4), m.p(3).detach(), m.p(3).detach(), m.p(3), m.p(3), training=True
        ),
        "instance_norm": lambda m: F.instance_norm(m.t(2, 3, 4), None, None, m.p(3), m.p(3)),
        "local_response_norm": lambda m: F.local_response_norm(m.t(*_IMAGE), 2),
        "_weight_norm": lambda m: torch._weight_norm(m.t(2, 3), m.t(2, 1), 0),
        "norm_except_dim": lambda m: torch.norm_except_dim(m.t(2, 3), 2, 0),
        "lp_pool1d": lambda m: F.lp_pool1d(m.t(2, 3, 4), 2.0, 2),
        "lp_pool2d": lambda m: F.lp_pool2d(m.t(*_IMAGE), 2.0, 2),
        "lp_pool3d": lambda m: F.lp_pool3d(m.t(*_VOLUME), 2.0, 2),
        "avg_pool1d": lambda m: F.avg_pool1d(m.t(2, 3, 4), 2),
        "avg_pool2d": lambda m: F.avg_pool2d(m.t(*_IMAGE), 2),
        "avg_pool3d": lambda m: F.avg_pool3d(m.t(*_VOLUME), 2),
        "max_pool1d": lambda m: F.max_pool1d(m.t(2, 3, 4), 2),
        "max_pool2d": lambda m: F.max_pool2d(m.t(*_IMAGE), 2),
        "max_pool3d": lambda m: F.max_pool3d(m.t(*_VOLUME), 2),
        "max_pool2d_with_indices": lambda m: F.max_pool2d_with_indices(m.t(*_IMAGE), 2),
        "max_pool3d_with_indices": lambda m: F.max_pool3d_with_indices(m.t(*_VOLUME), 2),
        "adaptive_avg_pool1d": lambda m: F.adaptive_avg_pool1d(m.t(2, 3, 4), 2),
        "adaptive_avg_pool2d": lambda m: F.adaptive_avg_pool2d(m.t(*_IMAGE), 2),
        "adaptive_avg_pool3d": lambda m: F.adaptive_avg_pool3d(m.t(*_VOLUME), 2),
        "adaptive_max_pool1d": lambda m: F.adaptive_max_pool1d(m.t(2, 3, 4), 2),
        "adaptive_max_pool2d": lambda m: F.adaptive_max_pool2d(m.t(*_IMAGE), 2),
        "adaptive_max_pool3d": lambda m: F.adaptive_max_pool3d(m.t(*_VOLUME), 2),
        "adaptive_max_pool3d_with_indices": lambda m: F.adaptive_max_pool3d_with_indices(m.t(*_VOLUME), 2),
        "fractional_max_pool2d": lambda m: F.fractional_max_pool2d(m.t(*_IMAGE), 2, output_size=2),
        "fractional_max_pool3d": lambda m: F.fractional_max_pool3d(m.t(*_VOLUME), 2, output_size=2),
        "fractional_max_pool2d_with_indices": lambda m: F.fractional_max_pool2d_with_indices(
            m.t(*_IMAGE), 2, output_size=2
        ),
        "fractional_max_pool3d_with_indices": lambda m: F.fractional_max_pool3d_with_indices(
            m.t(*_VOLUME), 2, output_size=2
        ),
        "max_unpool1d": lambda m: F.max_unpool1d(m.t(2, 3, 1), m.i(2, 3, 1), 2),
        "max_unpool2d": lambda m: F.max_unpool2d(m.t(2, 3, 1, 1), m.i(2, 3, 1, 1), 2),
        "max_unpool3d": lambda m: F.max_unpool3d(m.t(2, 3, 1, 1, 1), m.i(2, 3, 1, 1, 1), 2),
        "interpolate": lambda m: F.interpolate(m.t(*_IMAGE), scale_factor=2.0),
        "interpolate_area": lambda m: F.interpolate(m.t(*_IMAGE), size=2, mode="area"),
        "grid_sample": lambda m: F.grid_sample(m.t(*_IMAGE), m.t(2, 2, 2, 2), align_corners=False),
        "affine_grid": lambda m: F.affine_grid(m.t(2, 2, 3), (2, 3, 4, 4), align_corners=False),
        "pad": lambda m: F.pad(m.t(*_IMAGE), (1, 1)),
        "pad_reflect": lambda m: F.pad(m.t(*_IMAGE), (1, 1, 1, 1), mode="reflect"),
        "pad_replicate": lambda m: F.pad(m.t(*_IMAGE), (1, 1, 1, 1), mode="replicate"),
        "pad_circular": lambda m: F.pad(m.t(*_IMAGE), (1, 1, 1, 1), mode="circular"),
        "unfold": lambda m: F.unfold(m.t(*_IMAGE), 2),
        "fold": lambda m: F.fold(m.t(2, 12, 9), (4, 4), 2),
        "pixel_shuffle": lambda m: F.pixel_shuffle(m.t(2, 4, 2, 2), 2),
        "pixel_unshuffle": lambda m: F.pixel_unshuffle(m.t(*_IMAGE), 2),
        "channel_shuffle": lambda m: F.channel_shuffle(m.t(2, 4, 2, 2), 2),
        "native_channel_shuffle": lambda m: torch.native_channel_shuffle(m.t(2, 4, 2, 2), 2),
        "embedding": lambda m: F.embedding(m.i(2), m.p(4, 3)),
        "embedding_bag": lambda m: F.embedding_bag(m.i(2, 2), m.p(4, 3)),
        "where": lambda m: torch.where(m.b(2, 3), m.t(2, 3), m.t(2, 3)),
        "masked_fill": lambda m: m.t(2, 3).masked_fill(m.b(2, 3), 0.5),
        "masked_scatter": lambda m: m.t(2, 3).masked_scatter(m.b(2, 3), m.t(2, 3)),
        "masked_select": lambda m: m.t(2, 3).masked_select(m.b(2, 3)),
        "index_put": lambda m: m.t(2, 3).index_put((m.i(1),), m.t(1, 3)),
        "index_fill": lambda m: m.t(2, 3).index_fill(0, m.i(1), 0.5),
        "index_add": lambda m: m.t(2, 3).index_add(0, m.i(1), m.t(1, 3)),
        "index_copy": lambda m: m.t(2, 3).index_copy(0, m.i(1), m.t(1, 3)),
        "index_select": lambda m: m.t(2, 3).index_select(0, m.i(1)),
        "index_reduce": lambda m: m.t(2, 3).index_reduce(0, m.i(1), m.t(1, 3), "mean"),
        "scatter": lambda m: m.t(2, 3).scatter(0, m.i(1, 3), m.t(1, 3)),
        "scatter_add": lambda m: m.t(2, 3).scatter_add(0, m.i(1, 3), m.t(1, 3)),
        "scatter_reduce": lambda m: m.t(2, 3).scatter_reduce(0, m.i(1, 3), m.t(1, 3), "sum"),
        "select_scatter": lambda m: m.t(2, 3).select_scatter(m.t(3), 0, 0),
        "slice_scatter": lambda m: m.t(2, 3).slice_scatter(m.t(1, 3), 0, 0, 1),
        "diagonal_scatter": lambda m: m.t(3, 3).diagonal_scatter(m.t(3)),
        "put": lambda m: m.t(2, 3).put(m.i(1), m.t(1)),
        "take": lambda m: m.t(2, 3).take(m.i(1)),
        "take_along_dim": lambda m: m.t(2, 3).take_along_dim(m.i(1, 3), 0),
        "gather": lambda m: m.t(2, 3).gather(0, m.i(1, 3)),
        "getitem": lambda m: m.t(2, 3)[0],
        "getitem_index": lambda m: m.t(2, 3)[m.i(2)],
        "addcmul": lambda m: torch.addcmul(m.t(2), m.t(2), m.t(2)),
        "addcdiv": lambda m: torch.addcdiv(m.t(2), m.t(2), m.t(2)),
        "cross": lambda m: torch.cross(m.t(2, 3), m.t(2, 3), dim=1),
        "linalg_cross": lambda m: torch.linalg.cross(m.t(2, 3), m.t(2, 3)),
        "lerp": lambda m: torch.lerp(m.t(2), m.t(2), 0.5),
        "clamp": lambda m: m.t(2).clamp(0.2, 0.5),
        "clamp_min": lambda m: m.t(2).clamp_min(0.2),
        "clamp_max": lambda m: m.t(2).clamp_max(0.2),
        "threshold": lambda m: F.threshold(m.t(2), 0.5, 0.0),
        "glu": lambda m: F.glu(m.t(2, 4)),
        "dropout1d": lambda m: F.dropout1d(m.t(2, 3, 4)),
        "dropout2d": lambda m: F.dropout2d(m.t(*_IMAGE)),
        "dropout3d": lambda m: F.dropout3d(m.t(*_VOLUME)),
        "native_dropout": lambda m: torch.native_dropout(m.t(2, 3), 0.5, True),
        "trapezoid": lambda m: torch.trapezoid(m.t(2, 3)),
        "cumulative_trapezoid": lambda m: torch.cumulative_trapezoid(m.t(2, 3)),
        "diff": lambda m: torch.diff(m.t(2, 3)),
        "gradient": lambda m: torch.gradient(m.t(3, 3))[0],
        "angle": lambda m: torch.angle(m.t(2)),
        "ldexp": lambda m: torch.ldexp(m.t(2), m.i(2)),
        "acosh": lambda m: torch.acosh(m.t(2) + 1),
        "polygamma": lambda m: torch.polygamma(1, m.t(2)),
        "mvlgamma": lambda m: torch.mvlgamma(m.t(2) + 2, 2),
        "special_xlog1py": lambda m: torch.special.xlog1py(m.t(2), m.t(2)),
        "special_zeta": lambda m: torch.special.zeta(m.t(2) + 1, m.t(2) + 1),
        "quantile": lambda m: torch.quantile(m.t(4), 0.5),
        "nanquantile": lambda m: torch.nanquantile(m.t(4), 0.5),
        "histc": lambda m: torch.histc(m.t(4).detach(), 2),
        "corrcoef": lambda m: torch.corrcoef(m.t(2, 3)),
        "cov": lambda m: torch.cov(m.t(2, 3)),
        "trace": lambda m: torch.trace(m.t(3, 3)),
        "logdet": lambda m: torch.logdet(m.t(2, 2) + 2 * torch.eye(2, dtype=m.dtype, device=m.device)),
        "linalg_solve": lambda m: torch.linalg.solve(m.t(3, 3), m.t(3, 2)),
        "linalg_solve_triangular": lambda m: torch.linalg.solve_triangular(m.t(3, 3), m.t(3, 2), upper=True),
        "linalg_lstsq": lambda m: torch.linalg.lstsq(m.t(3, 3), m.t(3, 2)),
        "linalg_matrix_power": lambda m: torch.linalg.matrix_power(m.t(3, 3), 3),
        "inverse": lambda m: torch.inverse(m.t(3, 3)),
        "pinverse": lambda m: torch.pinverse(m.t(3, 3)),
        "stft": lambda m: torch.stft(
            m.t(64), 16, return_complex=True, window=torch.ones(16, device=m.device)
        ),
        "complex": lambda m: torch.complex(m.t(2), m.t(2)),
        "polar": lambda m: torch.polar(m.t(2), m.t(2)),
        "view_as_complex": lambda m: torch.view_as_complex(m.t(2, 2)),
        "view": lambda m: m.t(2, 3).view(6),
        "reshape": lambda m: m.t(2, 3).reshape(6),
        "unflatten": lambda m: m.t(2, 6).unflatten(1, (2, 3)),
        "transpose": lambda m: m.t(2, 3).transpose(0, 1),
        "permute": lambda m: m.t(2, 3).permute(1, 0),
        "movedim": lambda m: m.t(2, 3).movedim(0, 1),
        "unsqueeze": lambda m: m.t(2, 3).unsqueeze(0),
        "narrow": lambda m: m.t(2, 3).narrow(0, 0, 1),
        "select": lambda m: m.t(2, 3).select(0, 0),
        "split": lambda m: m.t(2, 3).split(1),
        "chunk": lambda m: m.t(2, 3).chunk(2),
        "unbind": lambda m: m.t(2, 3).unbind(),
        "tensor_split": lambda m: m.t(2, 3).tensor_split(2),
        "diagonal": lambda m: m.t(3, 3).diagonal(),
        "diag_embed": lambda m: torch.diag_embed(m.t(3)),
        "flip": lambda m: m.t(2, 3).flip(0),
        "roll": lambda m: m.t(2, 3).roll(1),
        "cat": lambda m: torch.cat([m.t(2), m.t(2)]),
        "stack": lambda m: torch.stack([m.t(2), m.t(2)]),
        "hstack": lambda m: torch.hstack([m.t(2), m.t(2)]),
        "vstack": lambda m: torch.vstack([m.t(2), m.t(2)]),
        "dstack": lambda m: torch.dstack([m.t(2), m.t(2)]),
        "column_stack": lambda m: torch.column_stack([m.t(2), m.t(2)]),
        "block_diag": lambda m: torch.block_diag(m.t(2, 2), m.t(2, 2)),
        "expand": lambda m: m.t(2, 1).expand(2, 3),
        "repeat": lambda m: m.t(2, 3).repeat(2, 1),
        "tile": lambda m: m.t(2, 3).tile(2),
        "repeat_interleave": lambda m: m.t(2, 3).repeat_interleave(2),
        "broadcast_to": lambda m: m.t(1, 3).broadcast_to(2, 3),
        "meshgrid": lambda m: torch.meshgrid(m.t(2), m.t(3), indexing="ij"),
        "as_strided": lambda m: m.t(4).as_strided((2, 2), (1, 1)),
        "sort": lambda m: m.t(2, 3).sort(),
        "topk": lambda m: m.t(2, 3).topk(1),
        "kthvalue": lambda m: m.t(2, 3).kthvalue(1),
        "cummax": lambda m: m.t(2, 3).cummax(0),
        "full_like": lambda m: torch.full_like(m.t(2), 0.5),
        "new_zeros": lambda m: m.t(2).new_zeros(3),
        "multinomial": lambda m: torch.multinomial(m.t(4), 1),
        "aminmax": lambda m: torch.aminmax(m.t(2)),
    }
)
