"""
The cost of playing a team as a program instead of a generator: the server, the client and waiting for each other.

    python recipes/benchmarks/programs.py
    python recipes/benchmarks/programs.py --rounds 2 --steps 3

Two teams of a planner and a coder write the same replies on the embedded default model, 64 episodes a step. They take turns,
round by round, each in a process of its own with one thread. `program` uses the package openai; `program, urllib` asks the same
server without it. Seconds are those of the processor, of all threads, so that other load does not count. Those of a call are
measured without a model. All figures are medians.
"""

import json
import statistics
import tempfile
import time
import urllib.request

from common import ON_CPU, QUIET, make_parser, measure_apart, read_options, table, take_turns


KINDS = ("generator", "program", "program, urllib")
TASKS = ("Write a plan.\n\n{}", "Write the function. A plan:\n{}")


async def with_openai(problem, client):
    text = problem["prompt"]
    for agent, task in zip(("planner", "coder"), TASKS, strict=True):
        messages = [{"role": "user", "content": task.format(text)}]
        response = await client.chat.completions.create(model=agent, messages=messages)
        text = response.choices[0].message.content
    return text


def with_urllib(problem, client):
    text, headers = problem["prompt"], {"Authorization": f"Bearer {client.api_key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for agent, task in zip(("planner", "coder"), TASKS, strict=True):
        body = {"model": agent, "messages": [{"role": "user", "content": task.format(text)}]}
        request = urllib.request.Request(f"{client.base_url}chat/completions", json.dumps(body).encode(), headers)
        with opener.open(request) as response:
            text = json.load(response)["choices"][0]["message"]["content"]
    return text


def make_team(kind):
    from marcog_trl import Agent, Program, Workflow

    class Generator(Workflow):
        agents = (Agent("planner", "planner"), Agent("coder", "coder"))

        def play(self, problem):
            text = problem["prompt"]
            for agent, task in zip(("planner", "coder"), TASKS, strict=True):
                text = (yield {agent: [{"role": "user", "content": task.format(text)}]})[agent]
            return text

    if kind == "generator":
        return Generator()
    function = with_openai if kind == "program" else with_urllib
    return Program(function, ["planner", "coder"], max_calls=1, stage_timeout=60)


def measure(task):
    """Seconds of each step of a training, and milliseconds of each call of a play without a model."""
    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback

    from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, load_problems
    from marcog_trl.embedded import build_default_model
    from marcog_trl.rollout.engine import play

    kind, steps, episodes = task["kind"], task["steps"], task["episodes"]
    torch.set_num_threads(1)
    problems = load_problems("builtin", "train")

    def alone():
        started = time.process_time()
        play(
            make_team(kind), [problems[i] for i in range(episodes)], lambda rows: ([[0] * 60 for _ in rows], None),
            lambda prompts: [[0] for _ in prompts], lambda ids: ["x" * len(each) for each in ids],
        )  # fmt: skip
        return (time.process_time() - started) / (2 * episodes) * 1000

    seconds = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = time.process_time()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.process_time() - self.started)

    with tempfile.TemporaryDirectory() as folder:
        config = MultiAgentGRPOConfig(
            folder, max_steps=steps + 1, per_device_train_batch_size=2 * episodes, num_generations=4, seed=0,
            max_completion_length=64, learning_rate=1e-4, isolation="best_effort", **ON_CPU, **QUIET,
        )  # fmt: skip
        trainer = MultiAgentGRPOTrainer(
            str(build_default_model()), "execution_reward", config, problems, workflow=make_team(kind),
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
        )  # fmt: skip
        trainer.add_callback(Steps())
        trainer.train()
    alone()
    return {"steps": seconds[1:], "calls": [alone() for _ in range(5)]}


def main():
    options = read_options(make_parser(__doc__, rounds=3, steps=5, episodes=64), measure)
    tasks = {kind: {"kind": kind, "steps": options.steps, "episodes": options.episodes} for kind in KINDS}
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = take_turns(tasks, options.rounds, lambda task: measure_apart(__file__, task, **environment))
    calls, steps = (
        {kind: statistics.median(value for round in rounds for value in round[name]) for kind, rounds in found.items()}
        for name in ("calls", "steps")
    )
    rows = [
        [
            kind,
            f"{calls[kind]:.2f}",
            f"{calls[kind] - calls['generator']:.2f}",
            f"{steps[kind]:.3f}",
            f"{steps[kind] / steps['generator'] - 1:+.1%}",
        ]
        for kind in KINDS
    ]
    print(table(["team", "ms a call", "more", "seconds a step", "more"], *rows))


if __name__ == "__main__":
    main()
