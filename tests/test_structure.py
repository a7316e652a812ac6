"""Inputs and outputs of every shape: nested containers, objects, plain values, signatures."""

from __future__ import annotations

import collections
import enum
import inspect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from against_float32 import check
from torch import Tensor, nn

import ampfx
from ampfx.capture.inputs import is_input_leaf
from ampfx.capture.structure import flatten, unflatten


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Keys are attributes too, as in well-known libraries."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Batch:
    def __init__(self, x: Tensor, scale: float, name: str = "batch") -> None:
        self.x, self.scale, self.name = x, scale, name

    def doubled(self) -> Tensor:
        return self.x * 2


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 4)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    "kind", ["tuple", "list", "dict", "named", "dataclass", "ordered", "nested", "object", "set order"]
)
def test_outputs(kind: str) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            h = self.lin(x)
            y = self.out(h)
            if kind == "tuple":
                return y, h
            if kind == "list":
                return [y, [h, None], 3]
            if kind == "dict":
                return {"y": y, "h": h, "n": x.shape[0], "name": "dict", 3: True}
            if kind == "named":
                return Pair(y, h)
            if kind == "dataclass":
                return Output(y, [h, h * 2], loss=y.mean())
            if kind == "ordered":
                return ModelOutput(logits=y, hidden=(h,))
            if kind == "object":
                return Batch(y, 2.0)
            if kind == "set order":
                return {"b": y, "a": h}
            return {"a": [(y, {"b": Pair(h, y)})], "c": ({},), "d": [], "e": ()}

    model = check(Model, (leaf(4, 8),), (leaf(3, 8),), captures=1)
    got = model(torch.randn(5, 8))
    if kind == "dict":
        assert got["n"] == 5
        assert type(got["n"]) is int
        assert list(got) == ["y", "h", "n", "name", 3]
        assert got[3] is True
    if kind == "list":
        assert got[1][1] is None
        assert got[2] == 3
    if kind == "dataclass":
        assert type(got) is Output
        assert len(got.hidden) == 2
    if kind == "ordered":
        assert type(got) is ModelOutput
        assert got.logits.shape == (5, 4)
    if kind == "object":
        assert type(got) is Batch
        assert got.scale == 2.0
        assert got.doubled().shape == (5, 4)
    if kind == "set order":
        assert list(got) == ["b", "a"]
    if kind == "nested":
        assert got["c"] == ({},)
        assert got["d"] == []
        assert got["e"] == ()


def test_outputs_of_different_calls_are_different_objects() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            return Output(self.lin(x)), Batch(self.out(x), 1.0), {"a": [x * 2]}

    model = ampfx.convert(Model(), (torch.randn(2, 8),), dtype=torch.bfloat16)
    first, second = model(torch.ones(2, 8)), model(torch.zeros(2, 8))
    assert first[0] is not second[0]
    assert first[0].hidden is not second[0].hidden
    assert first[1] is not second[1]
    assert not torch.equal(first[0].logits, second[0].logits)
    assert not torch.equal(first[1].x, second[1].x)
    assert first[2]["a"] is not second[2]["a"]


def test_output_that_is_an_input_or_a_parameter() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            return x, self.lin.weight, self.out(self.lin(x)), None

    check(Model, (leaf(4, 8),), captures=1)
    net = Model()
    model = ampfx.convert(net, (torch.randn(2, 8),), dtype=torch.float16)
    x = torch.randn(2, 8)
    same, weight, _, nothing = model(x)
    assert torch.equal(same, x)
    assert torch.equal(weight, net.lin.weight)
    assert nothing is None


def test_outputs_without_tensors_and_constant_outputs() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            return None if x.shape[0] == 2 else x.shape[0] * 2

    net = Model()
    model = ampfx.convert(net, (torch.randn(2, 8),), dtype=torch.bfloat16)
    assert model(torch.randn(2, 8)) is None
    assert model(torch.randn(3, 8)) == 6
    assert type(model(torch.randn(4, 8))) is int


# ---------------------------------------------------------------- inputs


def test_dicts_objects_and_sequences_as_inputs() -> None:
    class Model(Base):
        def forward(self, batch: Any, extra: Any = None) -> Tensor:
            h = self.lin(batch["x"]) if isinstance(batch, dict) else self.lin(batch.doubled()) * batch.scale
            if extra is not None:
                for item in extra:
                    h = h + item
            return self.out(h)

    x = leaf(4, 8)
    check(
        Model,
        ({"x": x, "unused": torch.randn(2), "name": "a"},),
        (Batch(torch.randn(4, 8), 3.0),),
        (Batch(torch.randn(4, 8), 5.0),),
        ({"x": x, "unused": torch.randn(2), "name": "a"}, [torch.ones(8), torch.randn(8)]),
        ({"x": x, "unused": torch.randn(2), "name": "a"}, (torch.randn(8), 2.0, 3)),
        ({"x": x, "unused": torch.randn(2), "name": "a"}, (torch.randn(8), 4.0, 5)),
    )


