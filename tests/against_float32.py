"""Compare a converted model with a float32 run of the same model: outputs, gradients, buffers.

Each comparison is made twice. With every node kept in float32 the graph must repeat the model's own
numbers to float32 rounding, so that a fault of the capture cannot hide behind a loose tolerance; in
float16 with a static loss scale the relative error may be a few of the dtype's epsilons.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampfx

EXACT = ampfx.Policy(overrides=(ampfx.Override(predicate=lambda node: True, dtype="float32"),))
SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16, "policy": EXACT},
    {"dtype": torch.float16, "loss_scale": 256.0},
)


def tolerance(settings: dict[str, Any]) -> float:
    """The relative error in norm that a run may have: rounding adds up over a few layers."""
    if settings.get("policy") is EXACT:
        return 16 * torch.finfo(torch.float32).eps
    return 8 * torch.finfo(settings["dtype"]).eps


def tensors(value: Any) -> list[Tensor]:
    """The tensors inside a result, objects with attributes included."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, dict):
            found += tensors(list(leaf.values()))
        elif isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            found += tensors(list(vars(leaf).values()))
    return found


def loss_of(value: Any) -> Tensor:
    """A loss that every differentiable tensor of a result has a part in, not symmetric in its elements."""
    total = torch.zeros(())
    for tensor in tensors(value):
        if tensor.requires_grad:
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
            weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype)
            total = total + (flat * weights).sum().float()
    return total


def assert_close(got: Tensor, want: Tensor, tol: float, what: str) -> None:
    """Same dtype and shape, close in norm; integers and bools equal."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, float32 run {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, float32 run {tuple(want.shape)}"
    if not (got.is_floating_point() or got.is_complex()):
        assert torch.equal(got, want), f"{what} differs"
        return
    wide = torch.complex128 if got.is_complex() else torch.float64
    got, want = got.detach().to(wide), want.detach().to(wide)
    assert torch.equal(got.isfinite(), want.isfinite()), f"{what}: other elements are not finite"
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    error = float((got - want).norm())
    norm = float(want.norm())
    assert error <= tol * norm + 1e-7, f"{what}: relative error {error / max(norm, 1e-30):.2e}"


def copied(value: Any) -> Any:
    """Inputs of its own for each run."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf)

    return pytree.tree_map(one, value)


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 1) -> tuple[Any, Any, list[Any]]:
    """Output, inputs and gradients of one step."""
    model.zero_grad(set_to_none=True)
    args, kwargs = copied((args, kwargs))
    torch.manual_seed(seed)
    out = model(*args, **kwargs)
    loss = loss_of(out)
    if loss.requires_grad:
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    grads += [leaf.grad for leaf in tensors((args, kwargs))]
    return out, tensors((args, kwargs)), grads


def compare_runs(
    model: nn.Module,
    reference: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tol: float,
    what: str = "",
    runner: Callable[..., Any] = run,
) -> None:
    """One step of both models on the same inputs and seed."""
    out, inputs, grads = runner(model, args, kwargs)
    want, want_inputs, want_grads = runner(reference, args, kwargs)
    assert type(out) is type(want), f"{what}: returns {type(out)}, float32 run {type(want)}"
    if not tensors(want):
        assert out == want
    for label, ours, theirs in (("output", out, want), ("input", inputs, want_inputs)):
        found, expected = tensors(ours), tensors(theirs)
        assert len(found) == len(expected), f"{what}: {len(found)} tensors, float32 run {len(expected)}"
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.requires_grad == b.requires_grad, f"{what}: requires_grad of {label} {index} is {a.requires_grad}"
            assert_close(a, b, tol, f"{what}: {label} {index}")
    for index, (a, b) in enumerate(zip(grads, want_grads, strict=True)):
        assert (a is None) == (b is None), f"{what}: gradient {index} is {'None' if a is None else 'there'}"
        if a is not None:
            assert_close(a, b, tol, f"{what}: gradient {index}")
    for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert_close(a, b, tol, f"{what}: buffer {name}")


def check(
    build: Callable[[], nn.Module],
    *calls: Any,
    modes: tuple[str, ...] = ("train", "eval"),
    captures: int | None = None,
    tol: float | None = None,
    settings: tuple[dict[str, Any], ...] = SETTINGS,
    deferred: bool = False,
) -> nn.Module:
    """Compare on several calls in train and eval mode, under each setting; returns the last converted model.

    Args:
        build: makes the model; called under a fixed seed.
        calls: each a tuple of positional inputs, or a dict of keyword arguments; the first is the example.
        modes: which modes.
        captures: how many graphs may be captured in each mode; None for any number.
        tol: a tolerance instead of the one derived from the dtype (not for the exact setting).
        settings: which settings.
        deferred: convert without example inputs.
    """
    assert calls
    for setting in settings:
        torch.manual_seed(0)
        original = build()
        torch.manual_seed(0)
        reference = build()
        exact = setting.get("policy") is EXACT
        allowed = tolerance(setting) if tol is None or exact else tol
        if deferred:
            model = ampfx.convert(original, **setting)
        else:
            first = copied(calls[0])
            model = ampfx.convert(original, *((first,) if isinstance(first, (tuple, dict)) else first), **setting)
        for mode in modes:
            model.train(mode == "train")
            reference.train(mode == "train")
            before = model._ampfx.captures
            for index, call in enumerate((*calls, calls[0])):
                args, kwargs = ((), call) if isinstance(call, dict) else (call, {})
                what = f"{str(setting['dtype'])[6:]}{' exact' if exact else ''}, {mode}, call {index}"
                compare_runs(model, reference, args, kwargs, allowed, what)
            if captures is not None and not (mode == modes[0] and not deferred):
                assert model._ampfx.captures - before <= captures, f"{mode}: {model._ampfx.captures - before} captures"
            elif captures is not None:
                assert model._ampfx.captures <= captures, f"{mode}: {model._ampfx.captures} captures"
    return model
