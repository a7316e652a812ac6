"""LossScaleOptimizer: the plain loop, skipped steps, saving, and torch's own machinery around it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ampfx.errors import LossScaleError
from ampfx.grad_scaling import scale_cast, unscale, unscale_cast
from ampfx.loss_scale import LossScale, ModuleScale, register_model
from ampfx.optimizer import LossScaleOptimizer
from ampfx.skip import skips_in_kernel


class Half(nn.Module):
    """A layer as a converted graph computes it."""

    def __init__(self, inputs: int = 4, outputs: int = 3, scale: LossScale | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        part = register_model(self, scale if scale is not None else LossScale(), torch.float16)
        assert part is not None
        self.part: ModuleScale = part

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = unscale_cast(self.part, torch.float16, self.weight, self.bias)
        (x,) = unscale(self.part, x)
        return scale_cast(self.part, torch.float32, torch.nn.functional.linear(x.half(), weight, bias))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd fused dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam fused amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}
X, Y = torch.linspace(-1, 1, 40).reshape(10, 4), torch.linspace(0, 1, 30).reshape(10, 3)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad_steps", [(0,), (2,), (0, 1, 3)])
@pytest.mark.parametrize("kind", ["converted", "clipped", "own"])
def test_a_skipped_step_never_happened(name: str, bad_steps: tuple[int, ...], kind: str) -> None:
    results = []
    for bad in ((), bad_steps):
        torch.manual_seed(0)
        model = nn.Linear(4, 3) if kind == "own" else Half(scale=LossScale())
        # A scale that stays, so that float16 rounds alike in both runs.
        optimizer = LossScaleOptimizer(
            OPTIMIZERS[name](model.parameters()), init_scale=256.0, backoff_factor=1.0
        )
        for step in range(4):
            for factor in (1e30, 1.0) if step in bad else (1.0,):
                optimizer.zero_grad()
                loss = (model(X) - Y).pow(2).mean() * (
                    factor if kind != "own" or factor == 1 else float("inf")
                )
                before = [p.detach().clone() for p in model.parameters()]
                state = state_tensors(optimizer)
                optimizer.backward(loss)
                if kind == "clipped":
                    nn.utils.clip_grad_value_(model.parameters(), 1.0)  # turns inf into 1
                optimizer.step()
                assert optimizer.last_step_skipped == (factor != 1.0)
                if factor != 1.0:
                    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                    assert not state or all(
                        torch.equal(a, b) for a, b in zip(state, state_tensors(optimizer), strict=True)
                    )
        assert optimizer.skipped_steps == len(bad)
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_plain_loop_with_a_converted_model() -> None:
    model = Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=2.0**10, growth_interval=2)
    assert optimizer.get_scale() == 1024.0
    loss = (model(X) - Y).pow(2).mean()
    assert optimizer.scale_loss(loss) is loss
    loss.backward()
    grad = model.weight.grad
    assert grad is not None
    want = torch.autograd.grad((X @ model.weight.T + model.bias - Y).pow(2).mean(), model.weight)[0]
    torch.testing.assert_close(grad, want, rtol=1e-2, atol=1e-3)
    before = grad.clone()
    optimizer.unscale_()
    assert torch.equal(before, grad)
    optimizer.step()
    optimizer.zero_grad()
    (model(X) - Y).pow(2).mean().backward()
    optimizer.step()
    assert optimizer.get_scale() == 2048.0
    assert not optimizer.last_step_skipped


def test_plain_backward_without_scaling_is_stepped_unscaled() -> None:
    """Silent division by the scale is the worst that can happen."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**16, growth_interval=1)
    p.sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -torch.ones(3))
    assert optimizer.get_scale() == 2.0**16
    optimizer.zero_grad()
    optimizer.scale_loss(p.sum()).backward()
    torch.testing.assert_close(p.grad, torch.full((3,), 2.0**16))
    optimizer.step()
    torch.testing.assert_close(p.detach(), -2 * torch.ones(3))


