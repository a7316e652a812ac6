"""What the user wants to run in which precision.

A :class:`Policy` is data: a name (``"autocast"``: never less precise than ``torch.autocast``;
``"relaxed"``: infer ops may go low between low nodes), lists of ops that change class, own rows, and
overrides for parts of a model. An :class:`Override` selects nodes by op, module path, module type,
node name or a callable; several selectors in one override must all hold; later overrides win.

1. Names are brought to canonical form when the policy is made, so that mistakes show there.
2. :meth:`Policy.apply_to` lays op lists and own rows over a device's rules.
3. :meth:`Override.dtype_for` answers for a node.
4. :func:`check_matches` complains about everything in the policy that matched nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node

from ampfx.dtypes import LOW_DTYPES, long_name
from ampfx.errors import PolicyError
from ampfx.ops import base_op, canonical_op
from ampfx.rule_table import OpClass, Rule, RuleTable

POLICY_NAMES: tuple[str, ...] = ("autocast", "relaxed")
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
# Rows for special ways of calling an op change class with the op.
_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "getitem": ("getitem_index",),
    "pad": ("pad_reflect", "pad_replicate", "pad_circular"),
    "interpolate": ("interpolate_area",),
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
        return canonical_op(op)
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
            near = _near(part, dir(value))
            raise PolicyError(f"Op {op!r} does not exist: {value.__name__} has no {part!r}.{near}")
        value = getattr(value, part)
    return canonical_op(value)


@dataclass(frozen=True, kw_only=True)
class Override:
    """A dtype for the nodes that all given selectors select.

    Args:
        op: name of an op, its function, or a glob on canonical names (``"linalg_*"``).
        module: glob on module paths, matched part by part between the dots (``"layers.*.attn"``;
            ``"**"`` stands for any number of parts). Selects the module and everything below it.
        module_type: class of a module, or its name; selects the nodes of such modules and below.
        node: glob on node names.
        predicate: callable on the node; True selects, a dtype selects and says which.
        dtype: ``torch.float32``, the low dtype, or their names; ``"low"`` is the conversion's low dtype.
        reason: for the report.

    Raises:
        PolicyError: no selector, or a dtype that is neither float32 nor low.
    """

    op: str | Callable[..., Any] | None = None
    module: str | None = None
    module_type: type | str | None = None
    node: str | None = None
    predicate: Predicate | None = None
    dtype: torch.dtype | str = torch.float32
    reason: str = ""

    def __post_init__(self) -> None:
        if all(value is None for _, value in self._selectors()):
            raise PolicyError(
                "An Override selects nothing. Give at least one of op=, module=, module_type=, node=, predicate=."
            )
        if self.op is not None and not (isinstance(self.op, str) and _is_glob(self.op)):
            object.__setattr__(self, "op", op_name(self.op))
        object.__setattr__(self, "dtype", _parse_dtype(self.dtype, self))

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
        data = {name: value for name, value in self._selectors() if value is not None}
        if isinstance(self.module_type, type):
            data["module_type"] = f"{self.module_type.__module__}.{self.module_type.__qualname__}"
        data["dtype"] = self.dtype if isinstance(self.dtype, str) else long_name(self.dtype)
        if self.reason:
            data["reason"] = self.reason
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Override:
        """The override that :meth:`to_dict` wrote."""
        _check_keys(data, {item.name for item in fields(cls)} - {"predicate"}, "an override")
        return cls(**data)

    def __str__(self) -> str:
        parts = []
        for name, value in self._selectors():
            if value is None:
                continue
            text = value.__name__ if isinstance(value, type) else value
            if name == "predicate":
                text = getattr(value, "__name__", "callable")
            parts.append(f"{name}={text!r}" if isinstance(text, str) else f"{name}={text}")
        dtype = self.dtype if isinstance(self.dtype, str) else long_name(self.dtype)
        return f"Override({', '.join(parts)}, dtype={dtype})"

    def _selectors(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("op", self.op),
            ("module", self.module),
            ("module_type", self.module_type),
            ("node", self.node),
            ("predicate", self.predicate),
        )

    def _selects(self, node: Node) -> bool:
        if self.node is not None and not fnmatchcase(node.name, self.node):
            return False
        if self.op is not None and not self._selects_op(node):
            return False
        if self.module is not None and not any(
            path_matches(path, self.module) for path in _module_paths(node)
        ):
            return False
        if self.module_type is None:
            return True
        return any(_type_matches(kind, self.module_type) for kind in node.meta.get("module_types", ()))

    def _selects_op(self, node: Node) -> bool:
        assert isinstance(self.op, str)
        op = str(node.meta.get("op") or canonical_op(node))
        # A glob must not select placeholders, which have no op.
        return bool(op) and (fnmatchcase(op, self.op) or fnmatchcase(base_op(op), self.op))

    def _ask(self, node: Node) -> bool | torch.dtype | None:
        return True if self.predicate is None else self.predicate(node)


@dataclass(frozen=True)
class Policy:
    """The user's choices, see the module's docstring.

    Args:
        name: ``"autocast"`` or ``"relaxed"``.
        overrides: later ones win.
        allow: ops that become allow; also ``deny``, ``infer`` and ``clear``.
        rules: rows of one's own, over those of the device and under the op lists.

    Raises:
        PolicyError: an unknown name, or an op in two lists.
    """

    name: str = "autocast"
    overrides: tuple[Override, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    clear: tuple[str, ...] = ()
    rules: RuleTable = field(default_factory=RuleTable, hash=False)

    def __post_init__(self) -> None:
        if self.name not in POLICY_NAMES:
            known = ", ".join(repr(name) for name in POLICY_NAMES)
            raise PolicyError(
                f"Unknown policy {self.name!r}.{_near(self.name, POLICY_NAMES)} Known: {known}."
            )
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for override in self.overrides:
            if not isinstance(override, Override):
                raise PolicyError(f"overrides= takes ampfx.Override objects, not {override!r}.")
        seen: dict[str, OpClass] = {}
        for cls in OpClass:
            ops = getattr(self, cls.value)
            if isinstance(ops, str):
                raise PolicyError(f"{cls.value}= takes a list of ops. Write {cls.value}=({ops!r},).")
            names = tuple(op_name(op) for op in ops)
            object.__setattr__(self, cls.value, names)
            for name in names:
                if name in seen:
                    raise PolicyError(
                        f"Op {name!r} stands twice in the policy: in {seen[name].value}= and in {cls.value}=. Remove one."
                    )
                seen[name] = cls

    @classmethod
    def named(cls, name: str) -> Policy:
        """The policy of a name, without overrides."""
        return cls(name=name)

    def apply_to(self, table: RuleTable) -> RuleTable:
        """A device's rules with this policy's own rows and op lists on top."""
        joined = table + self.rules if len(self.rules) else table
        changed: dict[str, Rule] = {}
        for cls in OpClass:
            for name in getattr(self, cls.value):
                for op in (name, *_VARIANTS.get(name, ())):
                    changed[op] = _reclassified(joined.find(op), op, cls)
        return joined + RuleTable(changed.values(), name="policy") if changed else joined

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data, for files.

        Raises:
            PolicyError: an override has a predicate.
        """
        data: dict[str, Any] = {"name": self.name}
        if self.overrides:
            data["overrides"] = [override.to_dict() for override in self.overrides]
        for cls in OpClass:
            if getattr(self, cls.value):
                data[cls.value] = list(getattr(self, cls.value))
        if len(self.rules):
            data["rules"] = [_rule_to_dict(rule) for rule in self.rules.values()]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """The policy that :meth:`to_dict` wrote.

        Raises:
            PolicyError: the data has keys that no policy has.
        """
        _check_keys(data, {item.name for item in fields(cls)}, "a policy")
        lists = {item.value: tuple(data.get(item.value, ())) for item in OpClass}
        return cls(
            name=data.get("name", "autocast"),
            overrides=tuple(Override.from_dict(item) for item in data.get("overrides", ())),
            rules=RuleTable((_rule_from_dict(item) for item in data.get("rules", ())), name="policy rules"),
            **lists,
        )


