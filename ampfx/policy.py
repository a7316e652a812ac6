"""What the user wants to run in which precision.

A :class:`Policy` is data: a name (``"autocast"``: never less precise than ``torch.autocast``;
``"relaxed"``: infer ops may go low between low nodes), lists of ops that change class, own rows, and
overrides for parts of a model (:mod:`ampfx.overrides`), of which later ones win.

1. Names are brought to canonical form when the policy is made, so that mistakes show there.
2. :meth:`Policy.apply_to` lays own rows and op lists over a device's rules.
3. :func:`check_matches` (:mod:`ampfx.policy_check`) complains about what matched nothing in a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ampfx.errors import PolicyError
from ampfx.near_misses import check_keys, did_you_mean
from ampfx.overrides import Override, op_name, path_matches
from ampfx.policy_check import check_matches
from ampfx.rule_table import OpClass, Rule, RuleTable

__all__ = [
    "POLICY_NAMES",
    "Override",
    "Policy",
    "check_matches",
    "op_name",
    "path_matches",
    "resolve_policy",
]

POLICY_NAMES: tuple[str, ...] = ("autocast", "relaxed")

# Rows for special ways of calling an op change class with the op.
_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "getitem": ("getitem_index",),
    "pad": ("pad_reflect", "pad_replicate", "pad_circular"),
    "interpolate": ("interpolate_area",),
}


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
                f"Unknown policy {self.name!r}.{did_you_mean(self.name, POLICY_NAMES)} Known: {known}."
            )
        if isinstance(self.overrides, Override):
            raise PolicyError("overrides= takes a list of overrides. Write overrides=(Override(...),).")
        if not isinstance(self.overrides, Iterable):
            raise PolicyError(f"overrides= takes a list of ampfx.Override objects, not {self.overrides!r}.")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for override in self.overrides:
            if not isinstance(override, Override):
                raise PolicyError(f"overrides= takes ampfx.Override objects, not {override!r}.")
        seen: dict[str, OpClass] = {}
        for cls in OpClass:
            ops = getattr(self, cls.value)
            if isinstance(ops, str):
                raise PolicyError(f"{cls.value}= takes a list of ops. Write {cls.value}=({ops!r},).")
            if not isinstance(ops, Iterable) or isinstance(ops, type):
                raise PolicyError(f"{cls.value}= takes a list of ops, not {ops!r}.")
            names = tuple(op_name(op) for op in ops)
            object.__setattr__(self, cls.value, names)
            for name in names:
                if name in seen:
                    raise PolicyError(
                        f"Op {name!r} stands twice in the policy: in {seen[name].value}= "
                        f"and in {cls.value}=. Remove one."
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
        check_keys(data, {item.name for item in fields(cls)}, "a policy")
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
    check_keys(data, {item.name for item in fields(Rule)}, "a rule")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    try:
        values["cls"] = OpClass(values["cls"])
        return Rule(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            f"A rule needs op, cls (allow, deny, infer, clear), reason and source: {error}."
        ) from error