ORDERS = [["plain", "own"], ["own", "plain"], ["own", "scaled"], ["plain", "scaled", "own"], ["scaled", "own", "plain"]]


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64])
def test_plain_and_scaled_backward_passes_add_up(order: list[str], dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=3.0 * 2.0**10)
    for factor, kind in enumerate(order, start=1):
        loss = factor * (p.real if p.is_complex() else p).sum() / 4
        if kind == "plain":
            loss.backward()
        elif kind == "own":
            optimizer.backward(loss)
        else:
            optimizer.scale_loss(loss).backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    torch.testing.assert_close(p.detach(), torch.full_like(p, -sum(range(len(order) + 1)) / 4))


def test_gradients_are_true_after_backward() -> None:
    model = nn.Linear(4, 3)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=1.0), init_scale=2.0**10)
    loss = (model(X) - Y).pow(2).mean()
    want = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
    optimizer.backward(loss)
    torch.testing.assert_close(model.weight.grad, want)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = model.weight.grad.clone()  # type: ignore[union-attr]
    optimizer.backward((model(X) - Y).pow(2).mean())  # after clipping
    torch.testing.assert_close(model.weight.grad, clipped + want)
    failing = model(X)
    failing.register_hook(_fail)
    with pytest.raises(RuntimeError, match="hook"):
        optimizer.backward(failing.sum())
    torch.testing.assert_close(model.weight.grad, clipped + want)


def _fail(_: Tensor) -> None:
    raise RuntimeError("a hook that fails")


def test_a_penalty_on_gradients_of_a_plain_model() -> None:
    ends = []
    for own in (False, True):
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: create_graph keeps .grad and the parameter alive
            (optimizer.backward if own else torch.autograd.backward)(p.pow(3).sum(), create_graph=True)
        assert p.grad is not None
        penalty = p.grad.pow(2).sum()
        (optimizer.backward if own else torch.autograd.backward)(penalty)
        optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


