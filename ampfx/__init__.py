"""ampfx: mixed precision training as a compiler pass over torch.fx graphs."""

from __future__ import annotations

from ampfx.errors import (
    AmpfxError,
    CaptureError,
    GuardError,
    LossScaleError,
    NotCapturedError,
    PolicyError,
    VerifyError,
)

__all__ = [
    "AmpfxError",
    "CaptureError",
    "GuardError",
    "LossScaleError",
    "NotCapturedError",
    "PolicyError",
    "VerifyError",
]
