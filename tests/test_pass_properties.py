"""Properties that hold for every graph: random programs with views, in-place writes and mixed readers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graph_builder import PASSES, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_assign import Weights
from torch.fx import GraphModule

from ampfx.argument_needs import is_moves
from ampfx.context import ConversionContext
from ampfx.passes import FoldCasts, VerifyDtypes
from ampfx.passes.base import tidy
from ampfx.pins import CONSTANT_FACTORIES

Step = Callable[[Weights, torch.Tensor, torch.Tensor], torch.Tensor]

# Each keeps the shape [4, 4], is continuous and bounded, so that float32 and low can be compared.
STEPS: dict[str, Step] = {
    "linear": lambda m, a, b: torch.tanh(F.linear(a, m.w)),
    "product": lambda m, a, b: F.linear(a, m.v) / 2,
    "sum": lambda m, a, b: (a + b) / 2,
    "times": lambda m, a, b: torch.tanh(a * b),
    "view": lambda m, a, b: a.reshape(16).view(4, 4),
    "transpose": lambda m, a, b: a.t(),
    "relu": lambda m, a, b: torch.relu(a),
    "softmax": lambda m, a, b: torch.softmax(a, -1),
    "exp": lambda m, a, b: torch.exp(-a.abs()),
    "norm": lambda m, a, b: F.layer_norm(a, (4,)) / 4,
    "chunk": lambda m, a, b: torch.cat(a.chunk(2)[::-1]),
    "split": lambda m, a, b: torch.cat([a.split(2)[0], b.split(2)[1]]),
    "max": lambda m, a, b: a.max(-1, keepdim=True)[0] + torch.zeros(4, 4),
    "where": lambda m, a, b: torch.where(a > b, a, b),
    "scalar": lambda m, a, b: a * torch.tensor(0.5),
    "like": lambda m, a, b: torch.ones_like(a) - b,
    "float": lambda m, a, b: a.float() * 0.5,
    "index": lambda m, a, b: a[torch.tensor([0, 0, 1, 2])],
    "mean": lambda m, a, b: a - a.mean(-1, keepdim=True),
    "square": lambda m, a, b: torch.tanh((a * a).sum(-1, keepdim=True) + b),
    "detach": lambda m, a, b: a.detach() * 0.5,
    "scatter": lambda m, a, b: torch.zeros(4, 4).index_add(0, torch.tensor([0, 1, 2, 3]), a),
}
WRITES: dict[str, Step] = {
    "add_": lambda m, a, b: a.clone().add_(b).mul_(0.5),
    "view_": lambda m, a, b: _write_view(a.contiguous().clone(), b),
    "product_": lambda m, a, b: _write_view(F.linear(a, m.w), b).tanh_(),
    "setitem": lambda m, a, b: _set_rows(a * 1.0, b),
    "fill_": lambda m, a, b: torch.tanh(F.linear(a, m.v).masked_fill_(torch.eye(4) > 0, -1e9)),
}


def _write_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.view(16)[2:6].mul_(0.25)
    a[0].copy_(b[1])
    return a


def _set_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:3] = b[:2]
    return a


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    count = draw(st.integers(1, 14))
    name = st.sampled_from([*STEPS, *WRITES])
    return [(draw(name), draw(st.integers(0, index)), draw(st.integers(0, index))) for index in range(count)]


def run_program(program: list[tuple[str, int, int]]) -> Callable[[Weights, torch.Tensor], list[torch.Tensor]]:
    def run(m: Weights, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for name, first, second in program:
            values.append((STEPS.get(name) or WRITES[name])(m, values[first], values[second]))
        return values[-3:]

    return run


def converted(
    program: list[tuple[str, int, int]], low: torch.dtype, **options: object
) -> tuple[GraphModule, ConversionContext, torch.Tensor]:
    torch.manual_seed(len(program))
    x = torch.tanh(torch.randn(4, 4))
    gm = build(Weights(run_program(program)), x)
    ctx = ConversionContext(low_dtype=low, **options)  # type: ignore[arg-type]
    for step in PASSES[:3]:
        if step.run(gm, ctx):
            tidy(gm)
    gm.recompile()
    return gm, ctx, x


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs(),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["casts", "autocast"]),
    st.sampled_from(["autocast", "relaxed"]),
)
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_random_programs(
    low: torch.dtype, program: list[tuple[str, int, int]], device: str, objective: str, policy: str
) -> None:
    gm, ctx, x = converted(program, low, device_type=device, objective=objective, policy=policy)
    # 1. The graph verifies, by rule and by what torch itself computes.
    VerifyDtypes(fake=True).run(gm, ctx)
    # 2. Nothing is less precise than autocast, but for what only moves values.
    for node in gm.graph.nodes:
        decision = node.meta.get("decision")
        if (
            policy == "autocast"
            and decision is not None
            and decision.dtype == low
            and decision.autocast_dtype == torch.float32
        ):
            assert is_moves(node, ctx.rule_of(node)) or node.meta["facts"].base in CONSTANT_FACTORIES, (
                node.format_node()
            )
    # 3. It computes what float32 computes; a lost write or a stale cast would be far off.
    before = gm(x.clone())
    reference = run_program(program)(_weights_of(gm), x.clone())
    tolerance = 0.12 if low == torch.bfloat16 else 0.03
    for one, other in zip(before, reference, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    # 4. Folding changes no bit.
    if FoldCasts().run(gm, ctx):
        tidy(gm)
        gm.recompile()
    assert all(torch.equal(one, other) for one, other in zip(gm(x.clone()), before, strict=True))
    VerifyDtypes().run(gm, ctx)


def _weights_of(gm: GraphModule) -> Weights:
    model = Weights(None)
    for name, value in gm.named_parameters():
        getattr(model, name).data.copy_(value)
    return model
