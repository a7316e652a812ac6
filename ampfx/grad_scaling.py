"""The operations that a converted graph contains for loss scaling.

All four are the identity (or a cast) in the forward pass and act on gradients only:

* :func:`scale` and :func:`scale_cast` stand where a value leaves the graph; the gradient that comes back
  is multiplied by S.
* :func:`unscale` and :func:`unscale_cast` stand where a parameter or an input enters; the gradient that
  goes out is multiplied by 1/S, checked for inf and NaN, and handed on in the dtype of the input.

How they are built:

1. S and 1/S are read when the gradient arrives, never saved: S changes between steps.
2. A result of ``scale`` is a tensor of its own, so that the caller may write into it.
3. Differentiated twice, the multiplication counts as the identity: inside, a gradient is S times the true
   one and the derivative with respect to a gradient is the true one, so that their products are S times
   the true ones again. With the literal derivative a gradient penalty would vanish. What leaves or enters
   in a second backward is therefore like a value of the forward pass, and is treated by the same two
   functions when a third one follows.
4. A gradient that is None stays None: zeros would let weight decay move an unused parameter.
5. Tensors that need no gradient pass by; a frozen weight must not begin to need one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampfx.loss_scale import ModuleScale

Grads = Sequence[Tensor | None]


def unscale(loss_scale: ModuleScale, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters or inputs on their way into the graph."""
    return _enter(loss_scale, None, False, tensors)


def unscale_cast(loss_scale: ModuleScale, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters or inputs on their way into the graph, cast to ``dtype`` at once."""
    return _enter(loss_scale, dtype, False, tensors)


def unscale_written(loss_scale: ModuleScale, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Inputs that the graph writes in place: the results share memory with them but are no views."""
    return _enter(loss_scale, None, True, tensors)


def scale(loss_scale: ModuleScale, tensor: Tensor) -> Tensor:
    """A value on its way out of the graph."""
    return _leave(loss_scale, tensor.dtype, tensor)


def scale_cast(loss_scale: ModuleScale, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A value on its way out of the graph, cast to ``dtype`` at once."""
    return _leave(loss_scale, dtype, tensor)


def _enter(
    loss_scale: ModuleScale, dtype: torch.dtype | None, alias: bool, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        for tensor in tensors:
            loss_scale.prepare_traced(tensor.device)
    if torch._C._are_functorch_transforms_active():
        # Wrapped tensors do not always say whether they need a gradient.
        return _unscaled_inside(loss_scale, dtype, alias, tensors)
    if torch.is_grad_enabled():
        wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    else:
        wanted = []
    if len(wanted) == len(tensors):
        return _unscaled_inside(loss_scale, dtype, alias, tensors)
    results = [tensor if dtype is None else tensor.to(dtype) for tensor in tensors]
    if wanted:
        inside = _unscaled_inside(loss_scale, dtype, alias, tuple(tensors[index] for index in wanted))
        for index, tensor in zip(wanted, inside, strict=True):
            results[index] = tensor
    return tuple(results)


def _unscaled_inside(
    loss_scale: ModuleScale, dtype: torch.dtype | None, alias: bool, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _apply(_Unscale, loss_scale, dtype, alias, *tensors)
    return results


def _leave(loss_scale: ModuleScale, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        loss_scale.prepare_traced(tensor.device)
    active = torch.is_grad_enabled() and tensor.requires_grad
    if active or torch._C._are_functorch_transforms_active():
        result: Tensor = _apply(_Scale, loss_scale, dtype, tensor)
        return result
    return tensor.to(dtype)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    if torch.compiler.is_compiling():
        return function.apply(*args)
    function = _DUAL.get(function, function)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    # Function.apply inspects the signature of forward at every call, which costs more than all the rest.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def times(grad: Tensor, factor: Tensor) -> Tensor:
    """``grad * factor`` for a factor of shape (1,): one kernel that computes in at least float32."""
    if grad.is_sparse or grad.is_sparse_csr:
        return _times_sparse(grad, factor)
    product = grad * factor
    return product if grad.dim() else product.reshape(())


def _times_sparse(grad: Tensor, factor: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad.to(torch.float32) * factor.reshape(())
    return torch.sparse_coo_tensor(
        grad._indices(),
        grad._values() * factor,
        grad.shape,
        is_coalesced=grad.is_coalesced(),
        check_invariants=False,
    )


def _is_transformed(grads: Grads) -> bool:
    """Whether a torch.func transform, or ``is_grads_batched``, runs this backward pass."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return any(
        grad is not None
        and (functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad))
        for grad in grads
    )


