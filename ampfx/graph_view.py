"""A GraphModule whose attributes are those of another module.

The graphs of a converted module (train, eval, other situations) read its parameters, buffers and
submodules where they are. A :class:`GraphView` is one such graph: passes, ``print_readable`` and the
printer take it as they take any GraphModule, and nothing is copied or registered twice.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ampfx.checkpoints import has_regions, outline

_numbers = itertools.count()


class Host:
    """What generated code reads attributes from: those of a module, whatever they are called.

    A model may have a parameter named ``graph`` or ``code``; on the converted module these names mean
    something else. Here only the module's own tensors, submodules and attributes are found.
    """

    __slots__ = ("_ampfx_root",)

    def __init__(self, module: nn.Module) -> None:
        self._ampfx_root = module

    @property
    def _ampfx_host_of_graph(self) -> Host:
        return self

    def __getattr__(self, name: str) -> Any:
        stores = self._ampfx_root.__dict__
        if name in stores["_parameters"]:
            return stores["_parameters"][name]
        if name in stores["_modules"]:
            return stores["_modules"][name]
        if name in stores["_buffers"]:
            return stores["_buffers"][name]
        return stores[name] if name in stores else getattr(self._ampfx_root, name)


class GraphView(fx.GraphModule):
    """One graph over the attributes of ``root``.

    Args:
        root: the module that ``get_attr`` nodes read from.
        graph: the graph. It is owned from now on.
    """

    def __new__(cls, root: nn.Module, graph: fx.Graph) -> GraphView:
        return object.__new__(cls)

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(
            _ampfx_host=Host(root),
            _graph=graph,
            meta={},
            _tracer_cls=None,
            _tracer_extras={},
            _deepcopy_hooks=[],
            _replace_hooks=[],
            _create_node_hooks=[],
            _erase_node_hooks=[],
            _code=None,
            _run=None,
        )
        self.training = root.training
        graph.owning_module = None  # lint would look the attributes up by their names here

    def __getattr__(self, name: str) -> Any:
        host = self.__dict__.get("_ampfx_host")
        if host is None:
            raise AttributeError(name)
        return getattr(host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What a pass puts on the graph belongs to the converted module; plain state of the view does not.
        if name.startswith("_ampfx"):
            vars(self.root)[name] = value
        elif isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            self.__dict__[name] = value

    @property
    def root(self) -> nn.Module:
        """The module whose attributes the graph reads."""
        root = self.__dict__["_ampfx_host"]._ampfx_root
        assert isinstance(root, nn.Module)
        return root

    @property
    def graph(self) -> fx.Graph:
        """The graph; after an edit call :meth:`recompile`."""
        graph = self.__dict__["_graph"]
        assert isinstance(graph, fx.Graph)
        return graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self.__dict__["_graph"] = graph
        graph.owning_module = None
        self.recompile()

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        if self.__dict__["_code"] is None:
            self.__dict__["_code"] = self.graph.python_code(root_module="self").src
        return str(self.__dict__["_code"])

    def recompile(self) -> None:  # type: ignore[override]
        """Generate the code anew when it is needed next."""
        self.__dict__["_code"] = self.__dict__["_run"] = None

    @property
    def compiled(self) -> Callable[..., Any]:
        """The function ``(*inputs)`` of the graph's code."""
        if self.__dict__["_run"] is None:
            self.__dict__["_run"] = compile_graph(self.graph, self.__dict__["_ampfx_host"])
        run = self.__dict__["_run"]
        assert callable(run)
        return run  # type: ignore[no-any-return]

    def forward(self, *inputs: Any) -> Any:
        """Run the graph on the leaves of the inputs; returns the leaves of the result."""
        return self.compiled(*inputs)


def compile_graph(graph: fx.Graph, host: Host) -> Callable[..., Any]:
    """A function ``(*inputs)`` that runs a graph, its checkpointed regions as such.

    Tensors of the model are fetched from their containers in one sweep: walking from module to module
    for each of them is what an eager model spends much of its time on.
    """
    if has_regions(graph):
        graph = outline(graph, compile_flat)
    stores: list[tuple[dict[str, Any], str]] = []
    fetched = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    attributes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = fetched.node_copy(node)
        elif node.op == "get_attr" and (store := _store_of(host, str(node.target))) is not None:
            stores.append(store)
            attributes.append(node)
    for node in attributes:
        copies[node] = fetched.placeholder(node.name)
    for node in graph.nodes:
        if node not in copies:
            copies[node] = fetched.node_copy(node, copies.__getitem__)
    function = compile_flat(fetched)

    def run(*inputs: Any) -> Any:
        return function(host, *inputs, *[store[name] for store, name in stores])

    return run


def _store_of(host: Host, target: str) -> tuple[dict[str, Any], str] | None:
    """The container that holds an attribute, and the name in it; None for what is no stored tensor."""
    *path, name = target.split(".")
    module: Any = host._ampfx_root
    for part in path:
        module = vars(module).get("_modules", {}).get(part)
        if not isinstance(module, nn.Module):
            return None
    for store in (module._parameters, module._buffers):
        if isinstance(store.get(name), torch.Tensor):
            return store, name
    return None


def compile_flat(graph: fx.Graph) -> Callable[..., Any]:
    """The function of a graph's generated code; its lines show in tracebacks."""
    python_code = graph.python_code(root_module="self")
    filename = f"<ampfx graph {next(_numbers)}>"
    lines = python_code.src.splitlines(keepends=True)
    linecache.cache[filename] = (len(python_code.src), None, lines, filename)
    namespace = dict(python_code.globals)
    exec(compile(python_code.src, filename, "exec"), namespace)
    function = namespace["forward"]
    assert callable(function)
    return function  # type: ignore[no-any-return]
