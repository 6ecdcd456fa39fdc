"""The report of learning.py: intervals, tables and learning curves of the results that are there."""

import math

import numpy as np
from common import load_results, table


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


def results_by_family(folder, families):
    """The results in the folder: family → condition → list of results by seed, in the order of the families."""
    results = {family: {name: [] for name in conditions} for family, conditions in families.items()}
    for unit, result in load_results(folder):
        family, name = unit.split("/")
        if name in results[family]:
            results[family][name].append(result)
    return {family: {name: found for name, found in of.items() if found} for family, of in results.items()}


def figures_of(runs, name, part="final"):
    """A figure of every seed and problem, `(S, P)`; `None` where it is not known."""
    tables = [run["final"] if part == "final" else run["dissected"].get(part, {}) for run in runs]
    return np.array([own[name] for own in tables]) if all(name in own for own in tables) else None


def shown(figures):
    mean, half = interval(figures)
    return f"{mean:.3f} ± {half:.3f}"


def markdown(results, families):
    """Tables of solved shares, gaps, dissections and ledgers."""
    parts = []
    for family, conditions in results.items():
        if not conditions:
            continue
        plans = families[family]
        columns = {"solved": "solved, sampled", "greedy": "solved, greedy"}
        if family == "symmetry":
            columns |= {"complementary": "complementary"}
        rows = [
            [plans[name].label, len(runs), *(shown(figures_of(runs, column)) for column in columns)]
            for name, runs in conditions.items()
        ]
        parts += [f"**{family}**", table(["", "seeds", *columns.values()], *rows)]
        parts += areas(plans, conditions)
        parts += gaps(plans, conditions, columns)
        parts += dissections(plans, conditions, [*columns, *(["helper_as_named"] if family == "symmetry" else [])])
        rows = [ledger(plans[name].label, runs) for name, runs in conditions.items() if plans[name].trained]
        parts.append(
            table(["", "generated tokens", "evaluator calls", "sandbox", "training", "optimizer steps"], *rows)
        )
    return "\n\n".join(parts)


def ledger(label, runs):
    """A row of the ledger. Of CoMLRL and MADPO, evaluations and the sandbox are not counted."""

    def used(key, unit=""):
        counts = [run["ledger"][key] for run in runs if key in run["ledger"]]
        return f"{sum(counts) / len(counts):,.0f}{unit}" if counts else ""

    seconds = [used(key, " s") for key in ("sandbox_seconds", "training_seconds")]
    return [label, used("tokens"), used("evaluator_calls"), *seconds, used("optimizer_steps")]


def gaps(plans, conditions, columns):
    """How far separate adapters are above the shared policy, and how much of that SHPPO closes."""
    above = {name: difference(conditions, name, columns) for name in ("separate", "shppo", "shppo_agent")}
    lines = []
    for column in columns if above["separate"] else ():
        gap, half = interval(above["separate"][column])
        lines.append(
            f"* {column}: a LoRA per agent is {100 * gap:+.1f} ± {100 * half:.1f} points above the shared policy."
        )
        for name in ("shppo", "shppo_agent"):
            if above[name]:
                own, own_half = interval(above[name][column])
                closed = f", {100 * own / gap:.0f} % of that gap" if gap > half else ""
                lines.append(
                    f"* {column}: {plans[name].label} is {100 * own:+.1f} ± {100 * own_half:.1f} points above it{closed}."
                )
    return ["\n".join(lines)] if lines else []


def difference(conditions, name, columns):
    """How far a condition is above the shared policy: by column, of every seed that both have and every problem, `(S, P)`."""
    runs, others = paired(conditions, name, "shared_ppo")
    return {column: figures_of(runs, column) - figures_of(others, column) for column in columns} if runs else {}


def paired(conditions, *names):
    """The results of conditions with the seeds that all of them have, in the same order."""
    by_seed = [{run["unit"].rpartition("/")[2]: run for run in conditions.get(name, [])} for name in names]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    return [[runs[seed] for seed in seeds] for runs in by_seed]


ABLATIONS = {
    "final": "as trained",
    "cores_zero": "C = 0",
    "latents_swapped": "latents swapped",
    "latents_equal": "one latent for both",
}


def dissections(plans, conditions, columns):
    """The trained teams without their cores, with exchanged latents, and with one latent for both agents."""
    return [
        table(
            [plans[name].label, *columns],
            *(
                [label, *(shown(figures_of(runs, column, part)) for column in columns)]
                for part, label in ABLATIONS.items()
            ),
        )
        for name, runs in conditions.items()
        if all(run["dissected"] for run in runs)
    ]


def curve_of(run, name, start):
    """Tokens, `(points,)`, and figures of each problem, `(points, P)`, from `start`, those of the untrained team, to the end."""
    first = [] if start is None else [(0, start)]
    last = (run["ledger"]["tokens"], run["final"][name])
    points = [*first, *((point["tokens"], point[name]) for point in run["curve"]), last]
    tokens, figures = zip(*points, strict=True)
    return np.array(tokens), np.array(figures)


def start_of(plans, conditions, name, column):
    """Figures of the untrained team that a condition begins as, `(P,)`, or `None`, if it was not measured."""
    before = conditions.get("untrained_single" if plans[name].workflow == "single" else "untrained")
    return None if before is None or name == "roles_in_prompt" else figures_of(before, column).mean(0)


BUDGETS = (60_000, 200_000)


def areas(plans, conditions):
    """Areas under the curves of sampled solutions up to a number of tokens, which are their mean heights; and beside the best CoMLRL."""

    def of(runs, name, budget):
        start = start_of(plans, conditions, name, "solved")
        return np.array([area(*curve_of(run, "solved", start), budget) for run in runs])

    rows = []
    for budget in BUDGETS:
        reached = [
            name
            for name, runs in conditions.items()
            if plans[name].trained and start_of(plans, conditions, name, "solved") is not None
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


def draw_curves(family, plans, conditions, path):
    """Held-out figures by generated tokens: mean of the seeds, and the range between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True, layout="constrained")
    columns = ("complementary", "solved") if family == "symmetry" else ("solved", "greedy")
    for axis, column in zip(axes, columns, strict=True):
        for name, runs in conditions.items():
            plan = plans[name]
            if not plan.trained or plan.ablation or figures_of(runs, column) is None:
                continue
            curves = [curve_of(run, column, start_of(plans, conditions, name, column)) for run in runs]
            curves = [(at, figures.mean(1)) for at, figures in curves if len(at) == len(curves[0][0])]
            tokens, values = np.mean([at for at, _ in curves], 0), np.array([figures for _, figures in curves])
            (line,) = axis.plot(tokens, values.mean(0), "o-", label=plan.label, markersize=3.5)
            axis.fill_between(tokens, values.min(0), values.max(0), color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set(xlabel="generated tokens", ylabel=f"{column}, held-out problems", xlim=(0, None), ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{family}: line: mean of the seeds, band: their range", fontsize="medium")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(folder, families):
    """Prints the tables, and writes them and the learning curves into the folder of the results."""
    results = results_by_family(folder, families)
    text = markdown(results, families)
    print(text)
    (folder / "report.md").write_text(text + "\n")
    for family, conditions in results.items():
        if conditions:
            draw_curves(family, families[family], conditions, folder / f"{family}-curves.png")
