"""The module that :func:`ampfx.convert` returns.

It is the user's model with another forward: an instance of a class derived from the model's own, with
the same parameters, buffers and submodules (the same objects in the same containers) and the same
attributes and methods, which call the converted forward. The forward looks for a graph that was captured
for this situation, captures one if there is none, and runs it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ampfx.blocks import is_above
from ampfx.capture.capture import Capture, Captured, UnstableAttributeError
from ampfx.capture.containers import unchanged
from ampfx.capture.dtype_following import following_dtypes
from ampfx.capture.inputs import copy_inputs, is_input_leaf
from ampfx.capture.interception import active
from ampfx.capture.made_up_inputs import candidates
from ampfx.capture.plain_run import failing_line, first_call, plain_run, switched_mode
from ampfx.capture.structure import flatten
from ampfx.compiled_call import attributes_hold, leaves_of, parameter_names, state_holds
from ampfx.context import ConversionContext
from ampfx.errors import AmpfxError, CaptureError, GuardError, NotCapturedError, PolicyError
from ampfx.graph_entry import GraphEntry, call_key, make_entry
from ampfx.graph_view import GraphView
from ampfx.loss_scale import ModuleScale, register_model
from ampfx.options import Options
from ampfx.part_calls import PartCalls, captured_part, python_part
from ampfx.parts import convert_children, parts_below, run_python, widened
from ampfx.parts_report import explain_in_parts, report_in_parts
from ampfx.passes import PassManager
from ampfx.policy import check_matches
from ampfx.printing import format_graph
from ampfx.report import Explanation, Report, build_report, explain
from ampfx.runtime import GuardFailure
from ampfx.user_warning import warn_user

_COPIED_STORES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
BLOCK_WISE = "the conversion is block by block (blocks=)."
MADE_UP = (
    "the input was made up, to have a graph to look at; the first call captures with the real ones "
    "(or give convert example_inputs=)"
)
_capture_lock = threading.RLock()
# So often may a fresh graph fail its own guards before the forward stays Python.
_MAX_UNDECIDED = 3


class Conversion:
    """The graphs of one converted module, and how to get more.

    Args:
        options: what :func:`ampfx.convert` was asked for.
        original: the class of the user's model.
        forward: the model's own forward where it is set on the instance, None for the class's.
        scale: the module's part of its loss scale.
    """

    def __init__(
        self,
        options: Options,
        original: type[nn.Module],
        forward: Callable[..., Any] | None,
        scale: ModuleScale | None,
    ) -> None:
        self.options, self.original, self.instance_forward, self.scale = options, original, forward, scale
        self.parameter_names = parameter_names(forward or original.forward)
        self.entries: list[GraphEntry] = []
        self.current: GraphEntry | None = None
        self.captures = 0
        self.prefix = ""
        self.python_reason: str | None = None
        self.part_calls: dict[bool, PartCalls] = {}
        self._warned_many = False
        self._policy_checked = False
        self._policy_warnings: list[str] = []
        self._own_runs = 0
        self._undecided = 0

    # ------------------------------------------------------------------ running

    def call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the converted forward."""
        if torch.compiler.is_compiling():
            return self.call_compiling(root, args, kwargs)
        if active() is not None:  # a model around this one is being recorded, and decides for its whole graph
            forward = self.instance_forward or types.MethodType(self.original.forward, root)
            with self.as_original(root):
                return forward(*args, **kwargs)
        if self.python_reason is not None:
            return self.call_python(root, args, kwargs)
        leaves: list[Any] = []
        structure = flatten((args, kwargs), is_input_leaf, leaves)
        autocast = torch.is_autocast_enabled(self.options.device_type)
        if self.prefix and autocast:
            args, kwargs, leaves = widened(args, kwargs, structure, leaves, self.options.dtype)
        key = call_key(leaves)
        with captured_part(self.prefix):
            if autocast:
                with torch.autocast(self.options.device_type, enabled=False):
                    return self._call(root, args, kwargs, structure, key, leaves)
            return self._call(root, args, kwargs, structure, key, leaves)

    def _call(self, root: nn.Module, args: Any, kwargs: Any, structure: Any, key: Any, leaves: list[Any]) -> Any:
        if self.entries and self.entries[0].provisional:
            self._forget(root, self.entries.pop(0))
            self.captures -= 1
        for entry in self.entries:
            if entry.key == key and entry.captured.inputs == structure and entry.host.matches():
                try:
                    result = entry.run(leaves)
                except GuardFailure:
                    continue
                self._use(entry)
                return result
        try:
            entry = self.capture(root, args, kwargs)
        except CaptureError as error:
            if self.options.strict:
                raise
            self.stay_python(root, str(error))
            return self.call_python(root, args, kwargs)
        try:
            return entry.run(leaves)
        except GuardFailure as failure:
            return self._call_undecided(root, entry, failure, args, kwargs)

    def _call_undecided(self, root: nn.Module, entry: GraphEntry, failure: GuardFailure, args: Any, kwargs: Any) -> Any:
        """What forward decided in float32 is decided otherwise in low precision: no graph holds for this call."""
        self.entries.remove(entry)
        self._forget(root, entry)
        self._undecided += 1
        reason = (
            f"{self.original.__name__} decides at {failure.where or 'an unknown line'} by a value that comes out "
            f"differently in low precision (float32: {failure.expected!r}, now: {failure.found!r}). Keep what is "
            'decided by in float32 with ampfx.Override(..., dtype="float32").'
        )
        if self.options.strict:
            raise GuardError(reason)
        if self._undecided >= _MAX_UNDECIDED or isinstance(failure.expected, (float, str)):
            self.stay_python(root, reason)
        return self.call_python(root, args, kwargs)

    def call_python(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that stays Python; its children are converted."""
        options = self.options
        scaled = self.scale is not None and options.dtype == torch.float16
        forward = self.instance_forward or types.MethodType(self.original.forward, root)
        with self.as_original(root), python_part(self.prefix, self.part_calls, root.training):
            return run_python(forward, args, kwargs, options.device_type, None if scaled else options.dtype)

    @contextlib.contextmanager
    def as_original(self, root: nn.Module) -> Iterator[None]:
        """While the model's own code runs, its class is its own: it may have a ``graph`` or a ``report``."""
        with _capture_lock:
            self._own_runs += 1
            object.__setattr__(root, "__class__", self.original)
        try:
            yield
        finally:
            with _capture_lock:
                self._own_runs -= 1
                if not self._own_runs:
                    object.__setattr__(root, "__class__", converted_class(self.original))

    def stay_python(self, root: nn.Module, reason: str) -> None:
        """Leave this module's own code to Python from now on and convert its children instead."""
        self.python_reason = reason
        for entry in self.entries:
            self._forget(root, entry)
        self.entries.clear()
        self.convert_children(root, {})
        if not self.prefix and reason is not BLOCK_WISE:
            warn_user(
                f"{self.original.__name__} is converted in parts: {reason} What runs in Python is listed in "
                "report(); strict=True raises instead."
            )

    def convert_children(self, root: nn.Module, known: dict[int, nn.Module]) -> None:
        """Give ``root`` children that are converted, each by itself, when they are called."""

        def part(child: nn.Module, path: str) -> nn.Module:
            if isinstance(child, ConvertedModule):
                return child
            converted = wrap(child, self.options, self.scale)
            converted._ampfx.prefix = path
            blocks = self.options.blocks
            if blocks is not None and is_above(path, blocks):
                converted._ampfx.python_reason = BLOCK_WISE
                converted._ampfx.convert_children(converted, known)
            return converted

        convert_children(root, part, known, self.prefix)

    def call_compiling(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward as ``torch.compile`` sees it: the graph of the current mode, with its guards."""
        failed = ""
        for same_grad in (True, False):
            for entry in self.entries:
                if entry.training != root.training or same_grad != (entry.key[0] == torch.is_grad_enabled()):
                    continue
                leaves = leaves_of(entry.captured.inputs, self.parameter_names, args, kwargs)
                if leaves is None or not attributes_hold(entry.watched) or not state_holds(entry):
                    continue
                if entry.written_inputs or entry.written_tensors:
                    return entry.run_compiling(leaves)
                try:  # what was traced before a guard that fails is dropped: nothing is written there
                    return entry.run_compiling(leaves)
                except NotCapturedError as error:
                    failed = str(error)
        raise NotCapturedError(
            failed
            or f"torch.compile needs the graph of {self.original.__name__} for this mode and these arguments, and it "
            "was captured for others: call the converted module once in this way (train or eval, the same flags and "
            "structure) before compiling, or give convert example_inputs="
        )

    def _use(self, entry: GraphEntry) -> None:
        self.current = entry
        if self.entries[0] is not entry:
            self.entries.remove(entry)
            self.entries.insert(0, entry)

    # ------------------------------------------------------------------ capturing

    def capture(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphEntry:
        """Capture and convert the model for one more situation."""
        grad = torch.is_grad_enabled()  # asked first: leaving inference mode switches it on
        with _capture_lock, torch.inference_mode(False), torch.set_grad_enabled(grad):
            return self._capture(root, args, kwargs)

    def _capture(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphEntry:
        forward = self.instance_forward or types.MethodType(self.original.forward, root)
        prefix = f"_ampfx_constant_{self.captures}_"
        leaves: list[Any] = []
        flatten((args, kwargs), is_input_leaf, leaves)
        with self.as_original(root), unchanged((args, kwargs)):
            captured = self._record(root, forward, prefix, args, kwargs)
            if not (self.prefix or self._policy_checked):  # an override need not match something in each part
                self._check_policy(root, forward, captured, args, kwargs)
        entry = make_entry(root, captured, leaves, self.lower, self.original.__name__)
        self.captures += 1
        if len(self.entries) >= self.options.max_graphs:
            self._warn_many()
            self._forget(root, self.entries.pop())
        self.entries.insert(0, entry)
        self.current = entry
        for text in entry.context.warnings:
            warn_user(text)
        return entry

    def _check_policy(
        self, root: nn.Module, forward: Callable[..., Any], captured: Captured, args: Any, kwargs: Any
    ) -> None:
        """Every entry of the policy must select something, in the graph of this mode or of the other."""
        modules = list(root.named_modules())
        selects = functools.partial(
            check_matches,
            self.options.policy,
            paths=[path for path, _ in modules],
            types=[type(module) for _, module in modules],
            low=self.options.dtype,
        )
        nodes = _operations(captured)
        try:
            self._policy_warnings = selects(nodes)
        except PolicyError:
            with switched_mode(root):
                try:
                    other = self._record(root, forward, "_ampfx_other_mode_", args, kwargs)
                except AmpfxError:
                    other = captured
            self._policy_warnings = selects(nodes + _operations(other))
        self._policy_checked = True

    def _record(self, root: nn.Module, forward: Callable[..., Any], prefix: str, args: Any, kwargs: Any) -> Captured:
        """Record the forward; tell an error of the model from one of the recording."""
        try:
            try:
                return self._record_once(root, forward, prefix, args, kwargs)
            except UnstableAttributeError:
                # Many models set themselves up at their first call. Let them, then look again.
                with first_call(root, forward, args, kwargs):
                    return self._record_once(root, forward, prefix, args, kwargs)
        except CaptureError as error:
            raise CaptureError(f"{self.original.__name__} cannot be captured: {error}") from error
        except Exception as error:
            line = failing_line(error)
            call_args, call_kwargs = copy_inputs(args, kwargs)
            with plain_run(root):
                forward(*call_args, **call_kwargs)  # raises the model's own error if it is one
            raise CaptureError(
                f"{self.original.__name__} cannot be captured: at {line} its forward does something that runs with "
                f"plain values and fails while it is recorded ({type(error).__name__}: {error})"
            ) from error

    @staticmethod
    def _record_once(root: nn.Module, forward: Callable[..., Any], prefix: str, args: Any, kwargs: Any) -> Captured:
        try:
            capture = Capture(root, forward, prefix)
            capture.recorder.follow_dtypes = True
            with following_dtypes():
                return capture.run(args, kwargs)
        except TypeError:  # a function that takes no traced dtype
            return Capture(root, forward, prefix).run(args, kwargs)

    @staticmethod
    def _forget(root: nn.Module, entry: GraphEntry) -> None:
        for name in entry.captured.constants:
            vars(root).pop(name, None)

    def _warn_many(self) -> None:
        if not self._warned_many:
            self._warned_many = True
            warn_user(
                f"{self.original.__name__} was captured {self.captures} times: its forward branches on its inputs in "
                f"many ways. Only {self.options.max_graphs} graphs are kept; every further change captures again, "
                "which is right but slow. What differed can be seen in the guards of model.graph."
            )

    def preview(self, root: nn.Module) -> None:
        """Capture with a made-up input where one is easy to make up, to have a graph to look at."""
        if self.python_reason is not None:
            return
        forward = self.instance_forward or types.MethodType(self.original.forward, root)
        for candidate in candidates(root, forward):
            try:
                with torch.random.fork_rng(devices=[]), plain_run(root), torch.no_grad():
                    forward(candidate)
            except Exception:  # the model does not take such an input
                continue
            try:
                entry = self.capture(root, (candidate,), {})
            except AmpfxError:
                return
            entry.provisional = True
            return

    def lower(self, view: GraphView) -> ConversionContext:
        """Run the passes on a captured graph."""
        options = self.options
        context = ConversionContext(
            low_dtype=options.dtype,
            device_type=options.device_type,
            policy=options.policy,
            objective=options.objective,
            loss_scale=self.scale,
            output_dtype=options.output_dtype,
        )
        context.warnings += self._policy_warnings
        self._policy_warnings = []
        PassManager(options.passes).run(view, context)
        return context

    def entry(self, root: nn.Module, what: str) -> GraphEntry:
        """The graph that is looked at: of the current mode, the one used last."""
        for entry in self.entries:
            if entry.training == root.training:
                return entry
        if self.entries:
            return self.entries[0]
        if self.python_reason is not None:
            raise NotCapturedError(
                f"{self.original.__name__} stays Python and is converted in parts, so it has no {what} of its own; its "
                f"parts have: {', '.join(path for path, _ in parts_below(root, ConvertedModule)) or 'none'}. "
                f"Why: {self.python_reason}"
            )
        raise NotCapturedError(
            f"{self.original.__name__} is not captured yet, so it has no {what}: call it once, or convert it with "
            "example_inputs=."
        )


class ConvertedModule(fx.GraphModule):
    """A model converted by :func:`ampfx.convert`."""

    _ampfx: Conversion

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Stops here: to the registries of the user's base classes a converted class is no class of its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Calling the class makes a model of the user's: ``model[:2]`` and class methods do that."""
        original = getattr(cls, "_ampfx_original", None)
        if original is None:
            raise TypeError("converted modules are made by ampfx.convert")
        return original(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in mixed precision."""
        return self._ampfx.call(self, args, kwargs)

    # ------------------------------------------------------------------ looking

    @property
    def graph(self) -> fx.Graph:
        """The converted graph of the current mode (train or eval), the one that ran last."""
        return self._ampfx.entry(self, "graph").view.graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._ampfx.entry(self, "graph").view.graph = graph

    @property
    def code(self) -> str:
        """The Python code of :attr:`graph`."""
        return self._ampfx.entry(self, "code").view.code

    def __getattr__(self, name: str) -> Any:
        if name in ("graph", "code"):  # the property raised: repeat its message instead of "no attribute"
            self._ampfx.entry(self, name)
        original = self.__dict__["_ampfx"].original if "_ampfx" in self.__dict__ else nn.Module
        return original.__getattr__(self, name)

    def recompile(self) -> fx.graph.PythonCode:
        """Generate the code anew after an edit of :attr:`graph`."""
        entry = self._ampfx.entry(self, "graph")
        entry.view.recompile()
        entry.checked = entry.view.compiled
        return entry.view.graph.python_code(root_module="self")

    def print_readable(self, *args: Any, **kwargs: Any) -> str:
        """The code of the graph with types, as :meth:`torch.fx.GraphModule.print_readable`."""
        return str(self._ampfx.entry(self, "graph").view.print_readable(*args, **kwargs))

    def format_graph(self) -> str:
        """The graph, one line for each node, with dtype, shape, class and reason."""
        return format_graph(self._ampfx.entry(self, "graph").view)

    def report(self) -> Report:
        """What runs in which dtype, and why; casts and bytes. Of a model in parts: over all its graphs."""
        if self._ampfx.python_reason is not None:
            return report_in_parts(self, ConvertedModule)
        entry = self._ampfx.entry(self, "report")
        notes = [MADE_UP] if entry.provisional else []
        return build_report(
            entry.view,
            entry.context,
            title=entry.title,
            mode="train" if entry.training else "eval",
            inputs=_inputs(entry),
            notes=notes,
        )

    def explain(self, node_or_module_path: str) -> Explanation:
        """Why a node, or each node of a module, has its dtype."""
        if self._ampfx.python_reason is not None:
            return explain_in_parts(self, ConvertedModule, node_or_module_path)
        entry = self._ampfx.entry(self, "explanation")
        return explain(entry.view, entry.context, node_or_module_path)

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        state = {name: value for name, value in vars(self).items() if not name.startswith("_ampfx")}
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(state, memo))
        return _attach(twin, self._ampfx, memo)

    def __copy__(self) -> ConvertedModule:
        twin = object.__new__(type(self))
        vars(twin).update({name: value for name, value in vars(self).items() if not name.startswith("_ampfx")})
        return _attach(twin, self._ampfx, {})

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if not name.startswith("_ampfx")}
        conversion = self._ampfx
        return (
            _rebuild,
            (
                conversion.original,
                conversion.options,
                conversion.instance_forward,
                conversion.scale,
                conversion.prefix,
                conversion.python_reason,
            ),
            state,
            None,
            None,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._parameters, *self._buffers, *self._modules})

    def __repr__(self) -> str:
        return str(nn.Module.__repr__(self))

    def __str__(self) -> str:
        return repr(self)

    def _get_name(self) -> str:
        return self._ampfx.original.__name__


def _operations(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.op in ("call_function", "call_method")]


def _inputs(entry: GraphEntry) -> str:
    specs = [
        node.meta.get("val_float32", node.meta.get("val"))
        for node in entry.view.graph.nodes
        if node.op == "placeholder"
    ]
    return ", ".join("x".join(map(str, spec.shape)) if hasattr(spec, "shape") else "number" for spec in specs)


@functools.cache
def _converted_class(original: Any) -> type[ConvertedModule]:
    @functools.wraps(original.forward)
    def forward(self: ConvertedModule, *args: Any, **kwargs: Any) -> Any:
        return self._ampfx.call(self, args, kwargs)

    namespace = {
        "forward": forward,
        "_ampfx_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (ConvertedModule, original), namespace)


def converted_class(original: Any) -> type[ConvertedModule]:
    """The class of converted models of one class: derived from it, so that ``isinstance`` holds."""
    return _converted_class(original)


def wrap(model: nn.Module, options: Options, scale: ModuleScale | None = None) -> ConvertedModule:
    """A converted module over ``model``, with no graph yet; ``scale`` is that of the module it is a part of."""
    original = type(model)
    converted = object.__new__(converted_class(original))
    attributes = dict(vars(model))
    instance_forward = attributes.pop("forward", None)
    for store in _COPIED_STORES:
        if store in attributes:
            attributes[store] = copy.copy(attributes[store])
    vars(converted).update(attributes)
    if inspect.ismethod(instance_forward) and instance_forward.__self__ is model:
        instance_forward = types.MethodType(instance_forward.__func__, converted)
    return _finish(converted, options, original, instance_forward, scale)


def _finish(
    converted: ConvertedModule,
    options: Options,
    original: type[nn.Module],
    forward: Callable[..., Any] | None,
    scale: ModuleScale | None = None,
) -> ConvertedModule:
    part = register_model(converted, scale or options.loss_scale, options.dtype)
    vars(converted)["_ampfx"] = Conversion(options, original, forward, part)
    return converted


def _attach(twin: ConvertedModule, conversion: Conversion, memo: dict[int, Any]) -> ConvertedModule:
    """Give a copy its own conversion: it captures again at its first call, from its own tensors."""
    forward = conversion.instance_forward
    if inspect.ismethod(forward):
        forward = types.MethodType(forward.__func__, twin)
    scale = copy.deepcopy(conversion.scale, memo)  # the copies of a model's parts share one, too
    _finish(twin, conversion.options, conversion.original, forward, scale)
    twin._ampfx.prefix, twin._ampfx.python_reason = conversion.prefix, conversion.python_reason
    return twin


def _rebuild(
    original: type[nn.Module],
    options: Options,
    forward: Callable[..., Any] | None,
    scale: ModuleScale | None,
    prefix: str,
    python_reason: str | None,
) -> ConvertedModule:
    converted = _finish(object.__new__(converted_class(original)), options, original, forward, scale)
    converted._ampfx.prefix, converted._ampfx.python_reason = prefix, python_reason
    return converted