def test_gradients_dropped_or_stepped_before_the_scaled_loss_goes_back() -> None:
    """The loss is scaled, then zero_grad, then backward: the usual order of three lines."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**10, growth_interval=1)
    first, second = optimizer.scale_loss(p.sum()), optimizer.scale_loss(p.sum())
    for count, loss in enumerate((first, second), start=1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # S doubles
        torch.testing.assert_close(p.detach(), torch.full((3,), -float(count)))
    assert optimizer.get_scale() == 2.0**12


def test_an_overflow_of_a_plain_model_is_seen_at_zero_grad() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**10)
    optimizer.backward(p.sum() * float("inf"))
    optimizer.zero_grad()
    assert optimizer.get_scale() == 2.0**9


def test_losses_of_any_shape_and_dtype() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**16)
    half = p.half() * 2
    assert torch.isfinite(optimizer.scale_loss(half)).all()
    assert optimizer.scale_loss(half).dtype == torch.float32
    first, second = optimizer.scale_loss([half.sum(), p.double().sum()])
    assert first.dtype == torch.float32
    assert second.dtype == torch.float64
    optimizer.backward([p.sum(), (2 * p).sum()])
    optimizer.unscale_()
    optimizer.unscale_()
    torch.testing.assert_close(p.grad, torch.full((4,), 3.0))
    optimizer.scale_loss(p.sum()).backward()
    optimizer.unscale_()
    torch.testing.assert_close(p.grad, torch.full((4,), 4.0))
    optimizer.zero_grad()
    with pytest.raises(LossScaleError, match="tensor or a list"):
        optimizer.scale_loss(3.0)


def test_accumulation_skips_when_one_micro_batch_overflowed() -> None:
    model = Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=64.0)
    start = model.weight.detach().clone()
    for factor in (1.0, 1e30, 1.0):
        (model(X).sum() * factor).backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert torch.equal(start, model.weight)
    assert optimizer.get_scale() == 32.0
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.get_scale() == 32.0


def test_parameters_outside_the_model() -> None:
    model, extra = Half(), nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([*model.parameters(), extra], lr=0.1), init_scale=2.0**10)
    optimizer.backward((model(X) * extra).sum() + extra.sum())
    want = (model(X).detach()).sum(0) + 1
    torch.testing.assert_close(extra.grad, want)
    optimizer.step()
    optimizer.zero_grad()
    (model(X) * extra).sum().backward()
    assert extra.grad is not None
    extra.grad[0] = float("nan")
    before = model.weight.detach().clone()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert torch.equal(before, model.weight)


# ------------------------------------------------------------------ two optimizers, one group


def gan(group: LossScale) -> tuple[Half, Half, LossScaleOptimizer, LossScaleOptimizer]:
    generator, critic = Half(4, 4, scale=group), Half(4, 1, scale=group)
    return (
        generator,
        critic,
        LossScaleOptimizer(SGD(generator.parameters(), lr=0.01), generator, init_scale=1024.0),
        LossScaleOptimizer(SGD(critic.parameters(), lr=0.01), critic, init_scale=1024.0),
    )


def test_gan_trains_both_and_shares_one_scale() -> None:
    """Rule 5: with a scale per module a generator skipped 60 of 60 steps."""
    generator, critic, for_generator, for_critic = gan(LossScale())
    for _ in range(10):
        for_critic.zero_grad()
        (critic(X).mean() - critic(generator(X).detach()).mean()).backward()
        for_critic.step()
        for_generator.zero_grad()
        critic(generator(X)).mean().backward()
        for_generator.step()
    assert for_critic.skipped_steps == for_generator.skipped_steps == 0
    assert for_critic.get_scale() == for_generator.get_scale() == 1024.0


def test_gan_overflow_skips_whom_it_concerns_and_backs_off_once() -> None:
    generator, critic, for_generator, for_critic = gan(LossScale())
    (critic(generator(X)).mean() * 1e30).backward()  # overflows in both
    for_generator.step()
    assert for_generator.last_step_skipped
    assert for_generator.get_scale() == 512.0
    for_critic.zero_grad()  # its gradients of the generator's loss are dropped
    (critic(X).mean() - critic(generator(X).detach()).mean()).backward()
    for_critic.step()
    assert not for_critic.last_step_skipped
    assert for_critic.get_scale() == 512.0


def test_two_optimizers_on_one_model() -> None:
    model = Half()
    first = LossScaleOptimizer(SGD([model.weight], lr=0.1), init_scale=1024.0, growth_interval=2)
    second = LossScaleOptimizer(SGD([model.bias], lr=0.1), init_scale=1024.0, growth_interval=2)
    (model(X).sum() * 1e30).backward()
    first.step()
    second.step()
    assert first.last_step_skipped
    assert second.last_step_skipped
    assert first.get_scale() == second.get_scale() == 512.0  # once for one backward
    for count in range(2):
        first.zero_grad()
        second.zero_grad()
        model(X).sum().backward()
        first.step()
        second.step()
        assert first.get_scale() == (512.0 if count == 0 else 1024.0)  # one clean step for one backward


def test_zero_grad_drops_the_overflow_and_adapts() -> None:
    """A loop that looks at the gradients itself and never steps must still come down."""
    model = Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=1024.0)
    (model(X).sum() * 1e30).backward()
    optimizer.zero_grad()
    assert optimizer.get_scale() == 512.0
    optimizer.zero_grad()
    assert optimizer.get_scale() == 512.0
    model(X).sum().backward()
    optimizer.step()
    assert not optimizer.last_step_skipped


# ------------------------------------------------------------------ torch's fused optimizers


def test_fused_steps_need_no_host_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    optimizer = LossScaleOptimizer(AdamW(model.parameters(), fused=True))
    optimizer.backward(model(X).sum())
    monkeypatch.setattr("ampfx.optimizer.step_on_host", lambda *_: pytest.fail("the host decided"))
    optimizer.step()
    assert isinstance(optimizer._last_skipped, Tensor)
    assert not hasattr(optimizer.inner_optimizer, "found_inf")
    assert not hasattr(optimizer.inner_optimizer, "grad_scale")


def test_fused_sgd_with_a_late_first_gradient() -> None:
    for dampening in (0.0, 0.1):
        ends = []
        for fused in (True, False):
            early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
            inner = SGD([early, late], lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
            optimizer = LossScaleOptimizer(inner)
            optimizer.backward(early.sum())
            optimizer.step()
            for _ in range(2):
                optimizer.zero_grad()
                optimizer.backward((early * late).sum())
                optimizer.step()
            assert inner.param_groups[0]["fused"] is fused
            ends.append((early.detach(), late.detach()))
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b)


def test_a_forgotten_flag_is_removed() -> None:
    p = nn.Parameter(torch.ones(3))
    inner = AdamW([p], lr=0.1, fused=True)
    inner.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer = LossScaleOptimizer(inner)
    optimizer.backward(p.sum())
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(3))
    assert not hasattr(inner, "found_inf")


def test_groups_loaded_from_an_unfused_run_are_not_trusted() -> None:
    p = nn.Parameter(torch.ones(3))
    inner = AdamW([p], lr=0.1, fused=True)
    inner.load_state_dict(AdamW([p], lr=0.1, fused=False).state_dict())
    p.grad = torch.full((3,), float("inf"))
    assert not skips_in_kernel(inner)
    optimizer = LossScaleOptimizer(inner)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert torch.equal(p.detach(), torch.ones(3))


# ------------------------------------------------------------------ gradients of every kind


def test_gradients_of_every_kind() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    wide = nn.Parameter(torch.ones(4))
    unused, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0, 3))
    double, low = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2).half())
    cplx = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    params = [*table.parameters(), wide, unused, empty, double, low, cplx]
    optimizer = LossScaleOptimizer(SGD(params, lr=1.0), init_scale=1024.0)
    before = [p.detach().clone() for p in params]

    def loss() -> Tensor:
        return (
            table(torch.tensor([1, 1])).sum()
            + empty.sum()
            + double.float().sum()
            + low.float().sum()
            + cplx.real.sum()
        )

    optimizer.scale_loss(loss()).backward()
    wide.grad = torch.ones(1).expand(4) * 1024.0
    wide.grad = torch.full((1,), 1024.0).expand(4)  # overlapping memory
    optimizer.step()
    assert not optimizer.last_step_skipped
    changes = [
        float((a - p.detach()).abs().max()) if a.numel() else 0.0 for a, p in zip(before, params, strict=True)
    ]
    assert changes == [2.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    for place in (table.weight, double, low, cplx):
        optimizer.zero_grad()
        optimizer.backward(loss())
        assert place.grad is not None
        (place.grad._values() if place.grad.is_sparse else place.grad)[0] = float("nan")
        optimizer.step()
        assert optimizer.last_step_skipped


def test_large_finite_gradients_are_not_taken_for_overflows() -> None:
    p = nn.Parameter(torch.zeros(200, 200))
    optimizer = LossScaleOptimizer(SGD([p], lr=0.0))
    p.grad = torch.full((200, 200), 3e38)  # the sum is inf
    optimizer.step()
    assert not optimizer.last_step_skipped
    p.grad[7, 7], p.grad[8, 8] = float("inf"), -float("inf")
    optimizer.step()
    assert optimizer.last_step_skipped


# ------------------------------------------------------------------ closures


def test_closure_of_an_ordinary_optimizer() -> None:
    model = Half()
    optimizer = LossScaleOptimizer(Adam(model.parameters()), init_scale=64.0)
    factors = iter((1.0, 1e30))
    start = model.weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).sum() * next(factors)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert not torch.equal(start, model.weight)
    after = model.weight.detach().clone()
    optimizer.step(closure=closure)
    assert optimizer.last_step_skipped
    assert torch.equal(after, model.weight)
    assert optimizer.get_scale() == 32.0


@pytest.mark.parametrize("own", [True, False])
def test_lbfgs_is_evaluated_through(own: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if own else Half()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=4, tolerance_grad=0.0, tolerance_change=0.0)
    optimizer = LossScaleOptimizer(inner, init_scale=256.0)
    calls = 0
    bad_call = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(X) - Y).pow(2).mean()
        optimizer.backward(loss * (1e30 if calls == bad_call else 1.0) * (1e30 if calls == bad_call else 1.0))
        return loss

    first = float(optimizer.step(closure))
    second = float(optimizer.step(closure))
    assert calls > 2
    assert second < first
    before = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    scale = optimizer.get_scale()
    bad_call = calls + 3
    optimizer.step(closure)
    assert calls == bad_call
    assert optimizer.last_step_skipped
    assert optimizer.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert str(state) == str(optimizer.state_dict()["state"])


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("target", ["wrapper", "inner"])
def test_state_dict_round_trip(target: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(Adam([p]), init_scale=64.0, growth_interval=2)
    for factor in (float("inf"), 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        optimizer.backward(p.sum() * factor)
        optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = LossScaleOptimizer(Adam([p]), init_scale=8.0, growth_interval=2)
    (other if target == "wrapper" else other.inner_optimizer).load_state_dict(saved)
    assert other.state_dict()["param_groups"] == saved["param_groups"]
    assert "loss_scale" not in other.param_groups[0]
    assert other.get_scale() == 64.0
    assert other.skipped_steps == 1
    other.zero_grad()
    other.backward(p.sum())
    other.step()
    assert other.get_scale() == 128.0  # the growth counter went on
    Adam([p]).load_state_dict(saved)  # plain torch takes it


def test_plain_and_broken_state_dicts() -> None:
    p = nn.Parameter(torch.ones(3))
    plain = Adam([p], lr=0.5)
    optimizer = LossScaleOptimizer(Adam([p]), init_scale=8.0)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.get_scale() == 8.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    broken = optimizer.state_dict()
    broken["param_groups"][0]["loss_scale"] = {"scale": "much"}
    with pytest.raises(LossScaleError, match="cannot be read"):
        optimizer.load_state_dict(broken)


def test_groups_and_state_stay_shared_after_loading_either() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=0.1, momentum=0.9))
    inner = optimizer.inner_optimizer
    for target in (optimizer, inner):
        target.load_state_dict(target.state_dict())
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
    q = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    assert len(inner.param_groups) == 2
    optimizer.backward(q.sum() + p.sum())
    optimizer.step()
    assert not torch.equal(q.detach(), torch.ones(2))
    assert optimizer.defaults is inner.defaults


def test_dcp_dummy_step_does_not_move_the_scale() -> None:
    """torch.distributed.checkpoint steps a fresh optimizer with zero gradients to create its state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = Half()
    optimizer = LossScaleOptimizer(Adam(model.parameters()), model, init_scale=64.0, growth_interval=1)
    saved = get_optimizer_state_dict(model, optimizer)
    assert optimizer.get_scale() == 64.0
    model(X).sum().backward()
    optimizer.step()
    assert optimizer.get_scale() == 128.0
    saved = get_optimizer_state_dict(model, optimizer)
    other_model = Half()
    other = LossScaleOptimizer(Adam(other_model.parameters()), other_model, init_scale=4.0, growth_interval=1)
    set_optimizer_state_dict(other_model, other, saved)
    assert other.get_scale() == 128.0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_working(how: Callable[[Any], Any]) -> None:
    model = nn.Linear(4, 3)
    optimizer = LossScaleOptimizer(
        SGD(model.parameters(), lr=0.1, momentum=0.9), init_scale=64.0, hysteresis=2
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step on the instance
    optimizer.backward(model(X).sum() * float("inf"))
    optimizer.step()
    model2, optimizer2 = how((model, optimizer))
    assert optimizer2.param_groups[0]["params"][0] is model2.weight
    assert optimizer2.rule == optimizer.rule
    assert optimizer2.get_scale() == 64.0
    assert optimizer2.skipped_steps == 1
    optimizer2.zero_grad()
    optimizer2.backward(model2(X).sum() * float("inf"))
    optimizer2.step()
    assert optimizer2.get_scale() == 32.0
    assert optimizer.get_scale() == 64.0


def test_copies_of_model_and_optimizer_belong_together() -> None:
    model = Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model, init_scale=64.0)
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    (model2(X).sum() * 1e30).backward()
    nn.utils.clip_grad_value_(model2.parameters(), 1.0)
    optimizer2.step()
    assert optimizer2.last_step_skipped
    model(X).sum().backward()
    optimizer.step()
    assert not optimizer.last_step_skipped


