"""Two small models for 8 × 8 pictures, in plain PyTorch: nothing in here knows of mixed precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions with BatchNorm and a skip connection."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.skip = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, in_channels, height, width) to (batch, channels, height / stride, width / stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.skip(x))


class SmallResNet(nn.Module):
    """A residual network of three stages with one block each."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps pictures (batch, 1, 8, 8) to logits (batch, num_classes)."""
        x = F.relu(self.norm(self.stem(x)))
        x = self.stages(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.head(self.dropout(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Self-attention and a feed-forward network, each after a LayerNorm and beside a skip connection."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        """Self-attention over the tokens of (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.project(x.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (batch, tokens, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))))  # type: ignore[no-any-return]


class SmallTransformer(nn.Module):
    """A vision transformer: each row of the picture is one of 8 tokens."""

    def __init__(
        self, num_classes: int = 10, width: int = 64, depth: int = 2, num_heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, 8, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps pictures (batch, 1, 8, 8) to logits (batch, num_classes)."""
        x = self.embed(x.squeeze(1)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]
