"""
Measures what executing code adds to the evaluation of 164 HumanEval problems x 10 samples.

    python recipes/benchmarks/evaluation.py

An evaluation is run and timed in which a random model with the layers of a real one generates as many tokens as a real one
would, and its replies are then exchanged for programs: half of them reference solutions, half with one fault, no two alike.
On a GPU the model has its real sizes and generates all rows. Elsewhere it is as narrow as can be and generates one, so that a
step takes what it takes to launch its operations, which no accelerator spares: what execution adds is then overestimated.
"""

import json
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import make_parser, random_model, save_model

from marcog_trl import evaluate_team, load_problems
from marcog_trl.embedded import load_default_model
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.problems import make_job
from marcog_trl.team.settings import TeamSettings


warnings.filterwarnings("ignore", category=FutureWarning)
DATA = Path(__file__).parents[2] / "tests" / "data"


def make_replies(problems, num_samples):
    """A greedy and `num_samples` sampled programs per problem."""
    mutants = json.loads((DATA / "humaneval_mutants.json").read_text(encoding="utf-8"))
    return [
        f"{row['prompt']}{row['canonical_solution'] if i % 2 else mutants[row['task_id']]['code']}\n# reply {i}\n"
        for row in problems
        for i in range(num_samples + 1)
    ]


def judge(problems, replies, num_workers):
    """Executes all samples, and does nothing else."""
    size = len(replies) // len(problems)
    jobs = [make_job(problems[i // size], reply) for i, reply in enumerate(replies) if i % size]
    with CodeExecutor(num_workers, isolation="best_effort") as executor:
        executor.run(jobs[:8])  # workers have started
        started = time.perf_counter()
        verdicts = executor.run(jobs)
        seconds = time.perf_counter() - started
    assert sum(verdict.status == "passed" for verdict in verdicts) == len(jobs) // 2
    print(f"judging {len(jobs)} programs alone, {executor.num_workers} workers: {seconds:.1f} s", flush=True)


def sized_model(tokenizer, layers, hidden_size, vocab_size=None):
    heads = max(1, hidden_size // 128)
    return random_model(
        tokenizer,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads // 6),
        intermediate_size=6 * hidden_size,
        vocab_size=vocab_size,
    )


def evaluate(problems, replies, options):
    _, tokenizer = load_default_model()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, sized_model(tokenizer, 1, 64), tokenizer)
        team = untrained_team(folder, TeamSettings(isolation="best_effort", num_workers=options.num_workers))
    device = team.model.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = sized_model(tokenizer, options.layers, options.hidden_size, options.vocab_size).to(device, dtype).eval()
    tokens, seconds = iter(()), []

    def generate(prompts, sampler=None):
        started = time.perf_counter()
        rows = torch.full((options.rows or len(prompts), 128), 5, device=device)
        length = options.completion_length
        model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            min_new_tokens=length,
        )
        seconds.append(time.perf_counter() - started)
        return [next(tokens, [0]) for _ in prompts]  # of the last batch, what fills it up is not counted

    size = options.batch_size // (options.num_samples + 1) * (options.num_samples + 1)
    for _ in range(3):
        generate(range(size))
    alone = min(seconds)
    seconds.clear()
    tokens = iter([[*tokenizer(reply)["input_ids"], tokenizer.eos_token_id] for reply in replies])
    team._generate = generate
    team.executor.run([Job("", ["assert True"])] * 8)
    started = time.perf_counter()
    figures = evaluate_team(team, problems, options.num_samples, options.batch_size)
    total = time.perf_counter() - started
    team.close()
    assert abs(figures["solved"] - 0.5) < 1e-9, figures["solved"]
    expected, generated = alone * len(seconds), sum(seconds)
    print(
        f"generating {len(seconds)} batches x {options.completion_length} steps ({options.layers} layers, hidden size "
        f"{options.hidden_size}, {device}) alone: {expected:.1f} s; while the batch before is executed: {generated:.1f} s\n"
        f"evaluation: {total:.1f} s; {total - generated:.1f} s of it, {100 * (total - generated) / expected:.1f} % of what "
        f"generating takes alone, nothing is generated; with what execution takes from generation on this machine's cores: "
        f"{100 * (total / expected - 1):.1f} %"
    )


def main():
    sizes = {"hidden_size": 1536, "vocab_size": 151_936, "rows": None}  # of a model of 1.5 billion parameters
    if not torch.cuda.is_available():
        sizes = {"hidden_size": 64, "vocab_size": 1024, "rows": 1}
    lengths = {"num_samples": 10, "batch_size": 128, "completion_length": 256, "layers": 28, "num_workers": None}
    options = make_parser(__doc__, **lengths, **sizes).parse_args()
    problems = load_problems(str(DATA / "humaneval.jsonl.gz"), "test")
    replies = make_replies(problems, options.num_samples)
    judge(problems, replies, options.num_workers)
    evaluate(problems, replies, options)


if __name__ == "__main__":
    main()
