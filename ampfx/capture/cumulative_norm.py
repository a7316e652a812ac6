"""Batch norm whose statistics are plain averages over all batches (``momentum=None``).

``torch.nn`` turns its batch counter into a Python float in each forward, so that a recorded graph would
hold for one batch only. Here the same factor stays a node of the graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def counts_batches(module: nn.Module) -> bool:
    """Whether a module is a batch norm in training whose momentum is 1 / (number of batches)."""
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and module.momentum is None
        and module.training
        and module.track_running_stats
        and module.num_batches_tracked is not None
    )


def cumulative_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of such a module, as ``torch.nn`` writes it but for the type of the factor."""
    assert isinstance(module, _BatchNorm)
    assert module.num_batches_tracked is not None
    module._check_input_dim(x)
    module.num_batches_tracked.add_(1)
    factor = 1.0 / module.num_batches_tracked.item()
    return F.batch_norm(
        x, module.running_mean, module.running_var, module.weight, module.bias, True, factor, module.eps
    )
