"""``h.to(x.dtype)`` must follow the dtype that ``x`` is given, not the one it was recorded in.

While a model is recorded, reading ``.dtype`` of a computed float32 tensor gives a :class:`TracedDtype`. It
answers every question as the dtype does; cast to it, a tensor becomes a ``type_as`` node, which follows the
tensor that the dtype was read from. Everywhere else it stands for the recorded dtype.

torch's argument parsers know no dtype but its own, so the functions that take one are wrapped while a recording
runs; the wrappers do nothing for other arguments and on other threads. A function that is not wrapped raises a
``TypeError``: the capture then starts again with plain dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_FUNCTIONS = [
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "as_tensor",
    "zeros",
    "zeros_like",
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "sum",
    "mean",
    "prod",
    "nansum",
    "result_type",
    "promote_types",
    "can_cast",
    "finfo",
    "iinfo",
    "range",
]
_METHODS = [
    "to",
    "type",
    "new_empty",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "softmax",
    "log_softmax",
    "sum",
    "mean",
    "prod",
    "cumsum",
    "cumprod",
    "view",
]
_lock = threading.RLock()
_users = 0
_saved: list[tuple[Any, str, Any]] = []


class TracedDtype:
    """The dtype of a recorded tensor."""

    def __init__(self, dtype: torch.dtype, node: fx.Node, recorder: Any) -> None:
        self.value, self.fx_node, self.recorder = dtype, node, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["value"], name)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == plain_dtype(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        return str(self.value).removeprefix("torch.")

    @property
    def __class__(self) -> type:
        return torch.dtype

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a traced dtype keeps its class")


def is_traced_dtype(value: object) -> bool:
    """Whether ``value`` is a traced dtype (``isinstance`` is misled by ``__class__``)."""
    return type(value) is TracedDtype


def plain_dtype(value: Any) -> Any:
    """The dtype behind a traced one; anything else unchanged."""
    return value.value if type(value) is TracedDtype else value


@contextlib.contextmanager
def following_dtypes() -> Iterator[None]:
    """While active, torch's functions take traced dtypes."""
    global _users
    with _lock:
        if _users == 0:
            _install()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for owner, name, value in reversed(_saved):
                    if value is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, value)
                _saved.clear()


def _install() -> None:
    for name in _FUNCTIONS:
        _replace(torch, name, _plain_arguments(getattr(torch, name)))
    for name in _METHODS:
        original = getattr(torch.Tensor, name)
        _replace(torch.Tensor, name, _cast(original) if name in ("to", "type") else _plain_arguments(original))


def unwrapped(function: Any) -> Any:
    """Torch's own function for one that is wrapped while a recording runs (torch itself may hand on the wrapper)."""
    return getattr(function, "_ampfx_original", function)


def _replace(owner: Any, name: str, value: Any) -> None:
    _saved.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, value)


def _plain_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if any(type(arg) is TracedDtype for arg in (*args, *kwargs.values())):
            args = tuple(plain_dtype(arg) for arg in args)
            kwargs = {name: plain_dtype(arg) for name, arg in kwargs.items()}
        return function(*args, **kwargs)

    wrapped._ampfx_original = function  # type: ignore[attr-defined]
    return wrapped


def _cast(function: Callable[..., Any]) -> Callable[..., Any]:
    plain = _plain_arguments(function)

    @functools.wraps(function)
    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if len(given) == 1 and type(given[0]) is TracedDtype:
            dtype = given[0]
            return dtype.recorder.cast_like(tensor, dtype)
        return plain(tensor, *args, **kwargs)

    wrapped._ampfx_original = function  # type: ignore[attr-defined]
    return wrapped
