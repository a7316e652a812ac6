"""The tables of rules: complete, with reasons, true to torch.autocast and to the installed torch."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_samples import SAMPLES, Make
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.utils import _pytree as pytree

from ampfx.autocast_lists import AUTOCAST_LISTS, OUTSIDE_THE_LISTS, policy_by_name
from ampfx.errors import PolicyError
from ampfx.ops import FACTORIES, LIKE_OPS, base_op, canonical_op, is_in_place
from ampfx.rule_block import block
from ampfx.rules import (
    DEVICES,
    DIFFERENCES,
    OpClass,
    Rule,
    RuleTable,
    autocast_class,
    bind,
    expected_classes,
    rule_of,
    rules_for,
    variant,
)
from ampfx.rules_doc import rules_markdown

ROWS = [(device, rule) for device in DEVICES for rule in rules_for(device).values()]
PRECISION = {OpClass.ALLOW: 0, OpClass.INFER: 1, OpClass.CLEAR: 1, OpClass.DENY: 2}
LOW = {"cpu": torch.bfloat16, "cuda": torch.float16}

# What a dtype in and a dtype out say about autocast. Ops whose result is no managed float, or that
# cannot run on fake tensors, say nothing.
NO_FLOAT_RESULT = frozenset({"float_power", "embedding", "embedding_bag"})


def row(op: str, cls: OpClass = OpClass.INFER) -> Rule:
    return Rule(op, cls, "because", "somewhere")


# --- the table -------------------------------------------------------------------------------------


def test_two_rows_for_one_op_are_an_error() -> None:
    with pytest.raises(
        PolicyError, match=r"Two rows for op 'add' in table 'mine' \(infer and deny\). Remove one"
    ):
        RuleTable([row("add"), row("add", OpClass.DENY)], name="mine")


def test_joining_tables_lets_the_later_row_win() -> None:
    table = RuleTable([row("add"), row("mul")]) + RuleTable([row("add", OpClass.DENY)])
    assert {op: rule.cls for op, rule in table.items()} == {"add": OpClass.DENY, "mul": OpClass.INFER}
    assert len(table) == 2


def test_in_place_form_without_a_row_follows_what_it_writes_into() -> None:
    rule = rules_for("cpu").find("matmul_")  # torch.matmul(a, b, out=c)
    assert rule is not None
    assert (rule.op, rule.cls, rule.follow) == ("matmul_", OpClass.INFER, "input")
    assert rules_for("cpu").find("no_such_op_") is None
    assert rules_for("cpu").nearest("layernorm") == ["layer_norm"] or "layer_norm" in rules_for(
        "cpu"
    ).nearest("layernorm")


def test_a_block_with_a_star_has_in_place_rows() -> None:
    assert [rule.op for rule in block(OpClass.INFER, "add* mean", "r", "s")] == ["add", "add_", "mean"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_tables_are_wide(device: str) -> None:
    assert len([op for op in rules_for(device) if not is_in_place(op)]) >= 300


def test_device_names() -> None:
    assert rules_for("xpu")["softmax"].cls is OpClass.DENY
    with pytest.raises(PolicyError, match="No precision rules for device type 'toaster'"):
        rules_for("toaster")


def test_every_row_has_reason_source_and_canonical_name() -> None:
    for device, rule in ROWS:
        assert rule.reason, (device, rule)
        assert rule.source, (device, rule)
        assert canonical_op(rule.op) == rule.op, rule.op
        assert "|" not in rule.reason + rule.source + (rule.fp16_hazard or "")


def test_flags_fit_together() -> None:
    for device, rule in ROWS:
        where = (device, rule)
        assert not (rule.moves and rule.sums_backward), where
        assert not (rule.moves and rule.cls is not OpClass.CLEAR), where
        named = {*rule.keep, *rule.saturate, *([rule.follow] if rule.follow else [])}
        assert named <= set(rule.params), where
        if rule.cls is OpClass.ALLOW:
            assert rule.fp16_hazard is None, where


def test_factories_and_likes_are_clear() -> None:
    for device in DEVICES:
        table = rules_for(device)
        for op in FACTORIES | LIKE_OPS:
            assert table[op].cls is OpClass.CLEAR
        assert all(table[op].dtype_arg for op in LIKE_OPS)


# --- against autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_lists_are_what_the_installed_torch_registers(device: str) -> None:
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}[device]
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    registered = {name for name in registered if name.startswith("aten::")} - set(OUTSIDE_THE_LISTS[device])
    listed = [name for names in AUTOCAST_LISTS[device].values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == registered


@pytest.mark.parametrize("device", DEVICES)
def test_every_listed_op_has_a_row(device: str) -> None:
    assert [op for op in policy_by_name(device) if canonical_op(op) not in rules_for(device)] == []


def test_classes_agree_with_autocast_apart_from_the_differences() -> None:
    listed = {(item.device, item.op) for item in DIFFERENCES if item.dtype is None}
    found = {
        (device, rule.op)
        for device, rule in ROWS
        if rule.cls not in expected_classes(autocast_class(rule.op, device))
    }
    assert found == listed


def test_no_op_is_less_precise_than_under_autocast() -> None:
    for device, rule in ROWS:
        expected = max(PRECISION[cls] for cls in expected_classes(autocast_class(rule.op, device)))
        assert PRECISION[rule.cls] >= expected, (device, rule)
    for item in DIFFERENCES:
        assert item.ours is OpClass.DENY, item
        assert item.reason, item


def test_every_reason_for_a_difference_is_used() -> None:
    from ampfx.rules import _MORE_PRECISE

    different = {item.op for item in DIFFERENCES if item.dtype is None}
    for ops, reason in _MORE_PRECISE:
        assert set(ops.split()) - different == set(), reason


def test_float16_hazards_are_differences() -> None:
    hazards = {(item.device, item.op) for item in DIFFERENCES if item.dtype is torch.float16}
    assert {("cpu", "pow"), ("cpu", "normalize"), ("cuda", "var"), ("cpu", "rsqrt")} <= hazards
    assert ("cuda", "pow") not in hazards  # denied there in any dtype


def test_devices_differ_where_autocast_does() -> None:
    assert rules_for("cuda")["softmax"].cls is OpClass.DENY
    assert rules_for("cpu")["softmax"].cls is OpClass.INFER
    assert rules_for("cuda")["grid_sample"].cls is OpClass.INFER
    assert rules_for("cpu")["grid_sample"].cls is OpClass.DENY
    for device in DEVICES:
        assert rules_for(device)["sum"].cls is OpClass.DENY
        assert rules_for(device)["binary_cross_entropy"].cls is OpClass.DENY


def test_autocast_class_of_composites_and_in_place_forms() -> None:
    assert autocast_class("cross_entropy", "cuda") == "fp32"
    assert autocast_class("cross_entropy", "cpu") == "fp32"
    assert autocast_class("normalize", "cuda") == "fp32"
    assert autocast_class("normalize", "cpu") is None
    assert autocast_class("softmax", "cuda") == "set_opt_dtype"
    assert autocast_class("norm", "cuda") == "append_dtype"
    assert autocast_class("grid_sample", "cuda") == "promote"
    assert autocast_class("binary_cross_entropy", "cuda") == "banned"
    assert autocast_class("addmm_", "cuda") is None
    assert autocast_class("tanh", "cuda") is None


# --- against the installed torch ---------------------------------------------------------------------


@contextlib.contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """Autocast, for CUDA on fake tensors, which need no GPU."""
    if device == "cpu":
        with torch.autocast("cpu", LOW["cpu"]):
            yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", LOW["cuda"])
    try:
        with FakeTensorMode():
            torch.set_autocast_enabled("cuda", True)
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def result_dtype(op: str, device: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the first float result under autocast, None if the op cannot run here."""
    with warnings.catch_warnings(), autocast_on(device):
        warnings.simplefilter("ignore")
        try:
            result = SAMPLES[op](Make(dtype, device))
        except (RuntimeError, AssertionError, NotImplementedError):
            return None
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.dtype
    return None


