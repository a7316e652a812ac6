"""Runs every measurement of this folder one after the other: ``python -m bench``."""

from __future__ import annotations

import pkgutil
import runpy
import sys

import bench


def main() -> None:
    """Run each module of the folder as a program, in alphabetical order."""
    sys.argv = sys.argv[:1]
    for module in pkgutil.iter_modules(bench.__path__):
        if not module.name.startswith("_"):
            print(f"== {module.name}", flush=True)
            runpy.run_module(f"bench.{module.name}", run_name="__main__")
            print(flush=True)


if __name__ == "__main__":
    main()
