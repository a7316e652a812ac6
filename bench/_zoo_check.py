"""Checks one model of a folder of model builders against float32, for :mod:`bench.zoo`.

A file of builders has ``REG`` (names), ``build(name) -> (model, inputs)`` and ``inputs(batch_size) ->
(args, kwargs)``; where it has an ``OFFSET``, this number shifts the seeds of its inputs. For one model and
one low dtype:

1. The model is converted with a batch of 4 and compared with a float32 copy, in train and then in eval
   mode, on that batch, on a batch of 6, on other data under another seed, and on shorter sequences where
   the inputs have a length and the model takes another. Dropout is off: a mask drawn for another dtype
   is another mask, not an error. In float16 gradients are scaled by a power of two that autocast bears.
2. An error is the norm of the difference over the norm of the truth: for outputs the worst tensor, for
   gradients all parameters together. ``torch.autocast`` runs on the same inputs, with the same loss scale.
3. Beyond the dtype's tolerance is a failure, unless autocast is beyond it too: then both are compared with a
   float64 run, and ampfx must be no worse than autocast.
4. Names and identity of parameters, ``state_dict`` keys, ``deepcopy`` and ``pickle`` must be those of a model.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ampfx
from ampfx.capture.structure import flatten, unflatten

BATCHES = (4, 6)
SCALES = (1024.0, 32.0, 1.0)
TOLERANCE = {torch.bfloat16: (0.05, 0.15), torch.float16: (0.01, 0.03)}  # outputs, gradients
_CHOICES = ("topk", "argmax", "argmin", "argsort", "sort", "round", "floor", "sign", "multinomial", "bernoulli")
_COMPARISONS = ("gt", "lt", "ge", "le")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Outcome:
    """What one model does in one dtype.

    Args:
        name: the model.
        dtype: the low dtype.
        whole: whether it is one graph in each mode.
        reason: why it is not.
        coverage: what its report says.
        nodes: nodes of the graphs of the mode converted first.
        seconds: capture and conversion of the first graph.
        graphs: captured graphs in train and in eval mode.
        out, grad: the worst errors.
        out_autocast, grad_autocast: those of ``torch.autocast``; None where it cannot run the model.
        judged: why float64 was asked, empty where float32 was truth enough.
        failures: what is wrong.
        situations: comparisons made.
        scale: what the loss is multiplied by.
    """

    name: str
    dtype: torch.dtype
    whole: bool = True
    reason: str = ""
    coverage: float = 1.0
    nodes: int = 0
    seconds: float = 0.0
    graphs: list[int] = field(default_factory=list)
    out: float = 0.0
    grad: float = 0.0
    out_autocast: float | None = 0.0
    grad_autocast: float | None = 0.0
    judged: str = ""
    failures: list[str] = field(default_factory=list)
    situations: int = 0
    scale: float = 1.0


def check_model(builders: types.ModuleType, name: str, dtype: torch.dtype, labels: bool = False) -> Outcome:
    """Convert one model and compare; nothing is raised but by the builder."""
    outcome = Outcome(name, dtype)
    torch.manual_seed(0)
    model, inputs = builders.build(name, labels=True) if labels else builders.build(name)
    _no_dropout(model)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _check(outcome, builders, model, reference, inputs)
        except Exception as error:  # the table says it; the other models go on
            outcome.failures.append(f"{type(error).__name__}: {error}")
    return outcome


def _check(
    outcome: Outcome,
    builders: types.ModuleType,
    model: nn.Module,
    reference: nn.Module,
    inputs: Callable[[int], Inputs],
) -> None:
    parameters = dict(model.named_parameters())
    args, kwargs = inputs(BATCHES[0])
    model.train()
    scale: float | None = None
    if outcome.dtype == torch.float16:
        scale = outcome.scale = _scale(model, (args, kwargs))
    start = time.perf_counter()
    converted = ampfx.convert(model, args, kwargs, dtype=outcome.dtype, loss_scale=scale)
    outcome.seconds = time.perf_counter() - start
    before = 0
    for mode in (True, False):
        converted.train(mode)
        reference.train(mode)
        for what, seed, situation in _situations(builders, inputs, reference):
            label = f"{'train' if mode else 'eval'}, {what}"
            try:
                _compare(outcome, converted, reference, situation, seed, label)
            except Exception as error:
                outcome.failures.append(f"{label}: {type(error).__name__}: {error}")
            outcome.situations += 1
        graphs = _captures(converted)
        outcome.graphs.append(graphs - before)
        before = graphs
    report = converted.report()
    outcome.whole = converted._ampfx.python_reason is None
    outcome.reason = converted._ampfx.python_reason or ""
    outcome.coverage, outcome.nodes = float(report.coverage), len(report.nodes)
    _check_identity(outcome, converted, reference, parameters)
    _check_copies(outcome, converted, reference, inputs)


def _captures(converted: ampfx.ConvertedModule) -> int:
    """The graphs of a converted module; of one in parts, the most that any part has."""
    parts = [part for part in converted.modules() if isinstance(part, ampfx.ConvertedModule)]
    return max(part._ampfx.captures for part in parts)


def _situations(
    builders: types.ModuleType, inputs: Callable[[int], Inputs], reference: nn.Module
) -> Iterator[tuple[str, int, Inputs]]:
    first = inputs(BATCHES[0])
    yield f"batch {BATCHES[0]}", 1, first
    yield f"batch {BATCHES[1]}", 1, inputs(BATCHES[1])
    if hasattr(builders, "OFFSET"):
        vars(builders)["OFFSET"] = 1000
        other = inputs(BATCHES[0])
        vars(builders)["OFFSET"] = 0
        yield "other data", 2, other
    shorter = _shorter(first)
    if shorter is not None:
        try:
            with torch.no_grad():
                _copy(reference)(*shorter[0], **shorter[1])
        except Exception:  # the model has one length
            return
        yield "shorter", 1, shorter


def _shorter(inputs: Inputs) -> Inputs | None:
    """The inputs without the first three items of sequences, where integer matrices (ids, masks) tell a length."""
    leaves: list[Any] = []
    structure = flatten(inputs, _is_tensor, leaves)
    lengths = Counter(leaf.shape[1] for leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point())
    if not lengths:
        return None
    length = lengths.most_common(1)[0][0]
    if length < 8:
        return None
    cut = [leaf[:, 3:].clone() if leaf.shape[1:] == (length,) else leaf.clone() for leaf in leaves]
    return unflatten(structure, cut)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- one comparison


def _compare(
    outcome: Outcome, converted: nn.Module, reference: nn.Module, inputs: Inputs, seed: int, label: str
) -> None:
    converted.load_state_dict(reference.state_dict())  # statistics drift apart by rounding
    twin, double = _copy(reference), _copy(reference)
    got = _step(converted, inputs, seed)
    truth = _step(reference, inputs, seed)
    _check_kind(got, truth)
    autocast: _Step | None = None
    try:
        with torch.autocast("cpu", dtype=outcome.dtype):
            autocast = _step(twin, inputs, seed, outcome.scale)
    except Exception:  # it happens: no kernel for a dtype, a mix of dtypes
        outcome.out_autocast = outcome.grad_autocast = None
    _judge(outcome, got, truth, autocast, lambda: _step(double.double(), _in_double(inputs), seed), converted, label)


def _judge(
    outcome: Outcome,
    got: _Step,
    truth: _Step,
    autocast: _Step | None,
    in_double: Callable[[], _Step],
    converted: nn.Module,
    label: str,
) -> None:
    errors = _errors(got, truth)
    theirs = _errors(autocast, truth) if autocast is not None else None
    limits = TOLERANCE[outcome.dtype]
    outcome.out, outcome.grad = _worst(outcome.out, errors[0]), _worst(outcome.grad, errors[1])
    if theirs is not None and outcome.out_autocast is not None and outcome.grad_autocast is not None:
        outcome.out_autocast = _worst(outcome.out_autocast, theirs[0])
        outcome.grad_autocast = _worst(outcome.grad_autocast, theirs[1])
    for what, error, their, limit, index in zip(
        ("outputs", "gradients"), errors, theirs or (None, None), limits, (0, 1), strict=True
    ):
        if error <= limit:
            continue
        if their is None or their <= limit:
            said = "autocast cannot run it" if their is None else f"autocast {their:.2g}"
            outcome.failures.append(f"{label}: {what} off by {error:.2g} ({said})")
            continue
        try:
            best = in_double()
            assert autocast is not None
            ours, his = _errors(got, best)[index], _errors(autocast, best)[index]
            plain = _errors(truth, best)[index]
        except Exception:  # the model does not run in float64
            ours, his, plain = error, their, 0.0
        outcome.judged = _why(converted, truth, plain, outcome.dtype)
        if not ours <= 1.3 * his + limit:
            outcome.failures.append(f"{label}: {what} off float64 by {ours:.2g}, autocast by {his:.2g}")


def _scale(model: nn.Module, inputs: Inputs) -> float:
    """The largest scale that float16 gradients bear eight times over; dynamic scaling would find it."""
    for scale in SCALES:
        try:
            with torch.autocast("cpu", dtype=torch.float16):
                step = _step(_copy(model), inputs, 1, 8 * scale)
        except Exception:  # autocast cannot run the model
            break
        if all(grad.isfinite().all() for grad in step.grads.values() if grad is not None):
            return scale
    return SCALES[0] if scale != SCALES[-1] else scale  # autocast fails, or no scale helps


def _why(converted: nn.Module, truth: _Step, plain: float, dtype: torch.dtype) -> str:
    """Why a model is off under autocast too."""
    if plain > 1e-3:
        return f"ill-conditioned: float32 itself is off float64 by {plain:.1g}"
    largest = [float(out.abs().max()) for out in truth.outputs if out.is_floating_point() and out.numel()]
    if dtype == torch.float16 and any(0 < value < 1e-4 for value in largest):
        return f"an output of at most {min(filter(None, largest)):.1g} is below the range of float16"
    parts = [part for part in converted.modules() if isinstance(part, ampfx.ConvertedModule)]
    ops = {node.op for part in parts for entry in part._ampfx.entries for node in _nodes(entry)}
    found = [op for op in _CHOICES if op in ops] or [op for op in _COMPARISONS if op in ops]
    if "batch_norm" in ops:
        return "gradients nearly cancel in batch norm over few values"
    if found:
        return f"choices on computed values ({', '.join(found[:3])}) fall otherwise after rounding"
    return "gradients that nearly cancel amplify the rounding"


def _nodes(entry: Any) -> Iterator[Any]:
    for node in entry.view.graph.nodes:
        if node.op in ("call_function", "call_method"):
            yield types.SimpleNamespace(op=str(node.meta.get("op", "")))


@dataclass
class _Step:
    result: Any
    outputs: list[Tensor]
    grads: dict[str, Tensor | None]


def _step(model: nn.Module, inputs: Inputs, seed: int, scale: float = 1.0) -> _Step:
    """Forward and, in train mode, backward."""
    model.zero_grad(set_to_none=True)
    args, kwargs = copy.deepcopy(inputs)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    result = model(*args, **kwargs)
    outputs: list[Tensor] = []
    flatten(result, _is_tensor, outputs)
    if model.training:
        (_loss(outputs) * scale).backward()
    grads = {name: None if p.grad is None else _dense(p.grad) / scale for name, p in model.named_parameters()}
    return _Step(result, [tensor.detach() for tensor in outputs], grads)


def _loss(outputs: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for tensor in outputs:
        if tensor.is_floating_point():
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            weights = torch.linspace(-1, 1, tensor.numel(), dtype=wide.dtype).reshape(tensor.shape)
            total = total + (wide * weights).sum() / max(1, tensor.numel()) ** 0.5
    return total


def _check_kind(got: _Step, truth: _Step) -> None:
    if type(got.result) is not type(truth.result):
        raise AssertionError(f"returns {type(got.result).__name__}, float32 {type(truth.result).__name__}")
    shapes = [(t.dtype, tuple(t.shape)) for t in got.outputs], [(t.dtype, tuple(t.shape)) for t in truth.outputs]
    if shapes[0] != shapes[1]:
        raise AssertionError(f"outputs are {shapes[0]}, float32 {shapes[1]}")
    differing = [name for name, grad in truth.grads.items() if (grad is None) != (got.grads[name] is None)]
    if differing:
        raise AssertionError(f"gradients missing or too many: {', '.join(differing[:4])}")
    narrow = [name for name, grad in got.grads.items() if grad is not None and grad.dtype != torch.float32]
    if narrow:
        raise AssertionError(f"gradients not in float32: {', '.join(narrow[:4])}")


def _errors(got: _Step, truth: _Step) -> tuple[float, float]:
    """The worst output's error, and that of all gradients together."""
    out = 0.0
    for a, b in zip(got.outputs, truth.outputs, strict=True):
        if b.is_floating_point():
            out = _worst(out, _relative(a, b))
        elif not b.is_complex() and not torch.equal(a, b):
            out = _worst(out, float((a != b).double().mean()))  # integers: the share that differs
    difference = whole = 0.0
    for name, grad in truth.grads.items():
        ours = got.grads[name]
        if grad is not None and ours is not None:
            difference += float((ours.double() - grad.double()).norm() ** 2)
            whole += float(grad.double().norm() ** 2)
    return out, (difference / (whole + 1e-30)) ** 0.5


