"""Converted float16 models leave true float32 gradients, whatever the loss scale and however they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scaled import Layers, check, convert, mlp, plain_backward, relative_error, squares
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from ampfx import grad_scaling

X = torch.linspace(-1, 1, 96).reshape(8, 12).sin() * 0.5
SEQUENCE = torch.linspace(-2, 2, 180).reshape(3, 5, 12).sin()
IMAGES = torch.linspace(-9, 9, 8 * 3 * 36).reshape(8, 3, 6, 6).sin()
TOKENS = torch.arange(24).reshape(4, 6) * 7 % 30


# ---------------------------------------------------------------------- layers


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(12, 10, batch_first=True, **options)
        self.out = nn.Linear(20 if options.get("bidirectional") else 10, 3)

    def forward(self, x: Tensor) -> Any:
        y, state = self.rnn(x)
        return self.out(y), state


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(12, 10), nn.GRUCell(10, 10)

    def forward(self, x: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[0], 10)
        for step in range(x.shape[1]):
            h, c = self.lstm(x[:, step], (h, c))
            h = self.gru(h, h)
        return h, c


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (mlp, X),
    "conv, batch norm": (
        lambda: Layers(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8),
            nn.Flatten(),
            nn.Linear(128, 3),
        ),
        IMAGES,
    ),
    "batch norm in eval": (lambda: Layers(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), IMAGES),
    "layer norm": (lambda: Layers(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)), X),
    "embedding": (lambda: Layers(nn.Embedding(30, 12, padding_idx=0), nn.Linear(12, 4)), TOKENS),
    "sparse embedding": (lambda: Layers(nn.Embedding(30, 12, sparse=True), nn.Linear(12, 4)), TOKENS),
    "sparse bag": (lambda: Layers(nn.EmbeddingBag(30, 12, sparse=True), nn.Linear(12, 4)), TOKENS),
    "lstm": (lambda: Recurrent("LSTM", num_layers=2), SEQUENCE),
    "gru": (lambda: Recurrent("GRU", bidirectional=True), SEQUENCE),
    "rnn": (lambda: Recurrent("RNN"), SEQUENCE),
    "cells": (Cells, SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "encoder": (lambda: nn.TransformerEncoderLayer(12, 2, 16, dropout=0.1, batch_first=True), SEQUENCE),
    "spectral norm": (lambda: Layers(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4))), X),
    "weight norm": (lambda: Layers(nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))), X),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, x = LAYERS[name]
    check(make, [x], tolerance=0.04)


class Parts(nn.Module):
    """Two layers, a vector, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.v = nn.Parameter(torch.linspace(-0.5, 0.5, 12))
        self.apply_to = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.apply_to(self, *inputs)


def parts(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Parts(forward)


def test_parameter_used_in_both_dtypes_and_returned() -> None:
    check(
        parts(lambda m, x: (m.a(x), m.a.weight.exp().mean() + m.v.sum(), F.softmax(m.a.weight, -1), m.v)), [X]
    )


def test_tied_parameter() -> None:
    def tied() -> nn.Module:
        model = Layers(nn.Embedding(20, 12), nn.Tanh(), nn.Linear(12, 20, bias=False))
        model.net[2].weight = model.net[0].weight
        return model

    check(tied, [TOKENS % 20])


def test_unused_parameter_keeps_no_gradient() -> None:
    check(parts(lambda m, x: m.a(x)), [X])


def test_parameter_first_read_under_no_grad() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            target = m.a(x)
        return m.b(x) - target, m.a(x)

    check(parts(forward), [X])


def test_frozen_at_capture_and_unfrozen_later() -> None:
    def frozen() -> nn.Module:
        model = mlp()
        model.net[0].requires_grad_(False)
        return model

    def run(model: Any, x: Tensor) -> Any:
        first = plain_backward(model, x)
        assert model.net[0].weight.grad is None
        model.net[0].requires_grad_(True)
        model.net[2].requires_grad_(False)
        second = model.net[2].weight.grad.clone()
        plain_backward(model, x)
        assert torch.equal(model.net[2].weight.grad, second)
        return first

    check(frozen, [X], run)


@pytest.mark.filterwarnings("ignore:gradients arrive")
def test_small_gradients_underflow_without_the_scale_only() -> None:
    def deep() -> nn.Module:
        return Layers(*(nn.Linear(12, 12) for _ in range(6)))

    torch.manual_seed(1)
    model = deep()
    (1e-7 * model(X).mean()).backward()
    wanted = model.net[0].weight.grad
    assert wanted is not None
    errors = []
    for scale in (1.0, 2.0**15):
        model.zero_grad()
        (1e-7 * convert(model, [X], scale)(X).mean()).backward()
        errors.append(relative_error(model.net[0].weight.grad, wanted))
    assert errors[0] > 0.9
    assert errors[1] < 0.05


# ---------------------------------------------------------------------- leaving the graph


def test_hidden_states_are_returned_and_read_later() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        first = m.a(x)
        second = m.b(first.relu())
        return {"hidden": [first, second], "out": m.a(second), "exp": second.exp()}

    check(parts(forward), [X])


def test_gradient_with_respect_to_a_returned_hidden_state() -> None:
    def run(model: Any, x: Tensor) -> Any:
        hidden, out = model(x)
        return torch.autograd.grad(squares(out), [hidden, model.a.weight])

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.a(x)
        return hidden, m.b(hidden.tanh())

    check(parts(forward), [X], run)


def test_attributes() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        m.feature = m.a(x)
        m.kept = {"relu": m.feature.relu()}
        return m.b(m.kept["relu"])

    def run(model: Any, x: Tensor) -> Any:
        out = model(x)
        squares([out, model.feature, model.kept]).backward()
        return [model.feature, out]

    check(parts(forward), [X], run)


@pytest.mark.parametrize("examples", [True, False])
def test_forward_hook_sees_true_gradients(examples: bool) -> None:
    """Feature extraction whose feature is in the loss, and what Grad-CAM reads."""

    def run(model: Any, x: Tensor) -> Any:
        seen: dict[str, Tensor] = {}

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            output.register_hook(lambda g: seen.update(hook=g.clone()))
            seen["feature"] = output

        handle = model.net[2].register_forward_hook(hook)
        out = model(x)
        (squares(out) + squares(seen["feature"])).backward()
        handle.remove()
        return [seen["feature"].grad, seen["hook"], seen["feature"]]

    check(mlp, [X], run, examples=examples)


def test_backward_hooks_see_and_change_true_gradients() -> None:
    def run(model: Any, x: Tensor) -> Any:
        seen: dict[str, Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
                seen.update({f"{name} in": inputs[0].clone(), f"{name} out": outputs[0].clone()})

            return hook

        handles = [
            model.net[2].register_full_backward_hook(note("layer")),
            model.net[0].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,)),
            model.register_full_backward_hook(note("model")),
            model.net[2].register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            model.net[4].weight.register_hook(lambda g: seen.update(weight=g.clone())),
        ]
        results = plain_backward(model, x)
        for handle in handles:
            handle.remove()
        assert len(seen) == 5
        return [*results, *(seen[name] for name in sorted(seen))]

    check(mlp, [X], run)


