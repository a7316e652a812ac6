"""Compare a converted float16 model with its float32 original: gradients of everything that has one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ampfx
from ampfx.loss_scale import LossScale

SCALES = (2.0**15, 2.0**10, 1.0)

Run = Callable[..., Sequence[Tensor | None] | None]


class Layers(nn.Module):
    """Layers in a row; nn.Sequential itself has no forward of its own to speak of."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def mlp(outputs: int = 4) -> nn.Module:
    """A small network with smooth activations."""
    return Layers(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


def convert(model: nn.Module, inputs: Sequence[Tensor] | None, scale: float = 2.0**10) -> Any:
    """A float16 conversion with a fixed scale of its own."""
    group = LossScale.static(scale) if scale != 1.0 else LossScale()
    examples = None if inputs is None else tuple(inputs)
    return ampfx.convert(model, examples, dtype=torch.float16, loss_scale=group)


def relative_error(found: Tensor | None, wanted: Tensor | None) -> float:
    """The norm of the difference over the norm of what is wanted; infinite if only one exists."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    found, wanted = (t.to_dense() if t.is_sparse else t for t in (found.detach(), wanted.detach()))
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(wide), wanted.to(wide)
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def squares(outputs: Any) -> Tensor:
    """A loss that weighs every element of every tensor in ``outputs`` differently."""
    if isinstance(outputs, Tensor):
        if not outputs.requires_grad:
            return torch.zeros(())
        weights = torch.linspace(0.5, 1.5, outputs.numel()).reshape(outputs.shape)
        return 0.1 * (outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * weights).pow(2).mean()
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return torch.stack([squares(value).float() for value in values]).sum()


def plain_backward(model: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    """The plain step: forward, a loss outside, ``loss.backward()``."""
    for value in inputs:
        value.requires_grad_(value.is_floating_point())
    loss = squares(model(*inputs))
    loss.backward()
    return [loss, *(value.grad for value in inputs)]


def check(
    make: Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    run: Run = plain_backward,
    *,
    scales: Sequence[float] = SCALES,
    tolerance: float = 0.02,
    examples: bool = True,
) -> None:
    """Every gradient of a converted model is the float32 model's, whatever the scale.

    Args:
        make: makes the model, alike every time.
        inputs: tensors that the model is called with.
        run: called with a model and fresh inputs; calls backward and returns further tensors to compare.
        scales: values of S.
        tolerance: relative error allowed in float16.
        examples: whether the model is captured at ``convert`` or at its first call.
    """
    torch.manual_seed(1)
    original = make()
    twin = copy.deepcopy(original)
    state = copy.deepcopy(original.state_dict())
    flags = [parameter.requires_grad for parameter in original.parameters()]
    group = LossScale.static(scales[0])  # one capture serves all scales
    model = ampfx.convert(twin, tuple(inputs) if examples else None, dtype=torch.float16, loss_scale=group)
    torch.manual_seed(2)
    wanted = list(run(original, *(value.detach().clone() for value in inputs)) or ())
    for scale in scales:
        group.set(scale)
        model.load_state_dict(state)
        model.zero_grad()
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        torch.manual_seed(2)
        found = list(run(model, *(value.detach().clone() for value in inputs)) or ())
        wrong = {
            name: relative_error(q.grad, p.grad)
            for (name, p), q in zip(original.named_parameters(), model.parameters(), strict=True)
        }
        assert len(wanted) == len(found)
        for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
            wrong[f"result {index}"] = relative_error(b, a)
        wrong = {name: error for name, error in wrong.items() if not error <= tolerance}
        assert not wrong, f"at scale {scale:g}: {wrong}"
        for p, q in zip(original.parameters(), model.parameters(), strict=True):
            assert p.grad is None or (q.grad is not None and q.grad.dtype == p.grad.dtype)
