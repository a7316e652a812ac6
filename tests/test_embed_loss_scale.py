"""The pass that puts the loss scale into a graph: every way in and out, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_builder import PASSES, build, current
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ampfx import grad_scaling, runtime
from ampfx.context import ConversionContext
from ampfx.loss_scale import LossScale
from ampfx.passes import PassManager
from ampfx.passes.embed_loss_scale import EmbedLossScale
from ampfx.scale_nodes import ATTRIBUTE

LEAVE = (grad_scaling.scale, grad_scaling.scale_cast)
ENTER = (grad_scaling.unscale, grad_scaling.unscale_cast, grad_scaling.unscale_written)


def embed(
    function: Any,
    *inputs: Any,
    low: torch.dtype = torch.float16,
    scale: float | None = 1024.0,
    **options: Any,
) -> GraphModule:
    """The graph after all passes, with a static loss scale."""
    gm = build(function, *inputs)
    loss_scale = None if scale is None else LossScale.static(scale).module_scale()
    context = ConversionContext(low_dtype=low, loss_scale=loss_scale, **options)
    *first, verify = PASSES
    PassManager((*first, EmbedLossScale(), verify)).run(gm, context)
    return gm


def calls(gm: GraphModule, targets: tuple[Callable[..., Any], ...]) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target in targets]


def run(gm: GraphModule, *inputs: Any) -> Any:
    """The graph's result; its gradients are in the leaves."""
    return gm(*inputs)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def compare_gradients(
    module: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor], rtol: float = 2e-2, factor: float = 1.0
) -> GraphModule:
    """Gradients of parameters and inputs equal the float32 run's, with a scale of 1024."""
    reference = copy.deepcopy(module)
    gm = embed(module, *inputs)
    ours = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    theirs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    (loss(run(gm, *ours)) * factor).backward()
    (loss(reference(*theirs)) * factor).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(module.parameters(), reference.parameters(), strict=True)]
    pairs += [(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True)]
    for got, want in pairs:
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max()))
    return gm


def test_gradients_are_those_of_float32() -> None:
    torch.manual_seed(0)
    gm = compare_gradients(Mlp(), torch.randn(5, 8), loss=lambda y: y.pow(2).mean())
    assert len(calls(gm, LEAVE)) == 1
    assert hasattr(gm, ATTRIBUTE)


def test_tiny_losses_do_not_underflow() -> None:
    """Rule 1: without S reaching the gradient in time, every gradient here is 0 in float16."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())])
    x = torch.randn(8, 16)
    reference = copy.deepcopy(model)
    gm = embed(model, x, scale=2.0**22)
    run(gm, x).pow(2).mean().mul(1e-7).backward()
    reference(x).pow(2).mean().mul(1e-7).backward()
    got, want = next(model.parameters()).grad, next(reference.parameters()).grad
    assert got is not None
    assert want is not None
    assert float((got - want).norm() / want.norm()) < 0.03


def test_outputs_leave_in_one_node_as_float32() -> None:
    gm = embed(nn.Linear(4, 4), torch.randn(2, 4))
    (leave,) = calls(gm, LEAVE)
    assert leave.target is grad_scaling.scale_cast
    assert leave.args[1] == torch.float32
    assert not [n for n in gm.graph.nodes if n.meta.get("cast") and n.args[1] == torch.float32]
    output = next(n for n in gm.graph.nodes if n.op == "output")
    assert output.args[0] is leave


def test_weight_casts_are_fused_and_parameters_share_calls() -> None:
    torch.manual_seed(0)
    gm = embed(Mlp(), torch.randn(5, 8))
    enters = calls(gm, ENTER)
    params = [n for n in gm.graph.nodes if n.op == "get_attr" and n.target != ATTRIBUTE]
    assert len(params) == 6
    for node in params:
        assert all(user.target in ENTER for user in node.users)
    assert len(enters) <= 4  # weights and biases cast together, the norm's, the input
    assert all(len(n.args) <= 2 + 16 for n in enters)
    assert not [n for n in gm.graph.nodes if n.meta.get("cast") and n.args[0].op == "get_attr"]


def test_many_small_layers_share_calls_and_large_ones_do_not() -> None:
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    gm = embed(small, torch.randn(2, 8))
    assert len(calls(gm, ENTER)) == 1 + 3  # the input; 40 parameters by 16
    large = nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(3)])
    gm = embed(large, torch.randn(2, 1100))
    assert len(calls(gm, ENTER)) == 1 + 3


def test_frozen_parameters_pass_unscale_too() -> None:
    """Rule 2: what is frozen at capture may be trained later."""
    model = Mlp()
    model.first.requires_grad_(False)
    gm = embed(model, torch.randn(5, 8))
    model.first.requires_grad_(True)
    run(gm, torch.randn(5, 8)).sum().backward()
    reference = copy.deepcopy(model)
    assert model.first.weight.grad is not None
    assert float(model.first.weight.grad.abs().max()) < 100
    assert reference is not model


def test_batch_norm_parameters_are_unscaled() -> None:
    """Rule 2: a parameter that is used in float32 has no cast to carry the node."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    compare_gradients(model, torch.randn(4, 2, 6, 6), loss=lambda y: y.pow(2).mean(), rtol=5e-2)


