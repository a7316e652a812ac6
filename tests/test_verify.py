"""The verifier finds what is wrong, and says where."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph_builder import casts, convert
from test_assign import Weights
from torch.fx import Node

from ampfx.context import ConversionContext
from ampfx.errors import VerifyError
from ampfx.passes import VerifyDtypes


def skip(cast: Node) -> None:
    """Let the readers of a cast read what it reads."""
    value = cast.args[0]
    assert isinstance(value, Node)
    cast.replace_all_uses_with(value)


def test_a_missing_cast_is_found() -> None:
    gm = convert(Weights(lambda m, x: F.linear(x, m.w)), torch.randn(4, 4))
    cast = casts(gm)[0]
    skip(cast)
    with pytest.raises(
        VerifyError, match=r"linear \(linear\) reads x in float32 and needs bfloat16.*Run InsertCasts"
    ):
        VerifyDtypes().run(gm, ConversionContext())


def test_a_promotion_that_nobody_decided_is_found() -> None:
    gm = convert(Weights(lambda m, x: F.linear(F.linear(x, m.w) * F.linear(x, m.v), m.v)), torch.randn(4, 4))
    product = next(node for node in gm.graph.nodes if node.name == "mul")
    product.update_arg(1, next(node for node in gm.graph.nodes if node.name == "x"))
    with pytest.raises(VerifyError, match=r"mul .* torch computes it in float32, decided was bfloat16"):
        VerifyDtypes().run(gm, ConversionContext())


def test_an_output_in_the_wrong_dtype_is_found() -> None:
    gm = convert(Weights(lambda m, x: F.linear(x, m.w)), torch.randn(4, 4))
    cast = casts(gm)[-1]
    skip(cast)
    with pytest.raises(VerifyError, match="reads linear in bfloat16 and needs float32"):
        VerifyDtypes().run(gm, ConversionContext())


def test_fake_tensors_find_a_wrong_note() -> None:
    gm = convert(Weights(lambda m, x: torch.sin(F.linear(x, m.w))), torch.randn(4, 4))
    sin = next(node for node in gm.graph.nodes if node.name == "sin")
    sin.meta["val"] = sin.meta["val"].with_dtype(torch.float64)
    with pytest.raises(VerifyError, match=r"sin .* noted as float64"):
        VerifyDtypes._fake(gm)
