"""The graph's gradient-scaling operations: true gradients outside, scaled ones inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampfx.grad_scaling import scale, scale_cast, unscale, unscale_cast, unscale_written
from ampfx.loss_scale import LossScale, ModuleScale

CPU = torch.device("cpu")


def part(value: float = 1024.0) -> ModuleScale:
    return LossScale.static(value).module_scale()


def linear(s: ModuleScale, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A float16 layer as the pass writes it."""
    low_weight, low_bias = unscale_cast(s, torch.float16, weight, bias)
    (low_x,) = unscale_cast(s, torch.float16, x)
    return scale_cast(s, torch.float32, torch.nn.functional.linear(low_x, low_weight, low_bias))


def leaves(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def test_gradients_are_true_float32_gradients() -> None:
    x, weight, bias = leaves()
    (linear(part(), x, weight, bias).pow(2).sum() * 1e-7).backward()
    reference = leaves()
    (torch.nn.functional.linear(*reference).pow(2).sum() * 1e-7).backward()
    for got, want in zip((x, weight, bias), reference, strict=True):
        assert got.grad is not None
        assert got.grad.dtype == torch.float32
        torch.testing.assert_close(got.grad, want.grad, rtol=5e-3, atol=1e-9)


def test_small_gradients_survive_only_with_a_scale() -> None:
    """Rule 1 of loss scaling: the output leaves as float32, and S reaches the gradient in time."""
    errors = {}
    for value in (1.0, 2.0**20):
        torch.manual_seed(0)
        s = part(value)
        weights = [nn.Parameter(torch.randn(16, 16) / 4) for _ in range(6)]
        reference = [nn.Parameter(w.detach().clone()) for w in weights]
        x = torch.randn(32, 16)
        h, h32 = x.half(), x
        for w, w32 in zip(weights, reference, strict=True):
            (low,) = unscale_cast(s, torch.float16, w)
            h, h32 = torch.tanh(h @ low), torch.tanh(h32 @ w32)
        (scale_cast(s, torch.float32, h).pow(2).mean() * 1e-7).backward()
        (h32.pow(2).mean() * 1e-7).backward()
        assert weights[0].grad is not None
        assert reference[0].grad is not None
        errors[value] = float((weights[0].grad - reference[0].grad).norm() / reference[0].grad.norm())
    assert errors[1.0] > 0.5
    assert errors[2.0**20] < 0.03


def test_scale_changes_between_forward_and_backward() -> None:
    group = LossScale()
    s = group.module_scale()
    s._warned = True
    x, weight, bias = leaves()
    loss = linear(s, x, weight, bias).sum()
    group.set(4096.0)
    loss.backward()
    torch.testing.assert_close(bias.grad, torch.full((5,), 3.0))


def test_outputs_and_inputs_can_be_written_in_place() -> None:
    """Rule 8: no result is a view that autograd refuses to see written."""
    s = part()
    weight = torch.randn(4, requires_grad=True)
    (w,) = unscale(s, weight)
    out = scale(s, w * 2)
    out /= 2.0
    out.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(4))
    x = torch.ones(4)
    (inside,) = unscale(s, x)
    inside.add_(1)
    torch.testing.assert_close(x, torch.full((4,), 2.0))
    y = torch.ones(4, requires_grad=True) * 1.0
    (inside,) = unscale_written(s, y)
    inside.mul_(3.0)
    torch.testing.assert_close(y.detach(), torch.full((4,), 3.0))
    assert not inside._is_view()


def test_unused_parameter_gets_no_gradient() -> None:
    s = part()
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first, _ = unscale(s, used, unused)
    scale(s, first * 2).sum().backward()
    assert used.grad is not None
    assert unused.grad is None


def test_frozen_tensors_stay_frozen() -> None:
    s = part()
    frozen, free = torch.ones(2), torch.ones(2, requires_grad=True)
    a, b = unscale(s, frozen, free)
    assert a is frozen
    assert b.requires_grad
    low, _ = unscale_cast(s, torch.float16, frozen, free)
    assert low.dtype == torch.float16
    assert not low.requires_grad
    with torch.no_grad():
        (same,) = unscale(s, free)
        assert same is free
        assert scale(s, free) is free


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_shapes_and_dtypes_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    s = part(8.0)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    (inside,) = unscale(s, x)
    seen: list[Tensor] = []
    inside = inside * 1
    inside.register_hook(seen.append)
    out = scale(s, inside)
    assert out.shape == x.shape
    assert out.dtype == dtype
    out.sum().abs().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(seen[0], torch.full_like(x, 8.0).detach())


def test_flag_is_sticky_and_set_by_non_finite_gradients_only() -> None:
    s = part()
    x, weight, bias = leaves()
    linear(s, x, weight, bias).sum().backward()
    assert s.flag_for(CPU).item() == 0.0
    (linear(s, x, weight, bias).sum() * 1e6).backward()
    assert s.flag_for(CPU).item() == 1.0
    x.grad = weight.grad = bias.grad = None
    linear(s, x, weight, bias).sum().backward()
    assert s.flag_for(CPU).item() == 1.0
    assert s.generation == 6


