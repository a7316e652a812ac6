"""The attributes of modules before a recorded run, and what the run made of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ampfx.capture.containers import containers, content, refill

MISSING = object()

_KEPT_STORES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
STORES = frozenset(
    {
        *_KEPT_STORES,
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
    }
)


def harmless(new: Any, old: Any) -> bool:
    """Whether an attribute was replaced by an equal object that is no plain value."""
    return type(new) is type(old) and new is not old and not isinstance(new, (int, float, str, bool)) and new == old


class ModuleState:
    """The attributes of one module before the recording."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {name: value for name, value in vars(module).items() if name not in STORES}
        self.holders = {name: vars(module)[name] for name in _KEPT_STORES}
        self.stores = {name: dict(holder) for name, holder in self.holders.items()}
        self.contents = {
            name: list(value) if isinstance(value, list) else dict(value)
            for name, value in self.attributes.items()
            if type(value) in (list, dict)
        }
        self.nested = [
            (name, container, content(container))
            for name, value in self.attributes.items()
            if not name.startswith("_ampfx")
            for container in containers(value)
            if container is not value or name not in self.contents
        ]

    def changes(self) -> list[tuple[str, Any]]:
        """Names and new values of the attributes and buffers that are not what they were."""
        now = vars(self.module)
        changed = []
        for name, value in now.items():
            if name in STORES or name.startswith("_ampfx"):
                continue
            old = self.attributes.get(name, MISSING)
            if (old is not value and not _same_plain(old, value)) or (
                name in self.contents and not _same_items(self.contents[name], value)
            ):
                changed.append((name, value))
        known = {name for name, _ in changed}
        for name, container, saved in self.nested:
            if name in now and name not in known and not _same_items(saved, content(container)):
                known.add(name)
                changed.append((name, now[name]))
        changed += [(name, MISSING) for name in self.attributes if name not in now]
        for store, old_items in self.stores.items():
            for name, value in now[store].items():
                if old_items.get(name, MISSING) is not value:
                    changed.append((name if store in ("_parameters", "_buffers") else store, value))
        return changed

    def restore(self) -> None:
        """Bring every attribute back, in place: the containers keep their identity."""
        now = vars(self.module)
        for name in [name for name in now if name not in STORES and name not in self.attributes]:
            if not name.startswith("_ampfx"):
                del now[name]
        for name, value in self.attributes.items():
            now[name] = value
        for name, items in self.contents.items():
            value = self.attributes[name]
            if isinstance(value, list):
                value[:] = items
            elif not _same_items(items, value):
                value.clear()
                value.update(items)
        for _, container, saved in self.nested:
            if not _same_items(saved, content(container)):
                refill(container, saved)
        for store, items in self.stores.items():
            # A new holder is not the forward's doing: the module got converted children in the run.
            if now[store] is self.holders[store] and not _same_items(items, now[store]):
                now[store].clear()
                now[store].update(items)


def _same_plain(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(new, (int, float, str, bool, bytes)) and old == new


def _same_items(old: Any, new: Any) -> bool:
    if len(old) != len(new):
        return False
    if isinstance(old, dict):
        return list(old) == list(new) and all(old[key] is new[key] or _same_plain(old[key], new[key]) for key in old)
    return all(a is b or _same_plain(a, b) for a, b in zip(old, new, strict=True))


def snapshot_attributes(root: nn.Module) -> list[ModuleState]:
    """The attributes of all modules, to bring them back later."""
    return [ModuleState(module) for module in root.modules()]


def restore_attributes(states: list[ModuleState]) -> None:
    """Bring back what :func:`snapshot_attributes` took."""
    for state in states:
        state.restore()
