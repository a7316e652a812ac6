"""The errors that ampfx raises.

Everything a user can meet derives from :class:`AmpfxError`. Those that several modules raise are here, the
others beside the only code that raises them::

    AmpfxError
    ├── OptionError                 an argument of convert has no meaning (also ValueError; ampfx/options.py)
    ├── PolicyError                 a policy or override is wrong or matches nothing (also ValueError)
    ├── CaptureError                a model, or a part of it, cannot be captured as a graph
    │   ├── NotCapturedError        the graph is asked for before a call captured it (also AttributeError)
    │   └── UnstableAttributeError  a recorded run leaves other attributes than it found (ampfx/capture/capture.py)
    ├── GuardError                  low precision changes what the forward decides, with strict=True
    ├── VerifyError                 a rewritten graph has an edge of the wrong dtype
    ├── LossScaleError              loss scaling is used in a way that cannot be right (also ValueError)
    └── UnknownNameError            explain was asked for an unknown name (also LookupError; ampfx/explanation.py)

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
    """What the forward decides comes out differently in low precision, and it may not run as Python instead."""


class PolicyError(AmpfxError, ValueError):
    """A policy or an override is wrong, or matches nothing."""


class VerifyError(AmpfxError):
    """A rewritten graph has an edge of the wrong dtype."""


class LossScaleError(AmpfxError, ValueError):
    """Loss scaling is used in a way that cannot be right."""
