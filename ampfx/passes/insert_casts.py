"""The pass that writes the decisions into the graph.

1. Walk the nodes in order. What a node reads is compared with what it needs (:mod:`ampfx.argument_needs`).
2. A cast is made once per value version, dtype and region. A value that nothing writes into is cast right
   behind its producer; one that is written into, or that is read in another region, right before its
   first reader there.
3. Where the op itself can be told the dtype (``dtype=``, ``zeros_like``), no cast is made.
4. Where a written storage has another dtype than the op that makes it, one cast begins the storage, and
   every alias follows it.
5. Outputs leave in the dtype that the original gives.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampfx.analysis import analyse_graph, facts_of, is_tuple_read, recorded_value
from ampfx.argument_needs import (
    NATIVE_OPS,
    Need,
    argument_needs,
    argument_nodes,
    gives_dtype,
    map_argument,
    runs_composite,
)
from ampfx.composites import run_composite
from ampfx.context import ConversionContext
from ampfx.decisions import Decision
from ampfx.dtypes import Region, TensorSpec, long_name
from ampfx.ops import AUTHOR_CASTS, FACTORIES, LIKE_OPS
from ampfx.passes.base import Pass
from ampfx.promotion import followed_argument
from ampfx.rewriting import current_dtype, current_float, with_dtype
from ampfx.rule_table import Rule
from ampfx.runtime import cast_saturated

_Key = tuple[Node, torch.dtype, bool, int, int, bool]


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Add the casts that the decisions need.

    Reads: ``meta["decision"]``, ``meta["entry_dtype"]``, ``meta["facts"]``.
    Writes: nodes with ``meta["cast"]``; ``meta["val"]`` in the new dtypes, ``meta["val_float32"]`` as recorded.
    Ensures: every node reads what it needs to run in the dtype of its decision.
    """

    def run(self, gm: GraphModule, ctx: ConversionContext) -> bool:
        analyse_graph(gm)
        return _Inserter(gm, ctx).run()


