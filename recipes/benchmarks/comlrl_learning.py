"""
The case `learning` of comlrl.py: what both sides learn on the built-in problems from as many generated tokens. Started by
comlrl.py; CoMLRL's environment imports this file, too, and has no marcog_trl.
"""

import functools
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from common import ON_CPU, QUIET, table, task_command


SCRIPT = str(Path(__file__).with_name("comlrl.py"))
AGENTS, EFFORT = ("helper", "main"), ("tokens", "updates", "seconds")
LEARNING = {"num_generations": 4, "new_tokens": 32, "batch": 8}  # as recipes/configs/builtin.yaml


def comlrl_args(algorithm, **kwargs):
    from comlrl.trainers.actor_critic.maac import MAACConfig
    from comlrl.trainers.reinforce.magrpo import MAGRPOConfig

    return {"magrpo": MAGRPOConfig, "maac": MAACConfig}[algorithm](
        agent_devices="cpu",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        early_termination_threshold=None,
        eval_interval=0,
        **kwargs,
    )


def our_learning(setting, make_work):
    """Trains a team with this package and saves its adapter."""
    from transformers import AutoTokenizer, TrainerCallback

    from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, load_problems

    work = make_work(AutoTokenizer.from_pretrained(setting["model"]).eos_token_id)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = work.tokens >= setting["tokens"]

    args = MultiAgentGRPOConfig(
        setting["folder"],
        workflow="collaboration",
        per_device_train_batch_size=setting["batch"] * 2 * setting["num_generations"],
        num_generations=setting["num_generations"],
        max_completion_length=setting["new_tokens"],
        learning_rate=setting["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=setting["tokens"],  # never reached
        isolation="best_effort",
        seed=setting["seed"],
        **QUIET | ON_CPU,
    )
    trainer = MultiAgentGRPOTrainer(
        setting["model"], "execution_reward", args, load_problems("builtin", "train"), callbacks=[Stop()]
    )
    figures = work.of(trainer.train)
    trainer.save_model(setting["folder"])
    return figures


def comlrl_learning(setting, make_work):
    """Trains a team with CoMLRL and saves its models; the reward comes from our interpreter, see `judge`."""
    import torch
    from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    work = make_work(tokenizer.eos_token_id)
    rng = random.Random(setting["seed"])
    random.seed(setting["seed"])  # CoMLRL shuffles with it
    torch.manual_seed(setting["seed"])
    problems = json.loads(Path(setting["problems"]).read_text())

    class UntilSpent(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                for problem in rng.sample(problems, len(problems)):
                    if work.tokens >= setting["tokens"]:
                        return
                    yield problem

        def __len__(self):  # of the progress bar
            return len(problems)

    server = subprocess.Popen(
        task_command(SCRIPT, ["judge", {}], setting["python"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def reward(helper, main, *, batch_items):
        question = {"index": batch_items[0]["index"], "replies": {"helper": helper[0], "main": main[0]}}
        print(json.dumps(question), file=server.stdin, flush=True)
        return [json.loads(server.stdout.readline())]

    trainer = MAGRPOTrainer(
        agents=[setting["model"]] * 2,
        num_agents=2,
        tokenizer=tokenizer,
        train_dataset=UntilSpent(),
        reward_func=reward,
        formatters=[lambda problem: problem["helper"], lambda problem: problem["main"]],
        args=comlrl_args(
            "magrpo",
            num_train_epochs=1,
            num_turns=1,
            num_generations=setting["num_generations"],
            max_new_tokens=setting["new_tokens"],
            rollout_buffer_size=setting["batch"],
            agent_learning_rate=setting["learning_rate"],
        ),
    )
    figures = work.of(trainer.train)
    server.communicate()
    trainer.save_model(setting["folder"])
    return figures


def judge(setting, make_work):
    """Answers every line of standard input, a problem and its replies, with the reward."""
    from marcog_trl import Collaboration, execution_reward, load_problems
    from marcog_trl.execution import CodeExecutor

    problems, workflow = list(load_problems("builtin", "train")), Collaboration()
    with CodeExecutor(isolation="best_effort") as executor:
        for line in sys.stdin:
            question = json.loads(line)
            problem = problems[question["index"]]
            solution = workflow.solution(problem, question["replies"])
            columns = {name: [value] for name, value in problem.items() if name != "prompt"}
            [reward] = execution_reward([problem["prompt"]], [solution], executor=executor, **columns)
            print(json.dumps(reward), flush=True)


def evaluate(setting, make_work):
    """Share of held-out problems that a team solves; `agents` are the folders of its agents' models or adapters."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from marcog_trl import Collaboration, load_problems
    from marcog_trl.execution import CodeExecutor
    from marcog_trl.rewards.verdicts import run_tests
    from marcog_trl.rollout.engine import encode_prompts, play

    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    models = {}
    for agent, folder in setting["agents"].items():
        kind = AutoPeftModelForCausalLM if (Path(folder) / "adapter_config.json").exists() else AutoModelForCausalLM
        models[agent] = kind.from_pretrained(folder).eval()
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def generate(rows, **kwargs):
        replies = {}
        for agent, model in models.items():
            own = [i for i, row in enumerate(rows) if row.slot.agent == agent]
            prompts = tokenizer.pad({"input_ids": [rows[i].prompt_ids for i in own]}, return_tensors="pt")
            output = model.generate(**prompts, max_new_tokens=setting["new_tokens"], **kwargs)
            replies |= zip(own, output[:, prompts["input_ids"].shape[1] :].tolist(), strict=True)
        return [replies[i] for i in range(len(rows))], None

    def solved(problems, **kwargs):
        with CodeExecutor(isolation="best_effort") as executor:
            episodes = play(
                Collaboration(),
                problems,
                functools.partial(generate, **kwargs),
                functools.partial(encode_prompts, tokenizer),
                functools.partial(tokenizer.batch_decode, skip_special_tokens=True),
            )
            verdicts = run_tests(problems, [episode.turns[-1].solution for episode in episodes], executor=executor)
        return [float(verdict.status == "passed") for verdict in verdicts]

    torch.manual_seed(0)
    problems = list(load_problems("builtin", "test"))
    samples = [solved(problems, **sampling) for _ in range(4)]
    sampled = [statistics.mean(of_problem) for of_problem in zip(*samples, strict=True)]
    greedy = solved(problems, do_sample=False)
    figures = {}
    for name, values in {"sampled": sampled, "greedy": greedy}.items():
        figures[name] = statistics.mean(values)
        figures[f"{name}_interval"] = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return figures


TASKS = {"our_learning": our_learning, "comlrl_learning": comlrl_learning, "judge": judge, "evaluate": evaluate}


# The process that compares


def write_problems(file, model):
    """The training problems with their prompts, for CoMLRL's environment."""
    from transformers import AutoTokenizer

    from marcog_trl import Collaboration, load_problems

    tokenizer, workflow, rows = AutoTokenizer.from_pretrained(model), Collaboration(), []
    for index, problem in enumerate(load_problems("builtin", "train")):
        prompts = {
            agent: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            for agent, messages in next(workflow.play(problem)).items()
        }
        rows.append({"index": index} | prompts)
    file.write_text(json.dumps(rows))


def compare(options, pythons, folder, run):
    """
    Trains teams with both sides, prints a table, and returns the figures.

    Args:
        options (`argparse.Namespace`): The flags of comlrl.py.
        pythons (`dict[str, str]`): Interpreter of each side.
        folder (`Path`): For models and problems.
        run (`Callable`): `run(task, python)` makes a measurement in a process of its own.
    """
    from marcog_trl.embedded import build_default_model

    model, problems = build_default_model(), folder / "problems.json"
    write_problems(problems, model)
    setting = LEARNING | {
        "model": model,
        "tokens": options.tokens,
        "python": sys.executable,
        "problems": str(problems),
    }
    rates = {"ours": options.learning_rate, "comlrl": options.comlrl_learning_rate}
    rows, results = [], {"untrained": None, "ours": [], "comlrl": []}

    def add(side, seed, agents, training):
        figures = run(["evaluate", setting | {"agents": agents}], sys.executable)
        shares = [f"{figures[name]:.3f} ± {figures[f'{name}_interval']:.3f}" for name in ("sampled", "greedy")]
        rows.append([side, seed, *(f"{training[key]:,.0f}" if training else "" for key in EFFORT), *shares])
        return training | figures

    results["untrained"] = add("untrained", "", dict.fromkeys(AGENTS, model), {})
    for seed in range(options.seeds):
        for side, parts in (("ours", (".", ".")), ("comlrl", ("agent_0", "agent_1"))):
            own = folder / f"{side}{seed}"
            task = setting | {"seed": seed, "folder": str(own), "learning_rate": rates[side]}
            training = run([f"{'our' if side == 'ours' else side}_learning", task], pythons[side])
            agents = {agent: str(own / part) for agent, part in zip(AGENTS, parts, strict=True)}
            results[side].append(add(side, seed, agents, training))
    print(f"\nbuilt-in problems, {options.tokens:,} generated tokens, learning rates {rates}\n")
    print(table(("team", "seed", *EFFORT, "solved, sampled", "solved, greedy"), *rows), flush=True)
    return results