def test_incoming_gradient_is_not_written() -> None:
    s = part(2.0)
    x = torch.ones(3, requires_grad=True)
    (inside,) = unscale(s, x)
    gradient = torch.ones(3)
    inside.backward(gradient)
    torch.testing.assert_close(gradient, torch.ones(3))
    torch.testing.assert_close(x.grad, torch.full((3,), 0.5))


def test_sparse_gradient() -> None:
    s = part(16.0)
    table = nn.Parameter(torch.randn(6, 3))
    (inside,) = unscale(s, table)
    out = scale(s, torch.nn.functional.embedding(torch.tensor([1, 1, 4]), inside, sparse=True))
    out.sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    want = torch.zeros(6, 3)
    want[1], want[4] = 2.0, 1.0
    torch.testing.assert_close(table.grad.to_dense(), want)
    assert s.flag_for(CPU).item() == 0.0


def penalty(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(run(x, w).sum(), x, create_graph=True)
    return run(x, w).mean() + 10 * (grad.norm(2, dim=1) - 1).pow(2).mean()


def test_double_backward_counts_the_scale_once() -> None:
    """Rule 3: a gradient penalty has the gradients that it has without scaling."""
    s = part(1024.0)
    torch.manual_seed(0)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        (x,), (w,) = unscale(s, x), unscale(s, w)
        return scale(s, torch.tanh(x @ w).pow(2))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).pow(2)

    got = torch.autograd.grad(penalty(scaled, x, w), (x, w))
    want = torch.autograd.grad(penalty(plain, x, w), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_torch_func_transforms() -> None:
    s = part(64.0)
    torch.manual_seed(0)
    w, x = torch.randn(4, 3), torch.randn(5, 4)

    def scaled(w: Tensor, x: Tensor) -> Tensor:
        (w,) = unscale(s, w)
        return scale(s, torch.tanh(x @ w)).sum()

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).sum()

    for transform in (
        lambda f: torch.func.grad(f),
        lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(None, 0)),
        lambda f: torch.func.grad(lambda w, x: torch.func.vmap(f, in_dims=(None, 0))(w, x).sum()),
        lambda f: torch.func.jacrev(f),
    ):
        torch.testing.assert_close(transform(scaled)(w, x), transform(plain)(w, x), rtol=1e-4, atol=1e-5)


def test_vmap_over_autograd_grad() -> None:
    s = part(64.0)
    w = torch.randn(3, requires_grad=True)
    (inside,) = unscale(s, w)
    out = scale(s, inside * 2)
    (jacobian,) = torch.autograd.grad(out, w, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(jacobian, 2 * torch.eye(3))


@pytest.mark.parametrize("prepared", [True, False])
def test_compiled_in_one_graph_and_sees_the_scale_change(prepared: bool) -> None:
    torch._dynamo.reset()
    group = LossScale()
    s = group.module_scale()
    if prepared:
        s.prepare([CPU])
    compiled = torch.compile(lambda x, w, b: linear(s, x, w, b), backend="aot_eager", fullgraph=True)
    graphs = 0
    for value in (1.0, 2.0**14, 2.0**10):
        group.set(value)
        x, weight, bias = leaves()
        (compiled(x, weight, bias).sum() * 1e-6).backward()
        assert bias.grad is not None
        if value == 1.0:
            assert abs(float(bias.grad[0]) - 3e-6) > 3e-8, (
                "float16 cannot hold 1e-6 exactly: S had no effect?"
            )
        else:
            torch.testing.assert_close(bias.grad, torch.full((5,), 3e-6), rtol=1e-3, atol=0.0)
        assert s.flag_for(CPU).item() == 0.0
        graphs += 1
    x, weight, bias = leaves()
    (compiled(x, weight, bias).sum() * 1e6).backward()
    assert s.flag_for(CPU).item() == 1.0
    assert s.traced
    assert graphs == 3


def test_compiled_backward_after_the_scale_changed() -> None:
    torch._dynamo.reset()
    group = LossScale()
    s = group.module_scale()
    s.prepare([CPU])
    compiled = torch.compile(lambda x, w, b: linear(s, x, w, b), backend="aot_eager", fullgraph=True)
    x, weight, bias = leaves()
    loss = compiled(x, weight, bias).sum()
    group.set(256.0)
    loss.backward()
    torch.testing.assert_close(bias.grad, torch.full((5,), 3.0))


def test_warns_once_when_nothing_is_attached() -> None:
    s = LossScale().module_scale(label="Net")
    with pytest.warns(UserWarning, match="no ampfx.LossScaleOptimizer is attached"):
        linear(s, *leaves()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear(s, *leaves()).sum().backward()
        linear(part(), *leaves()).sum().backward()  # a static scale needs no optimizer