def test_dataclass_and_named_tuple_inputs() -> None:
    class Model(Base):
        def forward(self, pair: Pair, more: Output) -> Tensor:
            assert isinstance(pair, Pair)
            assert isinstance(more, Output)
            left, right = pair
            return self.out(self.lin(left) + right + more.logits * len(more.hidden))

    for count in (1, 2):
        check(
            Model,
            (Pair(leaf(4, 8), torch.randn(4, 8)), Output(torch.randn(4, 8), [torch.ones(1)] * count)),
            (Pair(leaf(3, 8), torch.randn(3, 8)), Output(torch.randn(3, 8), [torch.ones(1)] * (3 - count))),
        )


@pytest.mark.parametrize(
    "values",
    [
        (None, 1.0),
        (True, False),
        ("relu", "tanh"),
        (0, 1, 2, 7),
        (0.5, 2.0, -1.0),
        (1, 1.0, True),
        (Kind.SMALL, Kind.LARGE),
        ((1, 2), (2, 1), [1, 2]),
        (torch.float32, torch.float64),
        (slice(0, 2), slice(1, 3)),
        (1e-2, 1e1),
    ],
    ids=lambda v: type(v[0]).__name__ + str(len(v)),
)
def test_changing_plain_arguments_gives_right_results(values: Any) -> None:
    class Model(Base):
        def forward(self, x: Tensor, value: Any = None) -> Any:
            h = self.lin(x)
            if value is None:
                h = h * 3
            elif value is True or value is False:
                h = h.relu() if value else h.tanh()
            elif isinstance(value, str):
                h = getattr(torch, value)(h)
            elif isinstance(value, (int, float)):
                h = h * value + (1 if isinstance(value, int) else 2)
            elif isinstance(value, Kind):
                h = h * value.value
            elif isinstance(value, (tuple, list)):
                h = h * value[0] - value[1] + isinstance(value, list)
            elif isinstance(value, slice):
                h = h[value]
            else:
                return self.out(h).to(value)
            return self.out(h)

    check(
        Model, *[(leaf(4, 8), value) for value in values], *[(leaf(4, 8), value) for value in values], modes=("train",)
    )


def test_number_argument_beyond_the_range_of_float16() -> None:
    class Model(Base):
        def forward(self, x: Tensor, mask: Tensor, fill: float = -1.0) -> Tensor:
            scores = self.lin(x)
            return self.out(scores.masked_fill(mask, fill).softmax(-1))

    x, mask = leaf(4, 8), torch.arange(8) > 5
    check(Model, (x, mask, -1e9), captures=1)
    check(Model, (x, mask, -1.0), (x, mask, -1e9))


def test_enum_members_are_not_touched() -> None:
    assert (Kind.SMALL.value, Kind.LARGE.value) == (1, 2)


def test_numbers_are_inputs_and_not_constants() -> None:
    class Model(Base):
        def forward(self, x: Tensor, scale: float, count: int) -> Tensor:
            return self.out(self.lin(x) * scale + count)

    x = torch.randn(2, 8)
    check(Model, (x, 2.0, 3), (x, 0.5, 7), (x, -1.0, 0), captures=1)


def test_keyword_only_defaults_and_variadic_arguments() -> None:
    class Model(Base):
        def forward(
            self, x: Tensor, *rest: Tensor, scale: float = 2.0, bias: Tensor | None = None, **more: Any
        ) -> Tensor:
            h = self.lin(x) * scale
            for item in rest:
                h = h + item
            if bias is not None:
                h = h + bias
            for name, value in more.items():
                h = h * value if name.startswith("m") else h - value
            return self.out(h)

    net = Model()
    import copy

    from against_float32 import EXACT, compare_runs

    reference, x = copy.deepcopy(net), leaf(4, 8)
    model = ampfx.convert(net, (x,), {"scale": 3.0}, dtype=torch.bfloat16, policy=EXACT)
    for args, kwargs in (
        ((x,), {"scale": 3.0}),
        ((x,), {}),
        ((x, torch.ones(8)), {}),
        ((x, torch.ones(8), torch.randn(8)), {"bias": torch.randn(8)}),
        ((), {"x": x, "bias": None}),
        ((x,), {"mul": torch.randn(8), "sub": 2.0}),
        ((x,), {"sub": 2.0, "mul": torch.randn(8)}),
        ((x,), {"mul": 3}),
        ((x,), {"mul": 3.0}),
    ):
        compare_runs(model, reference, args, kwargs, 1e-5, str(sorted(kwargs)))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()


