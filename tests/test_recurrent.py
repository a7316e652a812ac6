"""Recurrent cells in Python loops: the state has one dtype from the first step to the last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ampfx


class Reader(nn.Module):
    """Feeds its steps to a cell; returns what it reads off all states, and the last state."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.cell, self.out = nn.Linear(8, 8), cell(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self.first(x)
        state = steps.new_zeros(len(x), 8)
        carried = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        seen = []
        for t in range(x.shape[1]):
            carried = self.cell(steps[:, t], carried)
            seen.append(carried[0] if isinstance(carried, tuple) else carried)
        return self.out(torch.stack(seen, 1)), seen[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_the_last_state_is_an_output(cell: type[nn.Module], dtype: torch.dtype) -> None:
    reference, x = Reader(cell), torch.randn(4, 5, 8)
    model = ampfx.convert(copy.deepcopy(reference), (x,), dtype=dtype, loss_scale=None)
    got, want = model(x), reference(x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        # A handful of roundings, each of half a unit in the last place, over five steps.
        assert (a - b).norm() <= 8 * torch.finfo(dtype).eps * b.norm()
    sum(t.sum() for t in got).backward()
    sum(t.sum() for t in want).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() <= 16 * torch.finfo(dtype).eps * b.grad.norm()


class Packed(nn.Module):
    """Sequences of different lengths, packed; gives the padded result, the packed one and the state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[Any, ...]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        result, state = self.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(result)
        return self.out(padded), result.data, state


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_packed_sequence_is_as_precise_as_under_autocast(kind: type[nn.RNNBase]) -> None:
    reference, x, lengths = Packed(kind), torch.randn(40, 3, 8), torch.tensor([40, 20, 30])
    model = ampfx.convert(copy.deepcopy(reference), (x, lengths), dtype=torch.bfloat16)
    want, got = _tensors(reference(x, lengths)), _tensors(model(x, lengths))
    with torch.autocast("cpu", torch.bfloat16):
        autocast = _tensors(reference(x, lengths))
    for exact, ours, theirs in zip(want, got, autocast, strict=True):
        assert ours.dtype == torch.float32
        # Equally many roundings, of which few differ.
        assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


def _tensors(value: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(value)
