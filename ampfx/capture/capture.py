"""Capture a model: run it once under the recorder and return what its graph needs to run.

Steps:

1. bind the arguments as the forward would, take them apart, copy the tensors;
2. remember the state that a run changes (buffers, module attributes, random generators);
3. run the forward under :class:`ampfx.capture.recorder.Recorder`;
4. turn changed module attributes into graph nodes, refuse those that cannot be replayed;
5. bring the state back, so that a capture leaves no trace on the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn

from ampfx import runtime
from ampfx.capture.attributes import MISSING, ModuleState, harmless, restore_attributes, snapshot_attributes
from ampfx.capture.cumulative_norm import counts_batches, cumulative_forward
from ampfx.capture.holders import HeldTensors
from ampfx.capture.hooks import call_hooked, has_hooks
from ampfx.capture.inputs import copy_leaves, is_input_leaf, is_output_leaf, leaf_names
from ampfx.capture.interception import intercepting
from ampfx.capture.random_state import python_state, random_state
from ampfx.capture.recorder import Recorder, source_line
from ampfx.capture.structure import Structure, flatten, unflatten
from ampfx.capture.symbols import TracedFloat, TracedInt
from ampfx.errors import CaptureError
from ampfx.graph_utils import is_impure

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


@dataclass
class Captured:
    """A recorded graph and what belongs to it.

    Args:
        graph: the canonical graph: placeholders are the varying leaves of the inputs.
        inputs: structure of ``(args, kwargs)``.
        outputs: structure of the result; its leaves are the values of the output node.
        constants: objects the graph reads through ``get_attr`` and that the model does not hold.
        written_attributes: ``(module path, name)`` of attributes that the forward assigns.
        mutated: names of held tensors that the forward writes to in place.
        late_guards: whether guards stand among the nodes.
        module_calls: number of module calls recorded, by path.
    """

    graph: fx.Graph
    inputs: Structure
    outputs: Structure
    constants: dict[str, Any]
    written_attributes: tuple[tuple[str, str], ...] = ()
    mutated: tuple[str, ...] = ()
    late_guards: bool = False
    module_calls: dict[str, int] = field(default_factory=dict)


class UnstableAttributeError(CaptureError):
    """The forward changes a plain attribute; it may do so at its first call only."""


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Hooks on all modules (profilers, counters) are not the model's: they stay out of the recording."""
    stores = [getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS]
    kept = [dict(store) for store in stores]
    for store in stores:
        store.clear()
    try:
        yield
    finally:
        for store, hooks in zip(stores, kept, strict=True):
            store.update(hooks)


