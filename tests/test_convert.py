"""The function ``convert``: its arguments, its errors, and models that make it hard."""

from __future__ import annotations

import abc
import copy
import warnings
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from against_float32 import EXACT, assert_close, check, compare_runs
from torch import Tensor, nn

import ampfx

X = torch.randn(4, 8)
T = TypeVar("T")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, r"dtype=torch.float32: ampfx computes in torch.float16 or torch.bfloat16"),
        ({"capture": "fx"}, r"capture=.fx."),
        ({"objective": "fast"}, r"objective=.fast.: choose one of"),
        ({"loss_scale": "static"}, r"loss_scale=.static."),
        ({"loss_scale": True}, r"loss_scale=True"),
        ({"loss_scale": -1.0}, r"finite number.*got -1.0"),
        ({"loss_scale": float("inf")}, r"finite number.*got inf"),
        ({"output_dtype": torch.int64}, r"output_dtype=torch.int64 is no floating-point dtype"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ampfx.OptionError, ampfx.LossScaleError), match=message):
        ampfx.convert(net(), (X,), **{"dtype": torch.bfloat16, **options})


def test_wrong_models_are_named() -> None:
    model = ampfx.convert(net(), (X,), dtype=torch.bfloat16)
    with pytest.raises(ampfx.OptionError, match="converted already"):
        ampfx.convert(model)
    with pytest.raises(ampfx.OptionError, match=r"takes a torch.nn.Module, not function"):
        ampfx.convert(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ampfx.OptionError, match="wrap the result"):
        ampfx.convert(nn.DataParallel(net()))
    with pytest.raises(ampfx.OptionError, match=r"trainable parameters in torch.bfloat16.*model.float\(\)"):
        ampfx.convert(net().bfloat16())


def test_wrong_policies_are_named() -> None:
    with pytest.raises(ampfx.PolicyError, match=r"linaer.*linear"):
        ampfx.convert(net(), (X,), policy=ampfx.Policy(deny=("linaer",)))
    with pytest.raises(ampfx.PolicyError, match="layers"):
        ampfx.convert(net(), (X,), policy=ampfx.Policy(overrides=(ampfx.Override(module="layers.*", dtype="float32"),)))


def test_output_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        model = ampfx.convert(net(), (X,), dtype=torch.bfloat16, output_dtype=dtype)
        out = model(X)
        assert out.dtype == dtype
        out.float().sum().backward()


def test_default_dtype_is_autocast_s() -> None:
    model = ampfx.convert(net(), (X,))
    assert any("bf16" in line for line in model.format_graph().splitlines())


def test_overrides_reach_the_graph() -> None:
    policy = ampfx.Policy(overrides=(ampfx.Override(module="2", dtype="float32", reason="head"),))
    model = ampfx.convert(net(), (X,), dtype=torch.bfloat16, policy=policy)
    dtypes = [n.meta["val"].dtype for n in model.graph.nodes if n.meta.get("op") == "linear"]
    assert dtypes == [torch.bfloat16, torch.float32]
    assert "head" in model.format_graph()


def test_strict_says_what_where_and_what_to_do() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.steps = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.lin(x) / self.steps

    with pytest.raises(ampfx.CaptureError) as caught:
        ampfx.convert(Counter(), (X,), dtype=torch.bfloat16, strict=True)
    for part in ("Counter cannot be captured", "attribute steps", "register_buffer"):
        assert part in str(caught.value)


def test_a_strict_conversion_that_fails_at_a_call_leaves_the_model_whole() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.steps = nn.Linear(8, 8), 0

        def forward(self, x: Tensor, count: bool = False) -> Tensor:
            if count:
                self.steps += 1
                return self.lin(x) / self.steps
            return self.lin(x)

    model = ampfx.convert(Counter(), (X,), dtype=torch.bfloat16, strict=True)
    with pytest.raises(ampfx.CaptureError, match="steps"):
        model(X, count=True)
    assert model.steps == 0
    assert model(X).shape == (4, 8)


# ---------------------------------------------------------------- classes that make it hard


class Registry(nn.Module):
    """Asks its subclasses for an argument."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registry.known.append(key)


class Entry(Registry, key="entry"):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def test_registries_of_base_classes_do_not_see_converted_classes() -> None:
    ampfx.convert(Entry(), (X,), dtype=torch.bfloat16)
    assert Registry.known == ["entry"]


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def head(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * 2


class Concrete(Abstract, Generic[T]):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def head(self, x: Tensor) -> Tensor:
        return self.lin(x)


class OwnGetattr(nn.Module):
    """Delegates what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.out_features


class OwnCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class OwnNames(nn.Module):
    """Methods and properties of its own called like those of a converted module."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def report(self) -> float:
        return 2.0

    @property
    def graph(self) -> float:
        return 3.0

    def explain(self, x: Tensor) -> Tensor:
        return x + self.graph

    def forward(self, x: Tensor) -> Tensor:
        return self.explain(self.lin(x) * self.report())


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return self.lin(x)
        return self(x * 0.5, depth - 1).tanh() + x


class SuperForward(OwnGetattr):
    def forward(self, x: Tensor) -> Tensor:
        assert type(self) is SuperForward or type(self).__name__ == "SuperForward"
        return super().forward(x) - 1


class CachedProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    @property
    def table(self) -> Tensor:
        if not hasattr(self, "_table"):
            self._table = torch.linspace(0, 1, 8)
        return self._table

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.table


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.LazyLinear(3)
        self.out(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lin(x))


class Subclass(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    "kind",
    [Entry, Concrete, OwnGetattr, OwnCall, OwnNames, Recursive, SuperForward, CachedProperty, Lazy],
)
def test_classes_that_make_it_hard(kind: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(
            kind,
            (torch.randn(4, 8, requires_grad=True),),
            (torch.randn(3, 8),),
            settings=({"dtype": torch.bfloat16, "policy": EXACT}, {"dtype": torch.float16, "loss_scale": 64.0}),
        )


def test_subclasses_of_layers_and_single_layers() -> None:
    for build in (
        lambda: Subclass(8, 4),
        lambda: nn.Linear(8, 4),
        lambda: nn.LSTMCell(8, 4),
        lambda: nn.Bilinear(8, 8, 2),
    ):
        inputs = (torch.randn(4, 8), torch.randn(4, 8)) if isinstance(build(), nn.Bilinear) else (torch.randn(4, 8),)
        check(build, inputs)


def test_lazy_modules_that_are_not_set_up_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.Linear(8, 2))
    with pytest.raises(ampfx.OptionError, match=r"0\.weight.* no shape yet: run the model once"):
        ampfx.convert(model, (X,), dtype=torch.bfloat16)
    model(X)
    check(lambda: copy.deepcopy(model), (X,), modes=("eval",))


def test_models_that_set_themselves_up_at_the_first_call() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.built = nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.built:
                self.scale = torch.ones(x.shape[-1]) * 2
                self.built = True
            return self.lin(x) * self.scale

    model, original = Late(), None
    original = copy.deepcopy(model)
    converted = ampfx.convert(model, (X,), dtype=torch.bfloat16, policy=EXACT)
    torch.testing.assert_close(converted(X), original(X))
    torch.testing.assert_close(converted(X + 1), original(X + 1))


def test_to_half_double_and_device_moves_after_conversion() -> None:
    model = ampfx.convert(net(), (X,), dtype=torch.bfloat16, policy=EXACT)
    reference = copy.deepcopy(model._modules)
    model.double()
    out = model(X.double())
    assert out.dtype == torch.float64
    want = nn.Sequential(*reference.values()).double()(X.double())
    torch.testing.assert_close(out, want)
    model.float()
    assert model(X).dtype == torch.float32


def test_apply_functions_of_modules_on_the_converted_model() -> None:
    model = ampfx.convert(net(), (X,), dtype=torch.bfloat16)
    model.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    model[2].bias.data.fill_(1.0)
    assert torch.equal(model(X), torch.ones(4, 2))
    model.requires_grad_(False)
    assert not model(X).requires_grad
    model.add_module("3", nn.Linear(2, 5))
    assert model(X).shape == (4, 5)
    model.register_buffer("late", torch.ones(1))
    assert "late" in model.state_dict()
    del model[3]
    assert model(X).shape == (4, 2)


def test_func_apis_over_a_converted_model() -> None:
    source = net()
    model, reference = ampfx.convert(source, (X,), dtype=torch.bfloat16, policy=EXACT), copy.deepcopy(source)
    weights = {name: torch.randn_like(p) for name, p in reference.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(model, weights, (X,)), torch.func.functional_call(reference, weights, (X,))
    )

    def loss(weights: Any, current: nn.Module) -> Tensor:
        return torch.func.functional_call(current, weights, (X,)).square().sum()

    for ours, theirs in zip(
        torch.func.grad(loss)(weights, model).values(), torch.func.grad(loss)(weights, reference).values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradient_accumulation_and_second_derivatives() -> None:
    source = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    reference = copy.deepcopy(source)
    for options, tol in (
        ({"dtype": torch.bfloat16, "policy": EXACT}, 1e-4),
        ({"dtype": torch.float16, "loss_scale": 64.0}, 0.05),
    ):
        model = ampfx.convert(source, (X.clone().requires_grad_(),), **options)
        grads = []
        for current in (model, reference):
            current.zero_grad()
            x = X.clone().requires_grad_()
            (grad,) = torch.autograd.grad(current(x).sum(), x, create_graph=True)
            (grad.norm(dim=-1) - 1).square().sum().backward()
            current(X).mean().backward()
            grads.append([p.grad.clone() for p in current.parameters()])
        for a, b in zip(*grads, strict=True):
            assert_close(a, b, tol, "penalty and accumulation")


def test_no_warning_and_no_capture_in_the_ordinary_loop() -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    model = ampfx.convert(source, (X,), dtype=torch.float16)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.AdamW(model.parameters()), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.train()
            for count in (4, 4, 3):
                optimizer.zero_grad()
                model(X[:count]).sum().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for count in (4, 2):
                    model(X[:count])
    assert model._ampfx.captures == 2


def test_reference_of_a_frozen_model_without_gradients() -> None:
    source = net().requires_grad_(False)
    model = ampfx.convert(source, (X,), dtype=torch.float16, loss_scale=None)
    compare_runs(model, copy.deepcopy(source), (X,), {}, 0.01)