def test_same_tensor_twice_and_shared_memory() -> None:
    class Model(Base):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a = self.lin(a)
            return self.out(a * self.lin(b))

    class Writer(Base):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.add_(1)
            return self.out(a * b)

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for kind in (Model, Writer):
        net = kind()
        import copy

        reference = copy.deepcopy(net)
        model = ampfx.convert(net, (x.clone(), y.clone()), dtype=torch.bfloat16)
        for one, other in ((x, y), (x, None), (y, x), (x, "view")):
            results = []
            for current in (model, reference):
                a = one.clone()
                b = a if other is None else a.view(4, 8) if isinstance(other, str) else other.clone()
                results.append(current(a, b))
            torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def test_kinds_of_input_tensors() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.int64:
                x = nn.functional.one_hot(x, 8).float()
            return self.out(self.lin(x.float().reshape(-1, 8)))

    check(
        Model,
        (torch.randn(4, 8),),
        (torch.randn(4, 8).double(),),
        (torch.randn(4, 8).half(),),
        (torch.randn(4, 8).bfloat16(),),
        (torch.randint(0, 8, (4,)),),
        (torch.randn(4, 2, 8),),
        (torch.randn(8),),
        (torch.randn(8, 4).t(),),
        (torch.ones(4, 8, dtype=torch.bool),),
        (torch.randn(0, 8),),
        (nn.Parameter(torch.randn(4, 8)),),
        modes=("train",),
    )


def test_signature_is_kept() -> None:
    class Model(Base):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            """What it does."""
            return self.out(self.lin(x)) * scale

    model = ampfx.convert(Model(), (torch.randn(2, 8),), dtype=torch.bfloat16)
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)
    assert model.forward.__doc__ == "What it does."
    assert isinstance(model, Model)
    assert type(model).__name__ == "Model"


def test_example_inputs_in_every_form() -> None:
    class Model(Base):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.out(self.lin(x)) * scale

    x = torch.randn(2, 8)
    for inputs, kwargs in (
        (x, None),
        ((x,), None),
        ([x], None),
        ({"x": x}, None),
        ((x,), {"scale": 2.0}),
        ({"x": x, "scale": 2.0}, None),
        (None, {"x": x}),
    ):
        model = ampfx.convert(Model(), inputs, kwargs, dtype=torch.bfloat16)
        assert model._ampfx.captures == 1
    with pytest.raises(ampfx.OptionError, match="not in both"):
        ampfx.convert(Model(), {"x": x}, {"scale": 2.0}, dtype=torch.bfloat16)


def test_models_without_inputs_or_parameters() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.lin = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 4)

        def forward(self) -> Tensor:
            return self.lin(self.tokens)

    class Nothing(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x @ y).relu()

    model = check(Prompt, (), captures=1)
    assert model._ampfx.captures == 2
    check(Nothing, (leaf(4, 8), leaf(8, 3)), captures=1)
    for empty in (nn.Identity, nn.Sequential):
        check(empty, (leaf(4, 8),), captures=1, settings=({"dtype": torch.bfloat16}, {"dtype": torch.float16}))


# ---------------------------------------------------------------- the functions themselves


def test_flatten_and_unflatten_round_trip() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    values: list[Any] = [
        x,
        [x, y],
        (x, (y,)),
        {"a": x, 1: [y]},
        Pair(x, y),
        Output(x, [y], None),
        ModelOutput(a=x),
        Batch(x, 2.0),
        None,
        "s",
        True,
        [],
        (),
        {},
        collections.OrderedDict(a=x),
        collections.defaultdict(list, a=[x]),
        torch.Size([2, 3]),
        {"a": {"b": {"c": x}}},
    ]
    for value in values:
        leaves: list[Any] = []
        structure = flatten(value, is_input_leaf, leaves)
        back = unflatten(structure, leaves)
        assert type(back) is type(value)
        again: list[Any] = []
        assert flatten(back, is_input_leaf, again) == structure
        assert all(a is b for a, b in zip(leaves, again, strict=True))
    different = [flatten(value, is_input_leaf, []) for value in values]
    for i, a in enumerate(different):
        for b in different[i + 1 :]:
            assert a != b


def test_objects_of_equal_tensors_but_other_constants_differ() -> None:
    x = torch.ones(1)
    assert flatten(Batch(x, 1.0, "a"), is_input_leaf, []) != flatten(Batch(x, 1.0, "b"), is_input_leaf, [])
    assert flatten({"a": x, "m": True}, is_input_leaf, []) != flatten({"a": x, "m": False}, is_input_leaf, [])
    assert flatten({"a": x, "m": 1}, is_input_leaf, []) != flatten({"a": x, "m": True}, is_input_leaf, [])
    assert flatten([True], is_input_leaf, []) != flatten(["True"], is_input_leaf, [])