class _Inserter:
    def __init__(self, gm: GraphModule, ctx: ConversionContext) -> None:
        self.graph, self.ctx = gm.graph, ctx
        self.casts: dict[_Key, Node] = {}
        self.versions: dict[int, int] = {}
        self.changed = False
        self.last_placeholder: Node | None = None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.last_placeholder = node

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._rewrite_output(node)
            elif node.op in ("call_function", "call_method") and not node.meta.get("cast"):
                self._rewrite(node)
            elif node.meta.get("cast"):
                self._remember(node)
            self._begin_storage(node)
            if node.op != "output":
                for written in facts_of(node).writes:
                    group = facts_of(written).group
                    self.versions[group] = self.versions.get(group, 0) + 1
        return self.changed

    # ------------------------------------------------------------------ one node

    def _rewrite(self, node: Node) -> None:
        facts, rule = facts_of(node), self.ctx.rule_of(node)
        decision: Decision = node.meta["decision"]
        if not self._tell_dtype(node, rule, decision.dtype):
            self._cast_arguments(node, rule, decision.dtype)
        if runs_composite(node, rule) and node.target is not run_composite:
            self._wrap_composite(node)
        if facts.managed and decision.dtype is not None:
            _set_dtype(node, decision.dtype)

    def _cast_arguments(self, node: Node, rule: Rule | None, dtype: torch.dtype | None) -> None:
        facts = facts_of(node)
        needs = dict(argument_needs(node, facts, rule, dtype))
        native = self._native_target(node, needs, dtype)
        widest = self._widest_target(node, dtype)

        def caster(need: Need) -> Callable[[Node], Any] | None:
            target = dtype
            if need is Need.FLOAT32:
                target = torch.float32
            elif need is Need.LOW:
                target = self.ctx.low_dtype
            elif need is Need.NATIVE:
                target = native
            elif need is Need.KEEP:
                target = widest if dtype is None else None
            if target is None:
                return None
            dims_only = need is Need.NATIVE and self._has_dims(node, needs)

            def cast(value: Node) -> Any:
                if dims_only and facts_of(value).ndim == 0:
                    return value
                return self._as_dtype(value, target, node, saturate=need is Need.SATURATE)

            return cast

        args, kwargs, changed = list(node.args), dict(node.kwargs), False
        for key, need in needs.items():
            change = caster(need)
            if change is None:
                continue
            old = node.args[key] if isinstance(key, int) else node.kwargs[key]
            new = map_argument(old, change)
            if new is not old:
                changed = True
                if isinstance(key, int):
                    args[key] = new
                else:
                    kwargs[key] = new
        if changed:  # assigning arguments is not free
            node.args, node.kwargs = tuple(args), kwargs

    def _native_target(self, node: Node, needs: dict[int | str, Need], dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype to cast to before a native promotion, None where it gives the right dtype by itself."""
        if dtype is None:
            return None
        found: list[torch.dtype] = []
        with_dims = self._has_dims(node, needs)
        for value in self._native_values(node, needs):
            if facts_of(value).ndim > 0 or not with_dims:
                current = current_float(value)
                if current is not None:
                    found.append(current)
        if not found:
            return None
        result = found[0]
        for other in found[1:]:
            result = torch.promote_types(result, other)
        return None if result == dtype else dtype

    @staticmethod
    def _native_values(node: Node, needs: dict[int | str, Need]) -> list[Node]:
        return [
            value
            for key, need in needs.items()
            if need is Need.NATIVE
            for value in argument_nodes(node.args[key] if isinstance(key, int) else node.kwargs[key])
        ]

    def _has_dims(self, node: Node, needs: dict[int | str, Need]) -> bool:
        return any(facts_of(value).ndim > 0 and current_float(value) for value in self._native_values(node, needs))

    def _widest_target(self, node: Node, dtype: torch.dtype | None) -> torch.dtype | None:
        """For an op that makes no float tensor but wants its inputs alike: the widest of them."""
        facts = facts_of(node)
        if dtype is not None or facts.base in NATIVE_OPS or facts.in_place:
            return None
        rule = self.ctx.rule_of(node)
        if rule is None or facts.base in LIKE_OPS or is_tuple_read(node):
            return None
        found = {current_dtype(value) for value in node.all_input_nodes if facts_of(value).managed}
        return torch.float32 if len(found) > 1 else None

    # ------------------------------------------------------------------ casts

    def _as_dtype(self, value: Node, dtype: torch.dtype, reader: Node, saturate: bool = False) -> Any:
        facts = facts_of(value)
        if not facts.managed:
            return value
        if facts.tuple_valued:
            return self._rebuilt(value, dtype, reader)
        if current_dtype(value) == dtype:
            return value
        region = facts_of(reader).region if reader.op != "output" else Region()
        saturate = saturate and dtype == torch.float16
        key = (value, dtype, region.grad, region.opaque, self.versions.get(facts.group, 0), saturate)
        known = self.casts.get(key)
        if known is None:
            same = facts.region.grad == region.grad and facts.region.opaque == region.opaque
            after = value if not facts.group and same else None
            known = self.casts[key] = self._make_cast(value, dtype, after, reader, region, saturate)
        return known

    def _make_cast(
        self, value: Node, dtype: torch.dtype, after: Node | None, reader: Node, region: Region, saturate: bool
    ) -> Node:
        if after is not None and after.op == "placeholder":
            after = self.last_placeholder
        name = f"{value.name}_{'high' if dtype == torch.float32 else 'low'}"
        with self.graph.inserting_after(after) if after is not None else self.graph.inserting_before(reader):
            if saturate:
                cast = self.graph.create_node("call_function", cast_saturated, (value, dtype), name=name)
            else:
                cast = self.graph.create_node("call_method", "to", (value, dtype), name=name)
        owner = value if after is not None and value.op != "get_attr" else reader
        cast.meta = {
            "op": "to",
            "cast": True,
            "val": with_dtype(recorded_value(value), dtype),
            "val_float32": recorded_value(value),
            "region": region,
            "facts": dataclasses.replace(facts_of(value), op="to", base="to", writes=(), in_place=False, group=0, region=region),
            "decision": Decision(
                dtype, "cast", f"{reader.name} reads {value.name} in {long_name(dtype)}", cause=reader.name, chain=(cast.name, reader.name)
            ),
            **{key: owner.meta[key] for key in ("module_path", "module_types", "module_stack", "source") if key in owner.meta},
        }
        self.changed = True
        return cast

    def _remember(self, cast: Node) -> None:
        """A cast of an earlier run: readers find it again."""
        value, dtype = cast.args[0], cast.args[1]
        if isinstance(value, Node) and isinstance(dtype, torch.dtype) and not cast.meta.get("entry"):
            facts = facts_of(cast)
            version = self.versions.get(facts_of(value).group, 0)
            key = (value, dtype, facts.region.grad, facts.region.opaque, version, cast.target is cast_saturated)
            self.casts.setdefault(key, cast)

    def _rebuilt(self, value: Node, dtype: torch.dtype, reader: Node) -> Any:
        """A tuple that an op reads whole, with its parts cast."""
        parts = value.meta.get("val")
        assert isinstance(parts, tuple | list)
        wrong = [isinstance(part, TensorSpec) and _castable(part, value, i) and part.dtype != dtype for i, part in enumerate(parts)]
        if not any(wrong):
            return value
        items: list[Node] = []
        for index, part in enumerate(parts):
            with self.graph.inserting_before(reader):
                item = self.graph.call_function(operator.getitem, (value, index))
            recorded = value.meta.get("val_float32", parts)[index]
            item.meta = {**value.meta, "op": "getitem", "val": part, "val_float32": recorded}
            managed = isinstance(recorded, TensorSpec) and recorded.dtype == torch.float32
            item.meta["facts"] = dataclasses.replace(
                facts_of(value), op="getitem", base="getitem", tuple_valued=False, managed=managed, writes=()
            )
            items.append(item)
        return tuple(self._as_dtype(item, dtype, reader) if bad else item for item, bad in zip(items, wrong, strict=True))

    # ------------------------------------------------------------------ no cast needed

    def _tell_dtype(self, node: Node, rule: Rule | None, dtype: torch.dtype | None) -> bool:
        """Step 3: tell the op its dtype; True if its arguments need no cast then."""
        facts = facts_of(node)
        if dtype is None or not facts.managed or gives_dtype(node) or is_tuple_read(node) or facts.in_place:
            return False
        if facts.base in FACTORIES:
            natural: torch.dtype | None = torch.float32
        elif facts.base in LIKE_OPS or facts.base == "type_as" or (facts.base == "to" and not _same_device(node)):
            followed = followed_argument(node, rule)
            natural = current_float(followed) if followed is not None else None
        else:
            return self._tell_reduction(node, rule, dtype)
        told = node.kwargs.get("dtype")
        if (told or natural) == dtype:
            return True
        if facts.base in AUTHOR_CASTS:
            node.target, node.args, node.kwargs = "to", (node.args[0], dtype), {}
        else:
            node.kwargs = {**node.kwargs, "dtype": dtype}
        node.meta["given_dtype"] = True
        self.changed = True
        return True

    def _tell_reduction(self, node: Node, rule: Rule | None, dtype: torch.dtype) -> bool:
        if rule is None or not rule.dtype_arg or dtype != torch.float32 or None in node.args:
            return False
        if node.kwargs.get("dtype") is not None:
            return True  # told in an earlier run
        value = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(value, Node) or not facts_of(value).managed or current_dtype(value) != self.ctx.low_dtype:
            return False
        if self._cast_is_shared(value, node):
            return False
        node.kwargs = {**node.kwargs, "dtype": dtype}
        node.meta["given_dtype"] = True
        self.changed = True
        return True

    def _cast_is_shared(self, value: Node, reader: Node) -> bool:
        """Whether another reader needs a float32 cast of the value anyway."""
        if any(key[0] is value and key[1] == torch.float32 for key in self.casts):
            return True
        for user in value.users:
            if user is reader or user.op == "output":
                continue
            decision = user.meta.get("decision")
            if decision is None or decision.dtype != torch.float32 or user.meta.get("cast"):
                continue
            rule = self.ctx.rule_of(user)
            if rule is not None and not rule.dtype_arg and facts_of(user).base not in NATIVE_OPS:
                needs = argument_needs(user, facts_of(user), rule, decision.dtype)
                if any(
                    need is Need.SAME and value in argument_nodes(user.args[key] if isinstance(key, int) else user.kwargs[key])
                    for key, need in needs
                ):
                    return True
        return False

    def _wrap_composite(self, node: Node) -> None:
        node.kwargs = {
            **node.kwargs,
            "function": facts_of(node).op,
            "device_type": self.ctx.device_type,
            "dtype": self.ctx.low_dtype,
        }
        node.target = run_composite
        node.meta["given_dtype"] = True
        self.changed = True

    # ------------------------------------------------------------------ storages and outputs

    def _begin_storage(self, node: Node) -> None:
        """Step 4: the cast at which a written storage begins."""
        dtype = node.meta.pop("entry_dtype", None)
        if dtype is None:
            return
        facts = facts_of(node)
        users = list(node.users)
        cast = self._make_cast(node, dtype, node, node, facts.region, saturate=False)
        cast.meta["entry"] = True
        cast.meta["facts"].group = facts.group
        cast.meta["decision"] = Decision(
            dtype,
            "cast",
            f"{node.name} is written into later, where it is {long_name(dtype)}",
            cause=node.name,
            chain=(cast.name, node.name),
        )
        for user in users:
            user.replace_input_with(node, cast)
        node.meta["facts"] = dataclasses.replace(facts, group=0)

    def _rewrite_output(self, node: Node) -> None:
        def cast(value: Node) -> Any:
            return self._as_dtype(value, self.ctx.output_dtype, node) if facts_of(value).managed else value

        args = tuple(map_argument(arg, cast) for arg in node.args)
        if self.changed:
            node.args = args


def _set_dtype(node: Node, dtype: torch.dtype) -> None:
    recorded = node.meta.setdefault("val_float32", node.meta.get("val"))
    node.meta["val"] = with_dtype(recorded, dtype)


def _castable(part: TensorSpec, value: Node, index: int) -> bool:
    recorded = value.meta.get("val_float32", value.meta.get("val"))[index]
    return isinstance(recorded, TensorSpec) and recorded.dtype == torch.float32


def _same_device(node: Node) -> bool:
    """``x.to(device)``: neither a dtype nor another tensor is named."""
    return not (len(node.args) > 1 and isinstance(node.args[1], Node)) and "other" not in node.kwargs
