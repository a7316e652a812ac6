"""The whole way in under two seconds: convert, train five steps, print."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampfx
from ampfx.printing import format_graph


def test_convert_train_print() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    model = ampfx.convert(net, (x,), dtype=torch.float16)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert not optimizer.last_step_skipped
    assert net[0].weight.grad.dtype == torch.float32
    printed = format_graph(model.graph)
    assert "f16[32, 16] = linear(" in printed
    assert "f16" in str(model.report())
