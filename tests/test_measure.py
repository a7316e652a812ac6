"""The counts of one training step, against numbers worked out by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampfx.measure import StepCounts, count_step

F32, LOW = 4, 2  # bytes per element


def test_float32_linear_step_is_counted_exactly() -> None:
    linear, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)

    def step() -> None:
        linear.weight.grad = None
        linear(x).sum().backward()

    # Forward: mm (over a transposed view), sum. Backward: ones_like for the loss's own gradient, mm.
    # Saved: x only (the weight is not needed: x wants no gradient).
    assert count_step(step, linear) == StepCounts(casts=0, cast_bytes=0, kernels=4, saved_bytes=2 * 4 * F32)


def test_autocast_linear_step_is_counted_exactly() -> None:
    linear, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)

    def step() -> None:
        linear.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        y.float().sum().backward()

    # Casts: x, weight, y forward; y's and the weight's gradient backward. All have 8, 12 or 6 elements.
    elements = 8 + 12 + 6 + 6 + 12
    counts = count_step(step, linear)
    assert counts.casts == 5
    assert counts.cast_bytes == elements * (F32 + LOW)
    assert counts.kernels == 4 + 5
    # Saved: the low copy of x.
    assert counts.saved_bytes == 8 * LOW


def test_optimizer_step_is_part_of_the_count() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    # sum; ones_like for the loss's gradient; its expanded view is copied into .grad; one in-place add.
    assert count_step(step).kernels == 4


def test_a_copy_between_float_dtypes_is_a_cast_and_others_are_not() -> None:
    low, high = torch.zeros(6, dtype=torch.float16), torch.ones(6)
    assert count_step(lambda: low.copy_(high)) == StepCounts(1, 6 * (F32 + LOW), 1, 0)
    assert count_step(lambda: torch._foreach_copy_([low, low], [high, high])).casts == 2
    assert count_step(lambda: high.clone()).casts == 0
    assert count_step(lambda: high.float()).casts == 0
    assert count_step(lambda: high.double()).cast_bytes == 6 * (4 + 8)
    assert count_step(lambda: high.long()).casts == 0
    assert count_step(lambda: torch.ones(6, dtype=torch.long).float()).casts == 0


def test_views_and_allocations_are_no_kernels() -> None:
    x = torch.ones(4, 6)
    views = count_step(lambda: (x.view(24), x.t(), x[1:], x.expand(2, 4, 6), x.unbind(0), torch.empty(3)))
    assert views.kernels == 0
    assert count_step(lambda: x.t().reshape(24)).kernels == 1  # has to copy


def test_each_saved_storage_counts_once_with_its_full_size() -> None:
    x = torch.ones(8, 4, requires_grad=True)

    def step() -> None:
        y = torch.exp(x)  # saves its result
        (y[:2] * y[2:4]).sum().backward()  # saves two views of the same storage

    assert count_step(step).saved_bytes == 8 * 4 * F32


def test_parameters_do_not_count_as_saved() -> None:
    linear, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4, requires_grad=True)
    step = lambda: linear(x).sum().backward()  # noqa: E731
    assert count_step(step, linear).saved_bytes == 2 * 4 * F32
    assert count_step(step).saved_bytes == (2 * 4 + 4 * 3) * F32


def test_checkpointed_values_are_not_saved_but_their_kernels_run_twice() -> None:
    x = torch.ones(3, 5, requires_grad=True)
    chain = lambda value: torch.exp(torch.exp(value))  # noqa: E731
    plain = count_step(lambda: chain(x).sum().backward())
    saving = count_step(lambda: checkpoint(chain, x, use_reentrant=False).sum().backward())
    assert plain.saved_bytes == 2 * 15 * F32
    assert saving.saved_bytes == 15 * F32  # the region's input
    assert saving.kernels > plain.kernels


def test_the_warm_up_is_not_counted() -> None:
    calls: list[int] = []
    x = torch.ones(3)

    def step() -> None:
        calls.append(1)
        x.to(torch.float16)

    assert count_step(step, warmup=3).casts == 1
    assert len(calls) == 4


def test_counting_changes_no_result() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(3, 6)
    y = torch.tensor([0, 1, 1])

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    count_step(step, model, warmup=0)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
