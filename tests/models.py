"""Small models of the kinds that people train, for tests and for ``python -m bench.zoo``.

``build(name)`` gives a model and ``inputs(batch_size) -> (args, kwargs)``; ``REG`` has the names. Those in
``IN_PARTS`` cannot be one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
REG: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {}
IN_PARTS = ("NoisyEnsemble", "TreeReader")
OFFSET = 0  # shifts the seeds of the inputs


def build(name: str) -> tuple[nn.Module, Callable[[int], Inputs]]:
    """A model and what makes its inputs."""
    make, inputs = REG[name]
    return make(), inputs


def randn(batch: int, *shape: int) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch + OFFSET))


def ids(batch: int, length: int = 12, high: int = 40) -> Tensor:
    return torch.randint(1, high, (batch, length), generator=torch.Generator().manual_seed(batch + OFFSET))


def model(inputs: Callable[[int], Any]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class; ``inputs`` gives one tensor, a tuple of arguments or a dict of keywords."""

    def arguments(batch: int) -> Inputs:
        given = inputs(batch)
        if isinstance(given, dict):
            return (), given
        return (given if isinstance(given, tuple) else (given,)), {}

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        REG[cls.__name__] = (cls, arguments)
        return cls

    return register


# ---------------------------------------------------------------------- images


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x
        return F.relu(out)


@model(lambda batch: randn(batch, 3, 16, 16))
class ConvNet(nn.Module):
    """Convolutions with batch norm, in-place sums and a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(Residual(16) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@model(lambda batch: (randn(batch, 3, 16, 16), torch.arange(batch)))
class UNet(nn.Module):
    """A diffusion UNet: time embedding, group norm, skips that are padded and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU())
        self.inner = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(8, dtype=torch.float32, device=x.device) / 8)
        angles = t[:, None].float() * frequencies[None]
        embedding = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = F.silu(self.norm(self.inner(x))) + embedding[:, :, None, None]
        b = self.up(F.silu(self.down(a)))
        dy, dx = a.shape[2] - b.shape[2], a.shape[3] - b.shape[3]
        return self.out(torch.cat([a, F.pad(b, [0, dx, 0, dy])], dim=1))


@model(lambda batch: randn(batch, 3, 8, 8))
class VAE(nn.Module):
    """Noise in train mode only; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(128, 4), nn.Linear(128, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Unflatten(1, (8, 4, 4)))
        self.out = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean
        if self.training:
            deviation = torch.exp(0.5 * log_variance)
            z = mean + torch.randn_like(deviation) * deviation
        return {"image": self.out(self.decoder(z)), "mean": mean, "log_variance": log_variance}


@model(lambda batch: randn(batch, 8))
class Generator(nn.Module):
    """A GAN's generator, one convolution under spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            norm(nn.Conv2d(16, 8, 3, padding=1)),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z.view(-1, z.size(1), 1, 1))


# ---------------------------------------------------------------------- sequences


