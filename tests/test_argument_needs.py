"""What operations need, checked against torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ampfx.argument_needs import NATIVE_OPS, NATIVE_WRITES

_INDEX = torch.tensor([0, 1])
_SPECIAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda x, y: torch.where(x > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    **{
        name: (lambda x, y, name=name: getattr(torch, name)([x, y]))  # type: ignore[misc]
        for name in ("cat", "stack", "hstack", "vstack", "dstack", "column_stack")
    },
}


@pytest.mark.parametrize("op", sorted(NATIVE_OPS))
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_native_ops_promote_like_casting_first(op: str, low: torch.dtype) -> None:
    x, y = torch.rand(3, 4).add(0.5).to(low), torch.rand(3, 4).add(0.5)
    call = _SPECIAL.get(op) or getattr(torch, op)
    for left, right in ((x, y), (y, x)):
        mixed, cast = call(left, right), call(left.float(), right.float())
        assert mixed.dtype == cast.dtype
        assert torch.equal(mixed, cast)


@pytest.mark.parametrize(
    "op", sorted(NATIVE_OPS - {"where", "cat", "stack", "hstack", "vstack", "dstack", "column_stack"})
)
def test_a_scalar_tensor_decides_no_promotion(op: str) -> None:
    x, scalar = torch.rand(3).bfloat16(), torch.tensor(0.5)
    call = _SPECIAL.get(op) or getattr(torch, op)
    assert call(x, scalar).dtype in (torch.bfloat16, torch.bool)


def _has_in_place(op: str) -> bool:
    return hasattr(torch.Tensor, op + "_") and op not in ("zero", "masked_fill", "fill", "addcmul", "addcdiv")


@pytest.mark.parametrize("op", sorted(filter(_has_in_place, NATIVE_WRITES)))
def test_native_writes_take_any_float(op: str) -> None:
    for own, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x, y = torch.rand(3, 4).add(0.5).to(own), torch.rand(3, 4).add(0.5).to(other)
        assert getattr(x, op + "_")(y).dtype == own
