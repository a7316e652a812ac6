"""The loss scale S: its state on the devices, who sees an overflow, and when S changes.

A converted graph multiplies a gradient by S where it enters and by 1/S where it leaves. S therefore
never shows in ``.grad``; it only moves the gradients inside the graph into the range of float16.

Three kinds of object take part:

* :class:`LossScale` is a *group*: one value S and its counters. All converted modules share one
  group by default, because a gradient may pass several modules on its way.
* :class:`ModuleScale` is the part of a group that one converted module holds. Its graph reads S here
  and notes overflows here, in a *sticky flag* on the device of the gradient.
* :class:`Watch` is one optimizer's view of one module: the overflows that the optimizer has not yet
  consumed. A module trained by two optimizers has two watches, so neither steals the other's flag.

The state machine, per backward pass and step:

1. *backward*: the module's flag becomes 1 if a gradient that leaves the graph is not finite, and the
   module's generation (a count on the host) goes up. Nothing else happens, no host sync.
2. *collect*: whoever looks first (a step or a ``zero_grad``) hands the flags of all modules of the
   group to all watches (``pending``) and to the group (``unadapted``), and clears the flags.
3. *step*: pending → the step is skipped, whatever clipping made of the gradients since. S backs off
   if ``unadapted``, which is then cleared: one backward lowers S once, however many optimizers it
   concerns. A clean step counts towards growth if a backward passed since the last count. In both
   cases the optimizer's ``pending`` is cleared.
4. *zero_grad*: the gradients are gone and so is the reason to skip. ``pending`` is cleared; S backs
   off if nobody did so for this overflow, so that a loop that drops bad batches itself adapts too.
   (``model.zero_grad()`` is not seen; the price is at most one step skipped without need.)
5. Without a backward in between nothing is counted: ``torch.distributed.checkpoint`` calls ``step``
   on a fresh optimizer only to create its state.

When a module's graph was traced by ``torch.compile`` or captured in a CUDA graph, the host does not
see its backward passes; from then on every step counts as preceded by one.
"""

from __future__ import annotations

import copy
import math
import numbers
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ampfx.errors import LossScaleError


