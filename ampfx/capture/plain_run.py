"""Run a model as it is, beside the recordings of it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ampfx.capture.attributes import restore_attributes, snapshot_attributes
from ampfx.capture.holders import same_values, write_back
from ampfx.capture.inputs import copy_inputs
from ampfx.capture.random_state import random_state
from ampfx.errors import CaptureError


@contextlib.contextmanager
def plain_run(root: nn.Module) -> Iterator[None]:
    """What runs inside leaves no trace on the module: attributes, buffers and random generators come back."""
    before = snapshot_attributes(root)
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    try:
        with random_state():
            yield
    finally:
        restore_attributes(before)
        with torch.no_grad():
            for buffer, value in buffers:
                if not same_values(buffer, value):
                    write_back(buffer, value)


@contextlib.contextmanager
def first_call(root: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
    """Let a model set itself up as its first call would; undone if what runs inside raises ``CaptureError``."""
    before = snapshot_attributes(root)
    parameters = [(parameter, parameter.detach().clone()) for parameter in root.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    call_args, call_kwargs = copy_inputs(args, kwargs)
    try:
        with random_state():
            forward(*call_args, **call_kwargs)
        with torch.no_grad():
            for buffer, value in buffers:
                write_back(buffer, value)
        yield
    except CaptureError:
        restore_attributes(before)
        with torch.no_grad():
            for tensor, value in (*parameters, *buffers):
                if not same_values(tensor, value):
                    write_back(tensor, value)
        raise


@contextlib.contextmanager
def switched_mode(root: nn.Module) -> Iterator[None]:
    """A module in the other of train and eval mode; afterwards each submodule has its own mode again."""
    modes = [(module, module.training) for module in root.modules()]
    root.train(not root.training)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def failing_line(error: BaseException) -> str:
    """The innermost line of user code in an error's traceback."""
    own = __file__.rsplit("capture", 1)[0]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own, torch.__path__[0]))
    ]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "an unknown line"
