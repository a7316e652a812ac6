"""Where a gradient crosses the border of a graph, and the nodes that scale it there.

A value is *outside* if code that is not part of the graph may hold it or differentiate through it: inputs,
parameters, outputs, attributes that the forward assigns, arguments and results of hooks, and of custom
Functions that compute in float32 (their backward may clip, round or replace a gradient). All others are
*inside*, where gradients are multiplied by S. For each read across the border:

1. outside → inside: the reader gets ``unscale(value)``, fused with the cast to low precision where that cast
   is the only reader. Parameters of one block share a call; small blocks share one too. A gradient reaches
   its parameter only when the whole call ran backward, so large blocks do not wait for each other.
2. inside → outside: the outside reader gets ``scale(value)``, fused with the cast to float32 where it is one.
   Readers inside then read ``unscale(scale(value))``, so that a gradient taken with respect to the value
   outside holds all that depends on it.
3. outside → outside, integers, values that carry no gradient, and reads under no_grad: nothing.

A value that something writes into keeps its identity: as an input it is aliased, not viewed; as an output it
is scaled right at the outside reader.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ampfx import grad_scaling, runtime
from ampfx.analysis import NodeFacts, analyse_graph, facts_of, recorded_value, tensor_leaves
from ampfx.dtypes import Region, TensorSpec, is_low
from ampfx.graph_utils import get_attribute, op_of, region_of, spec
from ampfx.loss_scale import ModuleScale
from ampfx.ops import WRITES

ATTRIBUTE = "_ampfx_loss_scale"

MAX_PER_CALL = 16
# Elements of a call's parameters up to which further blocks join it: 4 MB of float32, little to wait for.
SMALL_CALL = 1 << 20

OUTSIDE_FUNCTIONS = frozenset(
    {
        runtime.set_attribute,
        runtime.read_attribute,
        runtime.run_forward_pre_hooks,
        runtime.run_forward_hooks,
        runtime.begin_backward_hooks,
        runtime.end_backward_hooks,
        runtime.attach_hook,
    }
)
_COPIED_META = ("module_path", "module_types", "module_stack", "source")


def embed_loss_scale(gm: GraphModule, loss_scale: ModuleScale) -> bool:
    """Put the scaling nodes into ``gm`` and the loss scale on it; False if they are there already."""
    if any(node.op == "get_attr" and node.target == ATTRIBUTE for node in gm.graph.nodes):
        return False
    analyse_graph(gm)
    _read_targets(gm)
    setattr(gm, ATTRIBUTE, loss_scale)
    border = _Border(gm)
    _copy_written_inputs(border)
    _open_tuples(border)
    leave = _Leave(border)
    changed = leave.run()
    changed = _Enter(border).run() or changed
    if not changed:
        gm.graph.erase_node(border.scale_node)
        return False
    loss_scale.prepare(_devices(gm))
    return True


def is_outside(node: Node) -> bool:
    """Whether code that is not part of the graph may hold the node's value, or is what the node runs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.meta.get("outside") or (node.op == "call_function" and node.target in OUTSIDE_FUNCTIONS):
        return True
    if is_foreign(node):
        return True
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source = node.args[0]
        return is_outside(source) and source.op not in ("placeholder", "get_attr")
    return False


def _read_targets(gm: GraphModule) -> None:
    """What an operation under no_grad wrote into is read by its own name: it still carries its gradient."""
    for node in gm.graph.nodes:
        if facts_of(node).in_place and not region_of(node).grad and "out" not in node.kwargs:
            target = node.args[0] if node.args else None
            if isinstance(target, Node):
                node.replace_all_uses_with(target)


