"""Every model of a folder of builders against float32 and autocast: ``python -m bench.zoo [FOLDER]``.

``python -m bench.zoo FOLDER [--names a,b] [--dtype bf16|fp16|both] [--labels] [--out docs/zoo.md]`` converts
each model of each ``*.py`` file of the folder (or of one file) and compares it in train and eval mode, as
:mod:`bench._zoo_check` says. Without a folder the project's own models in ``tests/models.py`` are taken.
The result is a table in markdown, with a summary above it and what is remarkable below.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path

import torch

from bench._zoo_check import TOLERANCE, Outcome, check_model

OWN_MODELS = Path(__file__).resolve().parent.parent / "tests" / "models.py"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def builders(folder: Path) -> Iterator[types.ModuleType]:
    """The files of a folder that have models, as modules."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.py"))
    for file in files:
        if "REG" not in file.read_text(encoding="utf-8"):
            continue
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # models must be found when they are unpickled
        spec.loader.exec_module(module)
        if hasattr(module, "build"):
            yield module


def run(folder: Path, names: list[str], dtypes: list[torch.dtype], labels: bool) -> dict[str, list[list[Outcome]]]:
    """The outcomes by file: of each model one in each dtype."""
    found: dict[str, list[list[Outcome]]] = {}
    for module in builders(folder):
        chosen = [name for name in module.REG if not names or name in names]
        for number, name in enumerate(chosen, 1):
            start = time.perf_counter()
            outcomes = [check_model(module, name, dtype, labels) for dtype in dtypes]
            found.setdefault(module.__name__, []).append(outcomes)
            seconds = time.perf_counter() - start
            verdict = "; ".join(dict.fromkeys(text for item in outcomes for text in item.failures)) or "ok"
            print(f"{module.__name__} {number}/{len(chosen)} {name}: {verdict[:600]} ({seconds:.1f} s)", flush=True)
    return found


# ---------------------------------------------------------------------- the page


def page(found: dict[str, list[list[Outcome]]], dtypes: list[torch.dtype]) -> str:
    """The whole text."""
    models = [outcomes for group in found.values() for outcomes in group]
    lines = ["# Models that are captured, converted and compared", "", *_summary(models, dtypes), ""]
    for group, rows in found.items():
        lines += [f"## {group}", "", *_table(rows, dtypes), ""]
    lines += _remarks(models)
    return "\n".join(lines).rstrip() + "\n"


def _summary(models: list[list[Outcome]], dtypes: list[torch.dtype]) -> Iterator[str]:
    outcomes = [item for row in models for item in row]
    whole = sum(all(item.whole for item in row) for row in models)
    good = sum(not item.failures for item in outcomes)
    judged = sum(any(item.judged for item in row) for row in models)
    again = [row[0].name for row in models if any(count > 1 for item in row for count in item.graphs)]
    slowest = max(outcomes, key=lambda item: item.seconds)
    largest = max(outcomes, key=lambda item: item.nodes)
    yield "Written by `python -m bench.zoo FOLDER --out docs/zoo.md`. Each model is converted once and compared with"
    yield "float32 in train and eval mode: two batch sizes, other data under another seed, shorter sequences where"
    yield "the model takes them."
    yield f"Tiny random weights, dropout off, CPU, one thread, PyTorch {torch.__version__}."
    yield ""
    comparisons = sum(item.situations for item in outcomes)
    yield f"* {len(models)} models, {comparisons} comparisons;"
    yield f"  {good} of {len(outcomes)} conversions without a deviation."
    yield f"* {whole} models are captured whole; {len(models) - whole} convert in parts."
    for dtype in dtypes:
        limits = TOLERANCE[dtype]
        own = [item for item in outcomes if item.dtype == dtype]
        plain = [item for item in own if not item.judged]
        out, grad = max(plain, key=lambda item: item.out), max(plain, key=lambda item: item.grad)
        yield f"* {_name(dtype)}: tolerance {limits[0]:.0%} of the norm for outputs, {limits[1]:.0%} for gradients;"
        yield f"  worst {out.out:.2%} ({out.name}) and {grad.grad:.2%} ({grad.name})."
    yield f"* {judged} models are beyond that under `torch.autocast` as well and are judged against float64 (*)."
    yield f"* {len(again)} models branch, or loop, on what changes between the calls and were captured again for it:"
    yield f"  {', '.join(again) or 'none'}."
    yield f"* Capture and conversion: at most {slowest.seconds:.2f} s ({slowest.name}); the largest graph has"
    yield f"  {largest.nodes} nodes ({largest.name}, {largest.seconds:.2f} s)."
    yield "* Parameters' names and identity, `state_dict` keys, deepcopy and pickle are checked for every model."


