"""One canonical name for every operation, however it was spelled.

torch offers most operations several times over: ``x + y``, ``x.add(y)``, ``torch.add(x, y)`` and
``operator.add(x, y)`` are one operation. Rules and policies speak of operations, so each spelling
is reduced to one name:

1. take the name: the method's, or the callable's ``__name__`` (``Tensor.T`` is ``"T"``);
2. operators: ``__add__`` and ``__radd__`` are ``"add"``, ``__iadd__`` is ``"add_"``;
3. aliases: ``true_divide`` is ``"div"``, ``special_expit`` is ``"sigmoid"``;
4. what writes into an argument ends with ``"_"``: in-place methods, ``F.relu(x, inplace=True)``
   and everything given ``out=``. ``setitem`` keeps its name.

``torch.ops.ns.name`` is ``"ns::name"`` (``aten`` operations have the plain name), any other Python
callable is ``"module.qualname"``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

# Operators that are no plain name between underscores. Written out, because stripping would turn
# __rand__ (a reversed &) into torch.rand and __float__ (a read on the host) into a cast.
_DUNDERS: Mapping[str, str] = {
    "truediv": "div",
    "div": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "matmul": "matmul",
    "pow": "pow",
}
_HOST_READS = ("float", "int", "bool", "index", "complex")
_UNARY_DUNDERS: Mapping[str, str] = {"invert": "bitwise_not", "pos": "positive", "inv": "bitwise_not"}
# The operator module ends the names of keywords with "_", which does not mean in place there.
_OPERATOR_NAMES: Mapping[str, str] = {
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "not_": "not",
    "is_": "is",
    "concat": "cat",
    "truth": "bool_of",
}

ALIASES: Mapping[str, str] = {
    "true_divide": "div",
    "divide": "div",
    "truediv": "div",
    "rdiv": "div",
    "multiply": "mul",
    "rmul": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "absolute": "abs",
    "negative": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "row_stack": "vstack",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "clip": "clamp",
    "fix": "trunc",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctanh": "atanh",
    "arctan2": "atan2",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "ger": "outer",
    "inv": "bitwise_not",
    "invert": "bitwise_not",
    "det": "linalg_det",
    "matrix_power": "linalg_matrix_power",
    "matrix_exp": "linalg_matrix_exp",
    "slogdet": "linalg_slogdet",
    "linalg_matmul": "matmul",
    "log_sigmoid": "logsigmoid",
    "_threshold": "threshold",
    "upsample": "interpolate",
    "upsample_nearest": "interpolate",
    "upsample_bilinear": "interpolate",
    "psi": "digamma",
    "special_digamma": "digamma",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammainc": "igamma",
    "special_gammaincc": "igammac",
    "special_gammaln": "lgamma",
    "special_i0": "i0",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_multigammaln": "mvlgamma",
    "special_polygamma": "polygamma",
    "special_psi": "digamma",
    "special_round": "round",
    "special_sinc": "sinc",
    "special_softmax": "softmax",
    "special_xlogy": "xlogy",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_unsafe_view": "view",
    "_reshape_alias": "view",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "cross_entropy_loss": "cross_entropy",
    "grid_sampler": "grid_sample",
    "affine_grid_generator": "affine_grid",
    "im2col": "unfold",
    "_to_copy": "to",
    "col2im": "fold",
    "constant_pad_nd": "pad",
}

# What the author wrote to choose a dtype. Such a call keeps its dtype and its input is left alone.
_CAST_METHODS: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "chalf": torch.complex32,
}
AUTHOR_CASTS: frozenset[str] = frozenset({*_CAST_METHODS, "to", "type", "type_as"})


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that make a tensor from no tensor.
FACTORIES: frozenset[str] = _words(
    """
    zeros ones empty full arange range linspace logspace rand randn randint randperm eye tensor
    as_tensor asarray scalar_tensor from_numpy empty_strided empty_permuted tril_indices triu_indices
    hann_window hamming_window blackman_window bartlett_window kaiser_window fft_fftfreq fft_rfftfreq
    """
)
# Operations that take only shape, device and dtype from their first argument.
LIKE_OPS: frozenset[str] = _words(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_full new_empty_strided new_tensor
    """
)
# Operations that look at a tensor without reading its values: they never need a cast.
QUERY_OPS: frozenset[str] = _words(
    """
    size dim ndim numel nelement shape stride storage_offset is_contiguous is_floating_point is_complex
    is_signed dtype device layout requires_grad is_leaf grad_fn grad element_size itemsize nbytes
    data_ptr is_cuda is_sparse is_nested is_meta is_quantized is_mkldnn is_cpu get_device len ndimension
    names type_of is_same_size result_type can_cast is_tensor is_inference is_conj is_neg promote_types
    _version broadcast_shapes
    """
)
# Arguments that an operation writes into although its name does not say so.
WRITES: Mapping[str, tuple[str, ...]] = {
    "batch_norm": ("running_mean", "running_var"),
    "instance_norm": ("running_mean", "running_var"),
}


