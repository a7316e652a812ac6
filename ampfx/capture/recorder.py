"""Record a real run of a model as an fx graph.

Method:

1. The model runs once, with real tensors, under a :class:`torch.overrides.TorchFunctionMode`. Every
   torch-level call (functions, methods, operators, factories, attribute reads, grad-mode switches)
   arrives here before it runs and becomes one node. Nothing in the model is replaced, so Python
   control flow, ``isinstance`` and C++ code behave as in a plain run.
2. A tensor is known by its identity: results of recorded calls map to their node; parameters,
   buffers and other tensors that the model holds become ``get_attr`` nodes at first use. A tensor
   that is neither, and did not exist before the run, was made out of the recorder's sight:
   that is an error, never a constant.
3. Sizes and other numbers are :mod:`ampfx.capture.symbols`: they stay nodes. What Python decides
   from a value (a branch, a loop count, the length of a list) is recorded as a guard node.
4. Calls whose inside must not be opened (custom autograd Functions, hooks) are one node of a
   function of :mod:`ampfx.runtime`.

The recorder computes in the model's own precision; it assigns none.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampfx import runtime
from ampfx.capture.dtype_following import TracedDtype, is_traced_dtype, unwrapped
from ampfx.capture.holders import HeldTensors
from ampfx.capture.structure import flatten
from ampfx.capture.symbols import TracedFloat, TracedInt, TracedSize, is_traced
from ampfx.dtypes import Region, TensorSpec
from ampfx.errors import CaptureError
from ampfx.ops import AUTHOR_CASTS, canonical_op

_TORCH_DIR = torch.__path__[0]
_OWN_DIR = __file__.rsplit("capture", 1)[0]

# Reads of a tensor's properties that the key of a graph fixes: answered, not recorded.
_FIXED_PROPERTIES = frozenset(
    [
        "dtype",
        "device",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_mps",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_vulkan",
        "is_xla",
        "is_ipu",
        "is_hpu",
        "is_maia",
        "is_mtia",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "itemsize",
        "names",
        "output_nr",
        "_version",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "retains_grad",
        "__dict__",
        "__class__",
        "_grad_fn",
        "_base",
        "_cdata",
        "name",
        "is_fbgemm",
        "__module__",
        "__doc__",
        "volatile",
        "grad_dtype",
    ]
)
# Methods of the same kind.
_FIXED_METHODS = frozenset(
    [
        "dim",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "element_size",
        "has_names",
        "get_device",
        "is_pinned",
        "is_shared",
        "is_conj",
        "is_neg",
        "is_set_to",
        "data_ptr",
        "__dir__",
        "__hash__",
        "type_name",
        "has_torch_function",
        "is_coalesced",
        "dense_dim",
        "sparse_dim",
        "is_distributed",
        "_is_view",
        "is_same_size",
        "const_data_ptr",
    ]
)
_TENSOR_PROPERTIES = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])
# Methods that hand a Python value to the model: recorded with a guard on that value.
_VALUE_METHODS = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "tolist",
        "is_contiguous",
        "stride",
        "storage_offset",
        "is_nonzero",
        "equal",
        "allclose",
        "__contains__",
    ]
)
_ARRAY_METHODS = frozenset(["numpy", "__array__", "__dlpack__", "untyped_storage", "storage"])
_TEXT_METHODS = frozenset(["__repr__", "__str__", "__format__"])
_HOOK_METHODS = frozenset(["register_hook", "retain_grad", "register_post_accumulate_grad_hook"])
# Operations whose number of results depends on a shape.
_LENGTH_OPS = frozenset(["unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes"])

_DUNDERS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__pow__": operator.pow,
    "__truediv__": operator.truediv,
    "__matmul__": operator.matmul,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": operator.abs,
    "__invert__": operator.invert,
}
_REVERSED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add,
    "__rsub__": operator.sub,
    "__rmul__": operator.mul,
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rpow__": operator.pow,
    "__rmod__": operator.mod,
    "__rmatmul__": operator.matmul,
    "__rlshift__": operator.lshift,
    "__rrshift__": operator.rshift,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "__ipow__": operator.ipow,
    "__ifloordiv__": operator.ifloordiv,
    "__imod__": operator.imod,
    "__iand__": operator.iand,
    "__ior__": operator.ior,
    "__ixor__": operator.ixor,
    "__ilshift__": operator.ilshift,
    "__irshift__": operator.irshift,
}
# Python functions of torch whose body is recorded instead of the call: their parts differ in precision.
_OPENED: frozenset[Any] = frozenset({F.multi_head_attention_forward})

_PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


# As they are before a recording wraps some of them.
_METHODS_OF_TENSORS: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}


class Recorder(TorchFunctionMode):
    """Records the torch-level calls made while it is active.

    Args:
        root: the module whose tensors become ``get_attr`` nodes.
        held: the tensors that exist before the run.
        constant_prefix: starts the attribute names of objects that the graph reads and the model does not hold.
    """

    def __init__(self, root: nn.Module, held: HeldTensors, constant_prefix: str = "_ampfx_constant_") -> None:
        super().__init__()
        self.root = root
        self.constant_prefix = constant_prefix
        self.held = held
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.late_guards = False
        self.follow_dtypes = False
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        self._attributes: dict[int, fx.Node] = {}
        self._guarded: set[tuple[fx.Node, str]] = set()
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._next_storage = 0
        self._paused = 0
        self._open: list[Any] = []
        self.module_stack: list[tuple[str, type]] = []
        self.autocast_stack: list[bool] = []
        self.opaque_stack: list[int] = []
        self._sizes: dict[tuple[fx.Node, int], TracedInt] = {}
        self._numbers: dict[tuple[Any, ...], fx.Node] = {}

    # ------------------------------------------------------------------ the mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        func = unwrapped(func)
        if self._paused:
            return func(*args, **keywords)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._read_property(func, args)
        if name in ("__set__", "__delete__"):
            return self._write_property(func, args)
        if func is torch._C._set_grad_enabled:
            node = self._create(func, self.to_fx(args), {}, "call_function")
            func(*args)
            node.meta["val"] = None
            return None
        if func in _OPENED:
            return self._record_inside(func, args, keywords)
        if _is_method(func, name):
            handled = self._method(name, func, args, keywords)
            if handled is not NotImplemented:
                return handled
        return self.call(func, args, keywords)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While active, calls run without being recorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # ------------------------------------------------------------------ what a call becomes

    def call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Record one call and run it; ``run`` replaces ``func`` in the recorded run only."""
        name = getattr(func, "__name__", "")
        target: Any
        if _is_method(func, name) and name in _REVERSED:
            kind, target, args = "call_function", _REVERSED[name], (args[1], args[0], *args[2:])
        elif _is_method(func, name) and name in _DUNDERS:
            kind, target = "call_function", _DUNDERS[name]
        elif _is_method(func, name) and name in _IN_PLACE:
            kind, target = "call_function", _IN_PLACE[name]
        elif _is_method(func, name):
            kind, target = "call_method", name
        else:
            kind, target = "call_function", func
        node = self._create(target, self.to_fx(args), self.to_fx(kwargs), kind)
        self._protect(node, args, kwargs)
        if node.meta["op"] in AUTHOR_CASTS:
            # A cast to the dtype a tensor has returns the tensor; its result is a value of its own here.
            run = _fresh(run or func)
        runner = target if kind == "call_function" and run is None else (run or func)
        result = self._run(runner, args, kwargs)
        return self.bind(result, node)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.paused():
            return func(*to_plain(args), **to_plain(kwargs))

    def _create(self, target: Any, args: Any, kwargs: Any, kind: str) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        self.describe(node)
        return node

    def describe(self, node: fx.Node) -> None:
        """Note on a node where in the model it stands."""
        node.meta["op"] = canonical_op(node)
        node.meta["module_stack"] = tuple(path for path, _ in self.module_stack)
        node.meta["module_types"] = tuple(kind for _, kind in self.module_stack)
        node.meta["module_path"] = self.module_stack[-1][0] if self.module_stack else ""
        node.meta["source"] = source_line()
        node.meta["region"] = Region(
            grad=torch.is_grad_enabled(),
            autocast=self.autocast_stack[-1] if self.autocast_stack else None,
            opaque=self.opaque_stack[-1] if self.opaque_stack else 0,
        )

    def bind(self, result: Any, node: fx.Node) -> Any:
        """Tie the result of a call to its node; numbers become traced numbers."""
        if isinstance(result, torch.Tensor):
            self.remember(result, node)
            return result
        if isinstance(result, bool):
            node.meta["val"] = None
            self.guard(node, result)
            return result
        if isinstance(result, (int, float)):
            node.meta["val"] = None
            return self._traced(result, node)
        if isinstance(result, (tuple, list)) and result:
            if node.meta["op"] in _LENGTH_OPS:
                self._create(runtime.guard_length, (node, len(result), source_line()), {}, "call_function")
                self.late_guards = True
            items = []
            for index, item in enumerate(result):
                part = self._create(operator.getitem, (node, index), {}, "call_function")
                items.append(self.bind(item, part))
            node.meta["val"] = tuple(self.spec_of(item) for item in items)
            if all(a is b for a, b in zip(items, result, strict=True)):
                return result
            return type(result)(items) if type(result) in (tuple, list) else result
        if isinstance(result, dict):
            for key, item in result.items():
                self.bind(item, self._create(operator.getitem, (node, key), {}, "call_function"))
            node.meta["val"] = {key: self.spec_of(item) for key, item in result.items()}
            return result
        node.meta["val"] = None
        if result is not None and not isinstance(result, _PLAIN_TYPES) and not isinstance(result, (tuple, list)):
            self._check_free_of_tensors(result, node)
        return result

    def _check_free_of_tensors(self, result: Any, node: fx.Node) -> None:
        leaves = pytree.tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves) and not all(leaf is result for leaf in leaves):
            raise CaptureError(
                f"{node.meta['op']} at {node.meta['source']} returns tensors inside a {type(result).__name__}"
            )
        self._attributes[id(result)] = node
        self.constants[f"_keep_{len(self.constants)}"] = result

    # ------------------------------------------------------------------ tensors and nodes

    def remember(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From now on ``tensor`` is the value of ``node``."""
        node.meta["val"] = self.spec_of(tensor)
        self._known[id(tensor)] = (weakref.ref(tensor), node)

    def spec_of(self, value: Any) -> Any:
        """The recorded facts about a tensor; None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        with self.paused():
            return TensorSpec(
                dtype=value.dtype,
                shape=tuple(int(size) for size in value.shape),
                requires_grad=value.requires_grad,
                device=value.device,
                storage=self._storage_id(value),
            )

    def _storage_id(self, tensor: torch.Tensor) -> int:
        try:
            reference = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without one storage
            self._next_storage += 1
            return -self._next_storage
        known = self._storages.get(reference.cdata)
        if known is None:
            # Holding the weak reference keeps the address from being used again.
            self._next_storage += 1
            known = self._storages[reference.cdata] = (self._next_storage, reference)
        return known[0]

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node whose value ``tensor`` is, None when it was not recorded."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def node_for(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor that an operation reads; a held tensor gets its ``get_attr`` here."""
        node = self.node_of(tensor)
        if node is not None:
            return node
        holder = self.held.find(tensor)
        if holder is None:
            raise CaptureError(
                "an operation reads a tensor that was made where the recorder does not see it "
                f"(shape {tuple(to_plain_shape(tensor))}, at {source_line() or 'an unknown line'}; numpy, a "
                "TorchScript function, or a constructor such as torch.Tensor(...)). Make it with torch.tensor, "
                "torch.zeros or another torch function, or keep it as a buffer."
            )
        if holder.attribute is not None:
            node = self._insert_attribute(holder.attribute)
        elif holder.path is not None:
            owner = self._insert_attribute(holder.owner or "_ampfx_root", is_module=True)
            node = self._create(runtime.read_attribute, (owner, holder.path), {}, "call_function")
        else:
            name = f"{self.constant_prefix}{len(self.constants)}"
            self.constants[name] = tensor
            node = self._insert_attribute(name)
        self.remember(tensor, node)
        return node

    def _insert_attribute(self, target: str, is_module: bool = False) -> fx.Node:
        # In generated code "self" is what attributes are read from.
        node = self.graph.create_node("get_attr", target, name="self_" if target == "self" else None)
        self.describe(node)
        owner = target.rpartition(".")[0]
        node.meta["attribute_owner"] = owner
        node.meta["val"] = None
        # A parameter is one value whatever region reads it first.
        node.meta["region"] = Region()
        return node

    def module_node(self, path: str) -> fx.Node:
        """A node whose value is the module at ``path``, the converted module itself for ``""``."""
        return self._insert_attribute(path or "_ampfx_root", is_module=True)

    def to_fx(self, value: Any) -> Any:
        """The arguments of a node for the arguments of a call."""
        if isinstance(value, torch.Tensor):
            return self.node_for(value)
        if is_traced(value):
            return value.fx_node
        if isinstance(value, slice):
            return slice(self.to_fx(value.start), self.to_fx(value.stop), self.to_fx(value.step))
        if issubclass(type(value), TracedSize):
            return tuple(self.to_fx(item) for item in value)
        if isinstance(value, tuple):
            items = [self.to_fx(item) for item in value]
            if hasattr(type(value), "_fields"):
                return type(value)(*items)
            return tuple(items)
        if isinstance(value, list):
            return [self.to_fx(item) for item in value]
        if isinstance(value, dict):
            return {key: self.to_fx(item) for key, item in value.items()}
        if is_traced_dtype(value):
            return value.value
        if isinstance(value, _PLAIN_TYPES) or value is Ellipsis:
            return value
        if isinstance(value, range):
            return [self.to_fx(item) for item in value]
        known = self._attributes.get(id(value))
        if known is not None:
            return known
        self._refuse_recorded_inside(value)
        name = f"{self.constant_prefix}{len(self.constants)}"
        self.constants[name] = value
        node = self._insert_attribute(name)
        node.meta["holds"] = getattr(value, "__name__", type(value).__name__)  # for reports
        self._attributes[id(value)] = node
        return node

    def _refuse_recorded_inside(self, value: Any) -> None:
        """An object or function of the model's that holds what forward computed cannot be a constant."""
        if isinstance(value, (type, nn.Module)):
            return
        parts: list[Any] = [value]
        if callable(value):
            parts = [getattr(value, name, None) for name in ("args", "keywords", "__defaults__", "__kwdefaults__")]
            parts += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
        leaves: list[Any] = []
        flatten(parts, lambda leaf: is_traced(leaf) or isinstance(leaf, torch.Tensor), leaves)
        nodes = [leaf.fx_node if is_traced(leaf) else self.node_of(leaf) for leaf in leaves]
        if any(node is not None and node.op != "get_attr" for node in nodes):
            kind = getattr(value, "__qualname__", type(value).__name__)
            raise CaptureError(
                f"{kind} at {source_line()} holds values that forward computes: the graph cannot see them inside. Hand "
                "them over as tensors, in lists or in dicts."
            )

    def _protect(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """Before an operation writes to a tensor the model holds, keep its value for restoring."""
        op = node.meta["op"]
        written: list[Any] = [kwargs.get("out")]
        if op.endswith("_") or op == "setitem":
            written += args[:1]
        elif "::" in op:  # a custom operator may write to any of its arguments
            written += [args, kwargs]
        for leaf in pytree.tree_leaves(written):
            if isinstance(leaf, torch.Tensor):
                self.held.protect(leaf)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.held.protect_generator(kwargs["generator"])

    # ------------------------------------------------------------------ numbers and guards

    def size_of(self, tensor: torch.Tensor, dim: int) -> TracedInt:
        """The traced size of a recorded tensor along one dimension: one node per tensor and dimension."""
        node = self.node_for(tensor)
        sizes = to_plain_shape(tensor)
        if not -len(sizes) <= dim < len(sizes):
            raise IndexError(f"Dimension out of range (got {dim} for a tensor of {len(sizes)} dimensions)")
        dim %= len(sizes)
        known = self._sizes.get((node, dim))
        if known is None:
            part = self._create("size", (node, dim), {}, "call_method")
            part.meta["val"] = None
            known = self._sizes[node, dim] = TracedInt(sizes[dim], part, self)
        return known

    def shape_of(self, tensor: torch.Tensor) -> TracedSize:
        """The traced shape of a recorded tensor."""
        return TracedSize(self.size_of(tensor, dim) for dim in range(len(to_plain_shape(tensor))))

    def number(self, function: Callable[..., Any], operands: tuple[Any, ...], result: Any) -> Any:
        """The traced result of arithmetic on traced numbers."""
        if self._paused:
            return result
        node = self._number_node(function, operands)
        if isinstance(result, bool):
            self.guard(node, result)
            return result
        return self._traced(result, node)

    def _traced(self, value: int | float, node: fx.Node) -> TracedInt | TracedFloat:
        node.meta["number"] = value
        return TracedInt(value, node, self) if isinstance(value, int) else TracedFloat(value, node, self)

    def decided(self, function: Callable[..., Any], operands: tuple[Any, ...], result: bool) -> bool:
        """A Python decision on traced numbers: its outcome is guarded."""
        if not self._paused:
            self.guard(self._number_node(function, operands), result)
        return result

    def _number_node(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> fx.Node:
        """One node per computation on numbers: the same again is the same node."""
        args = self.to_fx(operands)
        key = (function, *((type(arg), arg) for arg in args))
        node = self._numbers.get(key)
        if node is None:
            node = self._numbers[key] = self._create(function, args, {}, "call_function")
            node.meta["val"] = None
        return node

    def guard(self, node: fx.Node, value: Any) -> None:
        """Record that the graph holds only where ``node`` has this value."""
        if self._paused or (node, repr(value)) in self._guarded:
            return
        self._guarded.add((node, repr(value)))
        self._create(runtime.guard, (node, value, source_line()), {}, "call_function").meta["val"] = None
        self.late_guards = True

    # ------------------------------------------------------------------ methods and properties

    def _method(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor):
            return NotImplemented
        if name in _FIXED_METHODS:
            return self._run(func, args, kwargs)
        if name == "type" and len(args) == 1 and not kwargs:
            return self._run(func, args, kwargs)
        if name == "size":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return self.shape_of(tensor) if dim is None else self.size_of(tensor, to_plain(dim))
        if name == "__len__":
            return int(self.size_of(tensor, 0)) if to_plain_shape(tensor) else self._run(func, args, kwargs)
        if name in ("numel", "nelement", "item"):
            return self.call(func, args, kwargs)
        if name in _VALUE_METHODS:
            result = self._run(func, args, kwargs)
            return self._guarded_value(func, name, args, kwargs, result)
        if name in _ARRAY_METHODS or name in _TEXT_METHODS:
            return self._leave(name, func, args, kwargs)
        if name in _HOOK_METHODS:
            return self._attach_hook(name, args, kwargs)
        return NotImplemented

    def _guarded_value(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        if name == "__contains__":
            node = self._create(operator.contains, self.to_fx(args), {}, "call_function")
        else:
            node = self._create(name, self.to_fx(args), self.to_fx(kwargs), "call_method")
        node.meta["val"] = None
        self.guard(node, result)
        return result

    def _leave(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor leaves for numpy or as text: small ones are guarded by value, others cannot be captured.

        The model's own memory may leave: who reads it there sees what it holds then.
        """
        tensor: torch.Tensor = args[0]
        node = self.node_for(tensor)
        if node.op != "get_attr" or name not in ("untyped_storage", "storage"):
            if name in ("untyped_storage", "storage") or tensor.numel() > 4096:
                raise CaptureError(
                    f"a tensor that forward computes leaves for Python through .{name}() at {source_line()}: "
                    "what is computed from it there cannot be recorded"
                )
            with self.paused():
                copy = tensor.detach().cpu().clone()
            constant = f"{self.constant_prefix}{len(self.constants)}"
            self.constants[constant] = copy
            expected = self._insert_attribute(constant)
            expected.meta["val"] = self.spec_of(copy)
            self._create(runtime.guard_tensor, (node, expected, source_line()), {}, "call_function")
            self.late_guards = True
        return self._run(func, args, kwargs)

    def _attach_hook(self, name: str, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        node = self._create(
            runtime.attach_hook, (self.to_fx(tensor), name, *self.to_fx(tuple(rest))), {}, "call_function"
        )
        self.remember(tensor, node)

        class Handle:
            """Stands for the handle of a hook that each run attaches anew."""

            def remove(self) -> None:
                raise CaptureError(f"a hook attached in forward is removed in forward at {source_line()}")

        return None if name == "retain_grad" else Handle()

    def _read_property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        tensor = args[0] if args else None
        if name == "dtype" and self.follow_dtypes and isinstance(tensor, torch.Tensor):
            return self._dtype_of(tensor, self._run(func, args, {}))
        if not isinstance(tensor, torch.Tensor) or name in _FIXED_PROPERTIES:
            return self._run(func, args, {})
        if name == "shape":
            return self.shape_of(tensor)
        if name in _TENSOR_PROPERTIES:
            node = self._create(builtins.getattr, (self.to_fx(tensor), name), {}, "call_function")
            return self.bind(self._run(func, args, {}), node)
        if name == "grad" and self._run(func, args, {}) is None:
            return None
        if name == "nbytes":
            node = self._create(builtins.getattr, (self.to_fx(tensor), name), {}, "call_function")
            return self.bind(self._run(func, args, {}), node)
        raise CaptureError(f"forward reads .{name} of a tensor at {source_line()}: that cannot be recorded")

    def _dtype_of(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """The dtype of a tensor; traced where the assignment may give it another."""
        node = self.node_of(tensor)
        if dtype != torch.float32 or node is None or node.op in ("placeholder", "get_attr"):
            return dtype
        return TracedDtype(dtype, node, self)

    def cast_like(self, tensor: torch.Tensor, dtype: TracedDtype) -> torch.Tensor:
        """Record a cast to the dtype of another recorded tensor."""
        if self._paused:
            return tensor.to(dtype.value)
        node = self._create("type_as", (self.node_for(tensor), dtype.fx_node), {}, "call_method")
        with self.paused():
            result = tensor.to(dtype.value)
            result = torch.ops.aten.alias(result) if result is tensor else result
        self.remember(result, node)
        return result

    def _write_property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        if name == "requires_grad" and len(args) == 2:
            tensor: torch.Tensor = args[0]
            if self._run(lambda: tensor.requires_grad, (), {}) == bool(args[1]):
                return None
            return self.call(torch.Tensor.requires_grad_, args, {})
        raise CaptureError(
            f"forward assigns .{name} of a tensor at {source_line()}: use an in-place operation such as copy_ instead"
        )

    def _record_inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the body of a Python function of torch instead of the call."""
        namespace: Any = F
        saved = namespace.has_torch_function
        namespace.has_torch_function = lambda *_: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            namespace.has_torch_function = saved


def _fresh(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        return torch.ops.aten.alias(result) if args and result is args[0] else result

    return run


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_method(func: Any, name: str) -> bool:
    """Whether ``func`` is a method of tensors rather than a function of a module."""
    if _METHODS_OF_TENSORS.get(name) is func:
        return True
    # Tensor.__pow__ and others are wrappers of another name: pow.
    return getattr(func, "__module__", "") == "torch._tensor" and hasattr(torch.Tensor, name)


def to_plain(value: Any) -> Any:
    """The arguments of a call with traced numbers replaced by plain ones."""
    if is_traced(value) or is_traced_dtype(value):
        return value.value
    if issubclass(type(value), TracedSize):
        return torch.Size(to_plain(item) for item in tuple.__iter__(value))
    if isinstance(value, slice):
        return slice(to_plain(value.start), to_plain(value.stop), to_plain(value.step))
    if type(value) is tuple:
        return tuple(to_plain(item) for item in value)
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return type(value)(*(to_plain(item) for item in value))
    if type(value) is list:
        return [to_plain(item) for item in value]
    if type(value) is dict:
        return {key: to_plain(item) for key, item in value.items()}
    return value


def to_plain_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor without recording the read."""
    with torch._C.DisableTorchFunction():
        return tuple(tensor.shape)


def source_line() -> str:
    """``file.py:line`` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH_DIR, _OWN_DIR)) and not filename.startswith("<"):
            return f"{filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