@pytest.mark.parametrize("op", sorted(SAMPLES))
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_does_what_autocast_class_says(
    device: str, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")  # fake tensors log every refusal
    low = LOW[device]
    expected = {"lower": (low, low), None: (low, torch.float32), "promote": (low, torch.float32)}.get(
        autocast_class(op, device), (torch.float32, torch.float32)
    )
    seen = tuple(result_dtype(op, device, dtype) for dtype in (low, torch.float32))
    if None in seen or op in NO_FLOAT_RESULT:
        assert expected != (low, low) or device == "cuda", "an allow op must run"
        return
    if (device, op) == ("cuda", "affine_grid"):
        pytest.skip("fake tensors decompose it before autocast sees the product inside")
    assert seen == expected


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_what_may_run_low_has_low_kernels_forward_and_backward(low: torch.dtype) -> None:
    not_differentiable = {"unique", "floor_divide", "heaviside", "native_channel_shuffle"}
    table = rules_for("cpu")
    for op, sample in SAMPLES.items():
        rule = table[op]
        if rule.cls is OpClass.DENY or (low is torch.float16 and rule.fp16_hazard):
            continue
        result = sample(Make(low, grad=op not in not_differentiable))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        floats = {leaf.dtype for leaf in tensors if leaf.is_floating_point()}
        assert floats <= {torch.float32 if rule.follow == "weight" else low}, op
        roots = [leaf.float().sum() for leaf in tensors if leaf.requires_grad]
        if roots:
            torch.stack(roots).sum().backward()


def test_samples_are_of_known_ops_and_many() -> None:
    assert set(SAMPLES) <= set(rules_for("cpu"))
    assert len(SAMPLES) >= 250


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op",
    [op for op, rule in rules_for("cpu").items() if rule.moves and op in SAMPLES and not is_in_place(op)],
)
def test_a_cast_passes_what_moves_values_bit_exactly(op: str, low: torch.dtype) -> None:
    def run(cast_first: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        made: list[torch.Tensor] = []

        class Recorder(Make):
            def t(self, *shape: int) -> torch.Tensor:
                leaf = (torch.rand(shape) - 0.4).requires_grad_()
                made.append(leaf)
                return leaf.to(low) if cast_first else leaf

        result = SAMPLES[op](Recorder(torch.float32))
        tensors = [leaf.to(low) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        torch.manual_seed(1)
        torch.autograd.backward(tensors, [torch.randn_like(leaf) for leaf in tensors]) if op not in (
            "detach",
            "native_channel_shuffle",
        ) else None
        return tensors, [leaf.grad for leaf in made if leaf.grad is not None]

    if op == "native_channel_shuffle":
        pytest.skip("has no derivative")
    for before, after in zip(run(True), run(False), strict=True):
        assert len(before) == len(after)
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x, y)


# --- rows for calls ------------------------------------------------------------------------------------


def test_the_row_depends_on_how_an_op_is_called() -> None:
    graph = Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    table = rules_for("cpu")

    def called(target: Any, *args: Any, **kwargs: Any) -> tuple[str, Rule | None]:
        node = graph.call_function(target, (x, *args), kwargs)
        return variant(node), rule_of(table, node)

    name, rule = called(operator.getitem, 0)
    assert name == "getitem"
    assert rule is not None
    assert rule.moves
    name, rule = called(operator.getitem, [0, 0])
    assert name == "getitem_index"
    assert rule is not None
    assert rule.sums_backward
    assert called(operator.getitem, index)[0] == "getitem_index"
    assert called(F.pad, (1, 1))[0] == "pad"
    assert called(F.pad, (1, 1), mode="reflect")[0] == "pad_reflect"
    assert called(F.pad, (1, 1), "circular")[0] == "pad_circular"
    assert called(F.interpolate, scale_factor=2, mode="bilinear")[0] == "interpolate"
    assert called(F.interpolate, 2, None, "area")[0] == "interpolate_area"
    assert called(test_device_names)[1] is None


def test_bind_names_the_arguments() -> None:
    table = rules_for("cpu")
    assert bind(table["layer_norm"], ("x", (3,), "w"), {"bias": "b"}) == {
        "input": "x",
        "normalized_shape": (3,),
        "weight": "w",
        "bias": "b",
    }
    torch_order = bind(table["batch_norm"], ("x", "w", "b", "mean", "var"), {}, torch.batch_norm)
    assert torch_order["running_mean"] == "mean"
    functional_order = bind(table["batch_norm"], ("x", "mean", "var", "w", "b"), {}, F.batch_norm)
    assert functional_order["running_mean"] == "mean"
    assert bind(table["embedding"], ("w", "i"), {}, torch.embedding)["weight"] == "w"
    plain, packed = ("x", "h", ["w"], True), ("x", "sizes", "h", ["w"], True)
    assert bind(table["gru"], plain, {})["hx"] == bind(table["gru"], packed, {})["hx"] == "h"
    assert bind(table["masked_fill"], ("x",), {"mask": "m", "value": 0})["mask"] == "m"


def test_bases_of_in_place_rows_are_known_or_stand_alone() -> None:
    alone = {
        "copy",
        "zero",
        "normal",
        "uniform",
        "exponential",
        "cauchy",
        "geometric",
        "log_normal",
        "random",
    }
    for device in DEVICES:
        table = rules_for(device)
        for op in table:
            if is_in_place(op) and op != "setitem":
                assert base_op(op) in table or base_op(op) in alone | {"resize", "set", "requires_grad"}, op


# --- the page --------------------------------------------------------------------------------------------


def test_the_page_is_the_printed_table() -> None:
    page = Path(__file__).parent.parent / "docs" / "rules.md"
    assert page.read_text() == rules_markdown(), "run: python -m ampfx.rules > docs/rules.md"