# ------------------------------------------------------------------ finding the model


def test_models_are_found() -> None:
    model = Half()
    for given in (None, model, [model], nn.Sequential(model), nn.DataParallel(model), torch.compile(model)):
        optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), given, init_scale=32.0)  # type: ignore[arg-type]
        assert optimizer._own is None
        assert model.part.group.get() == 32.0
        assert optimizer.loss_scale.item() == 32.0
        assert optimizer.loss_scale.shape == ()


def test_a_model_converted_later_is_found() -> None:
    model = nn.Linear(4, 3)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=16.0)
    part = register_model(model, LossScale(), torch.float16)
    assert part is not None
    loss = model(X).sum()
    assert optimizer.scale_loss(loss) is loss
    assert part.group.get() == 16.0


def test_bfloat16_models_are_not_scaled() -> None:
    model = nn.Linear(4, 3)
    register_model(model, None, torch.bfloat16)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)
    loss = model(X).sum()
    assert optimizer.scale_loss(loss) is loss
    assert optimizer.get_scale() == 1.0
    loss.backward()
    assert model.weight.grad is not None
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert "scale" not in optimizer.state_dict()["param_groups"][0]["loss_scale"]


@pytest.mark.parametrize("check_finite", [True, None])
def test_bfloat16_steps_are_guarded_on_request(check_finite: bool | None) -> None:
    model = nn.Linear(4, 3)
    register_model(model, None, torch.bfloat16)
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model, check_finite=check_finite)
    model(X).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[0] = float("nan")
    optimizer.step()
    assert optimizer.last_step_skipped is bool(check_finite)
    assert bool(model.weight.isfinite().all()) is bool(check_finite)


