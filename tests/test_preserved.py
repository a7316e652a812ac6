"""What a model means stays: custom gradients, grad modes, writes, buffers, casts, dtypes, modes, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_float32 import EXACT, assert_close, check, compare_runs, tensors
from torch import Tensor, nn

import ampfx


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


class Simple(nn.Module):
    """Two layers with a step between them that each test gives."""

    def __init__(self, step: Callable[[Simple, Tensor], Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.step = step
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self, self.first(x)))


def check_step(step: Callable[[Any, Tensor], Tensor], buffers: Any = None, **options: Any) -> nn.Module:
    made = buffers or dict
    return check(lambda: Simple(step, **made()), (leaf(6, 8),), (leaf(3, 8),), captures=1, **options)


# ---------------------------------------------------------------- custom autograd Functions


class RoundSte(torch.autograd.Function):
    """Straight-through rounding, old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Reverse(torch.autograd.Function):
    """Gradient reversal, new style."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class TwoOut(torch.autograd.Function):
    """Two outputs, one of them an integer that carries no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * weight, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, weight = ctx.saved_tensors
        return 3 * grad * weight, (grad * x).sum(0)


class AddOne(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


bound_reverse = Reverse.apply
bound_round = RoundSte.apply


def test_custom_functions_keep_their_backward() -> None:
    check_step(lambda m, h: Reverse.apply(h, 0.5))
    check_step(lambda m, h: bound_reverse(h, 0.25))


def test_straight_through_rounding_keeps_its_backward() -> None:
    for step in (lambda m, h: RoundSte.apply(h), lambda m, h: bound_round(h)):
        check_step(step, settings=({"dtype": torch.bfloat16, "policy": EXACT},))
        check_step(step, tol=0.2)


def test_detach_trick_keeps_its_gradient() -> None:
    check_step(lambda m, h: h + (h.sign() - h).detach(), settings=({"dtype": torch.bfloat16, "policy": EXACT},))
    check_step(lambda m, h: h.sigmoid() + (h.sign() * 0.1 - h.sigmoid()).detach(), tol=0.15)


def test_function_with_several_outputs_and_a_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.linspace(0.5, 2, 16))

        def forward(self, x: Tensor) -> Any:
            y, index = TwoOut.apply(self.first(x), self.weight)
            return y * 2, index

    check(Model, (torch.eye(8)[:6] * 3,), captures=1)


def test_function_that_writes_to_its_input() -> None:
    check_step(lambda m, h: AddOne.apply(h * 2) * 1.5)

    def step(m: Any, h: Tensor) -> Tensor:
        g = h * 2
        AddOne.apply(g)
        return g * g

    check_step(step)


# ---------------------------------------------------------------- grad modes


