"""The loss scale's state machine, its bounds, and who finds it."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampfx.errors import LossScaleError
from ampfx.loss_scale import (
    LossScale,
    ModuleScale,
    ScaleRule,
    Watch,
    default_loss_scale,
    models_of,
    register_model,
    registration,
)

CPU = torch.device("cpu")
YES, NO = torch.ones(1), torch.zeros(1)


def overflow(part: ModuleScale) -> None:
    """A backward pass with an overflow."""
    part.note_backward(CPU)
    part.flag_for(CPU).fill_(1.0)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.25, 0.5, 1.0]),
)
def test_adapt_is_the_rule_written_out(
    steps: list[bool], interval: int, hysteresis: int, backoff: float
) -> None:
    rule = ScaleRule(2.0, backoff, interval, hysteresis, min_scale=2.0**-2, max_scale=2.0**6)
    group = LossScale()
    group.set(8.0)
    scale, good, bad = 8.0, 0, 0
    for is_bad in steps:
        if is_bad:
            good, bad = 0, bad + 1
            scale *= backoff if bad >= hysteresis else 1.0
        else:
            good, bad = good + 1, 0
            if good == interval:
                good, scale = 0, scale * 2.0
        scale = min(max(scale, 2.0**-2), 2.0**6)
        group.adapt(YES if is_bad else NO, NO if is_bad else YES, rule)
        assert group.state_dict() == {"scale": scale, "good_steps": good, "bad_steps": bad}
        assert group.inv_scale_for(CPU).item() == 1.0 / scale


@given(st.floats(2.0**-14, 2.0**24, width=32), st.integers(0, 2000), st.integers(0, 9))
def test_every_field_survives_state_dict(scale: float, good: int, bad: int) -> None:
    group = LossScale()
    group.set(scale, good_steps=good, bad_steps=bad)
    other = LossScale()
    other.load_state_dict(group.state_dict())
    assert other.state_dict() == {"scale": scale, "good_steps": good, "bad_steps": bad}


def test_neither_clean_nor_overflow_changes_nothing() -> None:
    group = LossScale()
    group.set(8.0, good_steps=3, bad_steps=1)
    group.adapt(NO, NO, ScaleRule(growth_interval=4))
    assert group.state_dict() == {"scale": 8.0, "good_steps": 3, "bad_steps": 1}


def test_static_scale_keeps_its_value() -> None:
    group = LossScale.static(256.0)
    group.attach(Watch(group.module_scale(), 4.0), 4.0)
    group.adapt(YES, NO, ScaleRule())
    group.load_state_dict({"scale": 2.0})
    assert group.get() == 256.0
    assert group.enabled
    assert not LossScale.disabled().enabled


def test_one_until_an_optimizer_attaches_and_again_after_the_last_is_gone() -> None:
    """Rule 7."""
    group = LossScale()
    part = group.module_scale()
    assert group.get() == 1.0
    assert part.scale_for(CPU).item() == 1.0
    first, second = Watch(part, 512.0), Watch(part, 512.0)
    assert part.scale_for(CPU).item() == 512.0
    assert part.inv_scale_for(CPU).item() == 1 / 512
    del first
    gc.collect()
    assert group.get() == 512.0
    del second
    gc.collect()
    assert group.get() == 1.0
    assert not group.attached


def test_collect_hands_the_flag_to_every_watch() -> None:
    group = LossScale()
    part, other = group.module_scale(), group.module_scale()
    first, second, third = Watch(part, 8.0), Watch(part, 8.0), Watch(other, 8.0)
    overflow(part)
    group.collect()
    assert [w.pending.item() for w in (first, second, third)] == [1.0, 1.0, 0.0]
    assert group.unadapted.item() == 1.0
    assert part.flag_for(CPU).item() == 0.0
    first.consume()
    assert second.pending.item() == 1.0
    assert second.unseen
    assert not first.unseen


def test_deepcopy_shares_the_group_and_not_the_flag() -> None:
    group = LossScale()
    part = group.module_scale(label="net")
    overflow(part)
    twin = copy.deepcopy(part)
    assert twin.group is group
    assert twin.flag_for(CPU).item() == 0.0
    assert twin.label == "net"
    own = LossScale(shared=False)
    own.set(32.0, good_steps=2)
    assert copy.deepcopy(own) is not own
    assert copy.deepcopy(own).state_dict() == own.state_dict()


def test_pickle() -> None:
    assert pickle.loads(pickle.dumps(default_loss_scale().module_scale())).group is default_loss_scale()
    group = LossScale()
    group.set(64.0, good_steps=5)
    assert pickle.loads(pickle.dumps(group)).state_dict() == group.state_dict()
    static = pickle.loads(pickle.dumps(LossScale.static(16.0)))
    assert static.get() == 16.0
    assert not static.dynamic


def test_registry_is_weak_and_finds_by_parameters() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    part = register_model(model, LossScale(), torch.float16)
    register_model(other, None, torch.bfloat16)
    assert registration(model) == (part, torch.float16)
    assert models_of([model.weight]) == [model]
    assert models_of([torch.ones(2)]) == []
    weight = model.weight
    del model
    gc.collect()
    assert models_of([weight]) == []


def test_tensors_are_real_under_fake_and_inference_mode() -> None:
    from torch._subclasses import FakeTensorMode

    part = LossScale().module_scale()
    with FakeTensorMode():
        scale = part.scale_for(CPU)
    assert type(scale) is torch.Tensor
    part = LossScale().module_scale()
    with torch.inference_mode():
        flag = part.flag_for(CPU)
    assert not flag.is_inference()


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth_factor": 0.5},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.5},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"min_scale": 0.0},
        {"max_scale": float("inf")},
        {"min_scale": 8.0, "max_scale": 4.0},
    ],
)
def test_rules_that_cannot_be_right(wrong: dict[str, float]) -> None:
    with pytest.raises(LossScaleError, match="loss scale"):
        ScaleRule(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_right(value: float) -> None:
    with pytest.raises(LossScaleError):
        LossScale(value)
    with pytest.raises(LossScaleError):
        LossScale().load_state_dict({"scale": value})


def test_scale_moves_with_the_model() -> None:
    group = LossScale()
    part = group.module_scale()
    watch = Watch(part, 8.0)
    group.use_device(torch.device("meta"))
    assert group.device.type == "meta"
    assert watch.pending.device.type == "meta"
