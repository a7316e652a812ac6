"""Makes cast nodes, each once per value version, dtype and region.

A value that nothing writes into is cast right behind its producer, where the cast serves every reader of
its region. One that is written into, or that is read in another region (under no_grad, in a checkpoint),
is cast right before its first reader there, and the cast serves readers up to the next write.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ampfx.analysis import facts_of, recorded_value
from ampfx.decisions import Decision
from ampfx.dtypes import Region, TensorSpec, long_name
from ampfx.graph_utils import region_of
from ampfx.rewriting import current_dtype, with_dtype
from ampfx.runtime import cast_saturated

_Key = tuple[Node, torch.dtype, bool, int, int, bool]
_PLACE = ("module_path", "module_types", "module_stack", "source")


def _place_of(value: Node) -> Region:
    """The region that a node right behind ``value`` would run in.

    A parameter belongs to no region, but its node stands in the one that reads it first.
    """
    if value.op != "get_attr":
        return facts_of(value).region
    node = value
    while node.op == "get_attr" or node.meta.get("cast"):
        node = node.next
    return region_of(node)


class CastMaker:
    """The casts of one graph while it is walked from top to bottom."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.changed = False
        self._casts: dict[_Key, Node] = {}
        self._cast_values: set[tuple[Node, torch.dtype]] = set()
        self._versions: dict[int, int] = {}
        self._last_placeholder = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)

    def passed(self, node: Node) -> None:
        """Note that the walk has passed a node: what it writes into is another value from here on."""
        for written in facts_of(node).writes:
            group = facts_of(written).group
            self._versions[group] = self._versions.get(group, 0) + 1

    def has_cast(self, value: Node, dtype: torch.dtype) -> bool:
        """Whether any cast of this value to this dtype exists."""
        return (value, dtype) in self._cast_values

    def as_dtype(self, value: Node, dtype: torch.dtype, reader: Node, saturate: bool = False) -> Any:
        """What a reader reads to have this value in this dtype: the value itself or a cast."""
        facts = facts_of(value)
        if not facts.managed:
            return value
        if facts.tuple_valued:
            return self._parts(value, dtype, reader)
        if current_dtype(value) == dtype:
            return value
        region = facts_of(reader).region if reader.op != "output" else Region()
        key = self._key(value, dtype, region, saturate and dtype == torch.float16)
        known = self._casts.get(key)
        if known is None:
            place = _place_of(value)
            same = (place.grad, place.opaque) == (region.grad, region.opaque)
            after = value if not facts.group and same else None
            known = self._casts[key] = self.make(value, dtype, reader, region, after=after, saturate=key[-1])
            self._cast_values.add((value, dtype))
        return known

    def remember(self, cast: Node) -> None:
        """Take a cast of an earlier run as known."""
        value, dtype = cast.args[0], cast.args[1]
        if isinstance(value, Node) and isinstance(dtype, torch.dtype) and not cast.meta.get("entry"):
            key = self._key(value, dtype, facts_of(cast).region, cast.target is cast_saturated)
            self._casts.setdefault(key, cast)
            self._cast_values.add((value, dtype))

    def make(
        self,
        value: Node,
        dtype: torch.dtype,
        reader: Node,
        region: Region,
        *,
        after: Node | None = None,
        saturate: bool = False,
    ) -> Node:
        """A new cast behind ``after``, or before the reader."""
        place = self._last_placeholder if after is not None and after.op == "placeholder" else after
        name = f"{value.name}_{'high' if dtype == torch.float32 else 'low'}"
        with self.graph.inserting_before(reader) if place is None else self.graph.inserting_after(place):
            if saturate:
                cast = self.graph.create_node("call_function", cast_saturated, (value, dtype), name=name)
            else:
                cast = self.graph.create_node("call_method", "to", (value, dtype), name=name)
        # A parameter belongs to no line of the program; its cast belongs to the reader's.
        owner = value if place is not None and value.op == "call_function" else reader
        reason = f"{reader.name} reads {value.name} in {long_name(dtype)}"
        cast.meta = {
            "op": "to",
            "cast": True,
            "val": with_dtype(recorded_value(value), dtype),
            "val_float32": recorded_value(value),
            "region": region,
            "facts": dataclasses.replace(
                facts_of(value), op="to", base="to", writes=(), in_place=False, group=0, region=region
            ),
            "decision": Decision(dtype, "cast", reason, cause=reader.name, chain=(cast.name, reader.name)),
            **{key: owner.meta[key] for key in _PLACE if key in owner.meta},
        }
        self.changed = True
        return cast

    def _key(self, value: Node, dtype: torch.dtype, region: Region, saturate: bool) -> _Key:
        version = self._versions.get(facts_of(value).group, 0)
        return (value, dtype, region.grad, region.opaque, version, saturate)

    def _parts(self, value: Node, dtype: torch.dtype, reader: Node) -> Any:
        """A tuple that an op reads whole, with its managed parts cast."""
        noted, recorded = value.meta.get("val"), recorded_value(value)
        assert isinstance(noted, tuple | list)
        wrong = [
            isinstance(now, TensorSpec) and before.dtype == torch.float32 and now.dtype != dtype
            for now, before in zip(noted, recorded, strict=True)
        ]
        if not any(wrong):
            return value
        parts: list[Any] = []
        for index, bad in enumerate(wrong):
            with self.graph.inserting_before(reader):
                part = self.graph.call_function(operator.getitem, (value, index))
            before = recorded[index]
            managed = isinstance(before, TensorSpec) and before.dtype == torch.float32
            part.meta = {**value.meta, "op": "getitem", "val": noted[index], "val_float32": before}
            part.meta["facts"] = dataclasses.replace(
                facts_of(value), op="getitem", base="getitem", tuple_valued=False, managed=managed, writes=()
            )
            parts.append(self.as_dtype(part, dtype, reader) if bad else part)
        self.changed = True
        return tuple(parts)
