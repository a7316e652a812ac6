"""The pass as a backend of ``torch.compile``: ``torch.compile(model, backend="ampfx")``.

Dynamo captures the model, piece by piece where it must; each piece becomes a graph in mixed precision and
goes on to another backend:

1. the options are checked (an unknown one is an error);
2. the graph becomes a canonical one (:mod:`ampfx.dynamo_graph`), the insides of checkpoints too, and the
   passes run;
3. in float16 the loss scale is embedded as in a converted model. Its tensors become inputs of the graph, and
   optimizers find it by the parameters;
4. ``inner`` compiles the result. Ambient ``torch.autocast`` is off in it: the graph has its casts.

What of the model never comes here runs in float32; :mod:`ampfx.dynamo_coverage` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.registry import lookup_backend

from ampfx.context import ConversionContext
from ampfx.dynamo_coverage import note_graph, watch_compilations
from ampfx.dynamo_graph import DynamoGraph, body_inputs, close_attention, from_dynamo, open_attention, to_compiler
from ampfx.errors import CaptureError, PolicyError, VerifyError
from ampfx.graph_utils import region_of
from ampfx.loss_scale import LossScale, ModuleScale, models_of, register_model, registration
from ampfx.optimizer import search_again
from ampfx.options import OptionError, Options, make_options
from ampfx.passes import PassManager
from ampfx.policy import check_matches
from ampfx.scale_nodes import ATTRIBUTE
from ampfx.traced_scale import lift_scale, scale_inputs
from ampfx.user_warning import warn_user

OPTION_NAMES = ("dtype", "policy", "loss_scale", "objective", "device", "inner", "passes")
DEFAULT_INNER = "inductor"

_static_scales: dict[float, LossScale] = {}
_warned: set[str] = set()
watch_compilations()


def ampfx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Convert one graph of Dynamo's and compile it.

    Args:
        gm: the graph.
        example_inputs: what stands for its placeholders.
        options: ``dtype``, ``policy``, ``loss_scale``, ``objective``, ``device`` and ``passes`` as of
            :func:`ampfx.convert`; ``inner``: the backend that compiles the converted graph, ``"inductor"`` (the
            default), ``"aot_eager"``, ``"eager"`` or another name that ``torch.compile`` knows.
        mode: a mode of ``torch.compile``, for Inductor.

    Raises:
        OptionError: an option is unknown or has no meaning.
    """
    given = dict(options or {})
    unknown = sorted(set(given) - set(OPTION_NAMES))
    if unknown:
        raise OptionError(
            f'torch.compile(backend="ampfx") knows no option {", ".join(map(repr, unknown))}; '
            f"its options are {', '.join(OPTION_NAMES)}"
        )
    watch_compilations()
    compiler: Callable[..., Callable[..., Any]] = _inner(given.pop("inner", DEFAULT_INNER), mode)
    settings = _settings(given, example_inputs)
    parameters = [value for value in example_inputs if isinstance(value, nn.Parameter)]
    scale, holder = _scale_of(parameters, settings)
    grad = torch.is_grad_enabled()
    try:
        lowered, devices = _lower(gm, example_inputs, settings, scale, grad)
    except (CaptureError, VerifyError) as error:
        _warn_once(f"a graph of torch.compile is not converted and runs as it is: {error}")
        note_graph(parameters, [])
        return compiler(gm, list(example_inputs))
    note_graph(parameters, _converted_parameters(gm, example_inputs))
    extra = scale_inputs(scale, devices) if scale is not None and devices else []
    if scale is not None and devices:
        scale.traced = True
    with torch.autocast(settings.device_type, enabled=False):
        compiled = compiler(lowered, [*example_inputs, *extra])
    return _Compiled(compiled, settings.device_type, scale if devices else None, devices, holder)


