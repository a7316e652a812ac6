"""The graph after the passes, as text and as numbers."""

from __future__ import annotations

import copy

import graph_builder
import pytest
import torch
import torch.nn.functional as F
from graph_builder import build, casts, convert
from test_assign import Weights
from torch.utils import _pytree as pytree

from ampfx.context import ConversionContext
from ampfx.passes import AssignPrecision, FoldCasts, InsertCasts
from ampfx.printing import format_graph


def check(
    function: object,
    expected: str,
    *inputs: torch.Tensor,
    low: torch.dtype = torch.bfloat16,
    **options: object,
) -> None:
    """The text is the expected one, a second run changes nothing, the results are near float32's."""
    torch.manual_seed(1)
    inputs = inputs or (torch.randn(4, 4),)
    model = Weights(function)
    before = copy.deepcopy(model.state_dict())
    gm = convert(model, *(value.clone() for value in inputs), low=low, **options)  # type: ignore[arg-type]
    text = format_graph(gm, reasons=False)
    assert text == "\n".join(line.strip() for line in expected.strip().splitlines()), f"\n{text}"
    ctx = ConversionContext(low_dtype=low, **options)  # type: ignore[arg-type]
    assert not any(step.run(gm, ctx) for step in (AssignPrecision(), InsertCasts(), FoldCasts()))
    model.load_state_dict(before)
    got = gm(*(value.clone() for value in inputs))
    model.load_state_dict(before)
    reference = model(*(value.clone() for value in inputs))
    tolerance = 0.05 if low == torch.bfloat16 else 0.01
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(reference), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_one_cast_per_value() -> None:
    check(
        lambda m, x: F.linear(x, m.w) * torch.tanh(F.linear(x, m.v)) + F.linear(x, m.w),
        """
        x: f32[4, 4] = input
        x_low: bf16[4, 4] = to(x, bf16)
        w: f32[4, 4] = self.w
        w_low: bf16[4, 4] = to(w, bf16)
        linear: bf16[4, 4] = linear(x_low, w_low)
        v: f32[4, 4] = self.v
        v_low: bf16[4, 4] = to(v, bf16)
        linear_1: bf16[4, 4] = linear(x_low, v_low)
        tanh: bf16[4, 4] = tanh(linear_1)
        mul: bf16[4, 4] = mul(linear, tanh)
        linear_2: bf16[4, 4] = linear(x_low, w_low)
        add: bf16[4, 4] = add(mul, linear_2)
        add_high: f32[4, 4] = to(add, f32)
        return add_high
        """,
    )


def test_native_promotion_needs_no_cast() -> None:
    check(
        lambda m, x: torch.cat([x + F.linear(x, m.w), F.linear(x, m.v)]),
        """
        x: f32[4, 4] = input
        x_low: bf16[4, 4] = to(x, bf16)
        w: f32[4, 4] = self.w
        w_low: bf16[4, 4] = to(w, bf16)
        linear: bf16[4, 4] = linear(x_low, w_low)
        add: f32[4, 4] = add(x, linear)
        v: f32[4, 4] = self.v
        v_low: bf16[4, 4] = to(v, bf16)
        linear_1: bf16[4, 4] = linear(x_low, v_low)
        cat: f32[8, 4] = cat([add, linear_1])
        return cat
        """,
    )


def test_reductions_are_told_their_dtype() -> None:
    check(
        lambda m, x: F.linear(x, m.w).sum(),
        """
        x: f32[4, 4] = input
        x_low: f16[4, 4] = to(x, f16)
        w: f32[4, 4] = self.w
        w_low: f16[4, 4] = to(w, f16)
        linear: f16[4, 4] = linear(x_low, w_low)
        sum_1: f32[] = sum(linear, dtype=f32)
        return sum_1
        """,
        low=torch.float16,
    )


def test_a_write_makes_another_value() -> None:
    def write(m: Weights, x: torch.Tensor) -> torch.Tensor:
        before = F.linear(m.state, m.w)
        m.state.add_(x)
        return before + F.linear(m.state, m.w)

    check(
        write,
        """
        x: f32[4, 4] = input
        state: f32[4, 4] = self.state
        w: f32[4, 4] = self.w
        w_low: bf16[4, 4] = to(w, bf16)
        state_low: bf16[4, 4] = to(state, bf16)
        linear: bf16[4, 4] = linear(state_low, w_low)
        add_: f32[4, 4] = add_(state, x)
        add__low: bf16[4, 4] = to(add_, bf16)
        linear_1: bf16[4, 4] = linear(add__low, w_low)
        add: bf16[4, 4] = add(linear, linear_1)
        add_high: f32[4, 4] = to(add, f32)
        return add_high
        """,
    )


