"""The canonical graph of what Dynamo captured, and the way back to a graph for a compiler.

Dynamo hands over a torch-level graph whose inputs are the model's tensors as well. The passes want the
graph that :mod:`ampfx.capture` makes:

1. every parameter and buffer is a ``get_attr`` node with its dotted name, so that rules about parameters,
   buffers and module paths hold; its placeholder stays, unread;
2. every node says which operation it is, where in the model it stands and what it makes
   (:class:`ampfx.dtypes.TensorSpec`). Sizes are the example's; nothing here adds a guard;
3. the author's autocast regions are facts about nodes, not nodes. What autocast made of the dtypes is
   computed anew, in float32;
4. higher-order operations (custom Functions, ``cond``) are code that cannot be looked into. The inside of a
   checkpoint is a graph of its own that is converted as well; so is multi-head attention, under autocast.

:func:`to_compiler` undoes 1 after the passes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ampfx.dtypes import Region, TensorSpec, long_name
from ampfx.errors import CaptureError
from ampfx.graph_utils import get_attribute, region_of
from ampfx.graph_view import GraphView
from ampfx.ops import canonical_op

_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_CHECKPOINT = "tag_activation_checkpoint"
_ROOT = re.compile(r"^(?:\w+\()*[LG]\['[^']*'\]")
_STEP = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.([A-Za-z]\w*)")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclasses.dataclass
class DynamoGraph:
    """A canonical graph made of one of Dynamo's.

    Args:
        view: the graph over a module that holds the parameters, buffers and whatever else it reads.
        placeholders: the placeholder of each ``get_attr`` node that stands for an input, by its target.
        bodies: names of graphs inside this one that are converted by themselves, with the node that runs each.
        values: the fake value of each node, in float32.
    """

    view: GraphView
    placeholders: dict[str, fx.Node]
    bodies: dict[str, fx.Node]
    values: dict[fx.Node, Any]


def from_dynamo(
    gm: fx.GraphModule, inputs: Sequence[Any], device_type: str, *, grad: bool, autocast: bool | None = None
) -> DynamoGraph:
    """Make the canonical graph; ``gm`` is left as it is.

    Args:
        gm: Dynamo's graph.
        inputs: what stands for its placeholders: parameters, tensors, numbers.
        device_type: device whose autocast regions count.
        grad: whether gradients are recorded where the graph begins.
        autocast: the author's autocast region that the whole graph stands in, as in ``Region``.

    Raises:
        CaptureError: what autocast changed cannot be computed in float32.
    """
    root = nn.Module()
    for store in ("_modules", "_parameters", "_buffers"):
        vars(root)[store].update(getattr(gm, store))
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    held: dict[str, fx.Node] = {}
    bodies: dict[str, fx.Node] = {}
    describe = _Describer(gm, device_type, grad, autocast)
    old_placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for old in old_placeholders:
        made[old] = graph.node_copy(old)
        made[old].meta = {"val": None, "op": "", "region": Region(), "dynamo": old.meta}
        if hasattr(old, "_dynamo_source"):
            made[old]._dynamo_source = old._dynamo_source
    for old, value in zip(old_placeholders, inputs, strict=True):
        placeholder = made[old]
        describe.given(old, value)
        name = _held_name(old, value)
        if name is None:
            describe(old, placeholder)
            continue
        target = _hold(root, name, value)
        made[old] = graph.create_node("get_attr", target)
        describe(old, made[old])
        made[old].meta["region"] = Region()
        held[target] = placeholder
    for old in gm.graph.nodes:
        if old.op == "placeholder" or describe.enters_region(old):
            continue
        made[old] = new = graph.node_copy(old, made.__getitem__)
        describe(old, new)
        if new.op == "call_function" and isinstance(new.target, HigherOrderOperator):
            body = _checkpoint_body(gm, old)
            new.meta["impure"] = True
            new.meta["op"] = f"higher_order{'.' if body else '::'}{new.target.__name__}"
            if body:
                bodies[body] = new
    values = {made[old]: value for old, value in describe.values.items()}
    return DynamoGraph(GraphView(root, graph), held, bodies, values)


def _held_name(node: fx.Node, value: Any) -> str | None:
    """The dotted name of a parameter or buffer of the model; None for an input."""
    source = source_name(node)
    if not isinstance(value, torch.Tensor):
        return None
    if not isinstance(value, nn.Parameter) and "._buffers[" not in source:
        return None
    return ".".join(path_of(source)) or str(node.target)


def source_name(node: fx.Node) -> str:
    """Where Dynamo found an input: ``L['self']._modules['fc']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def path_of(source: str) -> tuple[str, ...]:
    """The names on the way from the module that Dynamo ran to an attribute of it."""
    rest = _ROOT.sub("", source)
    steps = (match[1] or match[2] or match[3] for match in _STEP.finditer(rest))
    return tuple(step for step in steps if step not in ("_modules", "_parameters", "_buffers"))


