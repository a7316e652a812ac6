"""Runs every measurement of this folder one after the other: ``python -m bench``."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench


def main() -> None:
    """Call ``main()`` of each module in the folder, in alphabetical order."""
    sys.argv = sys.argv[:1]
    for module in pkgutil.iter_modules(bench.__path__):
        if not module.name.startswith("_"):
            print(f"== {module.name}", flush=True)
            importlib.import_module(f"bench.{module.name}").main()
            print(flush=True)


if __name__ == "__main__":
    main()
