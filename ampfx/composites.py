"""Operations that are several operations inside, with a precision of their own for each."""

from __future__ import annotations

from typing import Any

import torch


def run_composite(*args: Any, function: str, device_type: str, dtype: torch.dtype, **kwargs: Any) -> Any:
    """Call ``torch.<function>`` so that its matrix products run low while its state keeps its dtype.

    A recurrent cell multiplies the state with a weight and then adds to the state: only autocast can
    separate the two, so it is on for this one call.
    """
    with torch.autocast(device_type, dtype=dtype):
        return getattr(torch, function)(*args, **kwargs)
