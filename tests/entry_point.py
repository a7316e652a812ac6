"""Let ``backend="ampfx"`` be found where the package is run from its folder and is not installed.

PyTorch finds backends by the entry points of installed distributions. What ``pip install`` would write is
written into a temporary folder that is put on ``sys.path``, from what ``pyproject.toml`` says.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

GROUP = "torch_dynamo_backends"
ROOT = Path(__file__).resolve().parent.parent


def provide_entry_point() -> None:
    """Do it, unless the package is installed."""
    if any(point.name == "ampfx" for point in importlib.metadata.entry_points(group=GROUP)):
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = Path(folder) / "ampfx_from_its_folder-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ampfx-from-its-folder\nVersion: 0\n", encoding="utf-8")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"][GROUP].items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}", encoding="utf-8")
    sys.path.append(folder)