def values_of(grad: Tensor) -> Tensor:
    """The strided real tensor that holds all numbers of a gradient (sparse, complex, distributed)."""
    local: Tensor = grad if type(grad) is Tensor else getattr(grad, "_local_tensor", grad)
    if local.is_sparse:
        local = local._values()
    elif local.is_sparse_csr:
        local = local.values()
    return torch.view_as_real(local) if local.is_complex() else local


class _Unscale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        loss_scale: ModuleScale, dtype: torch.dtype | None, alias: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        if alias:
            return tuple(tensor.data for tensor in tensors)
        return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        loss_scale, ctx.result, _, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.loss_scale = loss_scale
        ctx.dtypes = tuple(tensor.dtype for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, *_unscaled(ctx.loss_scale, ctx.dtypes, grads))


class _Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(loss_scale: ModuleScale, dtype: torch.dtype, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.dtype == dtype else tensor.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.loss_scale, ctx.result, tensor = inputs
        ctx.dtype = tensor.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled() or _is_transformed((grad,)):
            return None, None, _apply(_Multiply, ctx.loss_scale, True, ctx.dtype, grad)
        factor = ctx.loss_scale.scale_for(grad.device)
        return None, None, times(grad, factor).to(ctx.dtype)


class _DualUnscale(_Unscale):
    """With forward-mode AD, which torch.compile refuses to see: a tangent passes as the value does."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kept = [t if t is None or ctx.result is None else t.to(ctx.result) for t in tangents[3:]]
        return tuple(None if t is None else t.view_as(t) for t in kept)


class _DualScale(_Scale):
    """The same for ``scale``."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tangent = tangents[2]
        return tangent.clone() if tangent.dtype == ctx.result else tangent.to(ctx.result)


class _Multiply(torch.autograd.Function):
    """A gradient that crosses the border while a graph of the backward pass is made; see step 3.

    Args of forward: the scale, whether the gradient enters (times S) or leaves (times 1/S), its new dtype.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(loss_scale: ModuleScale, enters: bool, dtype: torch.dtype, grad: Tensor) -> Tensor:
        return _multiplied(loss_scale, enters, dtype, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.loss_scale, ctx.enters, ctx.result, grad = inputs
        ctx.dtype = grad.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        if ctx.enters:
            return None, None, None, _apply(_Scale, ctx.loss_scale, ctx.dtype, grad)
        return None, None, None, _apply(_Unscale, ctx.loss_scale, ctx.dtype, False, grad)[0]


class _DualMultiply(_Multiply):
    """The same; a tangent of a gradient is a change of it, so it grows with it."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _multiplied(ctx.loss_scale, ctx.enters, ctx.result, tangents[3])


_DUAL: dict[type[torch.autograd.Function], type[torch.autograd.Function]]
_DUAL = {_Unscale: _DualUnscale, _Scale: _DualScale, _Multiply: _DualMultiply}


def _multiplied(loss_scale: ModuleScale, enters: bool, dtype: torch.dtype, grad: Tensor) -> Tensor:
    source = loss_scale.scale_for if enters else loss_scale.inv_scale_for
    return times(grad, source(grad.device)).to(dtype)


def _unscaled(loss_scale: ModuleScale, dtypes: tuple[torch.dtype, ...], grads: Grads) -> Grads:
    functorch = _is_transformed(grads)
    if torch.is_grad_enabled() or functorch:
        results: list[Tensor | None] = [
            None if grad is None else _apply(_Multiply, loss_scale, False, dtype, grad)
            for grad, dtype in zip(grads, dtypes, strict=True)
        ]
        if not functorch:  # under a transform nothing outside may be written, and no step follows
            with torch.no_grad():
                copies = [grad.detach().clone() for grad in results if grad is not None]
                _note(loss_scale, copies)
        return results
    products: list[Tensor] = []
    results = []
    for grad in grads:
        if grad is None:
            results.append(None)
            continue
        product = times(grad, loss_scale.inv_scale_for(grad.device))
        products.append(product)
        results.append(product)
    _note(loss_scale, products)
    # Only a parameter that the author made float16, or a float64 one, needs another dtype here.
    return [
        grad if grad is None or grad.dtype == dtype else grad.to(dtype)
        for grad, dtype in zip(results, dtypes, strict=True)
    ]


def _note(loss_scale: ModuleScale, owned: list[Tensor]) -> None:
    """Set the sticky flag if one of ``owned`` is not finite. They are written (times 1), so nobody else
    may hold them."""
    if not owned:
        return
    device = owned[0].device
    if any(grad.device != device for grad in owned):
        for other in {grad.device for grad in owned}:
            _note(loss_scale, [grad for grad in owned if grad.device == other])
        return
    if not torch.compiler.is_compiling():
        loss_scale.note_backward(device)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [values_of(grad) for grad in owned], loss_scale.flag_for(device), loss_scale.replica(device).one
    )