def canonical_op(target: Node | Callable[..., Any] | str) -> str:
    """The canonical name of an operation.

    Args:
        target: a node of a captured graph, a callable, or the name of a Tensor method.

    Returns:
        The name, ``""`` for nodes that are no calls. Only a node shows ``inplace=`` and ``out=``.
    """
    if isinstance(target, str):
        return _from_name(target)
    if not isinstance(target, Node):
        return _from_callable(target)
    if target.op == "call_method":
        name = _from_name(str(target.target))
    elif target.op == "call_function":
        name = _from_call(target)
    elif target.op == "call_module":
        return "call_module"
    else:
        return ""
    if is_in_place(name):
        return name
    if target.kwargs.get("out") is not None or _inplace_flag(target):
        return name + "_"
    return name


def base_op(name: str) -> str:
    """The operation behind an in-place name: ``"add"`` for ``"add_"``."""
    return name.removesuffix("_") if is_in_place(name) else name


def is_in_place(name: str) -> bool:
    """Whether a canonical name says that the operation writes into an argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "setitem"


def written_arguments(node: Node) -> tuple[Any, ...]:
    """The arguments that a node writes into: ``self`` in place, ``out=``, running statistics."""
    name = canonical_op(node)
    written: list[Any] = []
    out = node.kwargs.get("out")
    if out is not None:
        written.extend(out if isinstance(out, tuple | list) else (out,))
    elif is_in_place(name):
        written.append(node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self")))
    for argument in WRITES.get(base_op(name), ()):
        value = _argument(node, argument)
        if value is not None:
            written.append(value)
    if "::" in name:
        written.extend(_argument_of_schema(node, position, key) for position, key in schema_writes(node.target))
    return tuple(value for value in written if isinstance(value, Node))


def schema_writes(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator's schema says it writes into."""
    operator_ = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns
    if isinstance(operator_, torch._ops.OpOverloadPacket):
        operator_ = getattr(operator_, operator_.overloads()[0])
    if not isinstance(operator_, torch._ops.OpOverload):
        return ()
    arguments = enumerate(operator_._schema.arguments)
    return tuple(
        (position, argument.name)
        for position, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _argument_of_schema(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def author_dtype(node: Node) -> torch.dtype | None:
    """The dtype that the author fixed in this call: ``x.float()``, ``x.to(dtype)``, ``dtype=``.

    None when the call names no dtype; ``type_as`` and ``x.to(other)`` follow another tensor.
    """
    # Asked for every argument of every node: no look at the canonical name, which for these is the target.
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_method" and name in _CAST_METHODS:
        return _CAST_METHODS[str(name)]
    for value in node.args:
        if isinstance(value, torch.dtype):
            return value
    for value in node.kwargs.values():
        if isinstance(value, torch.dtype):
            return value
    if name == "type":
        return _dtype_of_type(node.args[1] if len(node.args) > 1 else node.kwargs.get("dtype"))
    return None


def indexes_with_tensor(node: Node) -> bool:
    """Whether a ``getitem`` or ``setitem`` picks elements by a tensor or a list.

    Such a read may pick an element twice, so that its backward adds gradients up.
    """
    index = node.args[1] if len(node.args) > 1 else None
    if isinstance(index, list):
        return True
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, list | torch.Tensor) or _is_tensor_node(item) for item in items)


