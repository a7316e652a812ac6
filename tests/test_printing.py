"""The printer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from graph_builder import build, convert
from test_assign import Weights

from ampfx.printing import format_graph, format_stage


def test_a_line_holds_dtype_call_class_and_reason() -> None:
    gm = convert(Weights(lambda m, x: x + F.linear(x, m.w)), torch.randn(2, 4))
    assert format_graph(gm, width=0) == (
        "x: f32[2, 4] = input\n"
        "x_low: bf16[2, 4] = to(x, bf16)  # cast: linear reads x in bfloat16\n"
        "w: f32[4, 4] = self.w\n"
        "w_low: bf16[4, 4] = to(w, bf16)  # cast: linear reads w in bfloat16\n"
        "linear: bf16[2, 4] = linear(x_low, w_low)  # allow: matrix product, accumulated in float32\n"
        "add: f32[2, 4] = add(x, linear)  # infer: reads x in float32\n"
        "return add"
    )
    assert all(len(line) <= 80 for line in format_graph(gm).splitlines())


def test_arguments_of_every_kind() -> None:
    gm = build(
        Weights(lambda m, x: (torch.cat([x[:, 1:], x[..., :1]], dim=-1).max(-1), x.to(torch.float64))),
        torch.randn(2, 4),
    )
    assert format_graph(gm, reasons=False) == (
        "x: f32[2, 4] = input\n"
        "getitem: f32[2, 3] = getitem(x, (:, 1:))\n"
        "getitem_1: f32[2, 1] = getitem(x, (..., :1))\n"
        "cat: f32[2, 4] = cat([getitem, getitem_1], dim=-1)\n"
        "max_1: (f32[2], i64[2]) = max(cat, -1)\n"
        "getitem_2: f32[2] = getitem(max_1, 0)\n"
        "getitem_3: i64[2] = getitem(max_1, 1)\n"
        "to: f64[2, 4] = to(x, f64)\n"
        "return ((getitem_2, getitem_3), to)"
    )


def test_a_stage_names_its_pass() -> None:
    gm = build(Weights(lambda m, x: x), torch.randn(2))
    assert format_stage("Analyse", gm, changed=False).startswith(
        "# after Analyse (edges unchanged)\nx: f32[2] = input"
    )