def resolve_policy(policy: str | Policy | None) -> Policy:
    """A policy from what the user gave: an object, a name, or None for the default.

    Raises:
        PolicyError: something else, or an unknown name.
    """
    if policy is None:
        return Policy()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy.named(policy)
    raise PolicyError(f"policy= takes a name or an ampfx.Policy, not {type(policy).__name__}.")


def check_matches(
    policy: Policy,
    nodes: Iterable[Node],
    known_ops: Collection[str] = (),
    module_paths: Collection[str] = (),
    module_types: Collection[type] = (),
    low: torch.dtype | None = None,
) -> list[str]:
    """Complain about what in a policy matched nothing.

    Args:
        policy: the policy.
        nodes: all nodes of the graph, or of all graphs of a model.
        known_ops: ops with a rule.
        module_paths: paths of the model's modules, for near misses.
        module_types: classes of the model's modules, for near misses.
        low: the low dtype of the conversion, to check the dtypes that overrides ask for.

    Returns:
        Warnings: ops in the policy's lists that exist, but not in this model.

    Raises:
        PolicyError: an override that selects no node, or an op that nobody knows.
    """
    calls = [node for node in nodes if node.op in ("call_function", "call_method", "call_module")]
    present = {base_op(str(node.meta.get("op") or canonical_op(node))) for node in calls}
    for index, override in enumerate(policy.overrides):
        if low is not None:
            override.resolve_dtype(low)
        if not any(override.matches(node) for node in calls):
            paths = set(module_paths) | {path for node in calls for path in _module_paths(node)}
            types = {*module_types, *(kind for node in calls for kind in node.meta.get("module_types", ()))}
            hint = _why_nothing(override, calls, present | set(known_ops), paths, types)
            raise PolicyError(
                f"{override} (number {index + 1} in the policy) selects no node of this model.{hint}"
            )
    warnings: list[str] = []
    for cls in OpClass:
        for op in getattr(policy, cls.value):
            if base_op(op) in present:
                continue
            if op not in known_ops and base_op(op) not in known_ops:
                near = _near(op, present | set(known_ops))
                raise PolicyError(
                    f"The policy's {cls.value}= names the op {op!r}, which is neither known nor in this model.{near}"
                )
            warnings.append(f"The policy's {cls.value}= names {op!r}, but this model does not use it.")
    return warnings


