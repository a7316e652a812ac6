"""Which modules become graphs of their own in a block-wise conversion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ampfx.errors import PolicyError
from ampfx.near_misses import did_you_mean
from ampfx.overrides import path_matches


def find_blocks(model: nn.Module, blocks: Any) -> frozenset[str]:
    """The dotted paths of the modules that ``blocks`` selects.

    Args:
        model: the model.
        blocks: a module type, a glob on module paths, or an iterable of both.

    Raises:
        PolicyError: an entry selects nothing, or has no meaning.
    """
    entries = [blocks] if isinstance(blocks, (str, type)) else list(_entries(blocks))
    modules = [(path, module) for path, module in model.named_modules() if path]
    found: set[str] = set()
    for entry in entries:
        if isinstance(entry, str):
            hits = {path for path, module in modules if path_matches(path, entry) or type(module).__name__ == entry}
            known = [*(path for path, _ in modules), *{type(module).__name__ for _, module in modules}]
        else:
            hits = {path for path, module in modules if isinstance(module, entry)}
            known = sorted({type(module).__name__ for _, module in modules})
        if not hits:
            name = entry if isinstance(entry, str) else entry.__name__
            raise PolicyError(f"blocks: no module of {type(model).__name__} is {name!r}.{did_you_mean(name, known)}")
        found |= hits
    return frozenset(path for path in found if not any(path.startswith(f"{outer}.") for outer in found))


def _entries(blocks: Any) -> Iterable[Any]:
    if not isinstance(blocks, Iterable):
        raise PolicyError(f"blocks={blocks!r}: a module type, a glob on module paths, or a list of them")
    for entry in blocks:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise PolicyError(f"blocks: {entry!r} is neither a module type nor a glob on module paths")
        yield entry


def is_above(path: str, blocks: frozenset[str]) -> bool:
    """Whether a module contains a block, so that its own code must stay Python."""
    return not path or any(block.startswith(f"{path}.") for block in blocks)
