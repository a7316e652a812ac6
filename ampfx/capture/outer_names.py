"""What a forward reads from outside its module: globals, closures, defaults.

``forward`` may read ``TEMPERATURE`` of its file, a variable of the function that defined the class, or a list that
is a default argument. A graph bakes their values in, so they belong to the state that it was captured for.

1. Start at the forwards of the modules; follow every name that is a method of one of their classes, and
   every global that is a function of the user's.
2. Of each function note the globals that it names, its closure's cells and its defaults, where they hold
   plain values, tensors, lists, dicts or plain objects.
3. A later change of one of them, seen by identity or by value, is another situation.

Names of torch and of other large packages are not followed; environment variables and files are not seen.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ampfx.capture.containers import content, is_plain_object

_MAX_FUNCTIONS = 300
_NOT_FOLLOWED = frozenset({"torch", "numpy", "builtins", "math", "typing", "functools", "ampfx", "transformers"})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)


class OuterNames:
    """The values that the forwards of some classes read from outside.

    Args:
        classes: the classes of a model's modules that are the user's own.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._reads: list[Callable[[], Any]] = list(_reads(classes))
        self._values = self._now()

    def _now(self) -> list[Any]:
        return [read() for read in self._reads]

    def capture(self) -> None:
        """Take the values anew."""
        self._values = self._now()

    def matches(self) -> bool:
        """Whether every value is what it was."""
        return all(_same(old, new) for old, new in zip(self._values, self._now(), strict=True))


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, torch.Tensor):
        return False
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    return isinstance(old, _PLAIN) and bool(old == new)


def _reads(classes: Iterable[type]) -> Iterator[Callable[[], Any]]:
    methods: dict[str, list[Any]] = {}
    queue: list[Any] = []
    for cls in classes:
        for name, value in vars(cls).items():
            for function in _functions_of(value):
                methods.setdefault(name, []).append(function)
                if name == "forward":
                    queue.append(function)
    seen: set[Any] = set()
    noted: set[tuple[int, str]] = set()
    while queue and len(seen) < _MAX_FUNCTIONS:
        function = inspect.unwrap(queue.pop())
        if not isinstance(function, types.FunctionType) or function in seen or not _is_followed(function):
            continue
        seen.add(function)
        for cell in function.__closure__ or ():
            yield from _value_reads(_cell_reader(cell), queue)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from _value_reads(lambda value=default: value, queue)  # type: ignore[misc]
        for name in _names(function.__code__):
            queue += methods.get(name, ())
            place = (id(function.__globals__), name)
            if name in function.__globals__ and place not in noted:
                noted.add(place)
                yield from _value_reads(_dict_reader(function.__globals__, name), queue, _names(function.__code__))


def _value_reads(read: Callable[[], Any], queue: list[Any], names: Iterable[str] = ()) -> Iterator[Callable[[], Any]]:
    """What to compare of one outer value; functions go on the queue."""
    value = read()
    if isinstance(value, types.FunctionType):
        queue.append(value)
        yield read
    elif isinstance(value, _PLAIN):
        yield read
    elif isinstance(value, types.ModuleType):
        if _root(value.__name__) not in _NOT_FOLLOWED | sys.stdlib_module_names:
            yield from (_dict_reader(vars(value), name) for name in names if isinstance(vars(value).get(name), _PLAIN))
    elif isinstance(value, tuple):
        yield read
    elif isinstance(value, (list, dict, set)) or is_plain_object(value):
        yield read
        yield lambda: content(value)


def _names(code: types.CodeType) -> tuple[str, ...]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return tuple(dict.fromkeys(names))


def _functions_of(value: Any) -> list[Any]:
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    return [value] if isinstance(value, types.FunctionType) else []


def _is_followed(function: types.FunctionType) -> bool:
    return _root(function.__module__ or "") not in _NOT_FOLLOWED


def _root(name: str) -> str:
    return name.partition(".")[0]


def _dict_reader(values: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: values.get(name)


def _cell_reader(cell: types.CellType) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not bound yet
            return None

    return read
