"""ampfx: mixed precision training as a compiler pass over torch.fx graphs."""

from __future__ import annotations

from ampfx.convert import convert
from ampfx.converted import ConvertedModule
from ampfx.errors import (
    AmpfxError,
    CaptureError,
    GuardError,
    LossScaleError,
    NotCapturedError,
    PolicyError,
    VerifyError,
)
from ampfx.loss_scale import LossScale
from ampfx.optimizer import LossScaleOptimizer
from ampfx.options import OptionError
from ampfx.policy import Override, Policy
from ampfx.report import Explanation, Report

__all__ = [
    "AmpfxError",
    "CaptureError",
    "ConvertedModule",
    "Explanation",
    "GuardError",
    "LossScale",
    "LossScaleError",
    "LossScaleOptimizer",
    "NotCapturedError",
    "OptionError",
    "Override",
    "Policy",
    "PolicyError",
    "Report",
    "VerifyError",
    "convert",
]
