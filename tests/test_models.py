"""The project's own models, converted and compared with float32 as ``python -m bench.zoo`` does it.

A sample runs always; the others are marked slow.
"""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

from bench import zoo
from bench._zoo_check import check_model

SAMPLE = ("ConvNet", "MaskedEncoder", "CausalLM", "Recommender", "Routed", "NoisyEnsemble")
BRANCHING = ("Routed", "RecurrentLM")  # how many rows an expert gets, and a loop over time, decide what runs
DTYPES = (torch.bfloat16, torch.float16)


def cases() -> list[object]:
    return [
        pytest.param(name, dtype, marks=() if name in SAMPLE else pytest.mark.slow, id=f"{name}-{str(dtype)[6:]}")
        for name in models.REG
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_a_model_is_as_good_as_in_float32(name: str, dtype: torch.dtype) -> None:
    outcome = check_model(models, name, dtype)
    assert outcome.failures == []
    assert outcome.situations >= 6
    assert outcome.whole == (name not in models.IN_PARTS)
    if name not in BRANCHING:
        assert outcome.graphs == [1, 1], "another batch size or length must not need another graph"
    else:
        assert max(outcome.graphs) == 2
    if outcome.whole:
        assert outcome.coverage == 1.0
    else:
        assert "cannot be captured" in outcome.reason
        assert outcome.coverage > 0.9


def test_the_sample_is_of_existing_models() -> None:
    assert {*SAMPLE, *BRANCHING, *models.IN_PARTS} <= set(models.REG)


def test_the_page_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "helper.py").write_text("print('has no models')\n")
    (folder / "zoo_of_two.py").write_text(
        "from torch import nn, randn\n"
        "REG = {'Net': None, 'Failing': None}\n"
        "class Failing(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise ValueError('never runs')\n"
        "def build(name):\n"
        "    net = nn.Linear(4, 2) if name == 'Net' else Failing(4, 2)\n"
        "    return net, lambda batch: ((randn(batch, 4),), {})\n"
    )
    out = tmp_path / "zoo.md"
    monkeypatch.setattr("sys.argv", ["zoo", str(folder), "--names", "Net", "--dtype", "bf16", "--out", str(out)])
    zoo.main()
    text = out.read_text()
    assert "| Net " in text
    assert "1 of 1 conversions without a deviation" in text
    assert "1 models are captured whole; 0 convert in parts" in text
    assert max(map(len, text.splitlines())) <= 110
    assert str(tmp_path) not in text
    monkeypatch.setattr("sys.argv", ["zoo", str(folder), "--dtype", "bf16", "--out", str(out)])
    with pytest.raises(SystemExit):
        zoo.main()
    assert "Failing, bf16: ValueError: never runs" in out.read_text()
    monkeypatch.setattr("sys.argv", ["zoo", str(folder), "--names", "Nobody"])
    with pytest.raises(SystemExit):
        zoo.main()
