"""TorchScript modules as input of convert."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampfx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def test_a_script_that_torch_can_turn_into_a_graph() -> None:
    plain, x = net(), torch.randn(2, 3, 8, 8)
    script = torch.jit.script(plain)
    model = ampfx.convert(script, (x,), dtype=torch.bfloat16)
    assert (model(x) - plain(x)).norm() <= 4 * torch.finfo(torch.bfloat16).eps * plain(x).norm()
    assert {id(p) for p in model.parameters()} == {id(p) for p in script.parameters()}
    assert "conv2d" in str(model.graph)
    assert model.report().casts > 0
    model(x).sum().backward()
    assert all(p.grad is not None for p in script.parameters())


def test_other_scripts_are_refused() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = 0
            while bool(x.sum() > n):
                x = x - 1
                n += 1
            return x

    with pytest.raises(ampfx.CaptureError, match=r"Convert the nn\.Module that it was made from"):
        ampfx.convert(torch.jit.script(Branch()), (torch.randn(3),))
    with pytest.raises(ampfx.CaptureError, match="example_inputs"):
        ampfx.convert(torch.jit.script(net()))
