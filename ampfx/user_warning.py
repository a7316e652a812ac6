"""Warnings that point at the user's line, however deep inside the package they arise."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_NOT_THE_USER = tuple(os.path.dirname(str(file)) + os.sep for file in (__file__, torch.__file__))


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither in this package nor in PyTorch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