def test_output_read_later_has_its_complete_gradient() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.body(x)
            return features, self.head(features)

    torch.manual_seed(0)
    model = TwoOutputs()
    x = torch.randn(3, 4)
    reference = copy.deepcopy(model)
    gm = embed(model, x)
    features, y = run(gm, x)
    want_features, want_y = reference(x)
    (got,) = torch.autograd.grad(features.sum() + y.pow(2).sum(), features, retain_graph=True)
    (want,) = torch.autograd.grad(want_features.sum() + want_y.pow(2).sum(), want_features)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    compare_gradients(reference, x, loss=lambda out: out[0].sum() + out[1].pow(2).sum())


def test_loss_inside_reads_the_output_without_another_copy() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(x)
            return torch.nn.functional.cross_entropy(logits, y), logits

    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randint(0, 5, (6,))
    gm = compare_gradients(WithLoss(), x, y, loss=lambda out: out[0] + 0.1 * out[1].pow(2).mean())
    assert not [n for n in gm.graph.nodes if n.meta.get("cast")]


def test_returned_inputs_and_parameters_stay_themselves() -> None:
    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.weight, x * self.weight

    model = Identity()
    x = torch.ones(3, requires_grad=True)
    gm = embed(model, x)
    same, weight, _ = run(gm, x)
    assert same is x
    assert weight is model.weight


def test_integers_and_no_grad_reads_pass_nothing() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4, 4))

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            with current[-1].region(grad=False) if current else torch.no_grad():
                self.mean.mul_(0.9).add_(self.layer.weight)
            return self.layer(x)[index]

    model = Ema()
    gm = embed(model, torch.randn(3, 4), torch.tensor([0, 2]))
    for node in calls(gm, ENTER):
        assert all(not isinstance(a, Node) or a.name != "x1" for a in node.args)
    add = next(n for n in gm.graph.nodes if n.meta["op"] == "add_")
    assert any(isinstance(a, Node) and a.op == "get_attr" for a in add.args[1:])


def test_inputs_written_in_place() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return self.layer(x)

    torch.manual_seed(0)
    model = Writes()
    gm = embed(model, torch.zeros(2, 4))
    assert "copy_" in [node.target for node in gm.graph.nodes]
    x = torch.zeros(2, 4)
    run(gm, x)
    torch.testing.assert_close(x, torch.ones(2, 4))
    leaf = torch.zeros(2, 4, requires_grad=True)
    run(gm, leaf * 1.0).sum().backward()
    want = model.layer.weight.detach().sum(0).expand(2, 4)
    torch.testing.assert_close(leaf.grad, want, rtol=1e-2, atol=1e-2)


def test_outputs_written_in_place_by_the_caller() -> None:
    model = nn.Linear(4, 4)
    gm = embed(model, torch.randn(2, 4))
    out = run(gm, torch.randn(2, 4))
    out /= 2.0
    out.sum().backward()
    assert model.bias.grad is not None
    torch.testing.assert_close(model.bias.grad, torch.ones(4))


def test_output_that_the_graph_writes_in_place() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.mul_(2.0)
            return y

    torch.manual_seed(0)
    compare_gradients(Writes(), torch.randn(2, 4), loss=lambda y: y.sum())


def _escaping_graph(function: Callable[..., Any], *extra: Any) -> tuple[GraphModule, nn.Linear]:
    """Linear → (function of its float32 result) → relu, as the capture writes side effects."""
    model = nn.Linear(4, 4)
    gm = build(model, torch.randn(2, 4))
    linear = next(n for n in gm.graph.nodes if n.meta["op"] == "linear")
    output = next(n for n in gm.graph.nodes if n.op == "output")
    args: list[Any] = []
    with gm.graph.inserting_before(output):
        for value in extra:
            if value is Ellipsis or isinstance(value, str):
                args.append(linear if value is Ellipsis else value)
            else:  # an object that the graph reads, as the capture holds constants
                gm.held_object = value
                args.append(gm.graph.create_node("get_attr", "held_object"))
                args[-1].meta.update(op="", val=None, region=linear.meta["region"])
        escape = gm.graph.call_function(function, tuple(args))
        relu = gm.graph.call_function(torch.relu, (escape if function is runtime.attach_hook else linear,))
    value = linear.meta["val"]
    escape.meta.update(linear.meta, op=f"ampfx.runtime.{function.__name__}", val=value)
    if function is runtime.set_attribute:
        escape.meta["val"] = None
    relu.meta.update(linear.meta, op="relu")
    output.args = (relu,)
    loss_scale = LossScale.static(1024.0).module_scale()
    PassManager((*PASSES[:-1], EmbedLossScale())).run(
        gm, ConversionContext(low_dtype=torch.float16, loss_scale=loss_scale)
    )
    return gm, model


