"""``ampfx.convert``: from a float32 model to one that trains in mixed precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampfx.blocks import find_blocks
from ampfx.capture.inputs import copy_inputs
from ampfx.capture.plain_run import plain_run
from ampfx.capture.torchscript import graph_of_script
from ampfx.converted import BLOCK_WISE, ConvertedModule, wrap
from ampfx.dtypes import LOW_DTYPES
from ampfx.errors import CaptureError
from ampfx.options import OptionError, make_options
from ampfx.passes import Pass
from ampfx.policy import Policy

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def convert(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    policy: str | Policy = "autocast",
    device: str | torch.device | None = None,
    loss_scale: Any = "auto",
    capture: str = "auto",
    strict: bool = False,
    passes: Sequence[Pass] | None = None,
    objective: str | None = None,
    blocks: Any = None,
    cache_weights: bool = False,
    output_dtype: torch.dtype = torch.float32,
) -> ConvertedModule:
    """Convert a float32 model into one that computes in mixed precision.

    The model is captured as a graph, every node gets a dtype, and the casts are written into the graph.
    The given model is not changed; parameters and buffers are shared with it and stay float32.

    Args:
        model: the model. Its parameters should be float32. A TorchScript module is converted where torch can
            turn it into a graph, for its mode and for the sizes of ``example_inputs``.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, or one tensor. The model
            is run on them once, here. Without them it is captured at its first call; a model that
            takes one tensor is captured with a made-up one before, so that its graph can be looked at.
        example_kwargs: keyword arguments beside positional ``example_inputs``.
        dtype: ``torch.float16`` or ``torch.bfloat16``; None for what ``torch.autocast`` takes on the device.
        policy: ``"autocast"`` (no operation less precise than under ``torch.autocast``), ``"relaxed"``, or a
            :class:`ampfx.Policy`.
        device: the device whose rules hold; None for the device of the parameters.
        loss_scale: ``"auto"`` (dynamic for float16, none for bfloat16), a number (static), a
            :class:`ampfx.LossScale` to share, or None to embed none.
        capture: ``"auto"``.
        strict: raise where the model cannot be captured whole. Otherwise what cannot be captured stays
            Python, and its children are converted, each by itself; a warning says so.
        passes: the passes to run, ``ampfx.passes.DEFAULT_PASSES`` when None.
        objective: what the assignment minimises: ``"casts"``.
        blocks: convert block by block: a module type, a glob on module paths, or a list of them. Each block
            becomes a graph of its own in the kept module tree (for FSDP, per-block hooks and checkpoints).
        cache_weights: not available yet.
        output_dtype: dtype of the outputs that the model gives in float32.

    Returns:
        A ``torch.fx.GraphModule`` that is also an instance of the model's class.

    Raises:
        CaptureError: the model cannot be captured; the message names the line.
        PolicyError: an override or an op list matches nothing.
        OptionError: an argument has no meaning.
    """
    inputs = _inputs(example_inputs, example_kwargs)
    if isinstance(model, torch.jit.ScriptModule):
        if inputs is None:
            raise CaptureError("a TorchScript module is converted from a graph that torch makes: give example_inputs=")
        model = graph_of_script(model, *inputs)
    _check_model(model)
    device_type = _device_type(model, device)
    options = make_options(
        dtype=dtype,
        policy=policy,
        device_type=device_type,
        loss_scale=loss_scale,
        capture=capture,
        strict=strict,
        passes=passes,
        objective=objective,
        blocks=None if blocks is None else find_blocks(model, blocks),
        cache_weights=cache_weights,
        output_dtype=output_dtype,
    )
    converted = wrap(model, options)
    if options.blocks is not None:
        converted._ampfx.stay_python(converted, BLOCK_WISE)
    if inputs is not None:
        with torch.autocast(device_type, enabled=False):
            _capture(converted, *inputs)
    else:
        with torch.autocast(device_type, enabled=False):
            converted._ampfx.preview(converted)
    return converted


def _capture(converted: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Capture the whole model, or its parts with the inputs that they get in a run of it."""
    conversion = converted._ampfx
    try:
        if conversion.python_reason is None:
            conversion.capture(converted, args, kwargs)
            return
    except CaptureError as error:
        if conversion.options.strict:
            raise
        conversion.stay_python(converted, str(error))
    with plain_run(converted):
        conversion.call_python(converted, *copy_inputs(args, kwargs))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, ConvertedModule):
        raise OptionError(f"this {type(model).__name__} is converted already")
    if isinstance(model, _WRAPPERS):
        raise OptionError(
            f"convert the model inside {type(model).__name__} and wrap the result: "
            f"{type(model).__name__}(convert(model))"
        )
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise OptionError(
            f"{', '.join(lazy)} have no shape yet: run the model once on a batch, as lazy modules need, and convert "
            "it then"
        )
    low = sorted({str(p.dtype) for p in model.parameters() if p.dtype in LOW_DTYPES and p.requires_grad})
    if low:
        raise OptionError(
            f"the model has trainable parameters in {', '.join(low)}; ampfx trains float32 parameters (they are the "
            "master weights) and casts them in the graph. Call model.float() first."
        )


def _device_type(model: nn.Module, device: str | torch.device | None) -> str:
    if device is not None:
        try:
            return torch.device(device).type
        except RuntimeError:
            raise OptionError(f"device={device!r}: torch knows no such device") from None
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device.type
    return "cpu"


def _inputs(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    keywords = dict(example_kwargs or {})
    if example_inputs is None:
        return ((), keywords) if example_kwargs is not None else None
    if isinstance(example_inputs, Mapping):
        if keywords:
            raise OptionError("give keyword arguments in example_inputs or in example_kwargs, not in both")
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, keywords
    if isinstance(example_inputs, list):
        return tuple(example_inputs), keywords
    return (example_inputs,), keywords
