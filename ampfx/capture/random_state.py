"""Random generators: torch's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch


def python_state() -> Any:
    """The state of the generators that torch does not own."""
    return random.getstate(), _numpy_state()


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Draws of random numbers inside leave the generators as they were."""
    devices = (
        list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )
    python, numpy_state = random.getstate(), _numpy_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            if random.getstate() != python:
                random.setstate(python)
            if _numpy_state() != numpy_state:
                _set_numpy_state(numpy_state)


def _numpy_state() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    state: Any = numpy.random.get_state()
    name, keys, position, has_gauss, cached = state
    return name, tuple(keys.tolist()), position, has_gauss, cached


def _set_numpy_state(state: Any) -> None:
    import numpy

    if state is not None:
        numpy.random.set_state((state[0], numpy.array(state[1], dtype=numpy.uint32), *state[2:]))
