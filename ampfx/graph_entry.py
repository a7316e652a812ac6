"""One captured situation of a model: its key, its graph, and how it is run safely.

A graph is used for a call only if

1. the inputs have the structure, dtypes, numbers of dimensions, devices and gradient flags of the capture,
   and grad mode is the same;
2. the modules are in the state of the capture (:class:`ampfx.capture.host_state.HostState`);
3. every guard holds. Guards on shapes are checked once for each set of input shapes; in such a run, and in
   every run of a graph with guards on values, what the graph writes is remembered, so that a guard that
   fails in the middle leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ampfx.capture.capture import Captured
from ampfx.capture.host_state import HostState
from ampfx.capture.shape_guards import value_guards
from ampfx.capture.structure import unflatten
from ampfx.compiled_call import watched_attributes
from ampfx.context import ConversionContext
from ampfx.errors import AmpfxError
from ampfx.graph_utils import get_attribute, is_impure
from ampfx.graph_view import GraphView, Host, compile_graph
from ampfx.ops import written_arguments
from ampfx.traced_guards import with_assertions

_MAX_VERIFIED = 4096
_FLOAT16 = torch.finfo(torch.float16)


def call_key(leaves: list[Any]) -> tuple[Any, ...]:
    """What a graph fixes about the inputs of a call, beside their structure."""
    grad = torch.is_grad_enabled()
    seen: dict[int, int] = {}
    parts: list[Any] = [grad]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), index)
            parts.append((leaf.dtype, leaf.dim(), leaf.device, grad and leaf.requires_grad, first, leaf.layout))
        else:
            parts.append((type(leaf), _magnitude(leaf)))
    return tuple(parts)


def _magnitude(number: int | float) -> int:
    """Whether a number is too large or too small for low precision: what it meets may then be in float32."""
    size = abs(number)
    if size == 0 or not math.isfinite(size):
        return 0
    return 1 if size > _FLOAT16.max else -1 if size < _FLOAT16.smallest_normal else 0


def shape_key(leaves: list[Any]) -> tuple[Any, ...]:
    """The shapes and numbers of a call."""
    return tuple(leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


def _shapes(value: Any) -> Any:
    """The shapes in what a forward keeps on its modules."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    return tuple(_shapes(item) for item in value.values()) if isinstance(value, dict) else None


@dataclass
class GraphEntry:
    """A graph of a converted module.

    Args:
        captured: the recording that the graph comes from.
        key: :func:`call_key` of the captured call.
        host: state of the modules.
        view: the converted graph, without guards on shapes.
        checked: the same graph with all guards.
        context: settings and notes of the passes.
        training: mode of the root module.
        watched: plain attributes of modules that a compiled program guards.
        traceable: ``checked`` with guards on values that a compiler can trace, where there are such guards.
    """

    captured: Captured
    key: tuple[Any, ...]
    host: HostState
    view: GraphView
    checked: Callable[..., Any]
    context: ConversionContext
    training: bool
    title: str = ""
    data_guards: bool = False
    verified: set[tuple[Any, ...]] = field(default_factory=set)
    written_inputs: tuple[int, ...] = ()
    written_tensors: tuple[str, ...] = ()
    num_inputs: int = 0
    kept: tuple[tuple[nn.Module, str], ...] = ()
    provisional: bool = False
    watched: tuple[tuple[Any, str, Any], ...] = ()
    traceable: Callable[..., Any] | None = None

    def run(self, leaves: list[Any]) -> Any:
        """Run the graph on the leaves of a call; raises ``GuardFailure`` with nothing changed."""
        key = self.shapes_of(leaves) if self.captured.late_guards else ()
        if self.captured.late_guards and (self.data_guards or key not in self.verified):
            with self._undone_on_error(leaves):
                values = self._run_checked(leaves)
            if not self.data_guards and len(self.verified) < _MAX_VERIFIED:
                self.verified.add(key)
        else:
            values = self.view.compiled(*leaves)
        return unflatten(self.captured.outputs, values)

    def run_compiling(self, leaves: list[Any]) -> Any:
        """Run with all guards and without bookkeeping, in a form that ``torch.compile`` can trace."""
        values = (self.traceable or self.checked)(*leaves)
        if self.captured.outputs.kind is None:
            return values[0]
        return unflatten(self.captured.outputs, values)

    def shapes_of(self, leaves: list[Any]) -> tuple[Any, ...]:
        """What the guards on shapes depend on: the inputs, and what earlier calls left on the modules."""
        if not self.kept:
            return shape_key(leaves)
        kept = tuple(
            _shapes(module._buffers[name] if name in module._buffers else vars(module).get(name))
            for module, name in self.kept
        )
        return (*shape_key(leaves), kept)

    def _run_checked(self, leaves: list[Any]) -> Any:
        """Run with all guards. What autograd notes on an input that is written to cannot be undone: take copies."""
        given = {i: leaves[i] for i in self.written_inputs if torch.is_grad_enabled() and leaves[i].requires_grad}
        if not given:
            return self.checked(*leaves)
        copies = {index: tensor.clone() for index, tensor in given.items()}
        values = self.checked(*[copies.get(index, leaf) for index, leaf in enumerate(leaves)])
        for index, tensor in given.items():
            tensor.copy_(copies[index])
        return values

    @contextlib.contextmanager
    def _undone_on_error(self, leaves: list[Any]) -> Iterator[None]:
        tensors = [get_attribute(self.view, name) for name in self.written_tensors]
        tensors += [leaves[index] for index in self.written_inputs]
        copies = [tensor.detach().clone() for tensor in tensors]
        random = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        grad = torch.is_grad_enabled()
        try:
            yield
        except BaseException:
            torch._C._set_grad_enabled(grad)
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.data.copy_(copy)
            torch.set_rng_state(random)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            raise