@dataclass(frozen=True)
class ScaleRule:
    """How S follows overflows and clean steps.

    Args:
        growth_factor: multiplies S after ``growth_interval`` clean steps in a row.
        backoff_factor: multiplies S after an overflow.
        growth_interval: clean steps in a row before S grows.
        hysteresis: overflows in a row before S backs off; each of them skips its step.
        min_scale: S never falls below this.
        max_scale: S never grows above this.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        def require(condition: bool, what: str) -> None:
            if not condition:
                raise LossScaleError(f"loss scale: {what}")

        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            number, what = getattr(self, name), f"{name} must be a finite number"
            require(is_number(number) and math.isfinite(number), f"{what}, got {number!r}")
        for name in ("growth_interval", "hysteresis"):
            number, what = getattr(self, name), f"{name} must be a whole number of steps"
            require(is_number(number) and isinstance(number, numbers.Integral), f"{what}, got {number!r}")
        require(self.growth_factor >= 1.0, f"growth_factor must be at least 1, got {self.growth_factor}")
        backoff = self.backoff_factor
        require(0.0 < backoff <= 1.0, f"backoff_factor must be in (0, 1], got {backoff}")
        require(self.growth_interval >= 1, f"growth_interval must be at least 1, got {self.growth_interval}")
        require(self.hysteresis >= 1, f"hysteresis must be at least 1, got {self.hysteresis}")
        # Below 2**-126 the inverse is no normal float32 number any more, above 2**126 S itself.
        for name, value in (("min_scale", self.min_scale), ("max_scale", self.max_scale)):
            require(2.0**-126 <= value <= 2.0**126, f"{name} must be in [2**-126, 2**126], got {value}")
        require(
            self.min_scale <= self.max_scale,
            f"min_scale {self.min_scale} is greater than max_scale {self.max_scale}",
        )


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class Replica:
    """S and 1/S on one device, as tensors of shape (1,): such a tensor promotes a float16 gradient."""

    def __init__(self, device: torch.device, value: float | Tensor) -> None:
        self.scale = _new(device, value)
        self.inv_scale = _new(device, 1.0)
        self.one = _new(device, 1.0)
        self.refresh()

    def refresh(self) -> None:
        """Recompute 1/S. Written through ``.data``: a graph that still waits for its backward reads the
        new value and must not be told that a saved tensor was modified."""
        torch.reciprocal(self.scale.data, out=self.inv_scale.data)


class LossScale:
    """One loss scale and the modules and optimizers that share it.

    Args:
        scale: the value of S; a dynamic scale starts at 1 and gets the optimizer's ``init_scale`` when
            a ``LossScaleOptimizer`` attaches.
        dynamic: whether optimizers adapt S. A static scale keeps its value; overflows still skip steps.
        shared: whether a deep copy of a holder refers to the same group (False: gets a group of its own).
    """

    def __init__(self, scale: float = 1.0, *, dynamic: bool = True, shared: bool = True) -> None:
        if not (is_number(scale) and math.isfinite(scale) and 2.0**-126 <= scale <= 2.0**126):
            raise LossScaleError(f"a loss scale must be a finite number in [2**-126, 2**126], got {scale!r}")
        self.dynamic = dynamic
        self.shared = shared
        self.changes = 0  # how often S may have changed, as the host sees it
        self._value = float(scale)
        self._replicas: dict[torch.device, Replica] = {}
        self._primary: torch.device | None = None
        self._good_steps: Tensor | None = None
        self._bad_steps: Tensor | None = None
        self._unadapted: Tensor | None = None
        self._modules: weakref.WeakSet[ModuleScale] = weakref.WeakSet()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """A scale that keeps its value."""
        return cls(scale, dynamic=False)

    @classmethod
    def disabled(cls) -> LossScale:
        """A scale that is 1 and stays 1."""
        return cls(1.0, dynamic=False)

    @property
    def enabled(self) -> bool:
        """Whether S can ever differ from 1."""
        return self.dynamic or self._value != 1.0

    @property
    def attached(self) -> bool:
        """Whether a living optimizer consumes the overflows of this group."""
        return len(self._watches) > 0

    @property
    def has_one_watch(self) -> bool:
        """Whether a single optimizer trains a single module here: its overflows are the group's."""
        return len(self._watches) == 1 and len(self._modules) == 1

    @property
    def device(self) -> torch.device:
        """The device where S is adapted."""
        return self._primary if self._primary is not None else torch.device("cpu")

    def module_scale(self, *, label: str = "") -> ModuleScale:
        """A new part of this group for one converted module."""
        return ModuleScale(self, label=label)

    # ------------------------------------------------------------------ tensors

    def replica(self, device: torch.device) -> Replica:
        """S and 1/S on ``device``, created at first use."""
        found = self._replicas.get(device)
        if found is None:
            found = self._create_replica(device)
        return found

    def _create_replica(self, device: torch.device) -> Replica:
        value: float | Tensor = self._value
        if self._replicas and self._primary is not None:
            value = self._replicas[self._primary].scale
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            replica = self._replicas[device] = Replica(device, value)
            if self._primary is None:
                self._set_primary(device)
        return replica

    def scale_for(self, device: torch.device) -> Tensor:
        """S as a float32 tensor of shape (1,) on ``device``."""
        return self.replica(device).scale

    def inv_scale_for(self, device: torch.device) -> Tensor:
        """1/S as a float32 tensor of shape (1,) on ``device``."""
        return self.replica(device).inv_scale

    def use_device(self, device: torch.device) -> None:
        """Adapt S on ``device`` from now on (the model moved); no effect if it is there already."""
        self.replica(device)
        if device != self._primary:
            self._set_primary(device)

    def _set_primary(self, device: torch.device) -> None:
        with torch.no_grad():
            self._good_steps = _move(self._good_steps, device, torch.int32)
            self._bad_steps = _move(self._bad_steps, device, torch.int32)
            self._unadapted = _move(self._unadapted, device, torch.float32)
            for watch in self._watches:
                watch.pending = watch.pending.to(device)
        if device.type != "cpu":
            # A copy of S on the host would cost a synchronisation at every step.
            self._replicas.pop(torch.device("cpu"), None)
        self._primary = device

    @property
    def unadapted(self) -> Tensor:
        """Float32 tensor, 1 if an overflow was collected for which S has not backed off yet."""
        self.replica(self.device)
        assert self._unadapted is not None
        return self._unadapted

    # ------------------------------------------------------------------ changes of S

    def collect(self) -> None:
        """Step 2: hand the flags of all modules of this group to all watches."""
        for module in list(self._modules):
            module.collect()

    def adapt(self, overflow: Tensor, clean: Tensor | None, rule: ScaleRule) -> None:
        """Step 3: change S on its device, without a host sync.

        Args:
            overflow: float32 (1,), 1 if an overflow counts against S.
            clean: float32 (1,), 1 if a step without overflow counts towards growth. With neither, nothing
                changes. None means the opposite of ``overflow``.
            rule: the factors and bounds.
        """
        if not self.dynamic:
            return
        self.changes += 1
        main = self.replica(self.device)
        assert self._good_steps is not None
        assert self._bad_steps is not None
        if clean is None and rule.hysteresis == 1:
            # One kernel of torch does the same; how many overflows came in a row does not matter then.
            torch._amp_update_scale_(
                main.scale.data,
                self._good_steps,
                overflow,
                rule.growth_factor,
                rule.backoff_factor,
                rule.growth_interval,
            )
            main.scale.data.clamp_(rule.min_scale, rule.max_scale)
            self._publish()
            return
        bad_now = overflow != 0
        good_now = ~bad_now if clean is None else clean != 0
        good = torch.where(bad_now, 0, self._good_steps + good_now)
        grow = good >= rule.growth_interval
        bad = torch.where(good_now, 0, self._bad_steps + bad_now)
        shrink = bad_now & (bad >= rule.hysteresis)
        factor = torch.where(shrink, rule.backoff_factor, torch.where(grow, rule.growth_factor, 1.0))
        self._good_steps.copy_(torch.where(grow, 0, good))
        self._bad_steps.copy_(bad)
        main.scale.data.copy_((main.scale.data * factor).clamp_(rule.min_scale, rule.max_scale))
        self._publish()

    def _publish(self) -> None:
        main = self._replicas[self.device]
        for device, replica in self._replicas.items():
            if device != self.device:
                replica.scale.data.copy_(main.scale.data, non_blocking=True)
            replica.refresh()

    @torch.no_grad()
    def set(self, scale: float, *, good_steps: int = 0, bad_steps: int = 0) -> None:
        """Give S and its counters new values."""
        self.changes += 1
        self._value = float(scale)
        for replica in self._replicas.values():
            replica.scale.data.fill_(self._value)
            replica.refresh()
        if self._good_steps is None and (good_steps or bad_steps):
            self.replica(self.device)
        if self._good_steps is not None and self._bad_steps is not None:
            self._good_steps.fill_(good_steps)
            self._bad_steps.fill_(bad_steps)

    def attach(self, watch: Watch, init_scale: float | None) -> None:
        """An optimizer begins to consume overflows; a dynamic scale takes its ``init_scale``."""
        if self.dynamic and init_scale is not None:
            self.set(init_scale)
        self._watches.add(watch)
        weakref.finalize(watch, _detached, weakref.ref(self))

    def get(self) -> float:
        """S as a number. A host sync."""
        if not self._replicas:
            return self._value
        return float(self._replicas[self.device].scale.item())

    def state_dict(self) -> dict[str, float | int]:
        """S and its counters as plain numbers. A host sync."""
        good = 0 if self._good_steps is None else int(self._good_steps.item())
        bad = 0 if self._bad_steps is None else int(self._bad_steps.item())
        return {"scale": self.get(), "good_steps": good, "bad_steps": bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a saved scale was; a static scale keeps its own value."""
        if not self.dynamic:
            return
        try:
            scale = float(state["scale"])
            good, bad = int(state.get("good_steps", 0)), int(state.get("bad_steps", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise LossScaleError(f"the saved loss scale cannot be read: {dict(state)!r}") from error
        if not (math.isfinite(scale) and scale > 0.0):
            raise LossScaleError(f"the saved loss scale is {scale}; it must be a finite number above 0")
        self.set(scale, good_steps=good, bad_steps=bad)

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScale:
        if self.shared:
            return self  # a copied model keeps training with its optimizer
        twin = LossScale(self.get(), dynamic=self.dynamic, shared=False)
        twin.load_state_dict(self.state_dict())
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        if self is _default:
            return default_loss_scale, ()
        return _rebuild, (self.get(), self.dynamic, self.shared, self.state_dict())

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        return f"LossScale({kind}, attached={self.attached})"


class ModuleScale:
    """The part of a loss scale that one converted module holds: what its graph reads and writes."""

    def __init__(self, group: LossScale, *, label: str = "") -> None:
        self.group = group
        self.label = label
        self.traced = False
        self.generation = 0  # backward passes seen by the host
        self.counted = 0  # the generation up to which steps were counted
        self._collected = 0
        self._flags: dict[torch.device, Tensor] = {}
        self._touched: set[torch.device] = set()
        self._warned = False
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        group._modules.add(self)

    @property
    def enabled(self) -> bool:
        """Whether S can ever differ from 1."""
        return self.group.enabled

    def replica(self, device: torch.device) -> Replica:
        """S and 1/S on ``device``."""
        return self.group.replica(device)

    def scale_for(self, device: torch.device) -> Tensor:
        """S as a float32 tensor of shape (1,) on ``device``."""
        return self.group.replica(device).scale

    def inv_scale_for(self, device: torch.device) -> Tensor:
        """1/S as a float32 tensor of shape (1,) on ``device``."""
        return self.group.replica(device).inv_scale

    def flag_for(self, device: torch.device) -> Tensor:
        """The sticky overflow flag on ``device``, float32 of shape (1,)."""
        flag = self._flags.get(device)
        if flag is None:
            flag = self._create_flag(device)
        return flag

    def _create_flag(self, device: torch.device) -> Tensor:
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            flag = self._flags[device] = _new(device, 0.0)
        return flag

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Create the tensors for ``devices`` now; a traced program cannot create them."""
        for device in devices:
            self.group.replica(device)
            self.flag_for(device)

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def prepare_traced(self, device: torch.device) -> bool:
        """The same from inside a trace: it runs at once, not in the traced program."""
        self.traced = True  # assigned here: in a checkpoint the traced program may assign nothing
        self.prepare([device])
        return True

    def note_backward(self, device: torch.device) -> None:
        """The host sees that gradients leave this module on ``device``. Not called in traced programs."""
        self.generation += 1
        self.touch(device)
        if not self._warned and self.group.dynamic and not self.group.attached:
            self.warn_if_unattached()
        if device.type == "cuda" and not self.traced and torch.cuda.is_current_stream_capturing():
            self.traced = True

    def touch(self, device: torch.device) -> None:
        """The flag on ``device`` may have been set since it was collected."""
        self._touched.add(device)
        self._collected = -1

    def warn_if_unattached(self) -> None:
        """Warn once that nothing adapts S, so that small float16 gradients are lost."""
        if self._warned or self.group.attached or not self.group.dynamic:
            return
        self._warned = True
        warnings.warn(
            f"gradients arrive in the float16 module {self.label or 'converted by ampfx'} but no "
            "ampfx.LossScaleOptimizer is attached to it: the loss scale is 1 and small gradients become 0. "
            "Wrap the optimizer (ampfx.LossScaleOptimizer(optimizer, model)), give a number "
            "(convert(..., loss_scale=1024.0)), or convert with loss_scale=None to scale the loss yourself.",
            UserWarning,
            stacklevel=2,
        )

    def collect(self) -> None:
        """Step 2 of the state machine, for this module."""
        if self._collected == self.generation and not self.traced:
            return
        self._collected = self.generation
        unadapted = self.group.unadapted
        for device in list(self._flags) if self.traced else self._touched:
            flag = self.flag_for(device)
            seen = flag.to(unadapted.device, non_blocking=True)
            torch.maximum(unadapted, seen, out=unadapted)
            for watch in list(self._watches):
                torch.maximum(watch.pending, seen, out=watch.pending)
            flag.zero_()
        self._touched.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleScale:
        new = ModuleScale(copy.deepcopy(self.group, memo), label=self.label)
        memo[id(self)] = new
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_module, (self.group, self.label)

    def __repr__(self) -> str:
        return f"ModuleScale({self.label!r}, {self.group!r})"


class Watch:
    """One optimizer's view of one module: overflows it has not consumed, backward passes it has not seen."""

    def __init__(self, module: ModuleScale, init_scale: float | None) -> None:
        self.module = module
        self.seen = module.generation
        self.pending = torch.zeros(1, device=module.group.device)
        module._watches.add(self)
        module.group.attach(self, init_scale)

    @property
    def group(self) -> LossScale:
        """The group of the watched module."""
        return self.module.group

    @property
    def fresh(self) -> bool:
        """Whether a backward passed that no step has counted yet."""
        return self.module.traced or self.module.counted != self.module.generation

    @property
    def unseen(self) -> bool:
        """Whether a backward passed that this optimizer has not dealt with."""
        return self.module.traced or self.seen != self.module.generation

    def consume(self) -> None:
        """Forget the pending overflow: it was acted upon, or its gradients are gone."""
        self.seen = self.module.generation
        self.pending.zero_()


_default = LossScale()
_models: weakref.WeakKeyDictionary[nn.Module, tuple[ModuleScale | None, torch.dtype | None]]
_models = weakref.WeakKeyDictionary()
_registrations = 0


def default_loss_scale() -> LossScale:
    """The group that converted modules share when none is given."""
    return _default


def as_module_scale(scale: LossScale | ModuleScale | None, *, label: str = "") -> ModuleScale | None:
    """What a graph holds: a new part of a group, or the part that is given."""
    return scale.module_scale(label=label) if isinstance(scale, LossScale) else scale


def register_model(
    model: nn.Module,
    loss_scale: LossScale | ModuleScale | None,
    dtype: torch.dtype | None = None,
) -> ModuleScale | None:
    """Make a converted module known, weakly, so that optimizers find it by its parameters.

    Args:
        model: the converted module; copies and unpickled modules are registered anew.
        loss_scale: its scale, or None when its graph scales nothing.
        dtype: its low dtype. A float16 module without a scale is scaled at the loss by the optimizer.

    Returns:
        The module's part of the scale.
    """
    global _registrations
    part = as_module_scale(loss_scale, label=type(model).__name__)
    _models[model] = (part, dtype)
    _registrations += 1
    return part


def registrations() -> int:
    """How many times a model was registered: tells whether a new search is worth while."""
    return _registrations


def registration(model: nn.Module) -> tuple[ModuleScale | None, torch.dtype | None] | None:
    """What ``model`` was registered with; None if it is no converted module."""
    return _models.get(model)


def models_of(params: Iterable[Tensor]) -> list[nn.Module]:
    """The living converted modules that own at least one of ``params``."""
    wanted = {id(param) for param in params}
    return [model for model in list(_models) if any(id(param) in wanted for param in model.parameters())]


def _new(device: torch.device, value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float32, copy=True)
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _move(value: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device) if value is None else value.to(device)


def _detached(group: weakref.ref[LossScale]) -> None:
    """The last optimizer is gone: nobody would lower S after an overflow, so S is 1 again."""
    living = group()
    # Iterated, not counted: the set may still count the watch that is going.
    if living is not None and living.dynamic and not any(True for _ in living._watches):
        living.set(1.0)


def _rebuild(scale: float, dynamic: bool, shared: bool, state: Mapping[str, Any]) -> LossScale:
    group = LossScale(scale, dynamic=dynamic, shared=shared)
    group.load_state_dict(state)
    return group


def _rebuild_module(group: LossScale, label: str) -> ModuleScale:
    return ModuleScale(group, label=label)
