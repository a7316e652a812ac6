"""TorchScript modules: torch turns some of them into a graph; those can be converted.

The graph that torch makes is fixed to the mode (train or eval) and to the input sizes it was made with, and
it stops at Python-like control flow. The parameters stay the TorchScript module's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampfx.errors import CaptureError


def graph_of_script(model: torch.jit.ScriptModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """A module that computes what a TorchScript module computes, with the same parameters.

    Raises:
        CaptureError: torch cannot turn it into a graph.
    """
    advice = "Convert the nn.Module that it was made from."
    try:
        from torch._export.converter import TS2EPConverter
    except ImportError:
        raise CaptureError(f"this version of torch cannot turn a TorchScript module into a graph. {advice}") from None
    try:
        with torch.no_grad():
            module = TS2EPConverter(model, args, kwargs).convert().module()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(f"torch cannot turn this TorchScript module into a graph ({reason}). {advice}") from error
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for parameter in module.parameters()):
        raise CaptureError(f"torch copies the parameters of this TorchScript module when it makes a graph. {advice}")
    return module
