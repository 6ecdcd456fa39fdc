"""The tables of gpu.py, of the results that are there."""

import json

from common import table
from throughput import PHASES


def tables(figures):
    """
    All tables, in Markdown.

    Args:
        figures (`dict`): The content of `gpu.json`: `machine`, `tasks` (name -> settings), `results` (name -> figures; seconds
            and GiB).
    """
    results = {name: figures["results"][name] for name in figures["tasks"] if name in figures["results"]}
    steps = {name: found for name, found in results.items() if "step" in found}
    rows = []
    for name, found in steps.items():
        task, base = figures["tasks"][name], f"{name.partition(':')[0]}: GRPO (TRL)"
        tokens = task["micro_batch"] * task["accumulation"] * task["completion"]
        compared = base in steps and task["completion"] == figures["tasks"][base]["completion"]
        row = [name, f"{found['step']:.2f}", f"{found['step'] / steps[base]['step']:.2f}" if compared else ""]
        row += [*(f"{found[phase]:.2f}" for phase in PHASES), f"{tokens / found['generate']:,.0f}"]
        peak, plan = found.get("peak_gib"), found.get("plan_gib")
        row += ["" if size is None else f"{size:.2f}" for size in (peak, plan)]
        rows.append([*row, "" if peak is None or plan is None else f"{plan / peak:.2f}"])
    others = []
    for name, found in results.items():
        if name not in steps:
            figures_of = {key: value for key, value in found.items() if not key.startswith(("plan", "wall"))}
            others.append([name, ", ".join(f"{key}: {shown(value)}" for key, value in figures_of.items())])
    header = ("", "step s", "of GRPO's", *PHASES, "tokens/s generated", "peak GiB", "plan GiB", "plan/peak")
    blocks = [table(header, *rows)] * bool(rows) + [table(("", "found"), *others)] * bool(others)
    return "\n\n".join([json.dumps(figures["machine"]), *blocks]) + "\n"


def shown(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)