def is_foreign(node: Node) -> bool:
    """Whether a custom Function or operator runs in float32, so that its gradients can be the true ones.

    One that computes in low precision (by an override or its author) stays inside: it needs the scale.
    """
    if node.op != "call_function" or not (node.target is runtime.apply_function or "::" in op_of(node)):
        return False
    values = [node, *node.all_input_nodes]
    if any(facts_of(value).group for value in values):
        return False  # it may write into an argument
    return not any(is_low(leaf.dtype) for value in values for leaf in tensor_leaves(value.meta.get("val")))


class _Border:
    """What both directions need: which values carry gradients, and the node that reads the loss scale."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.graph: Graph = gm.graph
        self.outside = {node for node in self.graph.nodes if is_outside(node)}
        self.carries = _carriers(gm, self.outside)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            self.scale_node = self.graph.create_node("get_attr", ATTRIBUTE)
        self.scale_node.meta = {"op": "", "val": None, "region": Region()}
        self.outside.add(self.scale_node)

    def inside_readers(self, value: Node) -> list[Node]:
        """The readers that gradients flow back from."""
        return [user for user in value.users if user not in self.outside and region_of(user).grad]

    def outside_readers(self, value: Node) -> list[Node]:
        """The readers that gradients come from."""
        return [user for user in value.users if user in self.outside and not _is_part(user, value)]


def _carriers(gm: GraphModule, outside: set[Node]) -> set[Node]:
    """The values that a gradient may flow through, in this run or a later one.

    What is written into a tensor flows through every name of its memory, those made before included: the
    walk is repeated until no further memory is found.
    """
    assigned = {
        f"{node.args[0].target}.{node.args[1]}".removeprefix("_ampfx_root.")
        for node in gm.graph.nodes
        if node.target is runtime.set_attribute and isinstance(node.args[0], Node)
    }
    sources = {node for node in outside if _is_source(gm, node, assigned) and _has_gradient_dtype(node)}
    memory: set[int] = set()
    while True:
        known, carries = len(memory), set(sources)
        for node in gm.graph.nodes:
            depends = region_of(node).grad and any(value in carries for value in node.all_input_nodes)
            if depends and facts_of(node).base not in WRITES:  # running statistics carry no gradient
                memory.update(facts_of(value).group for value in facts_of(node).writes)
            if (depends or facts_of(node).group in memory) and _has_gradient_dtype(node):
                carries.add(node)
        memory.discard(0)
        if len(memory) == known:
            return carries


def _is_source(gm: GraphModule, node: Node, assigned: set[str]) -> bool:
    """Whether a gradient may leave the graph through this outside value."""
    if node.op != "get_attr":
        return node.op != "output"
    target = str(node.target)
    try:
        value = get_attribute(gm, target)
    except AttributeError:
        return any(leaf.requires_grad for leaf in tensor_leaves(recorded_value(node)))
    if not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, nn.Parameter) or value.requires_grad or target in assigned:
        return True
    # A buffer is no variable; another tensor attribute may hold one next time.
    path, _, name = target.rpartition(".")
    owner = get_attribute(gm, path) if path else gm
    return name not in getattr(owner, "_buffers", {})


def _has_gradient_dtype(node: Node) -> bool:
    value = recorded_value(node)
    if value is None:  # a part of a hook's arguments; its own parts are known
        return True
    return any(leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in tensor_leaves(value))


def _is_part(user: Node, value: Node) -> bool:
    return user.target is operator.getitem and user.args[0] is value


def _copy_written_inputs(border: _Border) -> None:
    """An input that the graph writes gradients into is copied in, and what became of it is copied out.

    The caller holds that tensor: its history must lead through the border, not around it.
    """
    graph, output = border.graph, border.graph.output_node()
    analyse_graph(border.gm)
    writers = [node for node in graph.nodes if facts_of(node).writes and region_of(node).grad]
    groups = {facts_of(value).group for node in writers for value in facts_of(node).writes}
    for value in [node for node in graph.nodes if node.op == "placeholder"]:
        group = facts_of(value).group
        if not group or group not in groups or value not in border.carries:
            continue
        users = list(value.users)
        with graph.inserting_after(border.scale_node):
            inside = graph.call_method("clone", (value,))
        inside.meta = _meta(value, "clone", value.meta.get("val"))
        inside.meta["facts"].group = group
        value.meta["facts"] = dataclasses.replace(facts_of(value), group=0)
        for user in users:
            _replace_argument(user, value, inside)
        with graph.inserting_before(output):
            back = graph.call_method("copy_", (value, inside))
        back.meta = _meta(value, "copy_", value.meta.get("val")) | {"outside": True}
        border.carries.add(inside)
        border.outside.add(back)
        for result in list(output.all_input_nodes):
            if _writes_into(result, inside):
                _replace_argument(output, result, value)


def _writes_into(node: Node, target: Node) -> bool:
    """Whether a node's value is the target itself, returned by operations that write into it."""
    while node is not target:
        if not facts_of(node).in_place or not isinstance(node.args[0], Node) or "out" in node.kwargs:
            return False
        node = node.args[0]
    return True


