"""FLOPs of the matrix products in a captured graph, from the shapes of the recorded run.

A multiplication with its addition counts as two, as PyTorch's own counter has it. Products inside custom
functions and operators cannot be seen and count as none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from ampfx.graph_utils import op_of, specs

Shape = tuple[int, ...]


def graph_flops(graph: fx.Graph) -> int:
    """FLOPs of all matrix products of one forward pass."""
    return sum(node_flops(node) for node in graph.nodes)


def node_flops(node: fx.Node) -> int:
    """FLOPs of a node that is a matrix product; 0 for any other."""
    formula = _FORMULAS.get(op_of(node).removesuffix("_"))
    if formula is None:
        return 0
    try:
        return 2 * formula(node, _shape(node))
    except (IndexError, KeyError, TypeError, ValueError):  # an unusual way to call it
        return 0


def _shape(value: Any) -> Shape:
    found = specs(value)
    return tuple(int(size) for size in found[0].shape)


def _argument(node: fx.Node, index: int, *names: str) -> Any:
    if index < len(node.args):
        return node.args[index]
    return next(node.kwargs[name] for name in names if name in node.kwargs)


def _linear(node: fx.Node, out: Shape) -> int:
    return math.prod(out) * _shape(_argument(node, 0, "input"))[-1]


def _product(node: fx.Node, out: Shape) -> int:
    return math.prod(out) * _shape(_argument(node, 0, "input", "mat1"))[-1]


def _added_product(node: fx.Node, out: Shape) -> int:
    return math.prod(out) * _shape(_argument(node, 1, "mat1", "batch1"))[-1]


def _summed_batches(node: fx.Node, out: Shape) -> int:
    batches, _, inner = _shape(_argument(node, 1, "batch1"))
    return math.prod(out) * batches * inner


def _convolution(node: fx.Node, out: Shape) -> int:
    return math.prod(out) * math.prod(_shape(_argument(node, 1, "weight"))[1:])


def _transposed_convolution(node: fx.Node, out: Shape) -> int:
    return math.prod(_shape(_argument(node, 0, "input"))) * math.prod(_shape(_argument(node, 1, "weight"))[1:])


def _attention(node: fx.Node, out: Shape) -> int:
    *batch, queries, size = _shape(_argument(node, 0, "query"))
    *_, keys, value_size = _shape(_argument(node, 2, "value"))
    return math.prod(batch) * queries * keys * (size + value_size)


def _bilinear(node: fx.Node, out: Shape) -> int:
    return math.prod(out) * math.prod(_shape(_argument(node, 2, "weight"))[1:])


def _recurrent(node: fx.Node, out: Shape) -> int:
    *steps, _ = _shape(node.args[0])
    matrices = [node.args[2], node.args[3]] if op_of(node).endswith("_cell") else list(_lists(node))
    return math.prod(steps) * sum(math.prod(_shape(weight)) for weight in matrices if len(_shape(weight)) == 2)


def _lists(node: fx.Node) -> list[fx.Node]:
    """The weights of a recurrent layer: the longest of its list arguments (states are lists as well)."""
    lists = [list(argument) for argument in node.args if isinstance(argument, (list, tuple))]
    return max(lists, key=len)


def _einsum(node: fx.Node, out: Shape) -> int:
    equation = str(node.args[0]).replace(" ", "")
    operands = [value for value in pytree.tree_leaves(node.args[1:]) if isinstance(value, fx.Node)]
    if len(operands) < 2:
        return 0
    inputs, _, result = equation.partition("->")
    terms = inputs.split(",")
    letters = "".join(terms)
    if "->" not in equation:
        result = "".join(letter for letter in letters if letters.count(letter) == 1)
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        shape = _shape(operand)
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(reversed(after), reversed(shape), strict=False))
    contracted = {letter for letter in letters if letter.isalpha() and letter not in result}
    return math.prod(out) * math.prod(sizes[letter] for letter in contracted)


_FORMULAS: dict[str, Callable[[fx.Node, Shape], int]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "chain_matmul"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added_product),
    "addbmm": _summed_batches,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "scaled_dot_product_attention": _attention,
    "bilinear": _bilinear,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _recurrent),
    "einsum": _einsum,
}
