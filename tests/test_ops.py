"""Every spelling of an operation has one name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ampfx.dtypes import TensorSpec
from ampfx.ops import (
    ALIASES,
    FACTORIES,
    LIKE_OPS,
    QUERY_OPS,
    author_dtype,
    base_op,
    canonical_op,
    indexes_with_tensor,
    is_in_place,
    written_arguments,
)


def function_node(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, (x, *args), kwargs)


def method_node(name: str, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    return graph.call_method(name, (x, *args), kwargs)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (torch.relu_, "relu_"),
        (F.linear, "linear"),
        (F.logsigmoid, "logsigmoid"),
        (F.threshold, "threshold"),
        (F.max_pool2d, "max_pool2d"),
        (F.gelu, "gelu"),
        (F.upsample, "interpolate"),
        (torch.true_divide, "div"),
        (torch.concat, "cat"),
        (torch.Tensor.add, "add"),
        (torch.Tensor.__radd__, "add"),
        (torch.Tensor.__rpow__, "pow"),
        (torch.Tensor.__getitem__, "getitem"),
        (torch.Tensor.__setitem__, "setitem"),
        (torch.Tensor.T.__get__, "T"),  # type: ignore[attr-defined]
        (operator.add, "add"),
        (operator.iadd, "add_"),
        (operator.and_, "bitwise_and"),
        (operator.not_, "not"),
        (operator.truediv, "div"),
        (operator.floordiv, "floor_divide"),
        (operator.getitem, "getitem"),
        (torch.linalg.norm, "linalg_norm"),
        (torch.special.expit, "sigmoid"),
        (torch.fft.fft, "fft_fft"),
        (torch.ops.aten.add.Tensor, "add"),
        (torch.ops.aten.relu_, "relu_"),
        (torch.ops.prims.sin, "prims::sin"),
        ("__rsub__", "sub"),
        ("__rand__", "bitwise_and"),  # not torch.rand
        ("__float__", "item"),  # a read on the host, no cast
        ("__imul__", "mul_"),
        ("__matmul__", "matmul"),
        ("__invert__", "bitwise_not"),
        ("true_divide_", "div_"),
        ("float", "float"),
    ],
)
def test_canonical_name(target: Callable[..., Any] | str, name: str) -> None:
    assert canonical_op(target) == name


def test_python_function_of_the_user_keeps_its_module() -> None:
    assert canonical_op(function_node).endswith("test_ops.function_node")


def test_node_is_in_place_by_name_flag_or_out() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert canonical_op(x) == ""
    assert canonical_op(function_node(F.relu, inplace=True)) == "relu_"
    assert canonical_op(function_node(F.relu, True)) == "relu_"
    assert canonical_op(function_node(F.relu)) == "relu"
    assert canonical_op(function_node(F.dropout, 0.5, True, True)) == "dropout_"
    assert canonical_op(function_node(torch.add, 1, out=x)) == "add_"
    assert canonical_op(method_node("add_", 1)) == "add_"
    assert canonical_op(function_node(getattr, "mT")) == "mT"


def test_base_op_and_in_place() -> None:
    assert base_op("add_") == "add"
    assert base_op("setitem") == "setitem"
    assert [is_in_place(name) for name in ("setitem", "relu_", "relu")] == [True, True, False]


def test_no_alias_leads_to_an_alias() -> None:
    assert not set(ALIASES) & set(ALIASES.values())


def test_groups_are_disjoint() -> None:
    assert not FACTORIES & LIKE_OPS
    assert not QUERY_OPS & (FACTORIES | LIKE_OPS)


def test_written_arguments() -> None:
    node = method_node("add_", 1)
    assert written_arguments(node) == (node.args[0],)
    assert written_arguments(method_node("add", 1)) == ()
    graph = Graph()
    x, mean, var, out = (graph.placeholder(name) for name in ("x", "mean", "var", "out"))
    assert written_arguments(graph.call_function(F.batch_norm, (x, mean, var))) == (mean, var)
    assert written_arguments(
        graph.call_function(F.batch_norm, (x,), {"running_mean": mean, "running_var": None})
    ) == (mean,)
    assert written_arguments(
        graph.call_function(torch.batch_norm, (x, None, None, mean, var, True, 0.1, 1e-5, True))
    ) == (
        mean,
        var,
    )
    assert written_arguments(graph.call_function(torch.add, (x, x), {"out": out})) == (out,)
    assert written_arguments(graph.call_function(operator.setitem, (x, 0, out))) == (x,)


@pytest.mark.parametrize(
    ("node", "dtype"),
    [
        (method_node("float"), torch.float32),
        (method_node("long"), torch.int64),
        (method_node("to", torch.float16), torch.float16),
        (method_node("to", dtype=torch.bfloat16), torch.bfloat16),
        (method_node("to", "cpu"), None),
        (method_node("type", "torch.HalfTensor"), torch.float16),
        (method_node("type", torch.float64), torch.float64),
        (function_node(torch.sum, dtype=torch.float64), torch.float64),
        (function_node(F.softmax, -1), None),
        (method_node("__float__"), None),
    ],
)
def test_author_dtype(node: Node, dtype: torch.dtype | None) -> None:
    assert author_dtype(node) is dtype


def test_indexing_with_a_tensor_is_told_from_slicing() -> None:
    graph = Graph()
    x, size, index = (graph.placeholder(name) for name in ("x", "size", "index"))
    size.meta["val"] = 3
    index.meta["val"] = TensorSpec(torch.int64, (2,), False, torch.device("cpu"), 0)

    def pick(what: Any) -> bool:
        return indexes_with_tensor(graph.call_function(operator.getitem, (x, what)))

    assert not pick(0)
    assert not pick(size)
    assert not pick((slice(None, size), None, Ellipsis, 0))
    assert pick(index)
    assert pick((0, index))
    assert pick([0, 0, 1])
