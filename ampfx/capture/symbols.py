"""Numbers that remember where they came from.

While a model is recorded, ``x.size(0)`` must stay a node of the graph, so that another batch size
runs on the same graph; yet the model's Python code must be able to compute with it, branch on it
and hand it to any torch function. :class:`TracedInt` and :class:`TracedFloat` are such numbers:

1. they hold the value of the recorded run and the node that computes it;
2. arithmetic on them gives further such numbers and records a node;
3. whatever turns them into a plain Python value (a comparison, ``range``, an index, a format
   string) is answered from the value and recorded as a guard: the graph is used only where the
   guard holds.

They derive from :class:`torch.SymInt` and :class:`torch.SymFloat`, because torch's argument parsers
take those wherever they take a number and hand them to the recording mode untouched;
``isinstance(n, int)`` is true for them as it is in a plain run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from ampfx.capture.recorder import Recorder


def plain(value: Any) -> Any:
    """The plain Python number behind a traced one; anything else unchanged."""
    return value.value if isinstance(value, _Traced) else value


def is_traced(value: object) -> bool:
    """Whether ``value`` is a traced number (``isinstance`` alone is misled by ``__class__``)."""
    return issubclass(type(value), _Traced)


class _NoSymbol:
    """What torch's own Python code asks of a SymInt beyond its number."""

    def is_nested_int(self) -> bool:
        """Traced integers are sizes of ordinary tensors."""
        return False


class _Traced:
    """What traced integers and floats have in common."""

    value: Any
    fx_node: Node
    recorder: Recorder

    def _init(self, value: Any, node: Node, recorder: Recorder) -> None:
        self.value, self.fx_node, self.recorder = value, node, recorder

    def _guarded(self) -> Any:
        """The plain value, with a guard that it is the same in later runs."""
        self.recorder.guard(self.fx_node, self.value)
        return self.value

    def __repr__(self) -> str:
        return repr(self._guarded())

    def __str__(self) -> str:
        return str(self._guarded())

    def __format__(self, format_spec: str) -> str:
        return format(self._guarded(), format_spec)

    def __hash__(self) -> int:
        return hash(self._guarded())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        return numpy.array(self._guarded(), dtype=dtype)

    def __reduce__(self) -> Any:
        return (type(self.value), (self._guarded(),))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self


def _binary(function: Callable[[Any, Any], Any], reverse: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: _Traced, other: Any) -> Any:
        number = plain(other)
        if not isinstance(number, (int, float)) or isinstance(other, torch.Tensor):
            return NotImplemented
        left, right = (other, self) if reverse else (self, other)
        result = function(plain(left), plain(right))
        return self.recorder.number(function, (left, right), result)

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: _Traced) -> Any:
        return self.recorder.number(function, (self,), function(self.value))

    return method


def _compare(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: _Traced, other: Any) -> Any:
        number = plain(other)
        if not isinstance(number, (int, float)) or isinstance(other, torch.Tensor):
            return NotImplemented
        result = function(self.value, number)
        return self.recorder.decided(function, (self, other), result)

    return method


def _pow(left: Any, right: Any) -> Any:
    return operator.pow(left, right)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "invert": operator.invert,
}


def _arithmetic() -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for name, function in _BINARY.items():
        methods[f"__{name}__"] = _binary(function)
        methods[f"__r{name}__"] = _binary(function, reverse=True)
    for name, comparison in _COMPARE.items():
        methods[f"__{name}__"] = _compare(comparison)
    for name, unary in _UNARY.items():
        methods[f"__{name}__"] = _unary(unary)
    methods["__floor__"] = _unary(math.floor)
    methods["__ceil__"] = _unary(math.ceil)
    methods["__trunc__"] = _unary(math.trunc)

    def divmod_(self: Any, other: Any) -> Any:
        return self // other, self % other

    def round_(self: Any, digits: Any = None) -> Any:
        return self.recorder.number(round, (self, plain(digits)), round(self.value, plain(digits)))

    methods["__divmod__"], methods["__round__"] = divmod_, round_
    methods["__bool__"] = lambda self: bool(self._guarded_truth())
    methods["__int__"] = lambda self: int(self._guarded())
    methods["__float__"] = lambda self: float(self._guarded())
    for name in (
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "__reduce__",
        "__deepcopy__",
        "__copy__",
        "__array__",
    ):
        methods[name] = getattr(_Traced, name)
    return methods


def _guarded_truth(self: Any) -> bool:
    return bool(self.recorder.decided(operator.truth, (self,), bool(self.value)))


class TracedInt(_Traced, torch.SymInt):
    """An integer of the recorded run and the node that computes it."""

    def __init__(self, value: int, node: Node, recorder: Recorder) -> None:
        self._init(value, node, recorder)

    _guarded_truth = _guarded_truth
    locals().update(_arithmetic())
    node = _NoSymbol()

    def __index__(self) -> int:
        return int(self._guarded())

    def bit_length(self) -> int:
        """As :meth:`int.bit_length`."""
        return int(self._guarded()).bit_length()

    @property
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a traced integer keeps its class")


class TracedFloat(_Traced, torch.SymFloat):
    """A float of the recorded run and the node that computes it."""

    def __init__(self, value: float, node: Node, recorder: Recorder) -> None:
        self._init(value, node, recorder)

    _guarded_truth = _guarded_truth
    locals().update(_arithmetic())

    def is_integer(self) -> bool:
        """As :meth:`float.is_integer`."""
        return float(self._guarded()).is_integer()

    @property
    def __class__(self) -> type:
        return float

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a traced float keeps its class")


class TracedSize(tuple[Any, ...]):
    """The shape of a recorded tensor: a tuple of :class:`TracedInt` with the methods of ``torch.Size``."""

    def numel(self) -> Any:
        """The product of the sizes."""
        total: Any = 1
        for size in self:
            total = total * size
        return total

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return TracedSize(item) if isinstance(index, slice) else item

    def __add__(self, other: Any) -> Any:
        return TracedSize(tuple(self) + tuple(other))

    def __radd__(self, other: Any) -> Any:
        return TracedSize(tuple(other) + tuple(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(bool(a == b) for a, b in zip(self, other, strict=True))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def __class__(self) -> type:
        return torch.Size

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a traced size keeps its class")