def _open_tuples(border: _Border) -> None:
    """A tuple that an outside node reads whole is read part by part."""
    for node in list(border.graph.nodes):
        if node not in border.outside or node.op in ("placeholder", "get_attr"):
            continue
        for value in node.all_input_nodes:
            parts = value.meta.get("val")
            if value in border.outside or value not in border.carries or not isinstance(parts, tuple | list):
                continue
            recorded = recorded_value(value)
            items: list[Node] = []
            for index, part in enumerate(parts):
                with border.graph.inserting_before(node):
                    item = border.graph.call_function(operator.getitem, (value, index))
                item.meta = {**_place(value), "op": "getitem", "val": part, "val_float32": recorded[index]}
                items.append(item)
                if isinstance(part, TensorSpec):
                    border.carries.add(item)
            built = tuple(items) if isinstance(parts, tuple) else items
            _replace_argument(node, value, built)
    analyse_graph(border.gm)


def _replace_argument(node: Node, old: Node, new: Any) -> None:
    def swap(argument: Any) -> Any:
        if argument is old:
            return new
        if isinstance(argument, tuple | list):
            items = [swap(item) for item in argument]
            if hasattr(argument, "_fields"):
                return type(argument)(*items)
            return tuple(items) if isinstance(argument, tuple) else items
        if isinstance(argument, dict):
            return {key: swap(item) for key, item in argument.items()}
        if isinstance(argument, slice):
            return slice(swap(argument.start), swap(argument.stop), swap(argument.step))
        return argument

    node.args, node.kwargs = swap(node.args), swap(dict(node.kwargs))


# ---------------------------------------------------------------------- inside → outside


