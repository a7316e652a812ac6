"""Decisions: which dtype, and why."""

from __future__ import annotations

import graph_builder
import pytest
import torch
import torch.nn.functional as F
from graph_builder import build, convert, decisions
from torch import nn
from torch.fx import GraphModule

import ampfx
from ampfx.context import ConversionContext
from ampfx.decisions import Decision
from ampfx.explanation import explain
from ampfx.passes import AssignPrecision
from ampfx.policy import Override, Policy

LOW, HIGH = torch.bfloat16, torch.float32


class Weights(nn.Module):
    """Two weights, a buffer, and a forward given as a function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.v = nn.Parameter(torch.randn(4, 4) / 2)
        self.state: torch.Tensor
        self.register_buffer("state", torch.zeros(4, 4))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(self, *inputs)  # type: ignore[operator]


def decide(function: object, *inputs: torch.Tensor, low: torch.dtype = LOW, **options: object) -> GraphModule:
    inputs = inputs or (torch.randn(4, 4),)
    gm = build(Weights(function), *inputs)
    AssignPrecision().run(gm, ConversionContext(low_dtype=low, **options))  # type: ignore[arg-type]
    return gm


def decision(gm: GraphModule, name: str) -> Decision:
    found = next(node.meta["decision"] for node in gm.graph.nodes if node.name == name)
    assert isinstance(found, Decision)
    return found


def test_products_are_low_and_residual_sums_stay_float32() -> None:
    gm = decide(lambda m, x: x + F.linear(F.gelu(F.linear(x, m.w)), m.v))
    assert decisions(gm) == {"linear": LOW, "gelu": LOW, "linear_1": LOW, "add": HIGH}
    add = decision(gm, "add")
    assert add.reason == "reads x in float32"
    assert add.chain == ("add", "x")
    assert add.cause == "x"
    assert decision(gm, "linear").kind == "rule"


def test_the_chain_leads_to_the_cause() -> None:
    gm = decide(lambda m, x: torch.sin(torch.exp(F.linear(x, m.w)) * 2), device_type="cuda")
    assert decisions(gm) == {"linear": LOW, "exp": HIGH, "mul": HIGH, "sin": HIGH}
    assert decision(gm, "sin").chain == ("sin", "mul", "exp")
    assert decision(gm, "sin").cause == "exp"
    assert decision(gm, "exp").cls == "deny"


def test_autocast_dtype_is_noted() -> None:
    gm = decide(lambda m, x: F.linear(x, m.w).exp(), low=torch.float16)
    assert decision(gm, "exp").dtype == HIGH  # a float16 hazard
    assert decision(gm, "exp").autocast_dtype == torch.float16  # CPU autocast has no entry for it


def test_moves_go_low_only_if_every_reader_is_low() -> None:
    low = decide(lambda m, x: (lambda r: F.linear(r, m.w) * F.linear(r.t(), m.v))(torch.relu(x.sin())))
    assert decisions(low)["t"] == LOW  # one cast of relu serves both products
    tied = decide(lambda m, x: m.w @ m.w.t() + F.linear(x, m.v))
    assert decisions(tied)["t"] == LOW  # also where what is cast is a parameter
    narrow = decide(lambda m, x: F.linear(torch.relu(x.sin())[1:], m.w))
    assert decisions(narrow)["getitem"] == HIGH  # fewer elements to cast behind the slice
    seen = decide(lambda m, x: (lambda r: (F.linear(r, m.w), r > 0.5))(torch.relu(x.sin())))
    assert decisions(seen)["relu"] == HIGH
    summed = decide(lambda m, x: F.linear(x.sin()[torch.tensor([0, 0])], m.w))
    assert decisions(summed)["getitem"] == HIGH  # its backward adds up


def test_constants_that_do_not_fit() -> None:
    def fill(m: Weights, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, m.w).masked_fill(x > 0, -1e9)

    assert decisions(decide(fill, low=torch.float16))["masked_fill"] == HIGH
    reason = decision(decide(fill, low=torch.float16), "masked_fill").reason
    assert reason == "the constant -1e+09 is beyond the largest float16, 65504"

    def tiny(m: Weights, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, m.w) + 1e-12, m.v)

    assert decisions(decide(tiny, low=torch.float16))["add"] == HIGH
    assert decisions(decide(tiny))["add"] == LOW


def test_scalar_tensors_that_do_not_fit() -> None:
    def mask(m: Weights, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.where(x > 0, F.linear(x, m.w), torch.tensor(-1e9)), -1)

    assert decisions(decide(mask, low=torch.float16))["where"] == HIGH
    assert decisions(decide(mask))["where"] == LOW


def test_squares_in_float16_and_what_follows_them() -> None:
    def rms(m: Weights, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, m.w)
        return F.linear(h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6), m.v)

    found = decisions(decide(rms, low=torch.float16))
    assert [found[name] for name in ("mul", "mean", "add", "rsqrt", "mul_1")] == [HIGH] * 5
    assert decisions(decide(rms))["mul"] == LOW


def test_sigmoid_before_a_logarithm() -> None:
    gm = decide(lambda m, x: torch.log(torch.sigmoid(F.linear(x, m.w)).clamp(1e-3, 1.0)).sum())
    assert decisions(gm)["sigmoid"] == HIGH
    assert "its result reaches log" in decision(gm, "sigmoid").reason


def test_positions_stay_float32() -> None:
    positions = torch.arange(4)
    gm = decide(
        lambda m, p, x: torch.outer(p.float(), m.state[0]) @ m.state + F.linear(x, m.w),
        positions,
        torch.randn(4, 4),
    )
    assert decisions(gm)["matmul"] == HIGH
    assert "positions" in decision(gm, "matmul").reason


def test_buffers_that_do_not_fit_pin_their_readers() -> None:
    def masked(m: Weights, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, m.w)) - F.linear(x * 1.0, m.v).mul(torch.tanh(F.linear(x, m.w)))

    assert decisions(decide(masked, low=torch.float16))["sub"] == torch.float16
    big = torch.full((4, 4), -1e9)
    gm = decide(lambda m, x: torch.minimum(F.linear(x, m.w), big), low=torch.float16)
    assert decision(gm, "minimum").kind == "hazard"


def test_what_the_author_wrote_holds() -> None:
    gm = decide(lambda m, x: F.linear(x, m.w).float() * F.linear(x, m.v))
    assert decisions(gm)["mul"] == HIGH
    regions = decide(_without_autocast)
    assert decision(regions, "linear_1").kind == "region"
    assert decisions(regions) == {"linear": LOW, "linear_1": HIGH, "add": HIGH}


def _without_autocast(m: Weights, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, m.w)
    with graph_builder.current[-1].region(autocast=False):
        y = F.linear(x, m.v)
    return h + y


def test_overrides_win_and_go_on() -> None:
    def net(m: Weights, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, m.w)), m.v)

    high = decide(
        net, policy=Policy(overrides=(Override(node="linear", dtype="float32", reason="it overflows"),))
    )
    assert decisions(high) == {"linear": HIGH, "gelu": HIGH, "linear_1": LOW}
    assert decision(high, "linear").kind == "override"
    assert decision(high, "linear").reason == "it overflows"
    low = decide(
        lambda m, x: torch.exp(F.linear(x, m.w)) * 2,
        device_type="cuda",
        policy=Policy(overrides=(Override(op="exp", dtype="low"),)),
    )
    assert decisions(low)["exp"] == LOW


def test_relaxed_lets_sums_go_low() -> None:
    def net(m: Weights, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(3):
            y = F.linear(y, m.w) + F.linear(y + x.sum(), m.v)
            y = y + F.linear(y, m.w)
        return F.linear(y, m.w)

    kept, relaxed = decide(net), decide(net, policy="relaxed")
    assert sum(d == LOW for d in decisions(relaxed).values()) >= sum(
        d == LOW for d in decisions(kept).values()
    )


def test_written_storages_have_one_dtype() -> None:
    def net(m: Weights, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, m.w)
        view = h.view(16)
        h.masked_fill_(x > 0, -1e9)
        return F.linear(torch.softmax(view.view(4, 4), -1), m.v)

    gm = decide(net, low=torch.float16)
    found = decisions(gm)
    assert (found["linear"], found["masked_fill_"], found["view"]) == (torch.float16, HIGH, HIGH)
    linear = next(node for node in gm.graph.nodes if node.name == "linear")
    assert linear.meta["entry_dtype"] == HIGH


def test_buffers_that_are_written_stay_float32() -> None:
    gm = decide(lambda m, x: F.linear(m.state.add_(F.linear(x, m.w)), m.v))
    assert decisions(gm)["add_"] == HIGH


def test_unlisted_ops_are_noted() -> None:
    gm = build(Weights(lambda m, x: torch.special.airy_ai(F.linear(x, m.w))), torch.randn(4, 4))
    ctx = ConversionContext()
    AssignPrecision().run(gm, ctx)
    node = next(node for node in gm.graph.nodes if "airy" in node.name)
    if ctx.rule_of(node) is not None:
        pytest.skip("the rules know airy_ai")
    assert list(ctx.unlisted.values()) == [[node.name]]
    assert node.meta["decision"].kind == "unlisted"


def test_integers_and_float64_are_untouched() -> None:
    gm = decide(
        lambda m, x, i: (i * 2, F.linear(x, m.w).double() * 3, i.argmax()), torch.randn(4, 4), torch.arange(4)
    )
    found = decisions(gm)
    assert (found["mul"], found["mul_1"], found["argmax"]) == (None, None, None)


def test_objective_autocast_repeats_autocast() -> None:
    gm = decide(lambda m, x: torch.tanh(F.linear(x, m.w)), objective="autocast")
    assert decisions(gm) == {"linear": LOW, "tanh": LOW}  # the cheapest would be a tie, and float32
    assert decisions(decide(lambda m, x: torch.tanh(F.linear(x, m.w))))["tanh"] == HIGH


def test_every_decision_has_a_reason_and_a_chain() -> None:
    gm = convert(
        Weights(lambda m, x: torch.log_softmax(F.linear(torch.relu(x.sin()), m.w).chunk(2)[0] + x[:2], -1)),
        torch.randn(4, 4),
    )
    names = {node.name for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        found = node.meta["decision"]
        assert found.reason
        if found.dtype is not None:
            assert found.chain[0] == node.name
            assert set(found.chain) <= names | {"output"}


@pytest.mark.parametrize(("mode", "autocast"), [("reflect", HIGH), ("constant", LOW)])
def test_autocast_is_simulated_by_how_an_op_is_called(mode: str, autocast: torch.dtype) -> None:
    with torch.autocast("cpu", LOW):
        assert F.pad(torch.randn(1, 4, 4, dtype=LOW), (1, 1), mode=mode).dtype == autocast
    gm = decide(lambda m, x: F.pad(F.linear(x, m.w).unsqueeze(0), (1, 1), mode=mode))
    assert decision(gm, "pad").autocast_dtype == autocast


def sentence(gm: GraphModule, name: str) -> str:
    return " ".join(str(explain(gm, ConversionContext(low_dtype=LOW), name)).split())


def test_what_reads_nothing_has_the_default_dtype() -> None:
    gm = decide(lambda m, x: F.linear(x, m.w) + torch.zeros(4, 4))
    assert sentence(gm, "zeros").endswith("The cause is torch's default dtype: zeros reads no tensor.")


def test_what_is_made_from_complex_numbers_names_them() -> None:
    gm = decide(lambda m, x: torch.fft.fft(F.linear(x, m.w)).abs())
    name = next(node.name for node in gm.graph.nodes if node.meta["op"] == "abs")
    assert decision(gm, name).chain == (name, "fft_fft")
    assert decision(gm, name).reason == "reads fft_fft, whose complex numbers are pairs of float32"
    assert "The cause is the rule for fft_fft" in sentence(gm, name)


def test_several_results_are_not_explained_by_themselves() -> None:
    gm = decide(lambda m, x: F.linear(x, m.w).topk(2)[0])
    found = decision(gm, "topk")
    assert "getitem" not in found.reason
    assert found.chain == ("topk", "linear")
    assert decision(gm, "getitem").chain[:2] == ("getitem", "topk")


def test_two_neighbours_do_not_explain_each_other() -> None:
    gm = decide(lambda m, x: F.linear(x, m.w).view(2, 8).relu().exp().log())
    for node in gm.graph.nodes:
        if "decision" in node.meta:
            chain = node.meta["decision"].chain
            assert len(set(chain)) == len(chain)
    assert decision(gm, "view").cause == decision(gm, "relu").cause


def test_what_forward_differentiates_is_said_to_be_so() -> None:
    def forward(m: Weights, x: torch.Tensor) -> torch.Tensor:
        z = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.linear(z, m.w).sum(), z, create_graph=True)
        return grad

    gm = decide(forward)
    assert decision(gm, "sum_1").kind == "gradient"
    assert "differentiates itself" in sentence(gm, "sum_1")


class Doubled(torch.autograd.Function):
    """A custom Function."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class WithFunction(nn.Module):
    """Calls it, and reads a size, which is guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Doubled.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return out if len(x) > 2 else out * 2


def test_a_custom_function_has_the_name_of_its_class() -> None:
    report = ampfx.convert(WithFunction(), (torch.randn(4, 4),), dtype=LOW).report()
    assert report.opaque == {"Doubled": ("apply_function",)}
    assert report.nodes["apply_function"].reason == "Doubled cannot be looked into"


def test_a_cell_names_the_state_that_it_follows() -> None:
    model = ampfx.convert(nn.GRU(4, 4), (torch.randn(5, 2, 4),), dtype=LOW)
    gru = next(node for node in model.report().nodes if node.op == "gru")
    assert gru.reason == "reads zeros in float32"