def test_hook_attached_inside_forward() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.a(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
        return m.b(hidden)

    check(parts(forward), [X])


class ClipGradient(torch.autograd.Function):
    """Its backward is no linear function: it must see the true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-4, 1e-4)


class OwnLoss(torch.autograd.Function):
    """Ignores the gradient that comes in, as some losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(2).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 2 * x / x.numel()
        return result


@torch.library.custom_op("ampfx_tests::clip_gradient", mutates_args=())
def clip_gradient(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("ampfx_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


torch.library.register_autograd("ampfx_tests::clip_gradient", lambda ctx, g: g.clamp(-1e-4, 1e-4))


@pytest.mark.parametrize("clip", [ClipGradient.apply, clip_gradient])
def test_custom_backward_sees_true_gradients(clip: Any) -> None:
    check(parts(lambda m, x: (m.b(clip(m.a(x) * m.v)), m.b(clip(m.a(x)) + m.a(x)))), [X])


def test_custom_loss_that_ignores_its_gradient() -> None:
    def run(model: Any, x: Tensor) -> None:
        model(x).backward()

    check(parts(lambda m, x: OwnLoss.apply(m.b(m.a(x)))), [X], run)


def test_custom_operator_that_writes() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.a(x)
        with torch.no_grad():
            double_(hidden)
        return m.b(hidden)

    check(parts(forward), [X])


# ---------------------------------------------------------------------- writing


def test_caller_writes_into_outputs() -> None:
    def run(model: Any, x: Tensor) -> Any:
        logits = model(x)
        logits /= 3.0
        logits.clamp_(-0.2, 0.2)
        squares(logits).backward()
        return [logits]

    check(mlp, [X], run)


def test_model_writes_into_its_input() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x.mul_(2)
        y = m.a(x)
        y += x
        return y.relu_(), x

    def run(model: Any, x: Tensor) -> Any:
        value = x.requires_grad_() * 1.0
        out, same = model(value)
        assert same is value
        (squares(out) + squares(value.exp())).backward()
        return [x.grad, value]

    check(parts(forward), [X], run, examples=False)


def test_input_without_gradient_takes_one_on() -> None:
    def forward(m: Any, x: Tensor, memory: Tensor) -> Any:
        memory.add_(m.a(x))
        return memory * 2

    def run(model: Any, x: Tensor, memory: Tensor) -> Any:
        out = model(x, memory)
        (squares(out) + squares(memory)).backward()
        return [memory, out]

    check(parts(forward), [X, X.flip(0)], run)


def test_leaf_written_under_no_grad() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            x.clamp_(-0.3, 0.3)
        return m.a(x), x

    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        (squares(model(x)) + squares(x.cos())).backward()
        return [x.grad, x]

    check(parts(forward), [X], run, examples=False)


def test_values_written_into_fresh_tensors() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.a(x)
        joined = torch.zeros(8, 24)
        joined[:, :12] = hidden
        joined[:, 12:] = x
        masked = hidden.new_zeros(8, 12)
        masked[x > 0] = hidden[x > 0]
        return joined, masked, torch.zeros(8, 12).index_add(0, torch.arange(8), hidden)

    check(parts(forward), [X])


def test_views_of_a_written_value_leave() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        flat, some = y.view(-1), y[:, :3]
        y.mul_(2)
        return y, flat, some, x

    check(parts(forward), [X])


# ---------------------------------------------------------------------- derivatives of derivatives


def penalty(model: Any, x: Tensor) -> Any:
    """The loss of a critic with a gradient penalty."""
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (0.1 * (slope.norm(dim=1) - 1).pow(2).mean() + squares(out)).backward()
    return [slope, x.grad]


def test_gradient_penalty() -> None:
    check(mlp, [X], penalty)


def test_gradient_penalty_through_norms() -> None:
    def make() -> nn.Module:
        return Layers(nn.Linear(12, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 1))

    check(make, [X], penalty, tolerance=0.04)


def test_penalty_on_parameter_gradients() -> None:
    def run(model: Any, x: Tensor) -> None:
        grads = torch.autograd.grad(squares(model(x)), list(model.parameters()), create_graph=True)
        torch.stack([g.pow(2).sum() for g in grads]).sum().backward()

    check(mlp, [X], run, scales=(2.0**12, 2.0**8), tolerance=0.04)


def test_third_derivatives() -> None:
    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        second.pow(2).sum().backward()
        return [first, second, x.grad]

    check(mlp, [X], run, scales=(2.0**12, 2.0**8), tolerance=0.05)


FUNCTIONAL: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    "grad": lambda m, x: list(grad(lambda p: functional_call(m, p, (x,)).pow(2).mean())(_values(m)).values()),
    "per sample": lambda m, x: list(
        vmap(grad(lambda p, row: functional_call(m, p, (row[None],)).pow(2).mean()), (None, 0))(
            _values(m), x
        ).values()
    ),
    "ensemble": lambda m, x: [
        vmap(lambda p: functional_call(m, p, (x,)))(
            {name: torch.stack([value, value / 2]) for name, value in _values(m).items()}
        )
    ],
    "jacobian": lambda m, x: [jacrev(m)(x)],
    "hessian": lambda m, x: [hessian(lambda value: m(value).sum())(x[:2])],
    "forward mode": lambda m, x: [jvp(m, (x,), (torch.ones_like(x),))[1]],
}


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_torch_func(name: str) -> None:
    check(mlp, [X], FUNCTIONAL[name], tolerance=0.04)


def test_functional_call_with_other_parameters() -> None:
    def run(model: Any, x: Tensor) -> Any:
        other = {name: (value / 2).requires_grad_() for name, value in _values(model).items()}
        squares(functional_call(model, other, (x,))).backward()
        return [value.grad for value in other.values()]

    check(mlp, [X], run)


def test_batched_gradients() -> None:
    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        out = model(x)[:, 0]
        return torch.autograd.grad(out, x, torch.eye(8), is_grads_batched=True)

    check(mlp, [X], run)


# ---------------------------------------------------------------------- how it is called


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_and_around(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.a(x + checkpoint(lambda t: m.b(F.gelu(m.a(t))), x, use_reentrant=reentrant))

    check(parts(forward), [X])

    def around(model: Any, x: Tensor) -> Any:
        model(x.requires_grad_())
        torch.manual_seed(3)
        squares(checkpoint(model, x, use_reentrant=reentrant)).backward()
        return [x.grad]

    check(lambda: Layers(nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 2)), [X], around)


def test_called_several_times_and_backward_again() -> None:
    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        out = model(model(x))
        squares(out[0]).backward(retain_graph=True)
        squares(out[1]).backward()
        return [x.grad]

    check(lambda: Layers(nn.Linear(12, 12), nn.Tanh()), [X], run)


def test_float64_and_complex_parts() -> None:
    def make() -> nn.Module:
        model = Parts(lambda m, x: (torch.fft.irfft(torch.fft.rfft(m.a(x)) * m.c), m.b(x).double() * m.d))
        model.c = nn.Parameter(torch.ones(7, dtype=torch.complex64))
        model.d = nn.Parameter(torch.ones(12, dtype=torch.float64))
        return model

    check(make, [X])


def test_train_and_eval_are_two_graphs_with_one_scale() -> None:
    def run(model: Any, x: Tensor) -> Any:
        results = []
        for training in (True, False, True):
            model.train(training)
            with torch.no_grad():
                results.append(model(x))
            out = model(x)
            squares(out).backward()
            results.append(out)
        return results

    def make() -> nn.Module:
        return Layers(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))

    check(make, [X], run)


def test_evaluation_without_gradients_has_no_scaling_nodes() -> None:
    model = convert(mlp(), [X])
    functions = {
        grad_scaling.scale,
        grad_scaling.scale_cast,
        grad_scaling.unscale,
        grad_scaling.unscale_cast,
    }
    assert functions & {node.target for node in model.graph.nodes}
    with torch.no_grad():
        model(X)
    assert not functions & {node.target for node in model.graph.nodes}