def test_no_grad_and_enable_grad_regions() -> None:
    def no_grad(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.abs().amax(-1, keepdim=True)
        return h / (scale + 1)

    def enable(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            a = h * 2
            with torch.enable_grad():
                b = h * 3
            c = b * a
        return b + c + a

    def setter(m: Any, h: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        a = h.sigmoid()
        torch.set_grad_enabled(True)
        return h * a

    def context(m: Any, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(not m.training):
            a = h * 2
        return a + h

    for step in (no_grad, enable, setter, context):
        check_step(step)


@torch.no_grad()
def target_of(h: Tensor) -> Tensor:
    return h.softmax(-1) * 2


@torch.enable_grad()
def with_grad(h: Tensor) -> Tensor:
    return h * 2


@torch.inference_mode()
def picked(h: Tensor) -> Tensor:
    return (h > 0).float()


def test_grad_mode_decorators() -> None:
    check_step(lambda m, h: h * target_of(h))
    check_step(lambda m, h: with_grad(h))


def test_inference_mode_region() -> None:
    def step(m: Any, h: Tensor) -> Tensor:
        with torch.inference_mode():
            size = h.abs().mean()
        return h * size.clone()

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            with torch.inference_mode():
                a = self.lin(x)
            return self.lin(x), a

    check(Region, (leaf(4, 8),))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_grad_and_then_with_grad(mode: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
    reference = copy.deepcopy(net)
    x = torch.randn(5, 8)
    with mode():
        model = ampfx.convert(net, (x,), dtype=torch.bfloat16)
        out, want = model(x), reference(x)
    assert not out.requires_grad
    assert_close(out, want, 0.06, "without grad")
    compare_runs(model, reference, (x,), {}, 0.06, "with grad")
    with mode():
        assert not model(x).requires_grad
        reference(x)
    compare_runs(model, reference, (x,), {}, 0.06, "with grad again")


def test_capture_deferred_to_a_call_in_inference_mode() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    reference, x = copy.deepcopy(net), torch.randn(5, 8)
    model = ampfx.convert(net, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert_close(model(x), reference(x), 0.06, "inference mode")
    compare_runs(model, reference, (x,), {}, 0.06)
    with torch.inference_mode():
        y = torch.randn(5, 8)  # an inference tensor
        assert_close(model(y), reference(y), 0.06, "inference tensor")
    assert_close(model(y), reference(y), 0.06, "inference tensor outside") if not torch.is_grad_enabled() else None


def test_nested_gradients() -> None:
    """A forward that takes gradients itself (an energy model)."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return grad

    check(Energy, (torch.randn(4, 8),), tol=0.1)


# ---------------------------------------------------------------- autocast regions


def test_autocast_disabled_region_runs_in_float32() -> None:
    def step(m: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.middle(h.float())

    class Model(Simple):
        def __init__(self) -> None:
            super().__init__(step)
            self.middle = nn.Linear(16, 16)

    model = check(Model, (leaf(6, 8),), captures=1)
    dtypes = {
        node.meta["module_path"]: node.meta["val"].dtype
        for node in model.graph.nodes
        if node.meta.get("op") == "linear"
    }
    assert dtypes["middle"] == torch.float32
    assert dtypes["first"] == dtypes["last"] == torch.float16


def test_ambient_autocast_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(5, 8)
    model = ampfx.convert(net, (x,), dtype=torch.float16, loss_scale=None)
    plain = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(x)
        fresh = ampfx.convert(net, (x,), dtype=torch.float16, loss_scale=None)(x)
    assert torch.equal(plain, inside)
    assert torch.equal(plain, fresh)
    assert model._ampfx.captures == 1
    assert inside.dtype == torch.float32


# ---------------------------------------------------------------- writes and views


def writes() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    def relu_in_place(m: Any, h: Tensor) -> Tensor:
        h = h * 2
        h.relu_()
        return h + F.relu(h - 1, inplace=True)

    def plus(m: Any, h: Tensor) -> Tensor:
        h = h * 2
        old = h
        h += 1
        h *= 0.5
        h -= old.mean()
        h /= 3
        return h + old

    def index(m: Any, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out[:, :4] = h[:, 4:8]
        out[:, 5] = h.sum(-1)
        out[0] = 7
        out[h.detach() > 0] += 1
        return out

    def view_write(m: Any, h: Tensor) -> Tensor:
        h = h.clone()
        left, right = h[:, :8], h[:, 8:]
        left.mul_(2)
        right[:, 0] = 3.0
        h.view(-1)[::2].add_(1)
        return h

    def out_argument(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            buffer = torch.empty_like(h)
            torch.mul(h, 2, out=buffer)
            torch.add(buffer, h, out=buffer)
        return h * buffer

    def masked(m: Any, h: Tensor) -> Tensor:
        mask = h.detach().abs() < 0.3
        h = h.masked_fill(mask, -2.0)
        h = h * 1.5
        h.masked_fill_(~mask, 0.5)
        return h + torch.where(mask, h, 0.1)

    def scatter(m: Any, h: Tensor) -> Tensor:
        index = torch.arange(16).flip(0).expand(h.shape[0], 16)
        out = torch.zeros(h.shape[0], 16)
        out.scatter_add_(1, index, h)
        out = out.index_add(1, torch.tensor([0, 1]), h[:, :2])
        out.copy_(out * 2)
        return out

    def index_put(m: Any, h: Tensor) -> Tensor:
        out = h.new_zeros(h.shape)
        out.index_put_((torch.tensor([0, 1]),), h[:2], accumulate=True)
        out.index_copy_(1, torch.tensor([3]), h[:, :1])
        out[..., -1:] = h[..., :1]
        return out

    def fill(m: Any, h: Tensor) -> Tensor:
        h = h * 1
        h[:, 0].zero_()
        h[:, 1:3].fill_(2)
        h.data.mul_(2)
        h.detach().add_(1)
        return h

    def transposed(m: Any, h: Tensor) -> Tensor:
        h = h * 1
        h.t()[0] += 5
        h.transpose(0, 1)[1:3].clamp_(-0.1, 0.1)
        with torch.no_grad():
            h[0, 3].add_(1)
        return h * h[0] + h[1]

    def setitem_of_a_read_value(m: Any, h: Tensor) -> Tensor:
        before = h * 2
        y = before * 3
        before = before.clone()
        before[:, 0] = y[:, 1]
        z = before + y
        before[:, 1] = z[:, 2]
        return before + z

    return {f.__name__: f for f in list(locals().values()) if callable(f)}


@pytest.mark.parametrize("name", sorted(writes()))
def test_writes_and_views(name: str) -> None:
    check_step(writes()[name])


def test_writes_to_inputs_reach_the_caller() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            h = self.lin(x)
            cache[: h.shape[0]] = h.detach()
            cache.mul_(0.5)
            return h + cache[: h.shape[0]]

    check(Writer, (leaf(4, 8), torch.ones(6, 8)), captures=1)
    check(Writer, (leaf(4, 8), torch.ones(6, 8)), deferred=True)


def test_write_to_an_input_that_is_computed_by_the_caller() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            x.mul_(2)
            return self.lin(x)

    net = Writer()
    reference = copy.deepcopy(net)
    model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.float16, loss_scale=256.0)
    results = []
    for current in (model, reference):
        torch.manual_seed(3)
        root = leaf(4, 8)
        x = root * 1
        current(x).sum().backward()
        results.append((x.detach(), root.grad))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, 0.01, "written input")


# ---------------------------------------------------------------- buffers


def test_buffers_that_a_forward_updates() -> None:
    def assigned(m: Any, h: Tensor) -> Tensor:
        m.ema = 0.9 * m.ema + 0.1 * h.detach().mean(0)
        return h - m.ema

    def copied(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.ema.copy_(0.9 * m.ema + 0.1 * h.mean(0))
        return h - m.ema

    def lerped(m: Any, h: Tensor) -> Tensor:
        m.ema.lerp_(h.detach().mean(0), 0.1)
        return h / (1 + m.ema.abs())

    def mul_add(m: Any, h: Tensor) -> Tensor:
        if m.training:
            m.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - m.ema

    def data(m: Any, h: Tensor) -> Tensor:
        m.ema.data = m.ema.data * 0.5
        return h - m.ema

    for step in (assigned, copied, lerped, mul_add):
        check_step(step, lambda: {"ema": torch.linspace(-1, 1, 16)})
    net = Simple(data, ema=torch.linspace(-1, 1, 16))
    with pytest.raises(ampfx.CaptureError, match=r"assigns \.data"):
        ampfx.convert(net, (leaf(6, 8),), dtype=torch.bfloat16, strict=True)
    assert torch.equal(net.ema, torch.linspace(-1, 1, 16))


def test_counters_in_buffers() -> None:
    def step(m: Any, h: Tensor) -> Tensor:
        m.count += 1
        m.total.add_(h.shape[0])
        return h * m.count + m.total

    check_step(step, lambda: {"count": torch.tensor(0), "total": torch.tensor(0.0)})


def test_batch_norm_statistics() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, bias=False),
            nn.BatchNorm2d(8, affine=False),
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.Flatten(),
            nn.Linear(4 * 16, 2),
        )

    check(build, (torch.randn(5, 3, 8, 8),), (torch.randn(3, 3, 8, 8),), captures=1, tol=0.2)


# ---------------------------------------------------------------- casts and other dtypes


def test_the_authors_own_casts() -> None:
    seen: list[torch.dtype] = []

    def half(m: Any, h: Tensor) -> Tensor:
        low = h.half()
        seen.append(low.dtype)
        return (low * 2).float()

    def double(m: Any, h: Tensor) -> Tensor:
        wide = h.double()
        return (wide.cumsum(-1) / 3).to(h.dtype)

    def typed(m: Any, h: Tensor) -> Tensor:
        s = h.sum(-1, dtype=torch.float64, keepdim=True)
        p = h.softmax(-1, dtype=torch.float32)
        return (h * p) + s.float() * 0.1

    def to_other(m: Any, h: Tensor) -> Tensor:
        mask = (h > 0).to(h)
        ones = torch.ones(16, dtype=h.dtype)
        return h * mask + ones.type_as(h) + mask.type(h.dtype)

    def checked(m: Any, h: Tensor) -> Tensor:
        assert h.dtype == torch.float32
        return h + torch.finfo(h.dtype).tiny

    for step in (half, double, typed, to_other, checked):
        check_step(step)
    assert set(seen) == {torch.float16}


def test_float64_complex_and_integers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.register_buffer("table", torch.linspace(0, 1, 16, dtype=torch.float64))
            self.wide = nn.Parameter(torch.linspace(1, 2, 16, dtype=torch.float64))

        def forward(self, x: Tensor, index: Tensor) -> Any:
            h = self.first(x)
            spectrum = torch.fft.rfft(h, dim=-1)
            back = torch.fft.irfft(spectrum * torch.exp(1j * torch.linspace(0, 1, 9)), n=16)
            wide = h * self.table * self.wide
            counted = torch.bincount(index, minlength=8)
            return back, wide, counted, h.argsort(-1).sum(), spectrum, index // 2

    check(
        Mixed,
        (torch.randn(4, 8), torch.tensor([1, 3, 3, 7])),
        captures=1,
        settings=({"dtype": torch.bfloat16, "policy": EXACT},),
    )

    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.linspace(1, 2, 16, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            h = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.weight, n=16)
            return self.last(h), (h.double() * self.wide)

    check(Fourier, (leaf(4, 8),), captures=1)


def test_float64_inputs_and_model() -> None:
    check(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), (leaf(3, 4).double().detach(),))


def test_factories_follow_their_dtype() -> None:
    def step(m: Any, h: Tensor) -> Tensor:
        positions = torch.arange(h.shape[-1])
        angles = positions[None] / 10000 ** (torch.arange(16) / 16)
        noise = torch.full((16,), 0.25, dtype=torch.float64)
        return h + angles.sin() + noise.float() + torch.tensor([1.0] * 16) + torch.eye(16)[0] * 2

    check_step(step)


# ---------------------------------------------------------------- modes


def test_functional_dropout_follows_the_mode() -> None:
    check_step(lambda m, h: F.dropout(h, 0.5, m.training))
    check_step(lambda m, h: F.dropout(h, 0.5, training=True))


def test_modes_of_submodules_count() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

    x = torch.randn(6, 8)
    net = build()
    reference = copy.deepcopy(net)
    model = ampfx.convert(net, (x,), dtype=torch.bfloat16, policy=EXACT)
    changes: list[Callable[[Any], Any]] = [
        lambda m: m[1].eval(),
        lambda m: m.eval(),
        lambda m: m[2].train(),
        lambda m: m.train(),
        lambda m: m[1].eval(),
        lambda m: setattr(m[2], "p", 0.1),
    ]
    for number, change in enumerate(changes):
        change(model)
        change(reference)
        for m in (model, reference):
            assert [k.training for k in m.modules()] == [k.training for k in reference.modules()]
        compare_runs(model, reference, (x,), {}, 1e-5, f"change {number}")
        compare_runs(model, reference, (x[:3],), {}, 1e-5, f"change {number}, other batch")


def test_switching_the_mode_on_the_original_is_seen() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    x = torch.randn(6, 8)
    model = ampfx.convert(net, (x,), dtype=torch.bfloat16, policy=EXACT)
    model(x)
    net.eval()
    torch.testing.assert_close(model(x), net(x))


def test_train_flag_of_submodule_only_in_mode_dependent_forward() -> None:
    class Child(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.training else x * 3

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.lin = Child(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(self.lin(x))

    net = Parent()
    reference, x = copy.deepcopy(net), torch.randn(2, 4)
    model = ampfx.convert(net, (x,), dtype=torch.bfloat16, policy=EXACT)
    for m in (model, reference):
        m.child.eval()
    compare_runs(model, reference, (x,), {}, 1e-5)


# ---------------------------------------------------------------- hooks


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def add_hooks(model: Any, kind: str, log: list[Any]) -> Any:
    """Add one hook to the middle layer; what it sees goes to the log."""

    def note(value: Any) -> Any:
        log.append([t.detach().clone() for t in tensors(value)])

    middle = model.middle
    if kind == "forward":
        return middle.register_forward_hook(lambda m, args, out: note((args, out)))
    if kind == "forward changes":
        return middle.register_forward_hook(lambda m, args, out: out * 2 + args[0])
    if kind == "forward kwargs":
        return middle.register_forward_hook(lambda m, args, kwargs, out: note((args, kwargs, out)), with_kwargs=True)
    if kind == "pre":
        return middle.register_forward_pre_hook(lambda m, args: note(args))
    if kind == "pre changes":
        return middle.register_forward_pre_hook(lambda m, args: args[0] * 3)
    if kind == "backward":
        return middle.register_full_backward_hook(lambda m, gi, go: note((gi, go)))
    if kind == "backward changes":
        return middle.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    if kind == "backward pre":
        return middle.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    if kind == "root forward":
        return model.register_forward_hook(lambda m, args, out: out * 2)
    if kind == "root pre":
        return model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    if kind == "root backward":
        return model.register_full_backward_hook(lambda m, gi, go: note((gi, go)))
    if kind == "parameter":
        return middle.weight.register_hook(lambda grad: (note(grad), grad * 2)[1])
    assert kind == "parameter accumulated"
    return middle.weight.register_post_accumulate_grad_hook(lambda p: note(p.grad))


KINDS = [
    "forward",
    "forward changes",
    "forward kwargs",
    "pre",
    "pre changes",
    "backward",
    "backward changes",
    "backward pre",
    "root forward",
    "root pre",
    "root backward",
    "parameter",
    "parameter accumulated",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks(kind: str, when: str) -> None:
    for setting, tol in (
        ({"dtype": torch.bfloat16, "policy": EXACT}, 1e-5),
        ({"dtype": torch.float16, "loss_scale": 256.0}, 0.01),
    ):
        torch.manual_seed(0)
        net, ours, theirs = Hooked(), [], []
        reference = copy.deepcopy(net)
        x = leaf(6, 8)
        handles = []
        if when == "before":
            handles.append(add_hooks(net, kind, ours))
        model = ampfx.convert(net, (x,), **setting)
        if when == "after" and len(kind) % 2:
            compare_runs(model, reference, (x,), {}, tol, "before the hook")
        if when != "before":
            handles.append(add_hooks(model, kind, ours))
        handles.append(add_hooks(reference, kind, theirs))
        ours.clear()
        theirs.clear()
        for count in (6, 3):
            compare_runs(model, reference, (x.detach()[:count].requires_grad_(),), {}, tol, kind)
        # A graph captured in the call has run the hook once more, at the capture.
        assert len(ours) - len(theirs) in (0, 1)
        for got, want in zip(ours[len(ours) - len(theirs) :], theirs, strict=True):
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                assert_close(a.float(), b, tol, f"what the {kind} hook sees")
        if when == "before" and kind.startswith("root"):
            continue  # the handle belongs to the given model's own store
        for handle in handles:
            handle.remove()
        compare_runs(model, reference, (x,), {}, tol, f"{kind} removed")


class Info:
    """An object that nobody registered."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, h: Tensor) -> dict[str, Any]:
        y = self.lin(h)
        return {"y": y, "info": Info(y * 0.5), "name": "scaled"}


class Residual(nn.Module):
    """What a hook is attached to has readers beside the hooked module."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = self.middle(h)
        inner = out["y"] + out["info"].value if isinstance(out, dict) else out[0]
        return self.last(inner + h * 2)


def test_forward_hook_on_a_structured_result() -> None:
    def build() -> nn.Module:
        model = Residual(Structured())
        model.middle.register_forward_hook(lambda m, args, out: {**out, "y": out["y"] * 3 + out["info"].value})
        return model

    check(build, (leaf(4, 8),), (leaf(3, 8),), captures=1)


def test_backward_hooks_beside_a_residual_and_a_forward_hook() -> None:
    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, h: Tensor) -> tuple[Tensor, str]:
            return self.lin(h), "name"

    logs: list[list[Tensor]] = []

    def build() -> nn.Module:
        log: list[Tensor] = []
        logs.append(log)
        model = Residual(Tuple())
        model.middle.register_full_backward_hook(lambda m, gi, go: (log.append(gi[0].clone()), (gi[0] * 2,))[1])
        model.middle.lin.register_full_backward_hook(lambda m, gi, go: log.append(go[0].clone()))
        model.middle.lin.register_forward_hook(lambda m, args, out: out * 5)
        return model

    check(build, (leaf(4, 8),), (leaf(3, 8),), modes=("train",))
    for ours, theirs in zip(logs[::2], logs[1::2], strict=True):
        assert len(ours) == len(theirs) == 6
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a.float(), b, 0.06, "seen gradient")


def test_old_backward_hooks_are_refused() -> None:
    net = Hooked()
    net.middle.register_backward_hook(lambda m, gi, go: None)
    with pytest.raises(ampfx.CaptureError, match=r"middle.*use register_full_backward_hook"):
        ampfx.convert(net, (torch.randn(2, 8),), dtype=torch.bfloat16, strict=True)


# ---------------------------------------------------------------- parameters


def test_frozen_before_and_after() -> None:
    x = torch.randn(6, 8)
    net = Hooked()
    net.first.requires_grad_(False)
    reference = copy.deepcopy(net)
    model = ampfx.convert(net, (x,), dtype=torch.float16, loss_scale=256.0)
    compare_runs(model, reference, (x,), {}, 0.01, "frozen before")
    for m in (model, reference):
        m.first.requires_grad_(True)
        m.last.weight.requires_grad_(False)
    compare_runs(model, reference, (x,), {}, 0.01, "thawed and frozen after")
    for m in (model, reference):
        m.requires_grad_(False)
    compare_runs(model, reference, (x,), {}, 0.01, "all frozen")
    compare_runs(model, reference, (leaf(6, 8),), {}, 0.01, "all frozen, input grads")


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(tokens)))

    model = check(Tied, (torch.randint(0, 10, (2, 5)),), (torch.randint(0, 10, (3, 7)),), captures=1)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 3
    assert "head.weight" in model.state_dict()


def test_a_module_used_twice_and_parameter_containers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.again = self.block
            self.scales = nn.ParameterList([nn.Parameter(torch.full((8,), float(i + 1))) for i in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.randn(8))})
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.heads = nn.ModuleDict({"x": nn.Linear(8, 2), "y": nn.Linear(8, 3)})

        def forward(self, x: Tensor, head: str = "x") -> Tensor:
            h = self.again(self.block(x))
            for layer, scale in zip(self.layers, self.scales, strict=False):
                h = layer(h) * scale
            for value in self.named.values():
                h = h + value
            return self.heads[head](h)

    check(Model, (leaf(4, 8),), (leaf(4, 8), "y"))


@pytest.mark.parametrize("kind", ["spectral hook", "spectral", "weight hook", "weight", "orthogonal"])
def test_parametrizations(kind: str) -> None:
    import torch.nn.utils as utils

    def build() -> nn.Module:
        lin: Any = nn.Linear(8, 8)
        if kind == "spectral hook":
            lin = utils.spectral_norm(lin)
        elif kind == "spectral":
            lin = utils.parametrizations.spectral_norm(lin)
        elif kind == "weight hook":
            lin = utils.weight_norm(lin)
        elif kind == "weight":
            lin = utils.parametrizations.weight_norm(lin)
        else:
            lin = utils.parametrizations.orthogonal(lin)
        return nn.Sequential(lin, nn.Tanh(), nn.Linear(8, 2))

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        # The hooks of torch keep the weight they computed on the module: it needs a gradient after one run.
        check(build, (leaf(4, 8),), (leaf(3, 8),), captures=2 if kind.endswith("hook") else 1)


def test_gradients_of_frozen_parts_of_a_graph_do_not_need_a_scale_attached() -> None:
    net = Hooked()
    reference, x = copy.deepcopy(net), leaf(6, 8)
    model = ampfx.convert(net, (x,), dtype=torch.float16)
    compare_runs(model, reference, (x,), {}, 0.01)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, init_scale=64.0)
    compare_runs(model, reference, (x,), {}, 0.01, "scale attached")
    optimizer.step()
    assert not optimizer.last_step_skipped


def test_attribute_that_keeps_an_activation() -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            self.kept = {"mean": self.hidden.mean(0), "parts": [self.hidden[:1]]}
            return self.last(self.hidden)

    def with_attributes(model: Any, args: Any, kwargs: Any) -> Any:
        out, inputs, _ = run_no_backward(model, args, kwargs)
        kept = (model.hidden, model.kept["mean"], model.kept["parts"][0])
        loss = out.sum() + kept[0].square().sum() + kept[1].sum() * 3 + kept[2].sum()
        loss.backward()
        return (out, *kept), inputs, [p.grad for p in model.parameters()]

    def run_no_backward(model: Any, args: Any, kwargs: Any) -> Any:
        model.zero_grad()
        return model(*args, **kwargs), (), ()

    for setting, tol in (
        ({"dtype": torch.bfloat16, "policy": EXACT}, 1e-5),
        ({"dtype": torch.float16, "loss_scale": 256.0}, 0.01),
    ):
        torch.manual_seed(0)
        net = Keeper()
        reference, x = copy.deepcopy(net), torch.randn(6, 8)
        model = ampfx.convert(net, (x,), **setting)
        assert not hasattr(net, "hidden")
        for count in (6, 3):
            compare_runs(model, reference, (x[:count],), {}, tol, "kept", runner=with_attributes)


def test_batch_norm_that_averages_over_all_batches_is_one_graph() -> None:
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    model = ampfx.convert(copy.deepcopy(reference), (torch.randn(4, 8),), dtype=torch.bfloat16)
    for _ in range(4):
        x = torch.randn(16, 8)
        model(x), reference(x)
    assert model._ampfx.captures == 1
    for name, want in reference.named_buffers():
        got = model.get_buffer(name)
        assert got.dtype == want.dtype
        assert (got.double() - want.double()).norm() <= 4 * torch.finfo(torch.bfloat16).eps * want.double().norm()
