"""The report of learning.py: intervals and tables of the results that are there."""

import math

import numpy as np
from common import table


def interval(figures):
    """
    Mean and half the width of its 95 % interval over problems and seeds.

    Args:
        figures (`numpy.ndarray` of shape `(S, P)`): A figure of every seed and problem; P at least 2.

    Returns:
        `tuple[float, float]`: mean and half width; see the docstring of learning.py.
    """
    parts = [figures.mean(axis) for axis in ((1, 0) if len(figures) > 1 else (0,))]
    variances = [means.var(ddof=1) / len(means) for means in parts]
    total = sum(variances)
    if total == 0:
        return float(figures.mean()), 0.0
    freedom = total**2 / sum(v**2 / (len(means) - 1) for v, means in zip(variances, parts, strict=True))
    return float(figures.mean()), student_t(freedom) * math.sqrt(total)


def student_t(freedom):
    """The 0.975 quantile of Student's t, for degrees of freedom from 1 on: with t = √freedom · tan θ its density is cos^(freedom − 1)."""
    angle = (np.arange(50_000) + 0.5) / 50_000 * math.pi / 2
    mass = np.cos(angle) ** (freedom - 1)
    edge = np.searchsorted(mass.cumsum() / mass.sum(), 0.95)
    return math.sqrt(freedom) * math.tan(angle[edge])


def figures_of(runs, name):
    """A figure of every seed and problem, `(S, P)`."""
    return np.array([run["final"][name] for run in runs])


def shown(figures):
    mean, half = interval(figures)
    return f"{mean:.3f} ± {half:.3f}"


def report(results, families):
    """Tables of solved shares, areas and ledgers, family by family."""
    parts = []
    for family, plans in families.items():
        conditions = {name: results[f"{family}/{name}"] for name in plans if f"{family}/{name}" in results}
        if not conditions:
            continue
        rows = [
            [plans[name].label, len(runs), *(shown(figures_of(runs, column)) for column in ("solved", "greedy"))]
            for name, runs in conditions.items()
        ]
        parts += [f"**{family}**", table(["", "seeds", "solved, sampled", "solved, greedy"], *rows)]
        parts += areas(plans, conditions)
        rows = [ledger(plans[name].label, runs) for name, runs in conditions.items() if plans[name].trained]
        parts.append(
            table(["", "generated tokens", "evaluator calls", "sandbox", "training", "optimizer steps"], *rows)
        )
    return "\n\n".join(parts)


def ledger(label, runs):
    """A row of the ledger. Of CoMLRL, evaluations and the sandbox are not counted."""

    def used(key, unit=""):
        counts = [run["ledger"][key] for run in runs if key in run["ledger"]]
        return f"{sum(counts) / len(counts):,.0f}{unit}" if counts else ""

    seconds = [used(key, " s") for key in ("sandbox_seconds", "training_seconds")]
    return [label, used("tokens"), used("evaluator_calls"), *seconds, used("optimizer_steps")]


def paired(conditions, *names):
    """The results of conditions with the seeds that all of them have, in the same order."""
    by_seed = [{run["unit"].rpartition("/")[2]: run for run in conditions.get(name, [])} for name in names]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    return [[runs[seed] for seed in seeds] for runs in by_seed]


def curve_of(run, start):
    """Tokens, `(points,)`, and solved samples of each problem, `(points, P)`, from `start`, the untrained team's, to the end."""
    last = (run["ledger"]["tokens"], run["final"]["solved"])
    points = [(0, start), *((point["tokens"], point["solved"]) for point in run["curve"]), last]
    tokens, figures = zip(*points, strict=True)
    return np.array(tokens), np.array(figures)


def start_of(plans, conditions, name):
    """Solved samples of the untrained team that a condition begins as, `(P,)`, or `None`, if it was not measured."""
    before = conditions.get("untrained_single" if plans[name].workflow == "single" else "untrained")
    return None if before is None else figures_of(before, "solved").mean(0)


BUDGETS = (60_000, 200_000)


def areas(plans, conditions):
    """Areas under the curves of sampled solutions up to a number of tokens, which are their mean heights; and beside the best CoMLRL."""

    def of(runs, name, budget):
        start = start_of(plans, conditions, name)
        return np.array([area(*curve_of(run, start), budget) for run in runs])

    rows = []
    for budget in BUDGETS:
        reached = [
            name
            for name, runs in conditions.items()
            if plans[name].trained and start_of(plans, conditions, name) is not None
            if runs[0]["ledger"]["tokens"] >= budget
        ]
        theirs = [name for name in reached if name.startswith("comlrl")]
        best = max(theirs, key=lambda name: of(conditions[name], name, budget).mean(), default=None)
        for name in reached:
            runs, others = ([], []) if best is None else paired(conditions, name, best)
            above = shown(of(runs, name, budget) - of(others, best, budget)) if runs and name != best else ""
            own = conditions[name]
            rows.append([f"{budget:,}", plans[name].label, len(own), shown(of(own, name, budget)), above])
    heads = ["tokens", "", "seeds", "area, sampled", "above the best of CoMLRL"]
    return [table(heads, *rows)] if rows else []


def area(tokens, figures, budget):
    """Mean height of a curve up to `budget` tokens, of each problem, `(P,)`."""
    at = np.array([*tokens[tokens < budget], budget])
    heights = np.array([np.interp(at, tokens, own) for own in figures.T])
    return np.trapezoid(heights, at, axis=1) / budget
