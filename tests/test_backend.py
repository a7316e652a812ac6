"""``torch.compile(model, backend="ampfx")``: what comes out is what ``convert`` would give, or is said."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampfx
from ampfx import backend as backend_module

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.006}
LOW = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend_module._warned.clear()
    yield
    torch._dynamo.reset()


class Seen:
    """A compiler that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    def nodes(self) -> list[torch.fx.Node]:
        return [node for gm in self.graphs for node in gm.graph.nodes]


def compiled(model: nn.Module, dtype: torch.dtype = torch.bfloat16, inner: Any = "eager", **more: Any) -> Any:
    settings = {name: more.pop(name) for name in ("fullgraph", "dynamic", "mode") if name in more}
    return torch.compile(model, backend="ampfx", options={"dtype": dtype, "inner": inner, **more}, **settings)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.detach().abs().max()) + 1e-6
    assert found.dtype == expected.dtype
    assert float((found.detach() - expected.detach()).abs().max()) <= tolerance * scale


def compare(model: nn.Module, net: nn.Module, *args: Any, tolerance: float) -> None:
    """One run of both, forward and backward."""
    found, expected = model(*args), net(*args)
    close(found, expected, tolerance)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), net.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            close(mine.grad, theirs.grad, 3 * tolerance)
    for mine, theirs in zip(model.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 4)
        self.shift = nn.Buffer(torch.randn(16))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = F.gelu(self.first(x))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x += self.shift * scale
        with torch.no_grad():
            factor = x.softmax(-1).sum(-1, keepdim=True)
        return self.last(x * factor)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", LOW)
def test_outputs_and_gradients(dtype: torch.dtype, inner: str) -> None:
    net = Mixed()
    model = compiled(copy.deepcopy(net), dtype, inner, fullgraph=True)
    compare(model, net, torch.randn(3, 5, 8), tolerance=TOLERANCE[dtype])
    model.eval(), net.eval()
    compare(model, net, torch.randn(3, 5, 8), tolerance=TOLERANCE[dtype])
    with torch.no_grad():
        close(model(torch.ones(3, 5, 8)), net(torch.ones(3, 5, 8)), TOLERANCE[dtype])


def test_matrix_products_run_low_and_the_rest_as_autocast_would() -> None:
    seen = Seen()
    compiled(Mixed(), torch.bfloat16, seen, fullgraph=True)(torch.randn(3, 5, 8))
    linear = [node for node in seen.nodes() if node.target is torch._C._nn.linear]
    low = [[argument.args[1:2] for argument in node.args] for node in linear]
    assert len(low) == 2
    assert all(casts == [(torch.bfloat16,)] * 3 for casts in low)


def test_sizes_stay_symbolic() -> None:
    net = Mixed()
    seen = Seen()
    model = compiled(copy.deepcopy(net), torch.bfloat16, seen, fullgraph=True)
    for batch in (3, 4, 7, 9):
        x = torch.randn(batch, 5, 8)
        torch._dynamo.mark_dynamic(x, 0)
        compare(model, net, x, tolerance=0.03)
    assert len(seen.graphs) == 1


def test_numbers_that_dynamo_makes_inputs_are_constants_of_their_size() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fill = nn.Linear(8, 8), -1e9

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).masked_fill(x > 0, self.fill).softmax(-1)

    net = Masked()
    model = compiled(copy.deepcopy(net), torch.float16, dynamic=True)
    x = torch.randn(4, 8)
    assert model(x).isfinite().all()
    close(model(x), net(x), 0.01)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", LOW)
def test_checkpoints_stay_and_compute_low(dtype: torch.dtype, inner: str) -> None:
    net = Checkpointed()
    compare(compiled(copy.deepcopy(net), dtype, inner, fullgraph=True), net, torch.randn(4, 8), tolerance=0.03)
    seen = Seen()
    torch._dynamo.reset()
    compiled(net, dtype, seen)(torch.randn(4, 8))
    bodies = [node for node in seen.nodes() if getattr(node.target, "__name__", "") == "tag_activation_checkpoint"]
    assert len(bodies) == 2
    inside = getattr(seen.graphs[0], str(bodies[0].args[0].target)).graph.nodes
    assert any(node.op == "call_method" and node.args[1:] == (dtype,) for node in inside)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_custom_functions_see_float32_and_true_gradients(inner: str) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Rounded.apply(self.first(x) * 4))

    torch.manual_seed(1)
    net = Quantised()
    model = compiled(copy.deepcopy(net), torch.float16, inner, loss_scale=256.0)
    x = torch.randn(64, 8)
    model(x).sum().backward()
    net(x).sum().backward()
    # The gradient is clamped: with S on it, it would be off by a factor.
    close(model.first.weight.grad, net.first.weight.grad, 0.02)


