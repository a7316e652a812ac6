"""Training converted float16 models in the plain loop: overflows, clipping, several optimizers, saving."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scaled import Layers, mlp, relative_error, squares
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import ampfx
from ampfx import LossScaleOptimizer
from ampfx.loss_scale import LossScale, default_loss_scale

X = (torch.arange(192.0) ** 2).sin().reshape(16, 12)
Y = X[:, :4].argmax(1)
OVERFLOW = 1e30


def with_norm() -> nn.Module:
    return Layers(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def converted(make: Callable[[], nn.Module] = mlp, scale: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    group = LossScale() if scale is None else scale
    return ampfx.convert(make(), (X,), dtype=torch.float16, loss_scale=group, **options)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return F.cross_entropy(model(X), Y) * factor


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd momentum fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
}


# ---------------------------------------------------------------------- a batch that overflows


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", ["none", "value", "norm"])
def test_an_overflowing_batch_never_happened(name: str, clip: str) -> None:
    """Not at the first step and not later, whatever clipping makes of the infinities before the step."""
    results = []
    for bad_steps in ((), (0, 2)):
        model = converted(with_norm)
        # A scale that stays, so that float16 rounds alike in both runs.
        inner = OPTIMIZERS[name](model.parameters())
        optimizer = LossScaleOptimizer(inner, model, init_scale=2.0**8, backoff_factor=1.0)
        for step in range(4):
            for factor in (OVERFLOW, 1.0) if step in bad_steps else (1.0,):
                optimizer.zero_grad()
                loss_of(model, factor).backward()
                if clip == "value":
                    nn.utils.clip_grad_value_(model.parameters(), 0.1)
                elif clip == "norm":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                assert optimizer.last_step_skipped == (factor == OVERFLOW)
        assert optimizer.skipped_steps == len(bad_steps)
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        results.append(values(model) + state)
    assert equal(*results)


def test_running_statistics_belong_to_the_forward_pass() -> None:
    """A skipped step undoes no forward pass: batch norm saw the batch, as under GradScaler."""
    model, twin = converted(with_norm), with_norm()
    twin.load_state_dict(model.state_dict())
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, OVERFLOW).backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    twin(X)
    for name, wanted in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), wanted, rtol=2e-2, atol=1e-3)


def test_overflow_in_one_of_several_micro_batches() -> None:
    model = converted()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)
    before = values(model)
    for factor in (1.0, OVERFLOW, 1.0):
        loss_of(model, factor).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert equal(before, values(model))


# ---------------------------------------------------------------------- the scale


def test_scale_backs_off_and_grows() -> None:
    model = converted()
    optimizer = LossScaleOptimizer(
        SGD(model.parameters(), lr=0.0), model, init_scale=1024.0, growth_interval=3
    )
    seen = []
    for factor in (OVERFLOW, 1.0, 1.0, 1.0, 1.0, OVERFLOW, 1.0):
        optimizer.zero_grad()
        loss_of(model, factor).backward()
        optimizer.step()
        seen.append(optimizer.get_scale())
    assert seen == [512.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0]


def test_static_scale_skips_and_stays() -> None:
    model = converted(scale=256.0)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)
    for factor in (1.0, OVERFLOW):
        optimizer.zero_grad()
        loss_of(model, factor).backward()
        optimizer.step()
        assert optimizer.get_scale() == 256.0
        assert optimizer.last_step_skipped == (factor == OVERFLOW)


class Blocks(nn.Module):
    """A model for ``blocks=``; its Python code may decide by a value."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.decides = decides

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if self.decides and float(x.detach().abs().mean()) > 1e6:
                x = x * 2
        result: Tensor = self.head(x)
        return result


@pytest.mark.filterwarnings("ignore:Blocks is converted in parts")
@pytest.mark.parametrize("how", ["parts", "blocks by type", "blocks by path"])
def test_models_converted_in_parts_or_blocks(how: str) -> None:
    torch.manual_seed(0)
    original = Blocks(decides=how == "parts")
    blocks = {"parts": None, "blocks by type": nn.Sequential, "blocks by path": "layers.*"}[how]
    x = torch.randn(16, 8)
    model = ampfx.convert(copy.deepcopy(original), (x,), dtype=torch.float16, blocks=blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model, init_scale=1024.0)
        found = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=1024.0)
    assert optimizer.get_scale() == found.get_scale() == 1024.0
    del found
    (original(x).pow(2).mean() * 1e-6).backward()
    (model(x).pow(2).mean() * 1e-6).backward()
    for wanted, got in zip(original.parameters(), model.parameters(), strict=True):
        assert relative_error(got.grad, wanted.grad) < 0.02
    optimizer.step()
    assert not optimizer.last_step_skipped
    optimizer.zero_grad()
    before = values(model)
    (model(x).sum() * OVERFLOW).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.get_scale() == 512.0
    assert equal(before, values(model))


