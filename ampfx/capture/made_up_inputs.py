"""Inputs made up for a model that is converted without any.

Many models take one tensor, and what they do first tells what it looks like: a Linear wants its
``in_features`` last, a convolution its channels, an embedding indices. A graph captured with such an input
can be looked at right after ``convert``; the first call captures anew with the real inputs.

1. Only models whose forward needs exactly one argument are tried, and only up to a size where a run is cheap.
2. The first module of the tree that says what it takes gives a few candidates, likelier ones first.
3. The first candidate that the model runs on is taken. None: the model is captured at its first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn

MAX_PARAMETERS = 200_000_000


def candidates(model: nn.Module, forward: Callable[..., object]) -> Iterator[torch.Tensor]:
    """Tensors that ``model`` may take as its only argument."""
    if not _takes_one_argument(forward) or sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        return
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    for shape, integers in _shapes(model):
        if integers:
            yield torch.randint(0, integers, shape, device=device)
        else:
            yield torch.randn(shape, device=device)


def _takes_one_argument(forward: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY


def _shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], int]]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield (2, module.in_features), 0
            yield (2, 3, module.in_features), 0
            return
        if isinstance(module, nn.modules.conv._ConvNd):
            dims = len(module.kernel_size)
            for size in (64, 32, 28, 224, 16) if dims < 3 else (16, 32):
                yield (2, module.in_channels, *(size,) * dims), 0
            return
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield (2, 8), module.num_embeddings
            yield (2,), module.num_embeddings
            return
        if isinstance(module, nn.RNNBase):
            yield (2, 8, module.input_size), 0
            return
        if isinstance(module, nn.MultiheadAttention):
            yield (2, 8, module.embed_dim), 0
            return
        if isinstance(module, nn.LayerNorm):
            yield (2, *module.normalized_shape), 0
            yield (2, 8, *module.normalized_shape), 0
            return
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for extra in ((), (16,), (16, 16)):
                yield (2, module.num_features, *extra), 0
            return
