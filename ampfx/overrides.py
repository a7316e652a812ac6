"""Overrides: a dtype for the nodes that some selectors select.

Nodes are selected by op, module path, module type, node name or a callable. Several selectors in one
override must all hold. Names are brought to canonical form when the override is made, so that
mistakes show there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node

from ampfx.dtypes import LOW_DTYPES, long_name
from ampfx.errors import PolicyError
from ampfx.near_misses import check_keys, did_you_mean
from ampfx.ops import base_op, canonical_op

Predicate = Callable[[Node], "bool | torch.dtype | None"]

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_SHORT_PATHS: Mapping[str, str] = {
    "F.": "torch.nn.functional.",
    "nn.": "torch.nn.",
    "Tensor.": "torch.Tensor.",
}


def op_name(op: str | Callable[..., Any]) -> str:
    """The canonical name for an op however the user names it: ``F.relu``, ``"torch.add"``, ``"add"``.

    Raises:
        PolicyError: a dotted torch name that does not exist.
    """
    if not isinstance(op, str):
        if not callable(op):
            raise PolicyError(f"An op is named by a string or a function, not by {op!r}.")
        return canonical_op(_no_module(op))
    if op.startswith("aten::"):
        return canonical_op(op.removeprefix("aten::").partition(".")[0])
    path = op
    for short, full in _SHORT_PATHS.items():
        if op.startswith(short):
            path = full + op.removeprefix(short)
    if not path.startswith("torch."):
        return canonical_op(op)
    value: Any = torch
    for part in path.split(".")[1:]:
        if not hasattr(value, part):
            near = did_you_mean(part, dir(value))
            raise PolicyError(f"Op {op!r} does not exist: {value.__name__} has no {part!r}.{near}")
        value = getattr(value, part)
    return canonical_op(_no_module(value))


def _no_module(op: Any) -> Any:
    kind = op if isinstance(op, type) else type(op)
    if issubclass(kind, torch.nn.Module):
        name = kind.__name__
        raise PolicyError(f"{name} is a module type, not an op. Write Override(module_type={name}).")
    return op


@dataclass(frozen=True, kw_only=True)
class Override:
    """A dtype for the nodes that all given selectors select.

    Args:
        op: name of an op, its function, or a glob on canonical names (``"linalg_*"``).
        module: glob on module paths, matched part by part between the dots (``"layers.*.attn"``;
            ``"**"`` stands for any number of parts, ``""`` is the model). Selects it and everything below.
        module_type: class of a module, or its name; selects the nodes of such modules and below.
        node: glob on node names.
        predicate: callable on the node; True selects, a dtype selects and says which.
        dtype: ``torch.float32``, the low dtype, or their names; ``"low"`` is the conversion's low dtype.
        reason: for the report.

    Raises:
        PolicyError: no selector, a selector of the wrong type, or a dtype that is neither float32 nor low.
    """

    op: str | Callable[..., Any] | None = None
    module: str | None = None
    module_type: type | str | None = None
    node: str | None = None
    predicate: Predicate | None = None
    dtype: torch.dtype | str = torch.float32
    reason: str = ""

    def __post_init__(self) -> None:
        if all(value is None for _, value in self.selectors()):
            raise PolicyError(
                "An Override selects nothing. Give at least one of op=, module=, module_type=, node=, "
                "predicate=."
            )
        self._check_types()
        if self.op is not None and not (isinstance(self.op, str) and _is_glob(self.op)):
            object.__setattr__(self, "op", op_name(self.op))
        object.__setattr__(self, "dtype", _parse_dtype(self.dtype))

    def _check_types(self) -> None:
        for name in ("op", "module_type", "node"):
            if getattr(self, name) == "":
                raise PolicyError(f"An override's {name}= is empty and selects nothing. Leave it out.")
        for name in ("module", "node"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise PolicyError(
                    f"An override's {name}= is a glob such as 'layers.*', "
                    f"not {_shown(value)}.{_module_hint(value)}"
                )
        kind = self.module_type
        if kind is not None and not isinstance(kind, type | str):
            raise PolicyError(
                "An override's module_type= is a class of modules or its name, "
                f"not {_shown(kind)}.{_module_hint(kind)}"
            )
        if isinstance(kind, type) and not issubclass(kind, torch.nn.Module):
            raise PolicyError(f"An override's module_type= is a class of modules, which {kind.__name__} is not.")
        if self.predicate is not None:
            _check_predicate(self.predicate)
        if not isinstance(self.reason, str):
            raise PolicyError(f"An override's reason= is a string, not {self.reason!r}.")

    def matches(self, node: Node, low: torch.dtype | None = None) -> bool:
        """Whether all selectors select the node. ``low`` is checked against the asked dtype if given."""
        if low is not None:
            self.resolve_dtype(low)
        return self._selects(node) and self._ask(node) not in (False, None)

    def dtype_for(self, node: Node, low: torch.dtype) -> torch.dtype | None:
        """The dtype that this override asks for a node, None if it does not select the node.

        Raises:
            PolicyError: the dtype cannot be had in a conversion to ``low``.
        """
        if not self._selects(node):
            return None
        answer = self._ask(node)
        if answer is None or answer is False:
            return None
        if isinstance(answer, torch.dtype):
            return _possible(answer, low, self)
        return self.resolve_dtype(low)

    def resolve_dtype(self, low: torch.dtype) -> torch.dtype:
        """The asked dtype in a conversion to ``low``.

        Raises:
            PolicyError: it is the other low dtype.
        """
        return low if isinstance(self.dtype, str) else _possible(self.dtype, low, self)

    def to_dict(self) -> dict[str, Any]:
        """The override as plain data.

        Raises:
            PolicyError: it has a predicate, which is code.
        """
        if self.predicate is not None:
            raise PolicyError(
                f"{self} has a predicate: code cannot be written to a file. Select by op, module or node."
            )
        data = {name: value for name, value in self.selectors() if value is not None}
        if isinstance(self.module_type, type):
            data["module_type"] = f"{self.module_type.__module__}.{self.module_type.__qualname__}"
        data["dtype"] = self.dtype if isinstance(self.dtype, str) else long_name(self.dtype)
        if self.reason:
            data["reason"] = self.reason
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Override:
        """The override that :meth:`to_dict` wrote."""
        check_keys(data, {item.name for item in fields(cls)} - {"predicate"}, "an override")
        return cls(**data)

    def __str__(self) -> str:
        parts = []
        for name, value in self.selectors():
            if value is None:
                continue
            text = value.__name__ if isinstance(value, type) else value
            if name == "predicate":
                text = getattr(value, "__name__", "callable")
            parts.append(f"{name}={text!r}" if isinstance(text, str) else f"{name}={text}")
        dtype = self.dtype if isinstance(self.dtype, str) else long_name(self.dtype)
        return f"Override({', '.join(parts)}, dtype={dtype})"

    def selectors(self) -> tuple[tuple[str, Any], ...]:
        """Name and value of each selector, those not given included."""
        return (
            ("op", self.op),
            ("module", self.module),
            ("module_type", self.module_type),
            ("node", self.node),
            ("predicate", self.predicate),
        )

    def _selects(self, node: Node) -> bool:
        if node.op not in ("call_function", "call_method", "call_module"):
            return False  # inputs and parameters keep their dtype
        if self.node is not None and not fnmatchcase(node.name, self.node):
            return False
        if self.op is not None and not self._selects_op(node):
            return False
        if self.module is not None and not any(
            path_matches(path, self.module) for path in module_paths(node)
        ):
            return False
        if self.module_type is None:
            return True
        return any(_type_matches(kind, self.module_type) for kind in node.meta.get("module_types", ()))

    def _selects_op(self, node: Node) -> bool:
        assert isinstance(self.op, str)
        op = str(node.meta.get("op") or canonical_op(node))
        return fnmatchcase(op, self.op) or fnmatchcase(base_op(op), self.op)

    def _ask(self, node: Node) -> bool | torch.dtype | None:
        return True if self.predicate is None else self.predicate(node)


def _shown(value: object) -> str:
    return f"an instance of {type(value).__name__}" if isinstance(value, torch.nn.Module) else repr(value)


def _module_hint(value: object) -> str:
    kind = type(value) if isinstance(value, torch.nn.Module) else value
    if not isinstance(kind, type):
        return ""
    return f" All modules of its type: module_type={kind.__name__}. One module: module= and its path."


def _check_predicate(predicate: object) -> None:
    if not callable(predicate):
        raise PolicyError(f"An override's predicate= is a function of a node, not {predicate!r}.")
    try:
        signature = inspect.signature(predicate)
    except (TypeError, ValueError):
        return  # builtins have none: a call will show
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(predicate, "__name__", "callable")
        raise PolicyError(
            f"An override's predicate= is called with one node, which {name}{signature} does not take: {error}."
        ) from None


def path_matches(path: str, pattern: str) -> bool:
    """Whether a glob matches a module path, part by part between the dots."""
    return _parts_match(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _parts_match(parts: list[str], globs: list[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_parts_match(parts[start:], globs[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _parts_match(parts[1:], globs[1:])


def module_paths(node: Node) -> tuple[str, ...]:
    """The module that a node belongs to and all around it, the root (``""``) included."""
    stack = node.meta.get("module_stack")
    path = str(node.meta.get("module_path", ""))
    parts = path.split(".") if path else []
    around = tuple(".".join(parts[:count]) for count in range(len(parts) + 1))
    return around if not stack else tuple(dict.fromkeys((*stack, *around)))


def _type_matches(kind: type, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return issubclass(kind, wanted)
    for base in kind.__mro__:
        if wanted in (base.__name__, f"{base.__module__}.{base.__qualname__}"):
            return True
        # torch.nn.LayerNorm lives in torch.nn.modules.normalization
        if (
            wanted.startswith("torch.nn.")
            and getattr(torch.nn, wanted.removeprefix("torch.nn."), None) is base
        ):
            return True
    return False


def _is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _parse_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if dtype == "low":
        return dtype
    parsed = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if parsed is torch.float32 or parsed in LOW_DTYPES:
        return parsed
    shown = (
        dtype
        if isinstance(dtype, str)
        else long_name(dtype)
        if isinstance(dtype, torch.dtype)
        else repr(dtype)
    )
    raise PolicyError(
        f"An override asks for dtype {shown}, but a node runs either in float32 or in the low dtype. "
        'Give torch.float32, torch.float16, torch.bfloat16 or "low".'
    )


def _possible(dtype: torch.dtype, low: torch.dtype, override: Override) -> torch.dtype:
    if dtype in (torch.float32, low):
        return dtype
    raise PolicyError(
        f"{override} asks for {long_name(dtype)} in a conversion to {long_name(low)}: "
        f"only {long_name(low)} and float32 are possible. "
        'Write dtype="low" to mean the low dtype of any conversion.'
    )
