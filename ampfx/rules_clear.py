"""Clear rows: what moves, compares or makes values.

Criterion: the result has no rounding of its own. ``moves`` marks ops that a cast may pass without
changing a bit of value or gradient. Ops that read an element several times (``sums_backward``) and
ops that decide an index or a bool are clear but do not have it.
"""

from __future__ import annotations

from ampfx.rule_block import CLEAR_LIST, CPU_LIST, PROMOTION, block, flatten, in_place
from ampfx.rule_table import OpClass, Rule

_MOVES = "moves values"
_REPEATS = "may read an element several times: its backward adds gradients up"
_DECIDES = "compares values; a bool or an index hangs on their last bit"
_ROUNDS = "rounds to integers: a jump hangs on the last bit"
_MAKES = "makes values, reads none"
_LIKE = "takes shape and dtype from its input, reads no value"
_QUERY = "looks at shape or type, reads no value"
_DTYPE = "the author chose this dtype"

SHARED: tuple[Rule, ...] = flatten(
    block(
        OpClass.CLEAR,
        "view reshape flatten unflatten ravel transpose* t* T mT H mH adjoint permute movedim unsqueeze* "
        "squeeze* view_as reshape_as contiguous clone detach* alias data narrow select getitem slice "
        "split split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind unsafe_chunk unsafe_split "
        "diagonal diag diag_embed diagflat flip fliplr flipud roll rot90 tril* triu* pixel_shuffle "
        "pixel_unshuffle channel_shuffle native_channel_shuffle masked_select atleast_1d atleast_2d "
        "atleast_3d cpu cuda pin_memory identity dequantize resolve_conj resolve_neg squeeze_copy hstack "
        "vstack dstack column_stack block_diag",
        _MOVES,
        CLEAR_LIST,
        moves=True,
    ),
    block(OpClass.CLEAR, "cat stack", _MOVES, CPU_LIST + "; " + CLEAR_LIST, moves=True),
    block(
        OpClass.CLEAR,
        "relu* neg* positive abs*",
        "changes at most the sign of a value",
        CLEAR_LIST,
        moves=True,
    ),
    block(OpClass.CLEAR, "pad", "moves values between zeros", CLEAR_LIST, moves=True),
    block(
        OpClass.CLEAR,
        "expand expand_as broadcast_to broadcast_tensors repeat tile repeat_interleave gather "
        "index_select take take_along_dim unfold as_strided* getitem_index index meshgrid cartesian_prod "
        "combinations unsafe_index pad_circular",
        _REPEATS,
        CLEAR_LIST,
        sums_backward=True,
    ),
    block(
        OpClass.CLEAR,
        "embedding",
        "reads rows of a float32 table, whose gradient adds up; follows the table",
        CLEAR_LIST,
        keep=("weight",),
        follow="weight",
        sums_backward=True,
    ),
    block(
        OpClass.CLEAR,
        "eq* ne* lt* le* gt* ge* isclose allclose equal isnan isinf isfinite isposinf isneginf isreal "
        "isin signbit logical_and* logical_or* logical_not* logical_xor* bitwise_and* bitwise_or* "
        "bitwise_not* bitwise_xor* bitwise_left_shift* bitwise_right_shift* any all max min amax amin "
        "aminmax argmax argmin argsort argwhere sort msort topk kthvalue median nanmedian mode cummax "
        "cummin nonzero count_nonzero unique unique_consecutive bincount searchsorted bucketize one_hot "
        "max_pool1d max_pool2d max_pool1d_with_indices max_pool2d_with_indices adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices item "
        "tolist numpy contains",
        _DECIDES,
        PROMOTION,
    ),
    block(OpClass.CLEAR, "floor* ceil* round* trunc* sign* sgn*", _ROUNDS, PROMOTION),
    block(
        OpClass.CLEAR,
        "zeros ones empty full arange range linspace logspace rand randn randint randperm eye tensor "
        "as_tensor asarray scalar_tensor from_numpy empty_strided empty_permuted tril_indices "
        "triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window "
        "fft_fftfreq fft_rfftfreq",
        _MAKES,
        "float32 unless dtype= says otherwise",
    ),
    block(
        OpClass.CLEAR,
        "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones "
        "new_empty new_full new_empty_strided new_tensor",
        _LIKE,
        PROMOTION,
    ),
    block(
        OpClass.CLEAR,
        "size dim ndim numel nelement shape stride storage_offset is_contiguous is_floating_point "
        "is_complex dtype device layout element_size is_cuda len requires_grad is_same_size result_type "
        "ndimension",
        _QUERY,
        PROMOTION,
    ),
    block(
        OpClass.CLEAR,
        "to type type_as float half bfloat16 double int long short char byte bool cfloat cdouble chalf",
        _DTYPE,
        "an explicit dtype is respected",
    ),
    block(
        OpClass.CLEAR,
        "real imag conj view_as_real fft_fftshift fft_ifftshift",
        "reads complex numbers, which are never cast",
        PROMOTION,
    ),
    in_place(
        OpClass.CLEAR,
        "copy zero normal uniform exponential cauchy geometric log_normal random resize set requires_grad",
        "fills its first argument, which keeps its dtype",
        "torch.autocast has no entry for in-place and out= forms",
    ),
    block(
        OpClass.CLEAR,
        "setitem",
        "writes into its first argument, which keeps its dtype",
        PROMOTION,
        follow="input",
    ),
)

CUDA: tuple[Rule, ...] = flatten(
    block(
        OpClass.CLEAR,
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d "
        "pad_reflect pad_replicate",
        _REPEATS,
        CLEAR_LIST,
        sums_backward=True,
    ),
    block(
        OpClass.CLEAR,
        "max_pool3d max_pool3d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices "
        "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
        "fractional_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d",
        _DECIDES,
        PROMOTION,
    ),
)

CPU: tuple[Rule, ...] = flatten(
    block(OpClass.CLEAR, "max_pool3d_with_indices", _DECIDES, PROMOTION),
)