def make_entry(
    root: nn.Module,
    captured: Captured,
    leaves: list[Any],
    lower: Callable[[GraphView], ConversionContext],
    title: str,
) -> GraphEntry:
    """Convert a recording and make it runnable.

    Args:
        root: the converted module.
        captured: the recording.
        leaves: leaves of the inputs it was recorded with.
        lower: runs the passes on the view.
        title: how messages call the model.
    """
    host = HostState(root, captured.written_attributes)
    view = GraphView(root, captured.graph)
    vars(root).update(captured.constants)
    written_inputs, written_tensors = _written(captured.graph)
    context = lower(view)
    checked = view.compiled
    shape_guards, data_guards = value_guards(view.graph)
    asserting = with_assertions(view.graph) if data_guards else None
    traceable = None if asserting is None else compile_graph(asserting, Host(root))
    if shape_guards:
        _remove(view.graph, shape_guards)
        view.recompile()
    entry = GraphEntry(
        captured=captured,
        key=call_key(leaves),
        host=host,
        view=view,
        checked=checked,
        context=context,
        training=root.training,
        title=title,
        data_guards=bool(data_guards),
        written_inputs=written_inputs,
        written_tensors=written_tensors,
        num_inputs=len(leaves),
        traceable=traceable,
        watched=watched_attributes(root, captured.written_attributes),
        kept=tuple((root.get_submodule(path), name) for path, name in captured.written_attributes),
    )
    captured.late_guards = bool(shape_guards or data_guards)
    entry.verified.add(entry.shapes_of(leaves))
    return entry


def _written(graph: fx.Graph) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Inputs (by position) and held tensors (by name) that share memory with something the graph writes."""
    storages = set()
    for node in graph.nodes:
        for target in written_arguments(node):
            spec = target.meta.get("val")
            storages.add(getattr(spec, "storage", None))
    storages.discard(None)
    inputs, names, position = [], [], 0
    for node in graph.nodes:
        shared = getattr(node.meta.get("val"), "storage", None) in storages
        if node.op == "placeholder":
            if shared:
                inputs.append(position)
            position += 1
        elif node.op == "get_attr" and shared:
            names.append(str(node.target))
    return tuple(inputs), tuple(names)


def _remove(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    for node in nodes:
        if node.users:
            raise AmpfxError(f"guard {node.name} has readers")
        graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=is_impure)
