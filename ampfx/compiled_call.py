"""What of a call and of a module ``torch.compile`` must check before it takes over a captured graph.

Dynamo traces the converted module's own code: what is compared here with plain Python becomes a guard of the
compiled program, so that a later call that differs is looked at anew.

1. The arguments have the structure of the capture, or can be brought into it by the names of the parameters;
   constants (flags, ``None``) are equal.
2. The modules are in the state of the capture when the program is traced; plain attributes that a user
   changes (``training``, flags, probabilities) are compared one by one and so guarded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampfx.capture.structure import Structure, constant_of

_SCALARS = (bool, int, float, str, type(None))
# Of torch's own layers, what people change; the rest follows from their parameters.
_CHANGED_IN_LAYERS = frozenset(["training", "p", "dropout", "eps", "momentum", "inplace", "negative_slope"])


def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's positional parameters, without ``self``."""
    try:
        found = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return ()
    names = tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return names[1:] if names[:1] == ("self",) else names


def leaves_of(
    structure: Structure, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any] | None:
    """The varying leaves of a call in the order of the capture; None if it is another kind of call.

    Args:
        structure: of the captured ``(args, kwargs)``.
        names: of the positional parameters.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """
    positional, keywords = structure.children
    given, named = list(args), dict(kwargs)
    while len(given) < len(positional.children):
        name = names[len(given)] if len(given) < len(names) else None
        if name is None or name not in named:
            return None
        given.append(named.pop(name))
    while len(given) > len(positional.children):
        if len(given) > len(names):
            return None
        named[names[len(given) - 1]] = given.pop()
    if len(named) != len(keywords.keys):
        return None
    leaves: list[Any] = []
    for part, value in zip(positional.children, given, strict=True):
        if not _take(part, value, leaves):
            return None
    for key, part in zip(keywords.keys, keywords.children, strict=True):
        if key not in named or not _take(part, named[key], leaves):
            return None
    return leaves


def _take(part: Structure, value: Any, leaves: list[Any]) -> bool:
    """Append the leaves of ``value``; False if it is not like the captured one."""
    kind = part.kind
    if kind is None:
        leaves.append(value)
        return isinstance(value, torch.Tensor) or type(value) in (int, float)
    if isinstance(value, torch.Tensor) or type(value) is not kind:
        return False
    if issubclass(kind, dict):
        if list(value.keys()) != list(part.keys):
            return False
        items = [value[key] for key in part.keys]
    elif issubclass(kind, (list, tuple)):
        items = list(value)
    elif part.keys:
        items = [getattr(value, key) for key in part.keys if key != "__dict__"]
    else:
        expected = constant_of(part)
        return value is expected or bool(value == expected)
    if len(items) != len(part.children):
        return False
    return all(_take(child, item, leaves) for child, item in zip(part.children, items, strict=True))


def watched_attributes(root: nn.Module, ignored: tuple[tuple[str, str], ...]) -> tuple[tuple[Any, str, Any], ...]:
    """Plain attributes of modules that a forward may read, with their values."""
    found = []
    for path, module in root.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        for name, value in vars(module).items():
            if name.startswith("_") or (path, name) in ignored or type(value) not in _SCALARS:
                continue
            if not of_torch or name in _CHANGED_IN_LAYERS:
                found.append((module, name, value))
    return tuple(found)


def attributes_hold(watched: tuple[tuple[Any, str, Any], ...]) -> bool:
    """Whether plain attributes are as they were; in a trace, each comparison is a guard."""
    return all(getattr(module, name) == value for module, name, value in watched)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def state_holds(entry: Any) -> bool:
    """Whether the modules are in the state of the capture; asked once, while the program is traced."""
    return bool(entry.host.matches())