def test_bfloat16_needs_none() -> None:
    torch.manual_seed(0)
    model = ampfx.convert(mlp(), (X,), dtype=torch.bfloat16)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.backward(loss_of(model))
        optimizer.step()
    assert optimizer.get_scale() == 1.0
    assert not any("scale" in str(node.target) for node in model.graph.nodes)


def test_float16_without_an_optimizer_warns_once() -> None:
    model = converted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss_of(model).backward()
    assert ["no ampfx.LossScaleOptimizer is attached" in str(warning.message) for warning in caught] == [True]


def test_grad_scaler_outside() -> None:
    original = mlp()
    torch.manual_seed(0)
    model = ampfx.convert(copy.deepcopy(original), (X,), dtype=torch.float16, loss_scale=None)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loss_of(original).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    for wanted, found in zip(original.parameters(), model.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 0.02
    scaler.step(optimizer)
    scaler.update()


def test_accumulation_across_a_change_of_scale() -> None:
    """Gradients of one step computed at different scales add up: each is a true one."""
    original, model = mlp(), converted()
    original.load_state_dict(model.state_dict())
    group = model._ampfx.scale.group
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model, init_scale=2.0**12)
    for scale in (2.0**12, 2.0**8, 2.0**14):
        group.set(scale)
        loss = loss_of(model)
        group.set(scale / 2)  # between forward and backward
        loss.backward()
        loss_of(original).backward()
    for wanted, found in zip(original.parameters(), model.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 0.02
    optimizer.step()
    assert not optimizer.last_step_skipped


# ---------------------------------------------------------------------- several of everything


@pytest.fixture
def shared_scale() -> Iterator[LossScale]:
    """The group that models share by default, without the optimizers of other tests."""
    gc.collect()
    yield default_loss_scale()
    gc.collect()


@pytest.mark.parametrize("fused", [False, True])
def test_gan(shared_scale: LossScale, fused: bool) -> None:
    """60 steps of both; the generator's gradient passes the critic and must not be skipped for its scale."""
    torch.manual_seed(0)
    noise, data = torch.randn(32, 8), torch.randn(32, 2)
    generator = ampfx.convert(
        Layers(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), (noise,), dtype=torch.float16
    )
    critic = ampfx.convert(
        Layers(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)), (data,), dtype=torch.float16
    )
    optimizers = [
        LossScaleOptimizer(Adam(m.parameters(), lr=1e-2, fused=fused), m) for m in (generator, critic)
    ]
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for step in range(60):
        fake, real = generator(torch.randn(32, 8)), torch.randn(32, 2) * 0.1 + 1
        optimizers[1].zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        (loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        (loss * (OVERFLOW if step == 30 else 1.0)).backward()
        optimizers[0].step()
    assert [optimizer.skipped_steps for optimizer in optimizers] == [1, 0]
    assert shared_scale.get() == 2.0**14


def test_gradient_through_two_converted_models() -> None:
    group = LossScale.static(2.0**12)
    originals = [mlp(12), mlp(4)]
    models = [ampfx.convert(copy.deepcopy(m), (X,), dtype=torch.float16, loss_scale=group) for m in originals]
    squares(originals[1](originals[0](X))).backward()
    squares(models[1](models[0](X))).backward()
    for original, model in zip(originals, models, strict=True):
        for wanted, found in zip(original.parameters(), model.parameters(), strict=True):
            assert relative_error(found.grad, wanted.grad) < 0.02


def test_several_losses_and_optimizers_on_one_model() -> None:
    model, original = converted(), mlp()
    original.load_state_dict(model.state_dict())
    optimizers = [
        LossScaleOptimizer(SGD(model.net[index].parameters(), lr=0.1), model, init_scale=2.0**10)
        for index in (0, 2)
    ]
    for version in (model, original):
        out = version(X)
        F.cross_entropy(out, Y).backward(retain_graph=True)
        (1e-3 * out.pow(2).mean() + 1e-4 * version.net[0].weight.pow(2).sum()).backward()
    for wanted, found in zip(original.parameters(), model.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 0.02
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, OVERFLOW).backward()
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.last_step_skipped
        assert optimizer.get_scale() == 2.0**9


class Wrapper(nn.Module):
    """As DDP does: holds the model as ``module`` and calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@pytest.mark.parametrize("given", ["nothing", "model", "wrapper", "list"])
def test_models_are_found(given: str) -> None:
    model = converted()
    wrapper = Wrapper(model)
    models = {"nothing": None, "model": model, "wrapper": wrapper, "list": [model]}
    optimizer = LossScaleOptimizer(SGD(wrapper.parameters(), lr=0.1), models[given], init_scale=512.0)
    assert model._ampfx.scale.group.get() == 512.0
    loss_of(wrapper, OVERFLOW).backward()
    nn.utils.clip_grad_value_(wrapper.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_step_skipped


# ---------------------------------------------------------------------- closures, schedules, saving


def test_closure_and_lbfgs() -> None:
    for make in (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5)):
        model = converted()
        optimizer = LossScaleOptimizer(make(model.parameters()), model)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        first = loss_of(model).item()
        for _ in range(5):
            optimizer.step(closure)
        assert optimizer.skipped_steps == 0
        assert loss_of(model).item() < first
        before = values(model)

        def overflows(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, OVERFLOW)
            loss.backward()
            return loss

        optimizer.step(overflows)
        assert optimizer.last_step_skipped
        assert equal(before, values(model))


def test_schedulers() -> None:
    model = converted()
    optimizer = LossScaleOptimizer(AdamW(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, OVERFLOW if step == 0 else 1.0).backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.inner_optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.1


@pytest.mark.parametrize("name", ["adam", "adamw fused"])
def test_restored_training_continues_bit_by_bit(name: str) -> None:
    def setup() -> tuple[Any, Any]:
        model = converted(with_norm)
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, LossScaleOptimizer(optimizer, model, init_scale=2.0**10, growth_interval=4)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, OVERFLOW if step in (1, 6) else 1.0).backward()
            optimizer.step()

    model, optimizer = setup()
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 12))
    file.seek(0)
    saved = torch.load(file)
    assert not any("scale" in key for key in saved["model"])
    again, restored = setup()
    again.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    train(again, restored, range(5, 12))
    assert equal(values(model), values(again))
    assert equal(list(model.buffers()), list(again.buffers()))
    assert restored.get_scale() == optimizer.get_scale()
    assert restored.skipped_steps == optimizer.skipped_steps == 2


def test_deep_copy_for_an_average_of_the_weights() -> None:
    model = converted(with_norm)
    optimizer = LossScaleOptimizer(Adam(model.parameters(), lr=0.01), model)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        average.update_parameters(model)
    assert average.module.net[0].weight is not model.net[0].weight
    with torch.no_grad():
        average.eval()
        assert (average(X) - model.eval()(X)).abs().max() < 0.5
    wanted = copy.deepcopy(model).eval()
    wanted.load_state_dict(average.module.state_dict())
    assert torch.equal(wanted(X), average(X))
    assert optimizer.skipped_steps == 0


def test_copies_of_model_and_optimizer_train_by_themselves() -> None:
    model = converted()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)
    other, second = copy.deepcopy((model, optimizer))
    loss_of(other, OVERFLOW).backward()
    second.step()
    assert second.last_step_skipped
    loss_of(model).backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert not equal(values(model), values(other))


# ---------------------------------------------------------------------- the promise as a whole


def test_training_follows_float32_where_gradients_would_underflow() -> None:
    """The same losses, scaled down by 1e-6 with a learning rate scaled up: only the loss scale saves them."""
    curves = []
    for kind in ("float32", "float16", "float16 without"):
        torch.manual_seed(0)
        model: nn.Module = mlp()
        optimizer: Any = SGD(model.parameters(), lr=0.5e6)
        if kind != "float32":
            scale = None if kind == "float16 without" else LossScale()
            model = ampfx.convert(model, (X,), dtype=torch.float16, loss_scale=scale)
        if kind == "float16":
            optimizer = LossScaleOptimizer(optimizer, model, init_scale=2.0**15)
        for _ in range(60):
            optimizer.zero_grad()
            loss_of(model, 1e-6).backward()
            optimizer.step()
        curves.append(loss_of(model).item())
    assert abs(curves[1] - curves[0]) < 0.02 * curves[0]
    assert abs(curves[2] - curves[0]) > 0.1 * curves[0]
