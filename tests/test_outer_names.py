"""Globals, closures and defaults that a forward reads belong to the situation that a graph was captured for."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampfx

FACTOR = 1.0
FACTORS = [1.0]
CONFIG = types.SimpleNamespace(factor=1.0)
TENSOR = torch.ones(())
DEFAULTS = [1.0]


def closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    value = 1.0

    def get() -> float:
        return value

    def put(new: float) -> None:
        nonlocal value
        value = new

    return get, put


GET, PUT = closure()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * FACTOR


class InHelper(Global):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.linear(x))


class InProperty(Global):
    @property
    def factor(self) -> float:
        return FACTOR

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


class InList(Global):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * FACTORS[0]


class InObject(Global):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * CONFIG.factor


class InTensor(Global):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * TENSOR


class InClosure(Global):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * GET()


class InDefault(Global):
    def forward(self, x: torch.Tensor, factors: list[float] = DEFAULTS) -> torch.Tensor:
        return self.linear(x) * factors[0]


def put_all(value: float) -> None:
    global FACTOR, TENSOR
    FACTOR = value
    FACTORS[0] = CONFIG.factor = DEFAULTS[0] = value
    TENSOR = torch.full((), value)
    PUT(value)


@pytest.mark.parametrize(
    "kind", [Global, InHelper, InProperty, InList, InObject, InTensor, InClosure, InDefault], ids=lambda k: k.__name__
)
def test_a_changed_value_is_seen(kind: type[nn.Module]) -> None:
    put_all(1.0)
    plain, x = kind(), torch.randn(2, 4)
    model = ampfx.convert(plain, (x,), dtype=torch.bfloat16)
    for value in (1.0, 5.0, 1.0):
        put_all(value)
        assert (model(x) - plain(x)).norm() <= 4 * torch.finfo(torch.bfloat16).eps * plain(x).norm()
    if kind is not InTensor:  # tensors count by identity
        assert model._ampfx.captures == 2