def test_a_model_without_conversion_warns() -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(UserWarning, match="no converted module"):
        LossScaleOptimizer(SGD(model.parameters(), lr=0.1), model)


def test_an_optimizer_of_other_parameters_warns() -> None:
    model, other = Half(), nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="holds none of the parameters"):
        LossScaleOptimizer(SGD(other.parameters(), lr=0.1), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossScaleOptimizer(SGD([model.bias, *other.parameters()], lr=0.1), model)  # part of it
        LossScaleOptimizer(SGD(other.parameters(), lr=0.1), nn.Sequential(other, model))
        model.requires_grad_(False)  # an input is trained through it
        LossScaleOptimizer(SGD(other.parameters(), lr=0.1), model)


def test_static_scale_skips_without_adapting() -> None:
    model = Half(scale=LossScale.static(256.0))
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=8.0)
    (model(X).sum() * 1e30).backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.get_scale() == 256.0


def test_disabled_passes_everything_through() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=0.1), enabled=False)
    loss = p.sum()
    assert optimizer.scale_loss(loss) is loss
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))
    assert "loss_scale" not in optimizer.state_dict()["param_groups"][0]
    assert optimizer.get_scale() == 1.0


# ------------------------------------------------------------------ schedulers, hooks, errors


@pytest.mark.parametrize("on", ["wrapper", "inner"])
def test_schedulers_after_a_skipped_first_step(on: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer if on == "wrapper" else optimizer.inner_optimizer, lambda k: 0.5**k
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.backward(p.sum() * float("inf"))
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def test_hooks_run() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0))
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state"))  # type: ignore[arg-type]
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "state", "load"]
    assert isinstance(optimizer, Optimizer)
    assert "SGD" in repr(optimizer)