class _Compiled:
    """What Dynamo calls: the compiled graph, given the tensors of the loss scale."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        device_type: str,
        scale: ModuleScale | None,
        devices: Sequence[torch.device],
        holder: nn.Module,
    ) -> None:
        self.compiled, self.device_type, self.scale, self.devices = compiled, device_type, scale, devices
        self.holder = holder  # optimizers find the scale through it
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        if self.scale is not None:
            args = (*args, *scale_inputs(self.scale, self.devices))
            if torch.is_grad_enabled() and self.calls < 3:
                self.calls += 1
                if self.calls == 3:  # an optimizer that trains the model would have attached by now
                    self.scale.warn_if_unattached()
        if not torch.is_autocast_enabled(self.device_type):
            return self.compiled(*args)
        with torch.autocast(self.device_type, enabled=False):
            return self.compiled(*args)


# ---------------------------------------------------------------------- settings


def _inner(name: Any, mode: str | None) -> Callable[..., Any]:
    if name == "ampfx":
        raise OptionError('inner="ampfx": the backend that compiles the converted graph is another one')
    if mode is not None and name != "inductor":
        raise OptionError(f'mode={mode!r} is for inner="inductor", not for inner={name!r}')
    try:
        found: Callable[..., Any] = lookup_backend(name)
    except Exception as error:
        known = ", ".join(torch.compiler.list_backends())
        raise OptionError(f"inner={name!r} is no backend of torch.compile; known are {known}") from error
    if mode is None:
        return found
    patches = torch._inductor.list_mode_options(mode)
    return lambda gm, inputs: torch._inductor.compile_fx.compile_fx(gm, inputs, config_patches=patches)


def _settings(given: dict[str, Any], inputs: Sequence[Any]) -> Options:
    device = given.get("device")
    loss_scale = given.get("loss_scale", "auto")
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        # Several graphs of one model, and its later compilations, share their scale.
        known = _static_scales.get(float(loss_scale))
        if known is not None:
            loss_scale = known
    options = make_options(
        dtype=given.get("dtype"),
        policy=given.get("policy", "autocast"),
        device_type=_device_type(inputs) if device is None else torch.device(device).type,
        loss_scale=loss_scale,
        capture="auto",
        strict=False,
        passes=given.get("passes"),
        objective=given.get("objective"),
        blocks=None,
        cache_weights=False,
        output_dtype=torch.float32,
    )
    if isinstance(loss_scale, (int, float)) and isinstance(options.loss_scale, LossScale):
        _static_scales[float(loss_scale)] = options.loss_scale
    return options


def _device_type(inputs: Sequence[Any]) -> str:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    # Numbers that Dynamo hands over as tensors are on the CPU whatever the model's device is.
    for tensor in sorted(tensors, key=lambda tensor: (not isinstance(tensor, nn.Parameter), tensor.dim() == 0)):
        return tensor.device.type
    return "cpu"


class CompiledParameters(nn.Module):
    """The parameters in the compiled graphs of one model: by them an optimizer finds the loss scale."""

    def hold(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Take further parameters; False if all are held already."""
        known = {id(parameter) for parameter in self._parameters.values()}
        fresh = [parameter for parameter in parameters if id(parameter) not in known]
        for parameter in fresh:
            self._parameters[f"p{len(self._parameters)}"] = parameter
        return bool(fresh)


def _scale_of(parameters: Sequence[nn.Parameter], settings: Options) -> tuple[ModuleScale | None, CompiledParameters]:
    """The loss scale of a graph over these parameters: that of the model's other graphs where there are any."""
    group = settings.loss_scale.group if isinstance(settings.loss_scale, ModuleScale) else settings.loss_scale
    for model in models_of(parameters):
        entry = registration(model)
        if isinstance(model, CompiledParameters) and entry is not None and entry[1] == settings.dtype:
            scale = entry[0]
            if (scale.group if scale is not None else None) is group:
                if model.hold(parameters):
                    register_model(model, scale, settings.dtype)
                    search_again()
                return scale, model
    holder = CompiledParameters()
    holder.hold(parameters)
    scale = register_model(holder, settings.loss_scale, settings.dtype)
    search_again()
    return scale, holder


# ---------------------------------------------------------------------- the passes


def _lower(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Options, scale: ModuleScale | None, grad: bool
) -> tuple[fx.GraphModule, list[torch.device]]:
    """The converted graph, and the devices whose loss scale it takes as further inputs."""
    dynamo = from_dynamo(gm, inputs, settings.device_type, grad=grad)
    attributes = _lower_bodies(dynamo, gm, settings)
    _check_policy(dynamo, settings)
    _run_passes(dynamo, settings, scale)
    graph = dynamo.view.graph
    devices = sorted({d for d in scale._flags if d.type != "meta"}, key=str) if scale is not None else []
    if not lift_scale(graph, ATTRIBUTE, devices):
        devices = []
    return to_compiler(dynamo, gm, attributes), devices


def _run_passes(dynamo: DynamoGraph, settings: Options, scale: ModuleScale | None) -> None:
    context = ConversionContext(
        low_dtype=settings.dtype,
        device_type=settings.device_type,
        policy=settings.policy,
        objective=settings.objective,
        loss_scale=scale,
        output_dtype=settings.output_dtype,
    )
    graph = dynamo.view.graph
    open_attention(graph, settings.device_type, settings.dtype)
    PassManager(settings.passes).run(dynamo.view, context)
    close_attention(graph)
    for text in context.warnings:
        _warn_once(text)


def _lower_bodies(dynamo: DynamoGraph, gm: fx.GraphModule, settings: Options) -> dict[str, Any]:
    """Convert the graphs that checkpoints run. Gradients cross their border scaled, in float32."""
    lowered: dict[str, Any] = {}
    for name, node in dynamo.bodies.items():
        region, body = region_of(node), getattr(gm, name)
        inner = from_dynamo(
            body, body_inputs(dynamo, node), settings.device_type, grad=region.grad, autocast=region.autocast
        )
        attributes = _lower_bodies(inner, body, settings)
        _run_passes(inner, settings, None)
        lowered[name] = to_compiler(inner, body, attributes)
    return lowered


def _check_policy(dynamo: DynamoGraph, settings: Options) -> None:
    try:
        texts = check_matches(settings.policy, dynamo.view.graph.nodes, low=settings.dtype)
    except PolicyError as error:
        # Dynamo may hand over the model in pieces: what matches nothing here may match in another one.
        texts = [f"in one graph of torch.compile {error}"]
    for text in texts:
        _warn_once(text)


def _converted_parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[nn.Parameter]:
    """The parameters that a converted operation reads; what only opaque code reads stays float32."""
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, nn.Parameter) and any(not _is_opaque(user) for user in node.users):
            yield value


def _is_opaque(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and "checkpoint" not in node.target.__name__


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn_user(text)