def _own_saves() -> contextlib.AbstractContextManager[Any]:
    """What a recorded run saves for a backward is its own: no hook of a caller (a checkpoint) may see it."""
    if torch._C._are_functorch_transforms_active():  # they allow no such hooks, so there are none of a caller
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Capture:
    """One recording of a module.

    Args:
        root: the module whose attributes the graph reads.
        forward: called with the arguments; runs the model.
    """

    def __init__(self, root: nn.Module, forward: Callable[..., Any], constant_prefix: str = "_ampfx_constant_") -> None:
        self.root, self.forward = root, forward
        self.paths: dict[int, str] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), path)
        self.held = HeldTensors(root)
        self.recorder = Recorder(root, self.held, constant_prefix)
        self.module_calls: dict[str, int] = {}
        self._regions = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """Record one call of the model with these arguments."""
        recorder, graph = self.recorder, self.recorder.graph
        leaves: list[Any] = []
        structure = flatten((args, kwargs), is_input_leaf, leaves)
        copies = copy_leaves(leaves)
        traced = self._placeholders(structure, copies)
        call_args, call_kwargs = unflatten(structure, traced)
        before = snapshot_attributes(self.root)
        try:
            with random_state(), torch.autocast(_device_type(leaves, self.root), enabled=False):
                python_random = python_state()
                with _own_saves(), _no_global_hooks(), self.held.recording(), intercepting(self), recorder:
                    result = self._call_root(call_args, call_kwargs)
                    outputs: list[Any] = []
                    out_structure = flatten(result, is_output_leaf, outputs)
                    self._refuse_changed_inputs(structure, traced, (call_args, call_kwargs))
                    written = self._record_writes(before)
                    graph.output(tuple(self._output_node(item) for item in outputs))
                if python_state() != python_random:
                    raise CaptureError(
                        "forward draws random numbers from Python's or numpy's generator: a graph would repeat the "
                        "numbers of the capture for ever. Draw them with torch (torch.rand(())), or pass them in."
                    )
            mutated = tuple(self.held.changed())
        finally:
            restore_attributes(before)
            self.held.restore()
        self._drop_unread()
        return Captured(
            graph=graph,
            inputs=structure.without_leaves(),
            outputs=out_structure.without_leaves(),
            constants={name: value for name, value in recorder.constants.items() if not name.startswith("_keep_")},
            written_attributes=written,
            mutated=mutated,
            late_guards=recorder.late_guards,
            module_calls=self.module_calls,
        )

    # ------------------------------------------------------------------ inputs and outputs

    def _placeholders(self, structure: Structure, leaves: list[Any]) -> list[Any]:
        recorder = self.recorder
        names = leaf_names(structure, self.forward)
        traced: list[Any] = []
        seen: dict[int, Any] = {}
        for name, leaf in zip(names, leaves, strict=True):
            node = recorder.graph.placeholder(name)
            recorder.describe(node)
            node.meta["source"] = ""
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in seen:
                    recorder.remember(leaf, node)
                    seen[id(leaf)] = leaf
                node.meta["val"] = recorder.spec_of(leaf)
                traced.append(leaf)
            else:
                node.meta["val"] = None
                node.meta["number"] = leaf
                kind = TracedInt if isinstance(leaf, int) else TracedFloat
                traced.append(kind(leaf, node, recorder))
        return traced

    def _drop_unread(self) -> None:
        """Dead nodes go here, before any pass looks; inputs stay, read or not."""
        self.recorder.graph.eliminate_dead_code(is_impure_node=is_impure)

    def _output_node(self, value: Any) -> fx.Node:
        node = self.recorder.to_fx(value)
        assert isinstance(node, fx.Node)
        return node

    def _refuse_changed_inputs(self, structure: Structure, leaves: list[Any], value: Any) -> None:
        after: list[Any] = []
        same = flatten(value, is_input_leaf, after)
        if same != structure or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise CaptureError(
                "forward changes one of its arguments (a dict, list or object that was passed in): the graph could "
                "not change the caller's. Return the new value instead."
            )

    # ------------------------------------------------------------------ modules, Functions, regions

    def _call_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.recorder.module_stack.append(("", type(self.root)))
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.recorder.module_stack.pop()

    def call_module(
        self, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module is called during the recording."""
        stack = self.recorder.module_stack
        path = self.paths.get(id(module))
        if path is None:
            outer = stack[-1][0] if stack else ""
            path = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
        self.module_calls[path] = self.module_calls.get(path, 0) + 1
        stack.append((path, type(module)))
        try:
            if id(module) in self.paths and has_hooks(module):
                return call_hooked(self, module, path, args, kwargs)
            if counts_batches(module) and not kwargs:
                return cumulative_forward(module, *args)
            return original(module, *args, **kwargs)
        finally:
            stack.pop()

    def call_function(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom autograd Function is applied: one node, its own backward is kept."""
        if cls is torch.utils.checkpoint.CheckpointFunction:
            function, _, *inputs = args
            with self.checkpoint_region():
                return function(*inputs)
        if kwargs:
            raise CaptureError(f"{cls.__name__}.apply is called with keyword arguments at {source_line()}")
        return self.recorder.call(runtime.apply_function, (cls, *args), {}, run=lambda cls_, *rest: cls_.apply(*rest))

    @contextlib.contextmanager
    def checkpoint_region(self) -> Iterator[None]:
        """The nodes recorded inside are recomputed in backward."""
        self._regions += 1
        outermost = not self.recorder.opaque_stack
        self.recorder.opaque_stack.append(self._regions if outermost else self.recorder.opaque_stack[-1])
        try:
            yield
        finally:
            self.recorder.opaque_stack.pop()

    # ------------------------------------------------------------------ attributes that forward assigns

    def _record_writes(self, before: list[ModuleState]) -> tuple[tuple[str, str], ...]:
        written = []
        for state in before:
            path = self.paths[id(state.module)]
            for name, value in state.changes():
                leaves: list[Any] = []
                flatten(value, is_output_leaf, leaves)
                if not leaves:
                    if value is MISSING or not harmless(value, state.attributes.get(name, MISSING)):
                        raise UnstableAttributeError(
                            f"forward changes the attribute {path + '.' if path else ''}{name} of "
                            f"{type(state.module).__name__} "
                            f"from {state.attributes.get(name, 'nothing')!r} to {value!r}: a graph would not repeat "
                            "that. Keep it in a buffer (register_buffer) and update it with a torch operation."
                        )
                    continue
                node = self.recorder._create(
                    runtime.set_attribute,
                    (self.recorder.module_node(path), name, self.recorder.to_fx(value)),
                    {},
                    "call_function",
                )
                node.meta["val"] = None
                written.append((path, name))
        return tuple(written)


def _device_type(leaves: list[Any], root: nn.Module) -> str:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            return _with_autocast(leaf.device.type)
    for parameter in root.parameters():
        return _with_autocast(parameter.device.type)
    return "cpu"


def _with_autocast(device_type: str) -> str:
    """The device whose autocast is switched off; tensors without values have none."""
    return device_type if torch.amp.is_autocast_available(device_type) else "cpu"