def test_clip_grad_norm_sees_true_gradients() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0), init_scale=2.0**16)
    optimizer.backward(p.sum())
    assert float(optimizer.clip_grad_norm_(1.0)) == 2.0
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))


def test_raise_names_the_parameter_and_changes_nothing() -> None:
    model = nn.Linear(4, 3)
    optimizer = LossScaleOptimizer(
        AdamW(list(model.named_parameters()), fused=True), on_overflow="raise", init_scale=64.0
    )
    before = model.weight.detach().clone()
    optimizer.backward(model(X).sum() * float("inf"))
    with pytest.raises(LossScaleError, match=r"non-finite gradients at loss scale 32 in weight, bias"):
        optimizer.step()
    assert torch.equal(before, model.weight)


def test_endless_overflow_warns_once() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0))

    def bad_steps() -> None:
        for _ in range(150):
            optimizer.zero_grad()
            optimizer.backward(p.sum() * float("nan"))
            optimizer.step()

    with pytest.warns(UserWarning, match="100 steps in a row were skipped") as seen:
        bad_steps()
    assert len(seen) == 1
    assert optimizer.get_scale() == 2.0**-14


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"on_overflow": "ignore"}, "on_overflow must be one of"),
        ({"init_scale": 0.0}, "init_scale must be between"),
        ({"init_scale": 2.0**30}, "init_scale must be between"),
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"init_scale": "x"}, "init_scale must be between"),
        ({"init_scale": float("nan")}, "init_scale must be between"),
        ({"growth_factor": "x"}, "growth_factor must be a finite number"),
        ({"backoff_factor": True}, "backoff_factor must be a finite number"),
        ({"growth_interval": 1.5}, "growth_interval must be a whole number"),
        ({"growth_interval": "a"}, "growth_interval must be a whole number"),
        ({"hysteresis": 1.5}, "hysteresis must be a whole number"),
        ({"min_scale": None}, "min_scale must be a finite number"),
        ({"enabled": "no"}, "enabled must be True or False"),
        ({"check_finite": "no"}, "check_finite must be True, False or None"),
        ({"process_group": "x"}, "process_group must be"),
        ({"process_group": True}, "process_group must be"),
        ({"model": 3}, "model must be the converted module"),
        ({"model": [torch.ones(1)]}, "model must be the converted module"),
        ({"model": []}, "model must be the converted module"),
    ],
)
def test_arguments_that_cannot_be_right(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(LossScaleError, match=match):
        LossScaleOptimizer(SGD([nn.Parameter(torch.ones(1))], lr=0.1), **wrong)


@pytest.mark.parametrize("own", [True, False])
def test_calls_that_cannot_be_right(own: bool) -> None:
    model = nn.Linear(4, 3) if own else Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1))
    for state in ({}, {"state": {}, "param_groups": 3}, 3):
        with pytest.raises(LossScaleError, match="state dict"):
            optimizer.load_state_dict(state)  # type: ignore[arg-type]
    for norm in (-1.0, "x", float("nan")):
        with pytest.raises(LossScaleError, match="max_norm"):
            optimizer.clip_grad_norm_(norm)  # type: ignore[arg-type]
    for loss in (3.0, [model(X).sum(), None]):
        with pytest.raises(LossScaleError, match="tensor or a list"):
            optimizer.backward(loss)


