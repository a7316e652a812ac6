"""The passes, and the order in which they run."""

from __future__ import annotations

import importlib.util

from ampfx.passes.analyse import Analyse
from ampfx.passes.assign import AssignPrecision
from ampfx.passes.base import ConversionContext, Pass, PassManager
from ampfx.passes.fold_casts import FoldCasts
from ampfx.passes.insert_casts import InsertCasts
from ampfx.passes.verify import VerifyDtypes

__all__ = [
    "DEFAULT_PASSES",
    "Analyse",
    "AssignPrecision",
    "ConversionContext",
    "FoldCasts",
    "InsertCasts",
    "Pass",
    "PassManager",
    "VerifyDtypes",
]


def _default_passes() -> tuple[Pass, ...]:
    steps: list[Pass] = [Analyse(), AssignPrecision(), InsertCasts(), FoldCasts()]
    if importlib.util.find_spec("ampfx.passes.embed_loss_scale") is not None:
        from ampfx.passes.embed_loss_scale import EmbedLossScale

        steps.append(EmbedLossScale())
    return (*steps, VerifyDtypes())


DEFAULT_PASSES: tuple[Pass, ...] = _default_passes()
