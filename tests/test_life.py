"""The life of a converted module after its conversion: what people do to modules, done to this one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_float32 import EXACT
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import ampfx

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
LOW = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.lin(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.stats = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing and self.training else block(x)
        return self.head(self.drop(self.stats(x)))


def pair(**options: Any) -> tuple[Any, Net]:
    """A converted model that must repeat float32's numbers, and the same model in float32."""
    net = Net()
    options = {"dtype": torch.bfloat16, "policy": EXACT} | options
    return ampfx.convert(copy.deepcopy(net), (X,), **options), net


def same(model: Any, net: nn.Module, x: Tensor = X, tolerance: float = 1e-5) -> None:
    """Outputs and gradients of one run, with the same dropout."""
    results = []
    for current in (model, net):
        torch.manual_seed(7)
        current.zero_grad()
        out = current(x)
        if out.requires_grad:
            (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), {name: p.grad for name, p in current.named_parameters()}))
    (mine, my_grads), (theirs, their_grads) = results
    assert mine.dtype == theirs.dtype
    assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm())
    assert list(my_grads) == list(their_grads)
    largest = max((float(grad.norm()) for grad in their_grads.values() if grad is not None), default=0.0)
    for name, grad in their_grads.items():
        got = my_grads[name]
        assert (got is None) == (grad is None), name
        if grad is not None and got is not None:
            # A gradient that cancels to nothing (a bias before a normalization) is measured by the others.
            assert float((got - grad).norm()) <= 3 * tolerance * max(float(grad.norm()), 0.1 * largest) + 1e-6, name


# ---------------------------------------------------------------------- states and devices


def test_state_dicts_go_both_ways_while_training() -> None:
    model, net = pair()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    same(model, net)
    optimizer.step()
    net.load_state_dict(model.state_dict(), strict=True)
    same(model, net)
    other = Net()
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)
    buffer.seek(0)
    result = model.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    same(model, other)
    optimizer.step()
    assert float((model.head.weight - other.head.weight).detach().norm()) > 0  # the optimizer holds these parameters
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({}, strict=True)


@pytest.mark.parametrize("dtype", LOW)
def test_assigned_parameters_are_the_ones_that_train(dtype: torch.dtype) -> None:
    model, _ = pair(dtype=dtype, policy="autocast", loss_scale="auto" if dtype == torch.float16 else None)
    other = Net()
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.head.weight.data_ptr() == state["head.weight"].data_ptr()
    same(model.eval(), other.eval(), tolerance=TOLERANCE[dtype])
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, init_scale=256.0)
    before = model.head.weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert not torch.equal(before, model.head.weight)


def test_moves_between_devices() -> None:
    model, net = pair()
    assert model.to("cpu") is model
    assert model.cpu() is model
    same(model, net)
    empty = copy.deepcopy(model).to("meta")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert empty.eval()(X.to("meta")).shape == (6, 4)
    back = empty.to_empty(device="cpu")
    back.load_state_dict(net.state_dict())
    same(back.eval(), net.eval())


def test_a_model_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ampfx.OptionError, match="device 'meta' has no autocast"):
        ampfx.convert(net, (X.to("meta"),), dtype=torch.bfloat16)
    model = ampfx.convert(net, (X.to("meta"),), dtype=torch.bfloat16, policy=EXACT, device="cpu")
    assert model(X.to("meta")).device.type == "meta"
    real = Net()
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    same(model, real)


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_low_precision_parameters_are_refused_or_right(cast: str) -> None:
    model, net = pair(policy="autocast", loss_scale=None)
    getattr(model, cast)()
    getattr(net, cast)()
    x = X.half() if cast == "half" else X.bfloat16()
    try:
        found = model.eval()(x)
    except ampfx.AmpfxError as error:
        message = str(error)
    else:
        message = ""
        expected = net.eval()(x)
        assert float((found.float() - expected.float()).detach().norm()) <= 0.05 * float(expected.detach().norm())
    assert message == "" or "float32" in message
    model.float()
    same(model.eval(), net.float().eval(), tolerance=0.03)