def test_only_plain_optimizers_are_wrapped() -> None:
    optimizer = LossScaleOptimizer(SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(LossScaleError, match="already"):
        LossScaleOptimizer(optimizer)
    with pytest.raises(LossScaleError, match=r"wraps a torch.optim.Optimizer"):
        LossScaleOptimizer(object())  # type: ignore[arg-type]


def test_under_grad_scaler() -> None:
    """A trainer that brings its own scaler: nothing is scaled twice."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = LossScaleOptimizer(SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(p.detach(), -torch.ones(3))


def _rank(rank: int, store: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Half()
    optimizer = LossScaleOptimizer(SGD(model.parameters(), lr=0.1), init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        (model(X).sum() * (1e30 if rank == step == 1 else 1.0)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    results[rank] = (optimizer.get_scale(), optimizer.skipped_steps, model.weight.tolist())
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_one_rank_overflows_and_all_skip(tmp_path: Any) -> None:
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), results), nprocs=2)
        assert results[0] == results[1]
        assert results[0][:2] == (32.0, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["adamw fused", "sgd fused", "sgd momentum"])
def test_host_syncs_on_cuda(name: str) -> None:
    model = Half().cuda()
    optimizer = LossScaleOptimizer(OPTIMIZERS[name](model.parameters()), init_scale=1024.0)
    x = X.cuda()
    for step in range(4):
        if step >= 2 and "fused" in name:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            (model(x).sum() * (1e30 if step == 2 else 1.0)).backward()
            optimizer.step()
            scale = optimizer.loss_scale
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scale.item() == 512.0
    assert optimizer.skipped_steps == 1