def test_cond_stays_float32_and_right() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return torch.cond(x.sum() > 0, lambda x: self.last(x), lambda x: x - 1, (x,))

    net = Either()
    model = compiled(copy.deepcopy(net), torch.bfloat16)
    x = torch.randn(4, 8)
    with torch.no_grad():
        close(model(x), net(x), 0.03)
        with pytest.warns(UserWarning, match="last of Either never reached a converted graph"):
            close(model(-x), net(-x), 0.03)


# ---------------------------------------------------------------------- autocast of the author's


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            x = self.middle(x.float())
        return self.last(x)


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_regions_and_ambient_autocast(inner: str, ambient: bool) -> None:
    net = Regions()
    seen = Seen()
    x = torch.randn(4, 8)
    for choice in (inner, seen):
        torch._dynamo.reset()
        model = compiled(copy.deepcopy(net), torch.float16, choice, loss_scale=None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
            found = model(x)
        close(found, net.last(net.middle(net.first(x).relu())), 0.006)
    first, middle, last = [node for node in seen.nodes() if node.target is torch._C._nn.linear]
    assert [len([a for a in node.args if a.op == "placeholder"]) for node in (first, middle, last)] == [0, 2, 0]
    assert not any("autocast" in str(node.target) for node in seen.nodes())


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtpye": torch.float16}, r"knows no option 'dtpye'; its options are dtype, policy"),
        ({"dtype": torch.float64}, "computes in torch.float16 or torch.bfloat16"),
        ({"inner": "inducktor"}, "inner='inducktor' is no backend"),
        ({"inner": "ampfx"}, "is another one"),
        ({"loss_scale": "yes"}, "loss_scale='yes'"),
        ({"policy": "fast"}, "policy"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    model = torch.compile(nn.Linear(4, 4), backend="ampfx", options={"inner": "eager"} | options)
    with pytest.raises(Exception, match=message):
        model(torch.randn(2, 4))


def test_mode_is_for_inductor() -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(ampfx.OptionError, match="mode='reduce-overhead' is for inner=\"inductor\""):
        backend_module.ampfx(gm, [torch.randn(2, 4)], options={"inner": "eager"}, mode="reduce-overhead")


def test_policies_reach_the_graph() -> None:
    seen = Seen()
    policy = ampfx.Policy(overrides=[ampfx.Override(module="last", dtype="float32")])
    compiled(Mixed(), torch.bfloat16, seen, policy=policy)(torch.randn(3, 5, 8))
    linear = [node for node in seen.nodes() if node.target is torch._C._nn.linear]
    assert linear[0].args[1].op != "placeholder"
    assert linear[1].args[1].op == "placeholder"


def test_attention_follows_an_override() -> None:
    seen = Seen()
    policy = ampfx.Policy(overrides=[ampfx.Override(module="attention", dtype="float32")])
    compiled(Mixed(), torch.bfloat16, seen, policy=policy)(torch.randn(3, 5, 8))
    assert [node for node in seen.nodes() if node.target is F.multi_head_attention_forward]


def test_an_override_that_matches_nothing_is_said() -> None:
    policy = ampfx.Policy(overrides=[ampfx.Override(module="lsat", dtype="float32")])
    with pytest.warns(UserWarning, match="in one graph of torch.compile .*lsat.*selects no node"):
        compiled(Mixed(), policy=policy)(torch.randn(3, 5, 8))


# ---------------------------------------------------------------------- loss scale


def deep(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("given", ["nothing", "compiled", "original"])
def test_optimizers_find_the_scale(given: str, inner: str) -> None:
    net = deep()
    original = copy.deepcopy(net)
    model = compiled(original, torch.float16, inner)
    inner_optimizer = torch.optim.SGD(original.parameters(), 0.1)
    with warnings.catch_warnings():
        if given != "original":
            warnings.simplefilter("error", UserWarning)
        else:
            warnings.simplefilter("ignore", UserWarning)
        models = {"nothing": None, "compiled": model, "original": None}
        optimizer = ampfx.LossScaleOptimizer(inner_optimizer, models[given], init_scale=2.0**12, growth_interval=2)
        x = torch.randn(8, 16)
        (model(x).sum() * 1e-7).backward()
        (net(x).sum() * 1e-7).backward()
    # The first backward is scaled already: gradients of 1e-7 would be lost in float16.
    for mine, theirs in zip(original.parameters(), net.parameters(), strict=True):
        close(mine.grad, theirs.grad, 0.05)
    assert optimizer.get_scale() == 2.0**12
    optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in original.parameters()]
    (model(x) * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.get_scale() == 2.0**11
    for mine, theirs in zip(original.parameters(), before, strict=True):
        assert torch.equal(mine, theirs)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    assert optimizer.get_scale() == 2.0**12  # the compiled graph saw no recompilation, and S changes


def test_graphs_of_one_model_share_their_scale() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x) + self.first(x)

    net = Broken()
    model = compiled(copy.deepcopy(net), torch.float16)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, init_scale=1024.0)
    x = torch.randn(4, 16)
    (model(x).sum() * 1e-6).backward()
    (net(x).sum() * 1e-6).backward()
    for mine, theirs in zip(model.parameters(), net.parameters(), strict=True):
        close(mine.grad, theirs.grad, 0.02)
    optimizer.step()
    assert len(optimizer._watches) <= 2


def test_float16_without_an_optimizer_warns() -> None:
    model = compiled(deep(), torch.float16)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
    with pytest.warns(UserWarning, match=r"no\s+ampfx.LossScaleOptimizer is attached"):
        model(torch.randn(4, 16))


def test_no_loss_scale_in_bfloat16() -> None:
    seen = Seen()
    compiled(deep(), torch.bfloat16, seen)(torch.randn(4, 16))
    assert not any("scale" in str(node.target) for node in seen.nodes())


# ---------------------------------------------------------------------- what never reaches a graph


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(tokens))[0])