def _is_tensor_node(item: Any) -> bool:
    # Only a recorded int (or nothing but None for a graph without facts) lets a node be a plain index.
    if not isinstance(item, Node):
        return False
    val = item.meta.get("val")
    return not isinstance(val, int | torch.SymInt) if val is not None else canonical_op(item) not in QUERY_OPS


def _dtype_of_type(value: Any) -> torch.dtype | None:
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    kind = name.removeprefix("torch.").removeprefix("cuda.").removesuffix("Tensor").lower()
    return _CAST_METHODS.get(kind)


def _inplace_flag(node: Node) -> bool:
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if node.op != "call_function":
        return False
    position = _inplace_position(node.target)
    return position is not None and len(node.args) > position and node.args[position] is True


def _argument(node: Node, name: str) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    if node.op != "call_function":
        return None
    names = _parameter_names(node.target)
    position = names.index(name) if name in names else None
    if position is None or position >= len(node.args):
        return None
    return node.args[position]


@functools.cache
def _parameter_names(target: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        # Builtins have no signature; those with these arguments are known by name.
        return _BUILTIN_PARAMETERS.get(getattr(target, "__name__", ""), ())


_BUILTIN_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    "instance_norm": ("input", "weight", "bias", "running_mean", "running_var"),
}


def _inplace_position(target: Any) -> int | None:
    names = _parameter_names(target)
    return names.index("inplace") if "inplace" in names else None


def _from_call(node: Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return _from_callable(node.target)


def _from_name(name: str) -> str:
    if name.startswith("__") and name.endswith("__") and len(name) > 4:
        return _from_dunder(name[2:-2])
    if "." in name or "::" in name:
        return name
    if name.endswith("_") and not name.endswith("__"):
        return ALIASES.get(name[:-1], name[:-1]) + "_"
    return ALIASES.get(name, name)


def _from_dunder(name: str) -> str:
    if name in _HOST_READS:
        return "item"
    if name in _UNARY_DUNDERS:
        return _UNARY_DUNDERS[name]
    if name in _DUNDERS:
        return _DUNDERS[name]
    if name[1:] in _DUNDERS and name[0] in "ri":
        # __radd__ is add; __iadd__ is add in place
        return _DUNDERS[name[1:]] + ("_" if name[0] == "i" else "")
    return ALIASES.get(name, name)


@functools.cache
def _from_callable(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _from_operator(target)
    owner: Any = getattr(target, "__self__", None)
    name = str(getattr(target, "__name__", ""))
    owner_name = str(getattr(owner, "__name__", ""))
    if name in ("__get__", "__set__") and owner_name:
        # a property of Tensor: torch.Tensor.T.__get__
        return owner_name if name == "__get__" else "set_" + owner_name
    module = getattr(target, "__module__", None)
    if module in ("_operator", "operator"):
        if name in _OPERATOR_NAMES:
            return _OPERATOR_NAMES[name]
        if name[:1] == "i" and name[1:] in _DUNDERS:
            return _DUNDERS[name[1:]] + "_"
        return _from_name(_DUNDERS.get(name, name))
    if not name:
        return f"{type(target).__module__}.{type(target).__qualname__}"
    if _is_torch(target, module):
        return _from_name(name)
    if module in (None, "builtins", "math"):
        return name
    return f"{module}.{getattr(target, '__qualname__', name)}"


def _is_torch(target: Any, module: str | None) -> bool:
    if module is not None:
        return module == "torch" or module.startswith("torch.")
    owner = getattr(target, "__objclass__", None) or getattr(target, "__self__", None)
    return str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).startswith("torch")


def _from_operator(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    namespace, _, name = str(packet._qualified_op_name).partition("::")
    if namespace == "aten":
        return _from_name(name)
    return f"{namespace}::{name}"