@model(lambda batch: ids(batch))
class RecurrentLM(nn.Module):
    """An LSTM, then a cell in a Python loop over time; weights tied between embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(16, 16)
        self.out = nn.Linear(16, 40)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.lstm(self.embed(tokens))
        hidden = states.new_zeros(tokens.size(0), 16)
        steps = []
        for t in range(tokens.shape[1]):
            hidden = self.cell(states[:, t], hidden)
            steps.append(hidden)
        return self.out(torch.stack(steps, 1)), hidden


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def padded(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, 12, dtype=torch.long)
    mask[-1, -3:] = 0
    return {"input_ids": ids(batch), "attention_mask": mask}


@model(padded)
class MaskedEncoder(nn.Module):
    """A mask builder that asks for numbers of dimensions and for the lowest number of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(40, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(16, 3)

    def extended(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if mask.dim() == 3:
            mask = mask[:, None]
        elif mask.dim() == 2:
            mask = mask[:, None, None, :]
        else:
            raise ValueError(f"wrong shape {tuple(mask.shape)}")
        return (1.0 - mask.to(dtype)) * torch.finfo(dtype).min

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> Tensor:
        batch, length = input_ids.size()
        x = self.embed(input_ids) + self.position(torch.arange(length, device=input_ids.device))[None]
        if attention_mask is None:
            attention_mask = torch.ones(batch, length)
        mask = self.extended(attention_mask, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x[:, 0])


@model(lambda batch: {"tokens": ids(batch), "labels": ids(batch)})
class CausalLM(nn.Module):
    """GPT with the loss inside: a causal buffer cut to the length, sdpa, logits for labels or the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32), persistent=False)
        self.block, self.qkv = Block(), nn.Linear(16, 48)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = tokens.shape[1]
        assert length <= 32, f"{length} tokens"
        x = self.embed(tokens)
        x = self.block(x, torch.zeros(()).masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf")))
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        x = self.norm(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        if labels is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=0)


@model(lambda batch: randn(batch, 6, 16))
class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


# ---------------------------------------------------------------------- other data


@model(lambda batch: randn(batch, 3, 20))
class PointNet(nn.Module):
    """A learned transform of point clouds; a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.transform = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.features, self.norm, self.out = nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.max(F.relu(self.local(x)), 2)[0]
        eye = torch.eye(3, dtype=x.dtype, device=x.device).view(1, 9).repeat(x.size(0), 1)
        transform = (self.transform(pooled) + eye).view(-1, 3, 3)
        moved = torch.bmm(x.transpose(2, 1), transform).transpose(2, 1)
        best, _ = torch.max(self.norm(self.features(moved)), 2)
        return F.log_softmax(self.out(best), -1), transform


@dataclass
class Prediction:
    score: Tensor
    hidden: list[Tensor]
    name: str = ""


@model(lambda batch: {"batch": {"user": ids(batch, 3), "dense": randn(batch, 8)}})
class Recommender(nn.Module):
    """A dict goes in, a dataclass comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.EmbeddingBag(40, 8, mode="sum")})
        self.bottom, self.top = nn.Linear(8, 8), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Prediction:
        hidden = [table(batch[name]) for name, table in self.tables.items()]
        hidden.append(self.bottom(batch["dense"]))
        return Prediction(torch.sigmoid(self.top(torch.cat(hidden, 1))).squeeze(-1), hidden, name="click")


class LoRALinear(nn.Linear):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(outputs, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


@model(lambda batch: randn(batch, 8))
class Adapted(nn.Module):
    """Frozen layers with adapters, and a block kept from autocast by its author."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = LoRALinear(8, 16), LoRALinear(16, 4), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.norm(hidden.float())
        return self.b(torch.tanh(hidden))


@model(lambda batch: randn(batch, 8))
class Routed(nn.Module):
    """A mixture of experts: which rows go where depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = torch.arange(len(x), device=x.device) % 3 + (self.gate(x).sum() * 0).long()
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(choice == index)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


# ---------------------------------------------------------------------- not one graph


@model(lambda batch: randn(batch, 8))
class NoisyEnsemble(nn.Module):
    """Draws from numpy's generator: only its parts are graphs. The head's matrix is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Parameter(torch.randn(16, 4) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        noise = float(np.random.rand()) * 0.0
        hidden = self.stem(x)
        for member in self.members:
            hidden = hidden + member(hidden) + noise
        return hidden @ self.head


class Encoder(nn.Module):
    """Python again: a part that has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, rows: Tensor) -> Tensor:
        nodes = [self.leaf(row) for row in rows.unbind(0)]
        np.random.rand()
        while len(nodes) > 1:
            nodes = [self.join(torch.cat(nodes[:2])).tanh(), *nodes[2:]]
        return nodes[0]


@model(lambda batch: randn(batch, 4, 8))
class TreeReader(nn.Module):
    """A recursive network over each sample, whose encoder stays Python as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        np.random.rand()
        return self.out(torch.stack([self.encoder(sample) for sample in x]))
