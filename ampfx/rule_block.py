"""How the row files write rows: a block of ops that share class, reason and source.

A block's names are words; ``name*`` marks an op that has an in-place form with a row of its own.
What belongs to the op and not to the block (its parameters, what float16 does to it) comes from
:mod:`ampfx.rule_facts`, so that it holds on every device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ampfx.rule_facts import DTYPE_ARG, FP16_HAZARDS, PARAMS
from ampfx.rule_table import OpClass, Rule, in_place_row

CUDA_LIST = "torch.autocast list, CUDA"
CPU_LIST = "torch.autocast list, CPU"
BOTH_LISTS = "torch.autocast lists, CUDA and CPU"
PROMOTION = "type promotion; in no autocast list"
CLEAR_LIST = "TensorFlow's clear list; in no autocast list"
KERNELS = "kernels of torch 2.13"


def block(
    cls: OpClass,
    ops: str,
    reason: str,
    source: str,
    *,
    keep: tuple[str, ...] = (),
    follow: str | None = None,
    moves: bool = False,
    sums_backward: bool = False,
    saturate: tuple[str, ...] = (),
    composite: bool = False,
) -> list[Rule]:
    """Rows for all ops of a block, in-place forms included."""
    rows: list[Rule] = []
    for word in ops.split():
        op = word.removesuffix("*")
        row = Rule(
            op=op,
            cls=cls,
            reason=reason,
            source=source,
            keep=keep,
            follow=follow,
            moves=moves,
            sums_backward=sums_backward,
            dtype_arg=op in DTYPE_ARG,
            saturate=saturate,
            composite=composite,
            fp16_hazard=FP16_HAZARDS.get(op),
            params=PARAMS.get(op, ("input",) if follow == "input" else ()),
        )
        rows.append(row)
        if word.endswith("*"):
            rows.append(in_place_row(row))
    return rows


def in_place(cls: OpClass, ops: str, reason: str, source: str) -> list[Rule]:
    """Rows for in-place ops that no row outside stands for (``copy_``), or that need another class."""
    return [replace(row, op=row.op + "_") for row in block(cls, ops, reason, source, follow="input")]


def flatten(*blocks: Iterable[Rule]) -> tuple[Rule, ...]:
    """All rows of some blocks in order."""
    return tuple(row for rows in blocks for row in rows)
