"""What a precision rule is, and the table that rules stand in.

A table is immutable and joins with ``+``; where both sides know an op, the right side wins. Two
rows for one op inside one table are an error: nobody could say which one holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampfx.errors import PolicyError
from ampfx.ops import base_op, is_in_place


class OpClass(StrEnum):
    """What is known about an op in low precision."""

    ALLOW = "allow"  # low precision pays and is safe: always low
    DENY = "deny"  # needs float32
    INFER = "infer"  # computes in the widest of its inputs; free under the relaxed policy
    CLEAR = "clear"  # moves, compares or makes values; takes the dtype of its input


@dataclass(frozen=True)
class Rule:
    """One row: an op, its class and how its arguments take part.

    Args:
        op: canonical name, see :mod:`ampfx.ops`.
        cls: the class.
        reason: one clause, why.
        source: where the class comes from.
        keep: arguments that are never cast (running statistics, float32 affine parameters).
        follow: the argument whose dtype the op's result has; None: the widest input.
        moves: only moves or compares values. A cast may pass it in either direction without
            changing a bit of the result or, as its backward adds nothing up, of the gradient.
        sums_backward: its backward adds gradients up in the dtype of its input.
        dtype_arg: takes ``dtype=``, which saves a separate cast of the input.
        saturate: mask-like arguments whose cast to float16 must stop at the largest finite value.
        composite: runs low-precision products inside, whatever the dtype of its result. Run it
            inside ``torch.autocast``.
        fp16_hazard: why float16 (with its small range) breaks the op; it is denied there.
        params: names of the positional parameters, first ones first.
    """

    op: str
    cls: OpClass
    reason: str
    source: str
    keep: tuple[str, ...] = ()
    follow: str | None = None
    moves: bool = False
    sums_backward: bool = False
    dtype_arg: bool = False
    saturate: tuple[str, ...] = ()
    composite: bool = False
    fp16_hazard: str | None = None
    params: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """The row's special properties as words, for the printed table."""
        words = [name for name in ("moves", "sums_backward", "dtype_arg", "composite") if getattr(self, name)]
        if self.follow:
            words.append(f"follows {self.follow}")
        if self.keep:
            words.append("keeps " + ", ".join(self.keep))
        if self.saturate:
            words.append("saturates " + ", ".join(self.saturate))
        return "; ".join(words).replace("_", " ")


class RuleTable(Mapping[str, Rule]):
    """Rows by op name.

    Raises:
        PolicyError: two rows name one op.
    """

    def __init__(self, rows: Iterable[Rule] = (), *, name: str = "rules") -> None:
        self.name = name
        self._rows: dict[str, Rule] = {}
        for row in rows:
            if row.op in self._rows:
                raise PolicyError(
                    f"Two rows for op {row.op!r} in table {name!r} ({self._rows[row.op].cls} and {row.cls}). "
                    "Remove one, or put it into a second table and join both with '+': the later one wins."
                )
            self._rows[row.op] = row

    def __getitem__(self, op: str) -> Rule:
        return self._rows[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __add__(self, other: RuleTable) -> RuleTable:
        joined = {**self._rows, **other._rows}
        return RuleTable(joined.values(), name=f"{self.name} + {other.name}")

    def __repr__(self) -> str:
        return f"RuleTable({self.name!r}, {len(self)} ops)"

    def find(self, op: str) -> Rule | None:
        """The row of an op; an in-place form without a row of its own follows its first argument."""
        row = self._rows.get(op)
        if row is not None or not is_in_place(op):
            return row
        base = self._rows.get(base_op(op))
        return None if base is None else in_place_row(base)

    def nearest(self, op: str) -> list[str]:
        """Known names that look like ``op``, for error messages."""
        return difflib.get_close_matches(op, self._rows, n=3)


def in_place_row(base: Rule) -> Rule:
    """The row of an op's in-place form: it computes in the dtype of what it writes into."""
    clear = base.cls is OpClass.CLEAR
    return Rule(
        op=base.op + "_",
        cls=OpClass.CLEAR if clear else OpClass.INFER,
        reason="writes into its first argument, which keeps its dtype",
        source="torch.autocast has no entry for in-place and out= forms",
        follow="input",
        moves=base.moves,
        sums_backward=base.sums_backward,
        fp16_hazard=base.fp16_hazard,
        params=base.params or ("input",),
    )
