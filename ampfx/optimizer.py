"""LossScaleOptimizer: any torch optimizer, with loss scaling, in the plain training loop.

With a converted model the graph scales (see :mod:`ampfx.loss_scale` for the state machine) and ``.grad``
holds true float32 gradients after a plain ``loss.backward()``. Without one the wrapper multiplies the
loss by S itself, when asked: ``optimizer.backward(loss)``. When that returns, ``.grad`` holds true gradients
too: those that were there before are multiplied by S when the scaled gradient sets out, and all of them
by 1/S at the end, so that scaled and plain backward passes add up in any order. Only after
``optimizer.scale_loss(loss).backward()`` does ``.grad`` hold gradients times S, until the next
:meth:`LossScaleOptimizer.unscale_`, ``clip_grad_norm_``, ``backward`` or ``step``.

A step:

1. divides the gradients by S if they still are gradients times S;
2. looks whether a gradient is not finite: by the flags that backward set, and by ``.grad`` itself;
3. takes the maximum over all ranks, so that all skip or none does;
4. steps the inner optimizer unless something was found (see :mod:`ampfx.skip`: without a host sync for
   torch's fused optimizers, with one otherwise); a skipped step changes no parameter, state or counter;
5. adapts S, on its device.

The wrapper owns no ``param_groups``, ``state`` or ``defaults``: it shows those of the inner optimizer, so
that schedulers, checkpoints and ``load_state_dict`` on either of the two see the same.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfx.errors import LossScaleError
from ampfx.gradients import (
    gradients_of,
    names_of_non_finite,
    non_finite,
    params_of,
    scale_gradients_,
    unscale_gradients_,
)
from ampfx.loss_scale import (
    LossScale,
    ModuleScale,
    ScaleRule,
    Watch,
    is_number,
    models_of,
    registration,
    registrations,
)
from ampfx.skip import ClosureRunner, evaluates_once, skips_in_kernel, step_in_kernel, step_on_host

STATE_KEY = "loss_scale"
_ON_OVERFLOW = ("skip", "raise")
_living: weakref.WeakSet[LossScaleOptimizer] = weakref.WeakSet()
_WARN_AFTER = 100  # skipped steps in a row; from any scale, 100 halvings reach the minimum


class LossScaleOptimizer(Optimizer):
    """Wraps an optimizer; skips steps with non-finite gradients and adapts the loss scale.

    Train a converted model with the plain ``loss.backward()``. Without one call ``optimizer.backward(loss)``;
    a plain ``loss.backward()`` before or after it adds up with it. After ``optimizer.scale_loss(loss).backward()``
    ``.grad`` holds gradients times S until ``unscale_()`` or ``step()``: no plain backward in between, and
    gradients are dropped with the ``zero_grad()`` of this optimizer. One optimizer for one plain model: what
    ``backward`` adds to the parameters of another optimizer stays times S.

    Args:
        optimizer: the optimizer that does the work.
        model: the converted module, a list of them, or a wrapper around one (DDP, compiled); None finds the
            converted modules that own the optimizer's parameters.
        init_scale: S when the optimizer attaches. Static scales keep their own value.
        growth_factor: see :class:`ampfx.loss_scale.ScaleRule`, as for the next five.
        backoff_factor: see there.
        growth_interval: see there.
        hysteresis: see there.
        min_scale: see there.
        max_scale: see there.
        on_overflow: ``"skip"``, or ``"raise"`` for an error that names the parameters (nothing is changed).
        enabled: False steps the inner optimizer as it is.
        check_finite: whether steps with non-finite gradients are skipped where nothing is scaled (bfloat16, or
            a static scale of 1). None: only where something is, or with ``on_overflow="raise"``.
        process_group: the ranks that skip together; None is all ranks, False this rank alone.

    Raises:
        LossScaleError: for arguments that cannot be right.
    """

    # A GradScaler on top must look at .grad itself instead of handing a flag to this object.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        on_overflow: str = "skip",
        enabled: bool = True,
        check_finite: bool | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise LossScaleError(f"LossScaleOptimizer wraps a torch.optim.Optimizer, got {type(optimizer)}")
        if isinstance(optimizer, LossScaleOptimizer):
            raise LossScaleError("this optimizer is a LossScaleOptimizer already; use it as it is")
        if on_overflow not in _ON_OVERFLOW:
            raise LossScaleError(f"on_overflow must be one of {_ON_OVERFLOW}, got {on_overflow!r}")
        rule = ScaleRule(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
        if not (is_number(init_scale) and min_scale <= init_scale <= max_scale):
            raise LossScaleError(
                f"init_scale must be between min_scale {min_scale} and max_scale {max_scale}, "
                f"got {init_scale!r}"
            )
        if not isinstance(enabled, bool):
            raise LossScaleError(f"enabled must be True or False, got {enabled!r}")
        if not (check_finite is None or isinstance(check_finite, bool)):
            raise LossScaleError(f"check_finite must be True, False or None, got {check_finite!r}")
        if not _may_be_process_group(process_group):
            raise LossScaleError(
                "process_group must be a torch.distributed.ProcessGroup, None (all ranks) or False "
                f"(this rank alone), got {process_group!r}"
            )
        model = _checked_model(model)
        self.inner_optimizer = optimizer
        self.rule = rule
        self.init_scale = float(init_scale)
        self.on_overflow = on_overflow
        self.enabled = enabled
        self.check_finite = on_overflow == "raise" if check_finite is None else check_finite
        self.process_group = process_group
        self._setup()
        self._searches = model is None
        self._search(_modules_in(model) if model is not None else None)
        if model is not None and enabled and not self._is_converted and _compiles_later(model):
            self._searches = True  # torch.compile converts at the first call; found by the parameters then
        elif model is not None and enabled and not self._is_converted:
            warnings.warn(
                "the model given to LossScaleOptimizer has no converted module: gradients are scaled only by "
                "optimizer.backward(loss). Convert it first: model = ampfx.convert(model, example_inputs)",
                UserWarning,
                stacklevel=2,
            )
        if model is not None and enabled and self._is_converted and self._trains_nothing_of(model):
            warnings.warn(
                "the optimizer given to LossScaleOptimizer holds none of the parameters of the given model: "
                "step() trains nothing of it. Make the optimizer from model.parameters(), or give the model "
                "that this optimizer trains.",
                UserWarning,
                stacklevel=2,
            )

    def _setup(self) -> None:
        """What is neither an argument nor saved."""
        Optimizer.__setstate__(self, {})  # the hook dictionaries, and the hooked step
        self._warned_capturable_if_run_uncaptured = True
        self._watches: list[Watch] = []  # converted modules that scale inside
        self._own: Watch | None = None  # the scale of the loss, where no module scales
        self._is_converted = False
        self._seen_registrations = -1
        self._is_scaled = False  # .grad holds gradients times S
        self._skipped_on_host = 0
        self._skipped_on_device: Tensor | None = None
        self._last_skipped: bool | Tensor = False
        self._skipped_in_a_row = 0
        self._closures = ClosureRunner(self.inner_optimizer)
        _living.add(self)
        _watch_loads(self.inner_optimizer, weakref.ref(self))

    # ------------------------------------------------------------------ the inner optimizer's own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self.inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner_optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner_optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.inner_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner_optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, and look for converted modules that own its parameters."""
        self.inner_optimizer.add_param_group(param_group)
        self._seen_registrations = -1

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __repr__(self) -> str:
        return f"LossScaleOptimizer({self.inner_optimizer!r})"

    # ------------------------------------------------------------------ the scale

    @property
    def loss_scale(self) -> Tensor:
        """S as a tensor without dimensions. No host sync; later steps do not change it."""
        self._search()
        groups = self._groups()
        if not groups:
            return torch.ones(())
        return groups[0].scale_for(groups[0].device).detach().reshape(()).clone()

    def get_scale(self) -> float:
        """S as a number. A host sync."""
        self._search()
        groups = self._groups()
        return groups[0].get() if groups else 1.0

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped. May be a host sync."""
        if isinstance(self._last_skipped, Tensor):
            self._last_skipped = bool(self._last_skipped.item())
        return self._last_skipped

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped. May be a host sync."""
        on_device = self._skipped_on_device
        return self._skipped_on_host + (0 if on_device is None else int(on_device.item()))

    def scale_loss(self, loss: Any) -> Any:
        """The loss (or a list of losses) times S; unchanged when a converted model scales inside.

        From its backward on, all of ``.grad`` is times S, until ``unscale_()`` or ``step()``.

        Raises:
            LossScaleError: for what is no tensor and no list of tensors.
        """
        _check_loss(loss)
        self._search()
        return loss if self._own is None else self._scaled(loss, self._own)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)`` with the loss scaled where the model does not do so itself.

        ``.grad`` holds true gradients afterwards, those of earlier backward passes included.

        Raises:
            LossScaleError: for what is no tensor and no list of tensors.
        """
        scaled = self.scale_loss(loss)
        try:
            if isinstance(scaled, Tensor):
                scaled.backward(**kwargs)
            else:
                torch.autograd.backward(list(scaled), **kwargs)
        finally:
            self.unscale_()

    def _scaled(self, loss: Any, own: Watch) -> Any:
        if not isinstance(loss, Tensor):
            return type(loss)(self._scaled(item, own) for item in loss)
        # A copy: the product keeps its factor for backward, and S may have changed by then.
        factor = own.group.scale_for(loss.device).detach().reshape(()).clone()
        low = loss.dtype in (torch.float16, torch.bfloat16)
        product = (loss.float() if low else loss) * factor
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            self._is_scaled = True  # no hook there
            own.module.generation += 1
        elif product.requires_grad:
            self._prepare_at_backward(product, factor, own)
        return product

    def _prepare_at_backward(self, product: Tensor, factor: Tensor, own: Watch) -> None:
        """When the gradient sets out, not now: until then gradients may be dropped, added or stepped."""
        group, changes, me = own.group, own.group.changes, weakref.ref(self)

        def prepare(grad: Tensor) -> Tensor | None:
            living = me()
            if living is not None:
                if not living._is_scaled:
                    scale_gradients_(params_of(living.param_groups), own.module)
                    living._is_scaled = True
                own.module.generation += 1
            if group.changes == changes:
                return None
            return grad * (group.scale_for(factor.device).reshape(()) / factor)

        product.register_hook(prepare)

    def unscale_(self) -> None:
        """Make ``.grad`` true gradients. Nothing happens when they are so already."""
        if not self._is_scaled or self._own is None:
            return
        unscale_gradients_(params_of(self.param_groups), self._own.module)
        self._is_scaled = False

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0, **kwargs: Any) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all parameters, of true gradients.

        Raises:
            LossScaleError: for a ``max_norm`` that is no number or is below 0.
        """
        if not (isinstance(max_norm, Tensor) or (is_number(max_norm) and max_norm >= 0.0)):
            raise LossScaleError(f"max_norm must be a number that is not below 0, got {max_norm!r}")
        self.unscale_()
        return nn.utils.clip_grad_norm_(params_of(self.param_groups), float(max_norm), norm_type, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and with them a pending overflow."""
        self.inner_optimizer.zero_grad(set_to_none=set_to_none)
        self._is_scaled = False
        unseen = [watch for watch in self._all_watches() if watch.unseen]
        for group in _distinct(watch.group for watch in unseen):
            group.collect()
            pending = _maximum([watch.pending for watch in unseen if watch.group is group])
            self._back_off(group, pending * group.unadapted, torch.zeros_like(pending))
        for watch in unseen:
            watch.consume()

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer unless a gradient is not finite, and adapt the loss scale.

        Args:
            closure: evaluates the model and calls ``backward``; optional for most optimizers.

        Returns:
            What the inner optimizer returns, or the closure's loss when the step is skipped.

        Raises:
            LossScaleError: with ``on_overflow="raise"``, after a non-finite gradient.
        """
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        if not (before or after):
            return self._step(closure)
        args: tuple[Any, ...] = () if closure is None else (closure,)
        kwargs: dict[str, Any] = {}
        for pre_hook in before.values():
            changed = pre_hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        result = self._step(*args, **kwargs)
        for post_hook in after.values():
            post_hook(self, args, kwargs)
        return result

    # torch wraps a step to run hooks and to name it in profiles. This one runs its own; the inner optimizer's
    # step is in the profile and runs the global hooks, once.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        inner = self.inner_optimizer
        if not self.enabled:
            return inner.step() if closure is None else inner.step(closure)
        self._search()
        if not (self.check_finite or self._groups()):
            self._last_skipped = False
            return inner.step() if closure is None else inner.step(closure)
        if closure is not None and not evaluates_once(inner):
            return self._step_through(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found, overflows = self._look()
        in_kernel = self.on_overflow == "skip" and skips_in_kernel(inner)
        if in_kernel:
            result = step_in_kernel(inner, found)
            self._count_on_device(found)
        else:
            skip = bool(found.item())  # the only host sync
            result = step_on_host(inner, skip)
            self._count_on_host(skip)
        self._adapt(found, overflows)
        self._after_step(in_kernel)
        return loss if closure is not None else result

    def _step_through(self, closure: Callable[[], Any]) -> Any:
        """A step whose closure is evaluated several times; S is adapted once."""
        outcome: list[tuple[Tensor, list[Tensor]]] = []

        def overflowed() -> bool:
            outcome[:] = [self._look()]
            return bool(outcome[0][0].item())

        result, skipped = self._closures.run(self.inner_optimizer, closure, overflowed)
        self._count_on_host(skipped)
        if outcome:
            self._adapt(*outcome[0])
        self._after_step(in_kernel=False)
        return result

    @torch.no_grad()
    def _look(self) -> tuple[Tensor, list[Tensor]]:
        """Whether to skip (exactly 0 or 1), and for each group whether the overflow counts against S."""
        checked = self._is_scaled  # unscaling sets the flag of what it multiplies
        self.unscale_()
        grads = gradients_of(self.param_groups)
        device = (grads or params_of(self.param_groups))[0].device
        bad = torch.zeros(1, device=device) if checked else non_finite(grads, device)
        groups = self._groups()
        for group in groups:
            group.use_device(device)
            group.collect()
        if len(groups) == 1 and groups[0].has_one_watch and self._fresh(groups[0]):
            found = torch.maximum(bad, self._all_watches()[0].pending)
            return self._reduce(found, [found])
        pending = {id(group): _maximum(self._pending(group)) for group in groups}
        noted = _maximum(list(pending.values())) if groups else torch.zeros_like(bad)
        found = torch.maximum(bad, noted)
        overflows = []
        for group in groups:
            # Put into .grad after backward: no flag knows of it.
            later = (bad * (1 - noted)) if self._fresh(group) else torch.zeros_like(bad)
            overflows.append(torch.maximum(pending[id(group)] * group.unadapted, later))
        return self._reduce(found, overflows)

    def _reduce(self, found: Tensor, overflows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The maximum over all ranks: in DDP one rank's overflow is in everybody's gradients."""
        if self.process_group is False or not _is_distributed(self.process_group):
            return found, overflows
        if len(overflows) == 1 and overflows[0] is found:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.process_group)
            return found, overflows
        both = torch.cat([found, *overflows])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=self.process_group)
        return both[:1].clone(), list(both[1:].split(1))

    def _adapt(self, found: Tensor, overflows: list[Tensor]) -> None:
        for group, overflow in zip(self._groups(), overflows, strict=True):
            fresh = self._fresh(group)
            if fresh or _is_distributed(self.process_group):
                if overflow is found:  # alone in its group
                    clean = None
                else:
                    clean = 1 - found if fresh else torch.zeros_like(found)
                self._back_off(group, overflow, clean)
        for watch in self._all_watches():
            watch.consume()
            watch.module.counted = watch.module.generation

    def _back_off(self, group: LossScale, overflow: Tensor, clean: Tensor | None) -> None:
        group.adapt(overflow, clean, self.rule)
        if clean is None:
            group.unadapted.zero_()
        else:
            group.unadapted.mul_(1 - overflow)

    def _count_on_device(self, found: Tensor) -> None:
        if self._skipped_on_device is None or self._skipped_on_device.device != found.device:
            self._skipped_on_host = self.skipped_steps
            self._skipped_on_device = torch.zeros(1, dtype=torch.int64, device=found.device)
        self._skipped_on_device.add_(found.to(torch.int64))
        self._last_skipped = found

    def _count_on_host(self, skipped: bool) -> None:
        self._last_skipped = skipped
        self._skipped_on_host += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0

    def _after_step(self, in_kernel: bool) -> None:
        self._is_scaled = False
        if in_kernel or not self._skipped_in_a_row:
            return
        if self.on_overflow == "raise":
            names = names_of_non_finite(self.param_groups)
            where = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise LossScaleError(
                f"non-finite gradients at loss scale {self.get_scale():g} in {where or 'the backward pass'}; "
                "no parameter was changed. Lower init_scale, or look for the operation that overflows."
            )
        if self._skipped_in_a_row == _WARN_AFTER:
            names = names_of_non_finite(self.param_groups) or ["a gradient before clipping"]
            warnings.warn(
                f"{_WARN_AFTER} steps in a row were skipped because gradients were not finite, first "
                f"{names[0]}. A smaller loss scale does not help. Look for NaN in the data or for an "
                "operation that overflows in the forward pass.",
                UserWarning,
                stacklevel=3,
            )

    # ------------------------------------------------------------------ who scales

    def _search(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Find the converted modules; again whenever one was registered since."""
        if not self.enabled or self._seen_registrations == registrations():
            return
        if modules is None:
            if not self._searches and self._seen_registrations != -1:
                return
            modules = models_of(params_of(self.param_groups)) if self._searches else []
        self._seen_registrations = registrations()
        watched = {id(watch.module) for watch in self._watches}
        unscaled_dtypes = []
        for module in modules:
            entry = registration(module)
            if entry is None:
                continue
            self._is_converted = True
            part, dtype = entry
            if part is None or not part.enabled:
                unscaled_dtypes.append(torch.bfloat16 if part is not None else dtype)
            elif id(part) not in watched:
                watched.add(id(part))
                self._watches.append(Watch(part, self.init_scale))
        if self._watches:
            self._own = None
        elif unscaled_dtypes and all(dtype == torch.bfloat16 for dtype in unscaled_dtypes):
            self._own = None  # bfloat16 has float32's range
        elif self._own is None:
            self._own = self._own_watch()

    def _own_watch(self) -> Watch:
        group = LossScale(shared=False)
        group.use_device(params_of(self.param_groups)[0].device)
        return Watch(group.module_scale(label="the loss"), self.init_scale)

    def _trains_nothing_of(self, model: Any) -> bool:
        """Whether the optimizer holds none of the parameters; a frozen model only passes gradients on."""
        held = {id(param) for param in params_of(self.param_groups)}
        params = [param for module in _modules_in(model) for param in module.parameters(recurse=False)]
        return any(param.requires_grad for param in params) and not any(id(param) in held for param in params)

    def _all_watches(self) -> list[Watch]:
        return self._watches if self._own is None else [*self._watches, self._own]

    def _groups(self) -> list[LossScale]:
        if self._own is None and len(self._watches) == 1:
            return [self._watches[0].group]
        return _distinct(watch.group for watch in self._all_watches())

    def _pending(self, group: LossScale) -> list[Tensor]:
        return [watch.pending for watch in self._all_watches() if watch.group is group]

    def _fresh(self, group: LossScale) -> bool:
        return any(watch.fresh for watch in self._all_watches() if watch.group is group)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict with the loss scale in its first group (a host sync).

        A plain torch optimizer loads it too, and keeps the entry as an unused option.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict: dict[str, Any] = dict(self.inner_optimizer.state_dict())
        scale = self._scale_state()
        if scale is not None:
            first, *rest = state_dict["param_groups"]
            state_dict["param_groups"] = [{**first, STATE_KEY: scale}, *rest]
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or a plain one of the inner optimizer's class.

        Raises:
            LossScaleError: for what is no optimizer's state dict, or a saved scale that cannot be read.
        """
        if not isinstance(state_dict, Mapping):
            raise LossScaleError(f"load_state_dict wants a state dict, got {type(state_dict)}")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        saved_groups = state_dict.get("param_groups")
        if not isinstance(saved_groups, (list, tuple)) or "state" not in state_dict:
            raise LossScaleError(
                "this is not the state dict of an optimizer: it needs the entries 'state' and 'param_groups', "
                f"and has {sorted(map(str, state_dict))}. Give what optimizer.state_dict() returned."
            )
        groups = [dict(group) for group in saved_groups]
        scale = groups[0].pop(STATE_KEY, None) if groups else None
        self.inner_optimizer.load_state_dict({**state_dict, "param_groups": groups})
        self._load_scale(scale)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _scale_state(self) -> dict[str, Any] | None:
        self._search()
        if not self.enabled:
            return None
        states = [group.state_dict() for group in self._groups()]
        result: dict[str, Any] = {**(states[0] if states else {}), "skipped_steps": self.skipped_steps}
        if len(states) > 1:
            result["others"] = states[1:]
        return result

    def _load_scale(self, state: Any) -> None:
        if state is None or not self.enabled:
            return
        if not isinstance(state, Mapping):
            raise LossScaleError(f"the saved loss scale cannot be read: {state!r}")
        self._search()
        self.unscale_()  # by the scale that they have
        groups = self._groups()
        if groups and "scale" in state:
            for group, saved in zip(groups, [state, *state.get("others", [])], strict=False):
                group.load_state_dict(saved)
        self._skipped_on_host = int(state.get("skipped_steps", 0))
        self._skipped_on_device = None

    # ------------------------------------------------------------------ copying

    _COPIED = ("check_finite", "inner_optimizer", "rule", "init_scale", "on_overflow", "enabled", "process_group")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: self.__dict__[name] for name in self._COPIED}
        if state["process_group"] is not False:
            state["process_group"] = None  # belongs to a process
        own = self._own
        return {
            **state,
            "modules": [watch.module for watch in self._watches],
            "own": None if own is None else own.group.state_dict(),
            "scales": [watch.group.state_dict() for watch in self._watches],
            "is_converted": self._is_converted,
            "searches": self._searches,
            "is_scaled": self._is_scaled,
            "skipped_steps": self.skipped_steps,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in self._COPIED:
            self.__dict__[name] = state[name]
        self._setup()
        self._searches = state["searches"]
        self._is_converted = state["is_converted"]
        self._is_scaled = state["is_scaled"]
        self._skipped_on_host = state["skipped_steps"]
        for module, scale in zip(state["modules"], state["scales"], strict=True):
            assert isinstance(module, ModuleScale)
            if not module.group.attached:
                module.group.load_state_dict(scale)
            self._watches.append(Watch(module, None))
        if state["own"] is not None:
            self._own = self._own_watch()
            self._own.group.load_state_dict(state["own"])
        self._seen_registrations = registrations()


def search_again() -> None:
    """A model was converted after its optimizer was made: the optimizers look for it before its first backward."""
    for optimizer in list(_living):
        optimizer._search()


def _compiles_later(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Whether ``torch.compile(..., backend="ampfx")`` made one of the models."""
    coverage = sys.modules.get("ampfx.dynamo_coverage")  # loaded with the backend
    if coverage is None:
        return False
    models: list[Any] = [model] if isinstance(model, nn.Module) else list(model)
    return any(coverage.is_compiled_here(part) for root in models for part in (root, *root.modules()))


def _modules_in(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """All modules in one model or several, through wrappers that hide them."""
    roots: list[Any] = [model] if isinstance(model, nn.Module) or hasattr(model, "module") else list(model)
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    while roots:
        root = roots.pop()
        if root is None or id(root) in seen:
            continue
        seen.add(id(root))
        if isinstance(root, nn.Module):
            found.update((id(module), module) for module in root.modules())
        roots += [getattr(root, "_orig_mod", None), getattr(root, "module", None)]
    return list(found.values())


def _checked_model(model: Any) -> Any:
    """``model`` as a module, a wrapper around one, a list of them or None."""
    if model is None or _holds_module(model):
        return model
    models = list(model) if isinstance(model, Iterable) else []
    if not models or not all(item is None or _holds_module(item) for item in models):
        raise LossScaleError(
            "model must be the converted module, a list of modules, or a wrapper around one, got "
            f"{models[0] if models else model!r}"
        )
    return models


def _holds_module(item: Any) -> bool:
    return isinstance(item, nn.Module) or isinstance(getattr(item, "module", None), nn.Module)


def _may_be_process_group(group: Any) -> bool:
    if group is None or group is False:
        return True
    distributed = torch.distributed
    if not distributed.is_available():
        return False
    outside = distributed.GroupMember.NON_GROUP_MEMBER  # what new_group returns on other ranks
    return isinstance(group, distributed.ProcessGroup) or (group is not True and group == outside)


def _check_loss(loss: Any) -> None:
    for item in loss if isinstance(loss, (list, tuple)) else [loss]:
        if isinstance(item, (list, tuple)):
            _check_loss(item)
        elif not isinstance(item, Tensor):
            raise LossScaleError(f"a loss must be a tensor or a list of tensors, got {item!r}")


def _maximum(values: list[Tensor]) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = torch.maximum(result, value.to(result.device))
    return result


def _distinct(groups: Iterable[LossScale]) -> list[LossScale]:
    return list({id(group): group for group in groups}.values())


def _is_distributed(process_group: Any) -> bool:
    if process_group is False:
        return False
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(process_group) > 1


def _watch_loads(inner: Optimizer, wrapper: weakref.ref[LossScaleOptimizer]) -> None:
    """A saved loss scale must not be lost when the state is loaded into the inner optimizer directly."""

    def after_load(optimizer: Optimizer) -> None:
        if optimizer.param_groups and STATE_KEY in optimizer.param_groups[0]:
            state = optimizer.param_groups[0].pop(STATE_KEY)
            living = wrapper()
            if living is not None and living.inner_optimizer is optimizer:
                living._load_scale(state)

    inner.register_load_state_dict_post_hook(after_load)
