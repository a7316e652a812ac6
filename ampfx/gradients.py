"""What a loss-scaling optimizer does with gradients: is one of them not finite, multiply them by 1/S or S.

The check only reads, or writes what it read: a gradient may be shared, expanded, sparse, distributed or
part of a graph. How it is done depends on the device, by measurement:

* On accelerators, one multi-tensor maximum norm over all gradients; the result stays on the device.
* On the CPU the maximum norm is ten times slower than a sum, so large gradients are summed. A sum is
  finite only if all its terms are; if it is not, an exact look decides (the sum itself may overflow).
* Many small gradients go through the one multi-tensor kernel that the CPU has, which multiplies by 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampfx.grad_scaling import times, values_of
from ampfx.loss_scale import ModuleScale

_SMALL = 1 << 14  # elements; below, a call costs more than the work on the CPU


def params_of(param_groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """All parameters of an optimizer, in order."""
    return [param for group in param_groups for param in group["params"]]


def gradients_of(param_groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    grads = [param.grad for group in param_groups for param in group["params"]]
    return [grad for grad in grads if grad is not None]


@torch.no_grad()
def non_finite(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Float32 tensor of shape (1,) on ``device``: 1 if one of ``grads`` holds inf or NaN, else 0.

    No host sync where gradients are on an accelerator.
    """
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.is_complex()
        values = grad if plain else values_of(grad)
        if values.numel():
            by_device[values.device].append(values)
    result: Tensor | None = None
    for where, values_list in by_device.items():
        found = _found_on_cpu(values_list) if where.type == "cpu" else _found(values_list)
        found = found.to(device, non_blocking=True)
        result = found if result is None else torch.maximum(result, found)
    return torch.zeros(1, device=device) if result is None else result


def _found(values: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(values, float("inf"))
    largest = torch.stack([norm.to(torch.float32) for norm in norms]).amax()
    return torch.isfinite(largest).logical_not_().to(torch.float32).reshape(1)


def _found_on_cpu(values: list[Tensor]) -> Tensor:
    flag = torch.zeros(1)
    small: list[Tensor] = []
    for value in values:
        # float64 would pass through float32 in the multi-tensor kernel.
        if value.numel() < _SMALL and value.dtype is not torch.float64 and _is_dense(value):
            small.append(value.data if value.requires_grad else value)
        elif not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
            return torch.ones(1)
    if small:
        torch._amp_foreach_non_finite_check_and_unscale_(small, flag, torch.ones(1))
    return flag


def _is_dense(values: Tensor) -> bool:
    """Whether no two elements share memory."""
    if values.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride < expected:
                return False
            expected = stride * size
    return True


@torch.no_grad()
def unscale_gradients_(params: Iterable[Tensor], loss_scale: ModuleScale) -> None:
    """Multiply the gradients of ``params`` by 1/S and set the sticky flag if one is not finite."""
    for device, values in _prepared(params, loss_scale.inv_scale_for).items():
        loss_scale.touch(device)
        flag, factor = loss_scale.flag_for(device), loss_scale.inv_scale_for(device)
        _multiply_(values, flag, factor)


@torch.no_grad()
def scale_gradients_(params: Iterable[Tensor], loss_scale: ModuleScale) -> None:
    """Multiply true gradients of ``params`` by S, so that gradients times S can be added to them."""
    for device, values in _prepared(params, loss_scale.scale_for).items():
        # What is not finite is found when these are divided again.
        _multiply_(values, torch.zeros(1, device=device), loss_scale.scale_for(device))


_Prepared = dict[torch.device, tuple[list[Tensor], list[Tensor]]]


def _multiply_(values: tuple[list[Tensor], list[Tensor]], flag: Tensor, factor: Tensor) -> None:
    """Multiply the first list in place; the second one is multiplied already. Both are checked."""
    to_multiply, multiplied = values
    if to_multiply:
        torch._amp_foreach_non_finite_check_and_unscale_(to_multiply, flag, factor)
    if multiplied:
        torch.maximum(flag, non_finite(multiplied, flag.device), out=flag)


def _prepared(params: Iterable[Tensor], factor_for: Callable[[torch.device], Tensor]) -> _Prepared:
    """The gradients by device, as tensors that the multi-tensor kernel can write.

    A gradient that is part of a graph (``create_graph=True``) is multiplied here, in that graph: what is
    derived from it must have the factor too.
    """
    by_device: defaultdict[torch.device, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.requires_grad and grad.layout is torch.strided:
            with torch.enable_grad():
                param.grad = grad = times(grad, factor_for(grad.device)).to(grad.dtype)
            values = values_of(grad.detach())
            by_device[values.device][1].append(values)
            continue
        if type(grad) is not Tensor or grad.layout is not torch.strided or grad.is_complex():
            if grad.is_sparse and not grad.is_coalesced():
                param.grad = grad = grad.coalesce()  # duplicates may add up to inf
            values = values_of(grad)
        elif _is_dense(grad):
            values = grad
        else:
            param.grad = values = grad.clone(memory_format=torch.contiguous_format)
        if values.numel():
            by_device[values.device][0].append(values.detach() if values.requires_grad else values)
    return dict(by_device)


@torch.no_grad()
def names_of_non_finite(param_groups: Iterable[dict[str, Any]]) -> list[str]:
    """The names (or group and position) of the parameters whose gradients are not finite. Syncs."""
    names: list[str] = []
    for number, group in enumerate(param_groups):
        given = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if param.grad is not None and not bool(values_of(param.grad).isfinite().all()):
                names.append(given[position] if given else f"param_groups[{number}]['params'][{position}]")
    return names