def _relative(got: Tensor, truth: Tensor) -> float:
    a, b = got.double(), truth.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        # The lowest number of a dtype stands for -inf in many masks; what it becomes in another is no error.
        edge = b.abs() > 1e30
        if not torch.equal(a.isfinite() | edge, finite | edge):
            return float("inf")
        finite = finite & ~edge
    return float((a[finite] - b[finite]).norm() / (b[finite].norm() + 1e-12))


def _worst(a: float, b: float) -> float:
    return b if b != b or b > a else a


# ---------------------------------------------------------------------- identity and copies


def _check_identity(
    outcome: Outcome, converted: nn.Module, reference: nn.Module, parameters: dict[str, nn.Parameter]
) -> None:
    ours = dict(converted.named_parameters())
    if list(ours) != list(parameters):
        outcome.failures.append("names of parameters differ")
    elif any(ours[name] is not parameter for name, parameter in parameters.items()):
        outcome.failures.append("parameters are not the model's")
    if list(converted.state_dict()) != list(reference.state_dict()):
        outcome.failures.append("state_dict keys differ")


def _check_copies(
    outcome: Outcome, converted: nn.Module, reference: nn.Module, inputs: Callable[[int], Inputs]
) -> None:
    situation = inputs(BATCHES[0])
    converted.eval()
    want = _step(converted, situation, 3)
    ways: tuple[tuple[str, Callable[[nn.Module], nn.Module]], ...] = (
        ("deepcopy", copy.deepcopy),
        ("pickle", lambda model: pickle.loads(pickle.dumps(model))),
    )
    copies: list[tuple[str, Callable[[], nn.Module]]] = []
    for what, way in ways:
        try:
            way(reference)
        except Exception:  # the model itself has closures, or keeps activations
            continue
        copies.append((what, functools.partial(way, converted)))
    for what, make in copies:
        try:
            got = _step(make(), situation, 3)
            _check_kind(got, want)
            if not _errors(got, want)[0] <= 1e-6:
                outcome.failures.append(f"{what}: other outputs")
        except Exception as error:
            outcome.failures.append(f"{what}: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------- small things


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _copy(model: nn.Module) -> nn.Module:
    """A copy; activations that the model keeps in attributes, which cannot be copied, are shared."""
    kept = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad.clone()


def _in_double(inputs: Inputs) -> Inputs:
    leaves: list[Any] = []
    structure = flatten(inputs, _is_tensor, leaves)
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
    return unflatten(structure, wide)  # type: ignore[no-any-return]


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("dropout", "drop", "drop_rate", "attn_dropout", "hidden_dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
