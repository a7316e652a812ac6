"""The errors that ampfx raises.

Everything a user can meet derives from :class:`AmpfxError`::

    AmpfxError
    ├── CaptureError          a model, or a part of it, cannot be captured as a graph
    │   └── NotCapturedError  the graph is asked for before the first call captured it
    ├── GuardError            a guard failed and no further graph may be captured
    ├── PolicyError           a policy or override is wrong or matches nothing (also ValueError)
    ├── VerifyError           a rewritten graph has an edge of the wrong dtype
    └── LossScaleError        loss scaling is used in a way that cannot be right

Internal invariants use ``assert``.
"""

from __future__ import annotations


class AmpfxError(Exception):
    """Base class of all errors raised by ampfx."""


class CaptureError(AmpfxError):
    """A model, or a part of it, cannot be captured as a graph."""


class NotCapturedError(CaptureError, AttributeError):
    """The graph is asked for before it was captured."""


class GuardError(AmpfxError):
    """What a graph assumed does not hold, and no further graph may be captured."""


class PolicyError(AmpfxError, ValueError):
    """A policy or an override is wrong, or matches nothing."""


class VerifyError(AmpfxError):
    """A rewritten graph has an edge of the wrong dtype."""


class LossScaleError(AmpfxError, ValueError):
    """Loss scaling is used in a way that cannot be right."""