def test_recurrent_layers_are_named() -> None:
    model = compiled(Recurrent())
    tokens = torch.randint(10, (2, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(tokens)
    texts = [str(warning.message) for warning in caught if 'backend="ampfx"' in str(warning.message)]
    assert "cells of Recurrent never reach a graph" in texts[0]
    assert "allow_rnn" in texts[0]
    assert len(texts) == len(set(texts)) <= 2


def test_recurrent_layers_run_low_where_dynamo_takes_them() -> None:
    net = Recurrent()
    seen = Seen()
    with torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(copy.deepcopy(net), torch.bfloat16, seen, fullgraph=True)
        tokens = torch.randint(10, (2, 5))
        close(model(tokens), net(tokens), 0.03)
        close(model(tokens), net(tokens), 0.03)
    (lstm,) = [node for node in seen.nodes() if getattr(node.target, "__name__", "") == "lstm"]
    assert all(weight.args[1] == torch.bfloat16 for weight in lstm.args[2])


def test_a_break_inside_a_loop_is_named() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if float(x.sum()) > 1e9:
                    break
            return self.head(x)

    model = compiled(Looped())
    model(torch.randn(2, 8))
    with pytest.warns(UserWarning, match=r"layers\.0, layers\.1, head of Looped never reached a converted graph"):
        model(torch.randn(2, 8))


def test_no_warning_where_all_is_converted() -> None:
    model = compiled(Mixed(), fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.randn(3, 5, 8)).sum().backward()


def test_modules_that_do_not_run_are_not_named() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = compiled(Spare())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.randn(2, 8))
    assert not model.spare._forward_pre_hooks


def test_a_graph_that_cannot_be_converted_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ampfx.CaptureError("reasons")

    monkeypatch.setattr(backend_module, "from_dynamo", fail)
    net = Mixed()
    model = compiled(net)
    x = torch.randn(3, 5, 8)
    with pytest.warns(UserWarning, match="not converted and runs as it is: reasons"):
        found = model(x)
    assert torch.equal(found, net(x))


def test_functions_can_be_compiled_as_well() -> None:
    layer = nn.Linear(8, 8)

    @torch.compile(backend="ampfx", options={"dtype": torch.bfloat16, "inner": "eager"})
    def function(x: Tensor) -> Tensor:
        return layer(x).relu()

    x = torch.randn(4, 8)
    close(function(x), layer(x).relu(), 0.03)
    assert not torch.equal(function(x), layer(x).relu())


def test_listed_among_the_backends() -> None:
    assert "ampfx" in torch.compiler.list_backends()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_with_inductor(dtype: torch.dtype) -> None:
    net = Mixed()
    model = compiled(copy.deepcopy(net), dtype, "inductor", fullgraph=True)
    compare(model, net, torch.randn(3, 5, 8), tolerance=TOLERANCE[dtype])