def test_a_cast_begins_a_storage_that_is_written_into() -> None:
    def write(m: Weights, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, m.w)
        row = h[0]
        h.masked_fill_(x > 0, -1e9)
        return row.softmax(-1)

    check(
        write,
        """
        x: f32[4, 4] = input
        x_low: f16[4, 4] = to(x, f16)
        w: f32[4, 4] = self.w
        w_low: f16[4, 4] = to(w, f16)
        linear: f16[4, 4] = linear(x_low, w_low)
        linear_high: f32[4, 4] = to(linear, f32)
        getitem: f32[4] = getitem(linear_high, 0)
        gt: bool[4, 4] = gt(x, 0)
        masked_fill_: f32[4, 4] = masked_fill_(linear_high, gt, -1000000000.0)
        softmax: f32[4] = softmax(getitem, -1)
        return softmax
        """,
        low=torch.float16,
    )


def test_casts_are_not_shared_across_regions() -> None:
    def regions(m: Weights, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, m.w)
        if graph_builder.current:
            with graph_builder.current[-1].region(grad=False):
                gate = F.linear(x, m.w)
        else:
            with torch.no_grad():
                gate = F.linear(x, m.w)
        return h * gate

    gm = convert(Weights(regions), torch.randn(4, 4, requires_grad=True))
    inside = [node for node in casts(gm) if not node.meta["region"].grad]
    assert [str(node.args[0]) for node in inside] == ["x", "w"]
    switches = [node for node in gm.graph.nodes if node.meta["op"] == "_set_grad_enabled"]
    nodes = list(gm.graph.nodes)
    assert all(nodes.index(switches[0]) < nodes.index(node) < nodes.index(switches[-1]) for node in inside)


def test_factories_are_told() -> None:
    check(
        lambda m, x: F.linear(torch.cat([F.linear(x, m.w), torch.zeros(2, 4)]), m.v).sum(),
        """
        x: f32[4, 4] = input
        x_low: f16[4, 4] = to(x, f16)
        w: f32[4, 4] = self.w
        w_low: f16[4, 4] = to(w, f16)
        linear: f16[4, 4] = linear(x_low, w_low)
        zeros: f16[2, 4] = zeros(2, 4, dtype=f16)
        cat: f16[6, 4] = cat([linear, zeros])
        v: f32[4, 4] = self.v
        v_low: f16[4, 4] = to(v, f16)
        linear_1: f16[6, 4] = linear(cat, v_low)
        sum_1: f32[] = sum(linear_1, dtype=f32)
        return sum_1
        """,
        low=torch.float16,
    )


def test_tied_weights_serve_both_readers() -> None:
    ids = torch.tensor([[0, 1], [2, 3]])
    check(
        lambda m, i: F.linear(torch.embedding(m.w, i) + 1.0, m.w),
        """
        x: i64[2, 2] = input
        w: f32[4, 4] = self.w
        w_low: bf16[4, 4] = to(w, bf16)
        embedding: f32[2, 2, 4] = embedding(w, x)
        add: f32[2, 2, 4] = add(embedding, 1.0)
        add_low: bf16[2, 2, 4] = to(add, bf16)
        linear: bf16[2, 2, 4] = linear(add_low, w_low)
        linear_high: f32[2, 2, 4] = to(linear, f32)
        return linear_high
        """,
        ids,
    )


def test_values_that_arrive_low_are_the_authors() -> None:
    check(
        lambda m, x: F.linear(x.float(), m.w),
        """
        x: bf16[4, 4] = input
        w: f32[4, 4] = self.w
        w_low: bf16[4, 4] = to(w, bf16)
        linear: bf16[4, 4] = linear(x, w_low)
        linear_high: f32[4, 4] = to(linear, f32)
        return linear_high
        """,
        torch.randn(4, 4).bfloat16(),
    )


def test_recurrent_cells_run_low_inside_and_keep_their_state() -> None:
    cell = torch.nn.GRUCell(4, 4)

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(4, 4)
            for _ in range(3):
                h = torch.gru_cell(x, h, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            return h

    x = torch.randn(4, 4)
    gm = convert(Loop(), x)
    nodes = [node for node in gm.graph.nodes if node.meta["op"] == "gru_cell"]
    assert [node.meta["val"].dtype for node in nodes] == [torch.float32] * 3
    assert len(casts(gm)) == 5  # the input and four weights, each once
    torch.testing.assert_close(gm(x), Loop()(x), rtol=0.02, atol=0.02)


def test_masks_saturate() -> None:
    q, mask = torch.randn(1, 2, 4, 4), torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    gm = convert(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, mask, low=torch.float16)
    assert "cast_saturated" in {getattr(node.target, "__name__", "") for node in gm.graph.nodes}
    torch.testing.assert_close(
        gm(q, mask), F.scaled_dot_product_attention(q, q, q, mask), rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_outputs_can_leave_low(low: torch.dtype) -> None:
    gm = build(Weights(lambda m, x: (F.linear(x, m.w), x + 1)), torch.randn(4, 4))
    ctx = ConversionContext(low_dtype=low, output_dtype=low)
    for step in graph_builder.PASSES:
        step.run(gm, ctx)
    gm.recompile()
    assert [value.dtype for value in gm(torch.randn(4, 4))] == [low, low]