def _hold(root: nn.Module, name: str, tensor: torch.Tensor) -> str:
    """Put a tensor into a tree of modules; returns the name it got."""
    *path, last = re.sub(r"[^\w.]", "_", name).split(".")
    owner = root
    for index, part in enumerate(path):
        child = owner._modules.get(part)
        if child is None:
            child = owner._modules[part] = nn.Module()
        if isinstance(child, fx.GraphModule):  # a graph inside the graph happens to have this name
            return _hold(root, ".".join([*path[:index], part + "_", *path[index + 1 :], last]), tensor)
        owner = child
    store: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    while last in owner._parameters or last in owner._buffers or last in owner._modules or hasattr(nn.Module, last):
        last += "_"
    store[last] = tensor
    return ".".join([*path, last])


def _checkpoint_body(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """The name of the graph that a checkpoint runs, if it runs it once and nothing else does."""
    if getattr(node.target, "__name__", "") != _CHECKPOINT or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    body = node.args[0]
    if body.op != "get_attr" or len(body.users) != 1 or not isinstance(getattr(gm, str(body.target), None), nn.Module):
        return None
    return str(body.target)


# ---------------------------------------------------------------------- what nodes carry


class _Describer:
    """Writes the meta of canonical nodes, in the order of the graph."""

    def __init__(self, gm: fx.GraphModule, device_type: str, grad: bool, autocast: bool | None) -> None:
        self.gm, self.device_type, self.grad = gm, device_type, grad
        self.regions: list[tuple[fx.Node | None, bool]] = [] if autocast is None else [(None, autocast)]
        self.storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self.values: dict[fx.Node, Any] = {}
        self.changed: set[fx.Node] = set()
        self.ambient = torch.is_autocast_enabled(device_type)
        self.mode: Any = None

    def given(self, placeholder: fx.Node, value: Any) -> None:
        """What stands for an input: of a graph inside a graph, the value that the outer one computes."""
        example = placeholder.meta.get("example_value")
        if isinstance(value, FakeTensor) and isinstance(example, torch.Tensor) and value.dtype != example.dtype:
            self.values[placeholder] = value
            self.changed.add(placeholder)
        if self.mode is None:
            self.mode = getattr(example, "fake_mode", None)  # not the tracing context's: that is for the compiler

    def enters_region(self, node: fx.Node) -> bool:
        """Take note of an autocast region that begins or ends; True if the node is only that."""
        if node.op != "call_function":
            return False
        if node.target is _ENTER and node.args[0] == self.device_type:
            self.regions.append((node, bool(node.args[2])))
            return True
        if node.target is _EXIT and any(node.args[0] is entered for entered, _ in self.regions):
            self.regions = [region for region in self.regions if region[0] is not node.args[0]]
            return True
        return False

    def __call__(self, old: fx.Node, new: fx.Node) -> None:
        """Describe ``new``, the copy of Dynamo's ``old``."""
        stack = [(path_of(path), kind) for path, kind in old.meta.get("nn_module_stack", {}).values()]
        paths = tuple(".".join(path) for path, _ in stack)
        value = self._value(old)
        self.values[old] = value
        new.meta = {
            "op": canonical_op(new),
            "val": self._specs(value),
            "module_stack": paths,
            "module_types": tuple(kind for _, kind in stack),
            "module_path": paths[-1] if paths else "",
            "source": source_line(old),
            "region": Region(grad=self.grad, autocast=self.regions[-1][1] if self.regions else None),
            "dynamo": old.meta,
        }
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            new.meta["number"] = _hint(value)
        if new.target is torch._C._set_grad_enabled:
            self.grad = bool(new.args[0])

    def _value(self, node: fx.Node) -> Any:
        """What the node makes in float32: computed again where autocast had a hand in it."""
        value = self.values.get(node, node.meta.get("example_value"))
        if node.op in ("placeholder", "get_attr", "output"):
            return value if value is not None else _attribute(self.gm, node)
        cast = bool(self.ambient or self.regions)
        if not any(isinstance(leaf, torch.Tensor) and _is_float(leaf) for leaf in pytree.tree_leaves(value)):
            return value
        if not cast and not any(source in self.changed for source in node.all_input_nodes):
            return value
        again = self._run(node)
        before, after = (
            [leaf.dtype for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            for found in (value, again)
        )
        if before == after:
            return value
        self.changed.add(node)
        return again

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            if self.mode is None:
                raise CaptureError("no example values")
            with self.mode, torch.autocast(self.device_type, enabled=False), torch.set_grad_enabled(self.grad):
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                return node.target(*args, **kwargs)
        except Exception as error:
            raise CaptureError(
                f"{node.name} at {source_line(node) or 'an unknown line'} stands in an autocast region and cannot be "
                f"computed in float32 beforehand ({type(error).__name__}: {error})"
            ) from error

    def _specs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorSpec(
                dtype=value.dtype,
                shape=tuple(int(_hint(size) or 1) for size in value.shape),
                requires_grad=value.requires_grad,
                device=value.device,
                storage=self._storage(value),
            )
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            specs = [self._specs(item) for item in value]
            return specs if type(value) is list else tuple(specs)
        if isinstance(value, dict):
            return {key: self._specs(item) for key, item in value.items()}
        return None

    def _storage(self, tensor: torch.Tensor) -> int:
        try:
            reference = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without one storage
            return -len(self.values) - 1
        known = self.storages.setdefault(reference.cdata, (len(self.storages) + 1, reference))
        return known[0]


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    if node.op != "get_attr":
        return None
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _hint(number: Any) -> Any:
    """The example's value of a size or a number, without a guard on it; None if it has none."""
    node = getattr(number, "node", None)
    if node is None:
        return number
    try:
        return node.hint if node.has_hint() else None
    except Exception:  # a number that only a run knows
        return None


def source_line(node: fx.Node) -> str:
    """``file.py:line`` of the innermost line in a node's stack trace."""
    lines = [
        (name, line)
        for name, line in _LINE.findall(node.meta.get("stack_trace") or "")
        if not name.startswith(torch.__path__[0])
    ]
    return f"{lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]}" if lines else ""


# ---------------------------------------------------------------------- attention


def open_attention(graph: fx.Graph, device_type: str, dtype: torch.dtype) -> None:
    """Multi-head attention, one node in Dynamo's graphs, runs its matrix products low, its edges are float32."""
    for node in graph.nodes:
        if node.target is F.multi_head_attention_forward and region_of(node).autocast is not False:
            node.target = attention_in_low_precision
            node.kwargs = {**node.kwargs, "ampfx_device_type": device_type, "ampfx_dtype": long_name(dtype)}
            node.meta["op"] = canonical_op(node)


def close_attention(graph: fx.Graph) -> None:
    """After the passes: where the policy chose another dtype for attention, that is what it runs in."""
    for node in graph.nodes:
        if node.target is attention_in_low_precision and node.meta["decision"].kind == "override":
            node.target = F.multi_head_attention_forward
            node.kwargs = {name: value for name, value in node.kwargs.items() if not name.startswith("ampfx_")}


def attention_in_low_precision(*args: Any, ampfx_device_type: str, ampfx_dtype: str, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward`` as ``torch.autocast`` runs it; a dtype in the call would be the author's."""
    with torch.autocast(ampfx_device_type, dtype=getattr(torch, ampfx_dtype)):
        output, weights = F.multi_head_attention_forward(*args, **kwargs)
    return output.float(), None if weights is None else weights.float()


# ---------------------------------------------------------------------- the way back


def to_compiler(dynamo: DynamoGraph, gm: fx.GraphModule, attributes: dict[str, Any]) -> fx.GraphModule:
    """Dynamo's graph with the converted nodes: its placeholders are inputs again.

    Args:
        dynamo: the converted graph; it is used up.
        gm: the graph that Dynamo made; what the nodes read beside inputs comes from here.
        attributes: what else the nodes read, by name.
    """
    graph = dynamo.view.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in dynamo.placeholders:
            node.replace_all_uses_with(dynamo.placeholders[str(node.target)])
            graph.erase_node(node)
    for node in graph.nodes:
        # Compilers have their own use for meta; what Dynamo noted about values holds for inputs only.
        noted = dict(node.meta.get("dynamo", {}))
        if node.op != "placeholder":
            noted.pop("example_value", None)
        node.meta = noted
    root = nn.Module()
    for store in ("_modules", "_parameters", "_buffers"):
        vars(root)[store].update(getattr(gm, store))
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            root._modules[name] = value
        else:
            vars(root)[name] = value
    lowered = fx.GraphModule(root, graph, class_name="AmpfxGraph")
    lowered.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        lowered._param_name_to_source = gm._param_name_to_source
    return lowered


def body_inputs(dynamo: DynamoGraph, node: fx.Node) -> list[Any]:
    """What stands for the placeholders of the graph that a checkpoint runs: parameters as such, fake values else."""
    return [_given(dynamo, value) if isinstance(value, fx.Node) else value for value in node.args[1:]]


def _given(dynamo: DynamoGraph, value: fx.Node) -> Any:
    if value.op == "get_attr" and str(value.target) in dynamo.placeholders:
        return get_attribute(dynamo.view, str(value.target))
    return dynamo.values[value]