def test_a_tensor_kept_on_a_module_has_true_gradients() -> None:
    """Rule 2: what is stored leaves the graph."""
    holder = nn.Module()
    torch.manual_seed(0)
    gm, model = _escaping_graph(runtime.set_attribute, holder, "kept", ...)
    x = torch.randn(2, 4)
    out = run(gm, x)
    kept = holder.kept
    assert isinstance(kept, Tensor)
    assert kept.dtype == torch.float32
    (got,) = torch.autograd.grad(out.sum() + kept.sum(), kept, retain_graph=True)
    torch.testing.assert_close(got, 1.0 + (kept > 0).float())
    (out.sum() + kept.sum()).backward()
    assert model.bias.grad is not None
    torch.testing.assert_close(model.bias.grad, got.sum(0))


def test_a_hook_on_a_tensor_sees_true_gradients() -> None:
    seen: list[Tensor] = []
    torch.manual_seed(0)
    gm, model = _escaping_graph(runtime.attach_hook, ..., "register_hook", seen.append)
    run(gm, torch.randn(2, 4)).sum().backward()
    assert seen[0].dtype == torch.float32
    assert set(seen[0].unique().tolist()) <= {0.0, 1.0}
    assert model.bias.grad is not None
    torch.testing.assert_close(model.bias.grad, seen[0].sum(0))


def test_gradient_penalty_through_the_graph() -> None:
    """Rule 3."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))
    reference = copy.deepcopy(model)
    x = torch.randn(6, 4, requires_grad=True)
    gm = embed(model, x)
    for net in (gm, reference):
        out = net(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        assert grad.dtype == torch.float32
        (out.mean() + 10 * (grad.norm(2, dim=1) - 1).pow(2).mean()).backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        if want.grad is not None and float(want.grad.abs().max()) > 0:
            assert got.grad is not None
            torch.testing.assert_close(
                got.grad, want.grad, rtol=5e-2, atol=5e-2 * float(want.grad.abs().max())
            )


def test_reads_in_a_checkpoint_region_have_their_own_call() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if not current:
                return self.b(x)
            with current[-1].region(opaque=1):
                return self.b(x)

    gm = embed(Checkpointed(), torch.randn(2, 4))
    regions = {node.meta["region"].opaque for node in calls(gm, ENTER)}
    assert regions == {0, 1}


def test_nothing_is_embedded_without_a_scale() -> None:
    gm = embed(nn.Linear(4, 4), torch.randn(2, 4), scale=None)
    assert not calls(gm, (*LEAVE, *ENTER))
    assert not hasattr(gm, ATTRIBUTE)
    gm = build(nn.Linear(4, 4), torch.randn(2, 4))
    context = ConversionContext(low_dtype=torch.float16, loss_scale=LossScale.disabled())
    assert not EmbedLossScale().run(gm, context)


def test_second_run_changes_nothing() -> None:
    gm = embed(Mlp(), torch.randn(5, 8))
    before = str(gm.graph)
    context = ConversionContext(low_dtype=torch.float16, loss_scale=LossScale.static(8.0))
    assert not EmbedLossScale().run(gm, context)
    assert str(gm.graph) == before


def test_new_nodes_say_where_they_stand() -> None:
    gm = embed(Mlp(), torch.randn(5, 8))
    for node in calls(gm, (*LEAVE, *ENTER)):
        assert node.meta["op"] in ("scale", "scale_cast", "unscale", "unscale_cast")
        assert {"val", "region", "facts", "source", "module_path"} <= set(node.meta)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_compiles_in_one_graph(low: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    x = torch.randn(5, 8)
    gm = embed(model, x, low=low)
    gm(x).pow(2).mean().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.compile(gm, backend="aot_eager", fullgraph=True)(x).pow(2).mean().backward()
    for got, expected in zip(model.parameters(), want, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad, expected, rtol=1e-3, atol=1e-5)