def _table(rows: list[list[Outcome]], dtypes: list[torch.dtype]) -> Iterator[str]:
    yield "Errors in percent of the norm, in parentheses those of `torch.autocast`; *graphs* in train + eval mode;"
    yield "*s*: seconds to capture and convert. * judged against float64, ‡ in parts, † deviates: see below."
    yield ""
    heads = ["model", "nodes", "s", "graphs"]
    for dtype in dtypes:
        heads += [f"{_name(dtype)} outputs", "gradients"]
    widths = [22, 5, 4, 6] + [12, 12] * len(dtypes)
    yield f"| {' | '.join(head.ljust(width) for head, width in zip(heads, widths, strict=True))} |"
    yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    for row in rows:
        mark = "†" if any(item.failures for item in row) else "" if all(item.whole for item in row) else "‡"
        graphs = "+".join(str(max(counts)) for counts in zip(*(item.graphs for item in row), strict=False)) or "-"
        seconds = max(item.seconds for item in row)
        cells = [f"{row[0].name}{mark}", str(row[0].nodes), f"{seconds:.1f}", graphs]
        for item in row:
            star = "*" if item.judged else ""
            cells += [_errors(item.out, item.out_autocast, star), _errors(item.grad, item.grad_autocast, star)]
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _errors(ours: float, autocast: float | None, star: str) -> str:
    return f"{_percent(ours)}{star} ({'-' if autocast is None else _percent(autocast)})"


def _percent(error: float) -> str:
    return f"{100 * error:.2f}" if error < 0.0995 else f"{100 * error:.1f}" if error < 0.995 else f"{100 * error:.0f}"


def _remarks(models: list[list[Outcome]]) -> Iterator[str]:
    headings = ("Converted in parts (‡)", "Judged against float64 (*)", "Deviations (†)")
    sections: dict[str, list[str]] = {heading: [] for heading in headings}
    for row in models:
        for item in row[:1]:
            if not item.whole:
                share = f"{item.coverage:.0%} of the matrix-product FLOPs run converted"
                sections["Converted in parts (‡)"].append(f"* {item.name}: {share}. {item.reason}")
        judged = {item.judged: None for item in row if item.judged}
        if judged:
            sections["Judged against float64 (*)"].append(f"* {row[0].name}: {'; '.join(judged)}.")
        for item in row:
            texts = [f"* {item.name}, {_name(item.dtype)}: {text}" for text in item.failures]
            sections["Deviations (†)"] += texts
    for heading, lines in sections.items():
        if lines:
            yield f"## {heading}"
            yield ""
            for line in lines:
                yield from textwrap.wrap(line, 110, subsequent_indent="  ", break_on_hyphens=False)
            yield ""


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def main() -> None:
    """Check the models and print or write the page."""
    parser = argparse.ArgumentParser(description="Convert every model of a folder of builders and compare.")
    parser.add_argument("folder", nargs="?", type=Path, default=OWN_MODELS, help="folder or file of model builders")
    parser.add_argument("--names", default="", help="only these models, separated by commas")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both")
    parser.add_argument("--labels", action="store_true", help="build(name, labels=True): the loss inside the model")
    parser.add_argument("--out", type=Path, help="file to write the table into")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = list(DTYPES.values()) if args.dtype == "both" else [DTYPES[args.dtype]]
    found = run(args.folder, [name for name in args.names.split(",") if name], dtypes, args.labels)
    if not found:
        print(f"no model in {args.folder} has one of these names", file=sys.stderr)
        raise SystemExit(2)
    text = page(found, dtypes)
    if args.out is None:
        print(f"\n{text}")
    else:
        args.out.write_text(text, encoding="utf-8")
    if any(item.failures for group in found.values() for row in group for item in row):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