# ---------------------------------------------------------------------- freezing, modes, edits


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_freezing_in_the_middle_of_training(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {} if dtype == torch.float32 else {"dtype": dtype, "policy": "autocast"}
    if dtype == torch.float16:
        options["loss_scale"] = 256.0
    model, net = pair(**options)
    tolerance = TOLERANCE.get(dtype, 1e-5)
    same(model, net, tolerance=tolerance)
    for part in ("blocks", "head"):
        for current in (model, net):
            getattr(current, part).requires_grad_(False)
        same(model, net, tolerance=tolerance)
    for current in (model, net):
        current.requires_grad_(True)
        current.blocks[0].lin.bias.requires_grad_(False)
    same(model, net, tolerance=tolerance)
    model.requires_grad_(False), net.requires_grad_(False)
    same(model, net, tolerance=tolerance)
    assert not model(X).requires_grad
    assert model(X.clone().requires_grad_()).requires_grad


def test_modes_change_between_forward_and_backward() -> None:
    model, net = pair()
    grads = []
    for current in (model, net):
        torch.manual_seed(1)
        out = current(X)
        current.eval()
        with torch.no_grad():
            current(X)
        out.sum().backward()
        current.train()
        torch.manual_seed(2)
        current(X).sum().backward()
        grads.append([p.grad for p in current.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.stats.running_mean, net.stats.running_mean)
    assert int(model.stats.num_batches_tracked) == 2
    model.blocks.eval(), net.blocks.eval()
    same(model, net)
    model.drop.eval(), net.drop.eval()
    same(model, net)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(context: Callable[[], Any]) -> None:
    model, net = pair()
    model.eval(), net.eval()
    with context():
        found, expected = model(X), net(X)
    torch.testing.assert_close(found, expected)
    assert found.is_inference() == expected.is_inference()
    model.train(), net.train()
    same(model, net)


def test_checkpointing_is_switched_on_after_conversion() -> None:
    model, net = pair()
    same(model, net)
    model.gradient_checkpointing_enable(), net.gradient_checkpointing_enable()
    same(model, net)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(X)
        with_checkpoints = sum(saved)
        saved.clear()
        model.gradient_checkpointing = False
        model(X)
    assert with_checkpoints < sum(saved)


def test_modules_are_exchanged_added_and_removed() -> None:
    model, net = pair()
    same(model, net)
    wide = nn.Linear(8, 5)
    model.head, net.head = copy.deepcopy(wide), copy.deepcopy(wide)
    assert model(X).shape == (6, 5)
    same(model, net)
    extra = Block()
    model.blocks.append(copy.deepcopy(extra)), net.blocks.append(copy.deepcopy(extra))
    same(model, net)
    del model.blocks[0], net.blocks[0]
    same(model, net)
    model.head.bias, net.head.bias = None, None
    same(model, net)
    model.drop, net.drop = nn.Identity(), nn.Identity()
    same(model, net)


def test_parametrizations_and_pruning_after_conversion() -> None:
    model, net = pair()
    same(model, net)

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    for current in (model, net):
        parametrize.register_parametrization(current.head, "weight", Double())
    same(model, net)
    for current in (model, net):
        parametrize.remove_parametrizations(current.head, "weight")
        prune.l1_unstructured(current.blocks[0].lin, "weight", amount=0.5)
    same(model, net)
    for current in (model, net):
        prune.remove(current.blocks[0].lin, "weight")
    same(model, net)


def test_weights_are_tied_and_untied_after_conversion() -> None:
    model, net = pair()
    same(model, net)
    for current in (model, net):
        current.blocks[1].lin.weight = current.blocks[0].lin.weight
    same(model, net)
    for current in (model, net):
        current.blocks[1].lin.weight = nn.Parameter(current.blocks[0].lin.weight.detach().clone() * 2)
    same(model, net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hooks_on_kept_modules(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {}
    if dtype == torch.float16:
        options = {"dtype": dtype, "policy": "autocast", "loss_scale": 128.0}
    model, net = pair(**options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    same(model, net, tolerance=tolerance)
    seen: dict[int, list[Tensor]] = {id(model): [], id(net): []}
    handles = []
    for current in (model, net):
        notes = seen[id(current)]
        handles += [
            current.blocks[0].register_forward_hook(lambda m, a, out: out * 1.5),
            current.blocks[1].register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
            current.head.register_full_backward_hook(lambda m, g, o, notes=notes: notes.append(o[0])),
            current.head.weight.register_hook(lambda grad: grad * 2),
            current.register_forward_hook(lambda m, a, out: out.tanh()),
        ]
    same(model, net, tolerance=tolerance)
    mine, theirs = seen[id(model)], seen[id(net)]
    assert len(mine) == len(theirs) == 1
    assert float((mine[0] - theirs[0]).norm()) <= 3 * tolerance * float(theirs[0].norm())
    for handle in handles:
        handle.remove()
    same(model, net, tolerance=tolerance)
    assert len(mine) == 1


# ---------------------------------------------------------------------- torch.func


def test_functional_calls_with_buffers_and_gradients() -> None:
    model, net = pair()
    model.eval(), net.eval()
    parameters = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    buffers = {name: torch.rand_like(b) if b.is_floating_point() else b for name, b in net.named_buffers()}

    def loss(parameters: Any, current: nn.Module) -> Tensor:
        return torch.func.functional_call(current, (parameters, buffers), (X,)).square().mean()

    mine, theirs = (torch.func.grad(loss)(parameters, current) for current in (model, net))
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-5)
    same(model, net)


@pytest.mark.parametrize("base_on_meta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_an_ensemble_of_stacked_parameters(dtype: torch.dtype, base_on_meta: bool) -> None:
    options: dict[str, Any] = {} if dtype == torch.float32 else {"dtype": dtype, "policy": "autocast"}
    pairs = [pair(**options) for _ in range(3)]
    models = [model.eval() for model, _ in pairs]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0])
    if base_on_meta:
        base = base.to("meta")

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    found = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, X)
    expected = torch.stack([net.eval()(X) for _, net in pairs])
    tolerance = TOLERANCE.get(dtype, 1e-5)
    assert float((found - expected).detach().norm()) <= tolerance * float(expected.detach().norm())
    found.sum().backward()
    expected.sum().backward()
    for index, (_, net) in enumerate(pairs):
        for name, parameter in net.named_parameters():
            got = parameters[name].grad[index]
            assert parameter.grad is not None
            assert float((got - parameter.grad).norm()) <= 3 * tolerance * float(parameter.grad.norm()) + 1e-6, name


def test_gradients_of_each_sample() -> None:
    model, net = pair()
    model.eval(), net.eval()

    def loss(parameters: Any, current: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(current, parameters, (x[None],)).square().sum()

    found = []
    for current in (model, net):
        parameters = {name: p.detach() for name, p in current.named_parameters()}
        found.append(torch.vmap(torch.func.grad(loss), in_dims=(None, None, 0))(parameters, current, X))
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- saving


@pytest.mark.parametrize("dtype", LOW)
def test_saved_in_the_middle_of_training(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "policy": "autocast"}
    if dtype == torch.float16:
        options["loss_scale"] = 64.0
    model, net = pair(**options)
    same(model, net, tolerance=TOLERANCE[dtype])
    buffer = io.BytesIO()
    torch.save(model.eval(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert isinstance(loaded, Net)
    assert not loaded.training
    assert torch.equal(loaded(X), model(X))
    same(loaded.train(), net, tolerance=TOLERANCE[dtype])
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
