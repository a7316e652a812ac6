"""One training step in each precision: what one writes for float32, for ``torch.autocast``, for ampfx."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampfx


@dataclass(frozen=True)
class Mode:
    """A way to train: by whom the precision is chosen, and the low dtype."""

    by: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """``float32``, ``autocast bfloat16``, ``ampfx float16``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.by == "float32" else f"{self.by} {dtype}"


FLOAT32 = Mode("float32", torch.float32)
MODES = (
    FLOAT32,
    Mode("autocast", torch.bfloat16),
    Mode("ampfx", torch.bfloat16),
    Mode("autocast", torch.float16),
    Mode("ampfx", torch.float16),
)


@dataclass(frozen=True)
class Training:
    """A model with what is needed to train it in one mode.

    Args:
        model: the module that ``step`` trains; call it for predictions under ``precision()``.
        step: runs forward, backward and the optimizer on one batch.
        precision: a context for calls of ``model`` outside training.
        set_lr: sets the learning rate.
    """

    model: nn.Module
    step: Callable[[Tensor, Tensor], object]
    precision: Callable[[], contextlib.AbstractContextManager[object]]
    set_lr: Callable[[float], None]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss: labels a little smoothed, as classifiers are usually trained."""
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def build(
    mode: Mode, net: nn.Module, example: Tensor, lr: float, policy: ampfx.Policy | str = "autocast"
) -> Training:
    """Prepare ``net`` for classification in ``mode``, with AdamW and gradient clipping.

    ``policy`` is for ampfx; nothing like it exists for autocast.
    """
    if mode.by == "ampfx":
        return _with_ampfx(mode, net, example, lr, policy)
    return _with_autocast(mode, net, example.device.type, lr)


def _with_ampfx(
    mode: Mode, net: nn.Module, example: Tensor, lr: float, policy: ampfx.Policy | str
) -> Training:
    model = ampfx.convert(net, (example,), dtype=mode.dtype, policy=policy)
    inner = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    optimizer = ampfx.LossScaleOptimizer(inner, model)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(model, step, contextlib.nullcontext, _lr_setter(inner))


def _with_autocast(mode: Mode, net: nn.Module, device_type: str, lr: float) -> Training:
    """Also plain float32: autocast and GradScaler do nothing when they are disabled."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler(device_type, enabled=mode.dtype == torch.float16)

    def precision() -> torch.autocast:
        enabled = mode.by == "autocast"
        return torch.autocast(device_type, mode.dtype if enabled else None, enabled=enabled)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with precision():
            loss = cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Training(net, step, precision, _lr_setter(optimizer))


def _lr_setter(optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    def set_lr(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr

    return set_lr
