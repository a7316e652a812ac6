"""Run a step of a torch optimizer unless an overflow flag is set.

1. torch's fused Adam, AdamW, SGD and Adagrad take a ``found_inf`` tensor and skip inside the kernel, so the
   host need not know. torch 2.13 has five defects on this path, each avoided here:

   a. SGD creates momentum buffers uninitialised and a skipped first step leaves them so → they are filled
      with zeros beforehand, which equals the first step when dampening is 0; else the host decides.
   b. Only the exact value 1 skips → the flag that comes in is exactly 0 or 1.
   c. The flag must have no dimension → it is reshaped.
   d. SGD fails when a parameter gets its first gradient later than others → (a), or an unfused step.
   e. An attribute left behind skips all later steps → both are deleted in any case, before and after.

2. With any other optimizer the host reads the flag: the only synchronisation of a step.
3. With a closure that is evaluated again and again (LBFGS, SAM) the flag is read after each evaluation; an
   overflow ends the step and puts everything back to where it was.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ampfx.gradients import params_of

_FUSED = (Adam, AdamW, SGD, Adagrad)


def skips_in_kernel(optimizer: Optimizer) -> bool:
    """Whether the next step can take the flag as a tensor; prepares the optimizer for it (a, d)."""
    if type(optimizer) not in _FUSED or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = [g for g in optimizer.param_groups if any(p.grad is not None for p in g["params"])]
    # A state dict from an unfused run switches the groups to unfused and leaves the attribute.
    if not all(group.get("fused") for group in groups):
        return False
    if not isinstance(optimizer, SGD):
        return True
    if _all_have_momentum(optimizer):
        return True
    without = [(group, param) for group in groups for param in _without_momentum(optimizer, group)]
    if any(group["dampening"] != 0 for group, _ in without):
        return False
    for _, param in without:
        zeros = torch.zeros_like(param, memory_format=torch.preserve_format)
        optimizer.state[param]["momentum_buffer"] = zeros
    return True


# The states of optimizers whose parameters all have a momentum buffer, to look there without hashing them.
_complete: weakref.WeakKeyDictionary[Optimizer, tuple[Any, int, list[dict[str, Any]]]]
_complete = weakref.WeakKeyDictionary()


def _all_have_momentum(optimizer: Optimizer) -> bool:
    """Whether every parameter has its momentum buffer."""
    state, count = optimizer.state, sum(len(group["params"]) for group in optimizer.param_groups)
    known = _complete.get(optimizer)
    if known is None or known[0] is not state or known[1] != count or len(state) < count:
        _complete.pop(optimizer, None)
        if len(state) < count:
            return False
        known = state, count, [state[param] for param in params_of(optimizer.param_groups)]
        _complete[optimizer] = known
    if all(values.get("momentum_buffer") is not None for values in known[2]):
        return True
    del _complete[optimizer]
    return False


def _without_momentum(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    if not group.get("momentum"):
        return []
    state = optimizer.state
    return [p for p in group["params"] if p.grad is not None and state[p].get("momentum_buffer") is None]


def step_in_kernel(optimizer: Optimizer, found: Tensor) -> Any:
    """Step 1: no host sync. ``found`` is exactly 0 or 1."""
    with _clean(optimizer):
        optimizer.found_inf = found.reshape(())  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        return optimizer.step()


def step_on_host(optimizer: Optimizer, skip: bool) -> Any:
    """Step 2: the host has read the flag."""
    if skip:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            # Else a scheduler built on this optimizer warns that it was called before the first step.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return None
    with _clean(optimizer), _unfused_where_torch_fails(optimizer):
        return optimizer.step()


@contextlib.contextmanager
def _clean(optimizer: Optimizer) -> Iterator[None]:
    def clean() -> None:
        optimizer.__dict__.pop("found_inf", None)
        optimizer.__dict__.pop("grad_scale", None)

    clean()
    try:
        yield
    finally:
        clean()


@contextlib.contextmanager
def _unfused_where_torch_fails(optimizer: Optimizer) -> Iterator[None]:
    """Fused SGD cannot mix parameters with and without a momentum buffer (d)."""
    changed = []
    if isinstance(optimizer, SGD) and not _all_have_momentum(optimizer):
        for group in optimizer.param_groups:
            late = len(_without_momentum(optimizer, group)) if group.get("fused") else 0
            if 0 < late < sum(p.grad is not None for p in group["params"]):
                changed.append((group, group["fused"], group.get("foreach")))
                group.update(fused=False, foreach=False)
    try:
        yield
    finally:
        for group, fused, foreach in changed:
            group.update(fused=fused, foreach=foreach)


class StepAborted(Exception):
    """Raised inside an optimizer's closure when an evaluation overflowed; never leaves the step."""


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to evaluate a closure once, before it changes anything."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


class Snapshot:
    """Parameters and state of an optimizer, to go back to when a step is aborted halfway."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._values = [(param, param.detach().clone()) for param in params_of(optimizer.param_groups)]
        # Parameters appear as keys and inside some states; they stay the same objects.
        memo: dict[int, Any] = {id(param): param for param, _ in self._values}
        self._state = {key: copy.deepcopy(value, memo) for key, value in optimizer.state.items()}

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        """Put everything back."""
        for param, value in self._values:
            param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self._state)


class ClosureRunner:
    """Step 3: runs an optimizer's step with a closure and aborts it on overflow.

    Args:
        optimizer: the optimizer whose step evaluates the closure.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # An optimizer that evaluates once needs no copy of the parameters; it is watched at its first step.
        self.once: bool | None = None if not isinstance(optimizer, torch.optim.LBFGS) else False

    def run(
        self, optimizer: Optimizer, closure: Callable[[], Any], overflowed: Callable[[], bool]
    ) -> tuple[Any, bool]:
        """The result of the step, and whether it was skipped."""
        snapshot = None if self.once else Snapshot(optimizer)
        evaluations = 0
        loss: Any = None

        def evaluate() -> Any:
            nonlocal evaluations, loss
            evaluations += 1
            with torch.enable_grad():
                loss = closure()
            if overflowed():
                raise StepAborted
            return loss

        try:
            with _clean(optimizer):
                result = optimizer.step(evaluate)
        except StepAborted:
            if evaluations > 1 and snapshot is not None:
                snapshot.restore(optimizer)
            elif snapshot is not None:
                optimizer.state.clear()
                optimizer.state.update(snapshot._state)
            return loss, True
        if self.once is None:
            self.once = evaluations == 1
        elif evaluations > 1:
            self.once = False
        return result, False
