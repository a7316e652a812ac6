"""The settings of a conversion, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampfx.dtypes import LOW_DTYPES, long_name
from ampfx.errors import AmpfxError
from ampfx.loss_scale import LossScale, ModuleScale, default_loss_scale
from ampfx.passes import DEFAULT_PASSES, Pass
from ampfx.policy import Policy, resolve_policy

OBJECTIVES = ("casts",)
MAX_GRAPHS = 8


class OptionError(AmpfxError, ValueError):
    """An argument of :func:`ampfx.convert` has no meaning, or not together with the others."""


@dataclass
class Options:
    """What :func:`ampfx.convert` was asked for."""

    dtype: torch.dtype
    policy: Policy
    device_type: str
    objective: str
    loss_scale: LossScale | ModuleScale | None
    strict: bool
    passes: tuple[Pass, ...]
    output_dtype: torch.dtype
    blocks: frozenset[str] | None = None
    max_graphs: int = MAX_GRAPHS


def make_options(
    *,
    dtype: torch.dtype | None,
    policy: str | Policy | None,
    device_type: str,
    loss_scale: object,
    capture: str,
    strict: bool,
    passes: Sequence[Pass] | None,
    objective: str | None,
    blocks: frozenset[str] | None,
    cache_weights: bool,
    output_dtype: torch.dtype,
) -> Options:
    """Check the arguments of :func:`ampfx.convert` and fill in what was left open."""
    try:
        default = torch.get_autocast_dtype(device_type)
    except RuntimeError:
        raise OptionError(f"device {device_type!r} has no autocast and so no rules") from None
    low = default if dtype is None else dtype
    if low not in LOW_DTYPES:
        raise OptionError(f"dtype={low!r}: ampfx computes in torch.float16 or torch.bfloat16")
    if not isinstance(strict, bool):
        raise OptionError(f"strict={strict!r}: True or False")
    for step in passes or ():
        if not isinstance(step, Pass):
            raise OptionError(f"passes: {step!r} is no ampfx.passes.Pass")
    if capture not in ("auto", "record"):
        raise OptionError(f'capture={capture!r}: only "auto" exists (a real run is recorded)')
    if cache_weights:
        raise OptionError("cache_weights=True is not there yet: low-precision weights are cast in each forward")
    if objective is not None and objective not in OBJECTIVES:
        raise OptionError(f"objective={objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point:
        raise OptionError(f"output_dtype={output_dtype!r} is no floating-point dtype")
    return Options(
        dtype=low,
        policy=resolve_policy(policy),
        device_type=device_type,
        objective=objective or "casts",
        loss_scale=_scale(loss_scale, low),
        strict=strict,
        passes=DEFAULT_PASSES if passes is None else tuple(passes),
        output_dtype=output_dtype,
        blocks=blocks,
    )


def _scale(given: object, low: torch.dtype) -> LossScale | ModuleScale | None:
    if given is None or isinstance(given, (LossScale, ModuleScale)):
        return given
    if isinstance(given, str):
        if given != "auto":
            raise OptionError(f'loss_scale={given!r}: "auto", None, a number or a LossScale')
        return default_loss_scale() if low == torch.float16 else None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise OptionError(f'loss_scale={given!r}: "auto", None, a number or a LossScale')
    try:
        return LossScale.static(float(given))
    except AmpfxError:
        raise
    except ValueError as error:
        raise OptionError(f"loss_scale={given!r} ({long_name(low)}): {error}") from error