class _Leave:
    """Step 2."""

    def __init__(self, border: _Border) -> None:
        self.border = border
        self.made: dict[tuple[Node, torch.dtype], Node] = {}
        self.rerouted: set[Node] = set()

    def run(self) -> bool:
        for value in list(self.border.graph.nodes):
            if value in self.border.outside or value not in self.border.carries:
                continue
            readers = self.border.outside_readers(value)
            if readers and spec(value) is not None and region_of(value).grad:
                self._leave(value, readers)
        return bool(self.made)

    def _leave(self, value: Node, readers: list[Node]) -> None:
        base = _uncast(value)
        if base in self.border.outside or base not in self.border.carries:
            base = value
        dtype = _dtype(value)
        if facts_of(base).group or facts_of(value).group:
            for reader in readers:
                made = self._node(base, dtype, before=reader)
                _replace_argument(reader, value, made)
                self.made[base, dtype] = made
            return
        others = [reader for reader in self.border.inside_readers(value) if reader is not base]
        base_readers = (
            [] if base is value else [r for r in self.border.inside_readers(base) if r is not value]
        )
        made = self.made.get((base, dtype)) or self._node(base, dtype, before=base.next)
        self.made[base, dtype] = made
        for reader in readers:
            _replace_argument(reader, value, made)
        if all(is_foreign(reader) for reader in readers):
            pass  # nobody holds the value outside
        elif base not in self.rerouted and not any(_is_scale(reader) for reader in (*others, *base_readers)):
            self.rerouted.add(base)
            self._reroute(made, value, others, base, base_readers)
        if value is not base and not value.users:
            self.border.graph.erase_node(value)

    def _reroute(
        self, made: Node, value: Node, readers: list[Node], base: Node, base_readers: list[Node]
    ) -> None:
        for source, users in ((value, readers), (base, base_readers)):
            if users:
                cast = _dtype(source) if _dtype(source) != _dtype(made) else None
                back = _entry(self.border, [made], cast, before=made.next, like=base)[0]
                for user in users:
                    _replace_argument(user, source, back)

    def _node(self, base: Node, dtype: torch.dtype, *, before: Node) -> Node:
        graph, same = self.border.graph, _dtype(base) == dtype
        with graph.inserting_before(before):
            if same:
                node = graph.call_function(grad_scaling.scale, (self.border.scale_node, base))
            else:
                node = graph.call_function(grad_scaling.scale_cast, (self.border.scale_node, dtype, base))
        found = spec(base)
        assert found is not None
        node.meta = _meta(base, "scale" if same else "scale_cast", found.with_dtype(dtype))
        if facts_of(base).group:
            node.meta["facts"] = dataclasses.replace(node.meta["facts"], group=0)
        return node


def _is_scale(node: Node) -> bool:
    return node.target in (grad_scaling.scale, grad_scaling.scale_cast)


def _uncast(value: Node) -> Node:
    """The value behind a cast that a pass inserted."""
    if value.meta.get("cast") and value.target == "to" and isinstance(value.args[0], Node):
        return value.args[0]
    return value


# ---------------------------------------------------------------------- outside → inside