def path_matches(path: str, pattern: str) -> bool:
    """Whether a glob matches a module path, part by part between the dots."""
    return _parts_match(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _parts_match(parts: list[str], globs: list[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_parts_match(parts[start:], globs[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _parts_match(parts[1:], globs[1:])


def _module_paths(node: Node) -> tuple[str, ...]:
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


def _why_nothing(
    override: Override,
    nodes: list[Node],
    ops: Collection[str],
    paths: Collection[str],
    types: Collection[type],
) -> str:
    """Which selector is at fault, with near misses."""
    alone = {
        name: any(Override(**{name: value}).matches(node) for node in nodes)
        for name, value in override._selectors()
        if value is not None
    }
    if len(alone) > 1 and all(alone.values()):
        return f" Each of {', '.join(alone)} selects nodes, but no node has them all."
    if alone.get("op") is False:
        return f" No node has the op {override.op!r}.{_near(str(override.op), ops)}"
    if alone.get("module") is False:
        assert override.module is not None
        near = _near(override.module, paths, also=_same_end(override.module, paths))
        return f" No operation runs inside a module {override.module!r}.{near} Parts are matched from the root; '**' skips parts."
    if alone.get("module_type") is False:
        wanted = override.module_type
        name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        names = sorted({kind.__name__ for kind in types})
        return f" No operation runs inside a module of type {name!r}.{_near(name, names)}"
    if alone.get("node") is False:
        return (
            f" No node is named {override.node!r}.{_near(str(override.node), [node.name for node in nodes])}"
        )
    return " The predicate was false for every node."


def _same_end(pattern: str, paths: Collection[str]) -> list[str]:
    last = pattern.rpartition(".")[2]
    return sorted(path for path in paths if path and fnmatchcase(path.rpartition(".")[2], last))[:3]


def _near(name: str, known: Iterable[str], also: list[str] | None = None) -> str:
    close = difflib.get_close_matches(name, sorted(set(known) - {""}), n=3)
    names = list(dict.fromkeys([*(also or ()), *close]))[:3]
    return f" Did you mean {' or '.join(repr(item) for item in names)}?" if names else ""


def _is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _parse_dtype(dtype: torch.dtype | str, override: Override) -> torch.dtype | str:
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
        f'only {long_name(low)} and float32 are possible. Write dtype="low" to mean the low dtype of any conversion.'
    )


def _reclassified(row: Rule | None, op: str, cls: OpClass) -> Rule:
    reason, source = f"the policy puts it under {cls.value}", "policy"
    if row is None:
        return Rule(op, cls, reason, source)
    # Who allows an op by name takes its float16 hazard upon himself. Only a clear op may move casts.
    hazard = row.fp16_hazard if cls is not OpClass.ALLOW else None
    moves = row.moves and cls is OpClass.CLEAR
    return replace(row, op=op, cls=cls, reason=reason, source=source, moves=moves, fp16_hazard=hazard)


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    default = Rule("", OpClass.INFER, "", "")
    data = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(rule).items()
        if key in ("op", "cls", "reason", "source") or value != getattr(default, key)
    }
    data["cls"] = rule.cls.value
    return data


def _rule_from_dict(data: Mapping[str, Any]) -> Rule:
    _check_keys(data, {item.name for item in fields(Rule)}, "a rule")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    try:
        return Rule(**{**values, "cls": OpClass(values["cls"])})
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            f"A rule needs op, cls (allow, deny, infer, clear), reason and source: {error}."
        ) from error


def _check_keys(data: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for key in data:
        if key not in known:
            raise PolicyError(
                f"{key!r} is no setting of {what}.{_near(key, known)} Known: {', '.join(sorted(known))}."
            )