@dataclasses.dataclass
class _Read:
    """One outside value, read inside in one region."""

    value: Node
    readers: list[Node]
    position: int
    opaque: int
    cast: torch.dtype | None
    written: bool
    block: str
    numel: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What reads that share a call have in common."""
        kind = self.value.op if self.value.op in ("placeholder", "get_attr") else self.value.name
        return kind, self.opaque, self.cast, self.written


class _Enter:
    """Step 1."""

    def __init__(self, border: _Border) -> None:
        self.border = border
        self.position = {node: index for index, node in enumerate(border.graph.nodes)}

    def run(self) -> bool:
        reads = sorted(self._reads(), key=lambda read: read.position)
        for call in _calls(reads):
            self._insert(call)
        return bool(reads)

    def _reads(self) -> Iterator[_Read]:
        for value in list(self.border.graph.nodes):
            if value not in self.border.outside or value not in self.border.carries or spec(value) is None:
                continue
            by_region: dict[int, list[Node]] = {}
            for reader in self.border.inside_readers(value):
                if not (_is_unscale(reader) or _is_scale(reader)):
                    by_region.setdefault(region_of(reader).opaque, []).append(reader)
            for opaque, readers in by_region.items():
                yield self._read(value, opaque, readers)

    def _read(self, value: Node, opaque: int, readers: list[Node]) -> _Read:
        found = spec(value)
        assert found is not None
        written = facts_of(value).group != 0
        only = readers[0]
        fused = len(readers) == 1 and not written and _uncast(only) is value and not only.kwargs
        return _Read(
            value,
            readers,
            min(self.position.get(reader, 0) for reader in readers),
            opaque,
            _dtype(only) if fused else None,
            # A parameter is never written where gradients are recorded.
            written and value.op != "get_attr",
            _block(str(value.target)) if value.op == "get_attr" else "",
            found.numel,
        )

    def _insert(self, call: list[_Read]) -> None:
        first = min(call, key=lambda read: read.position)
        before = min(first.readers, key=lambda reader: self.position.get(reader, 0))
        for read in call:
            if read.value.op == "get_attr" and self.position[read.value] > self.position.get(before, 0):
                before.prepend(read.value)  # a get_attr stands at its first use, which may come later
        written = call[0].written
        values = [read.value for read in call]
        entered = _entry(self.border, values, call[0].cast, before=before, like=before, written=written)
        for read, node in zip(call, entered, strict=True):
            if read.cast is not None:
                (cast,) = read.readers
                cast.replace_all_uses_with(node)
                self.border.graph.erase_node(cast)
                self.position[node] = read.position
            else:
                for reader in read.readers:
                    _replace_argument(reader, read.value, node)


def _is_unscale(node: Node) -> bool:
    return node.target in (grad_scaling.unscale, grad_scaling.unscale_cast, grad_scaling.unscale_written)


def _calls(reads: Iterable[_Read]) -> list[list[_Read]]:
    """Group reads, in the order of first use."""
    calls: list[list[_Read]] = []
    open_calls: dict[tuple[Any, ...], list[_Read]] = {}
    for read in reads:
        call = open_calls.get(read.key)
        if call is not None and len(call) < MAX_PER_CALL:
            small = sum(other.numel for other in call) + read.numel <= SMALL_CALL
            if small or call[-1].block == read.block:
                call.append(read)
                continue
        open_calls[read.key] = [read]
        calls.append(open_calls[read.key])
    return calls


def _block(target: str) -> str:
    """The block that a parameter belongs to: ``layers.3`` for ``layers.3.attn.q.weight``."""
    parts = target.split(".")[:-1]
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1])


def _entry(
    border: _Border,
    values: list[Node],
    cast: torch.dtype | None,
    *,
    before: Node,
    like: Node,
    written: bool = False,
) -> list[Node]:
    """One unscale call for several values, and the nodes that pick its results."""
    graph = border.graph
    with graph.inserting_before(before):
        if cast is not None:
            name, call = (
                "unscale_cast",
                graph.call_function(grad_scaling.unscale_cast, (border.scale_node, cast, *values)),
            )
        else:
            function = grad_scaling.unscale_written if written else grad_scaling.unscale
            name, call = "unscale", graph.call_function(function, (border.scale_node, *values))
        items = [graph.call_function(operator.getitem, (call, index)) for index in range(len(values))]
    found = [spec(value) for value in values]
    results = tuple(s.with_dtype(cast) if s is not None and cast is not None else s for s in found)
    call.meta = _meta(values[0], name, results, place=like)
    call.meta["val_float32"] = tuple(recorded_value(value) for value in values)
    call.meta["facts"] = dataclasses.replace(
        call.meta["facts"], tuple_valued=True, numel=sum(s.numel for s in found if s is not None)
    )
    for item, value, result in zip(items, values, results, strict=True):
        item.meta = _meta(value, "getitem", result, place=like)
    return items


# ---------------------------------------------------------------------- what new nodes carry


def _place(node: Node) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in _COPIED_META if key in node.meta}
    return {"region": region_of(node), **kept}


def _meta(value: Node, op: str, result: Any, *, place: Node | None = None) -> dict[str, Any]:
    region = region_of(place if place is not None else value)
    facts: NodeFacts = dataclasses.replace(
        facts_of(value), op=op, base=op, writes=(), in_place=False, region=region, tuple_valued=False
    )
    return {
        **_place(place if place is not None else value),
        "op": op,
        "val": result,
        "val_float32": recorded_value(value),
        "facts": facts,
    }


def _dtype(node: Node) -> torch.dtype:
    found = spec(node)
    assert found is not None
    return found.dtype


def _devices(gm: GraphModule) -> set[torch.device]:
    found = {leaf.device for node in gm.graph.nodes for leaf in tensor_leaves(node.meta.get("val"))}
    return {device for device in found if device.type != "meta"}
