"""
Speed and learning beside CoMLRL 1.4.3, which lives in a virtual environment of its own (Python 3.11 or later):

    python -m venv comlrl && comlrl/bin/pip install comlrl==1.4.3 torch==2.13.0
    python recipes/benchmarks/comlrl.py --comlrl-python comlrl/bin/python

Both sides train on the same machine with one thread, the same model, problems, prompts and reward, and at temperature 1
without truncation. They take turns, and each measurement is a process of its own. CoMLRL is driven through its public
interface; nothing in it is patched. Two of its defaults would make the work unequal and are set otherwise: evaluation during
training is off, and `early_termination_threshold=None` lets all trees grow to their full depth. Seconds are those of
`train()` after a warm-up, tokens are counted in `GenerationMixin.generate` and optimizer updates in `Optimizer.step`, alike
on both sides.

What differs is the product: CoMLRL trains all parameters of one model per agent, and generates for one agent and one
history at a time; `MultiAgentGRPOTrainer` trains one LoRA of rank 16 on a base that the agents share, and generates for all
agents, problems and histories of a batch at once, with the LoRA merged meanwhile (`merge_for_generation`).

Cases:

* `one_turn`, `tree`, `vocabulary`: MAGRPO with a random Qwen2 (hidden size 64, 2 layers), 2 agents, 4 generations, 16
  problems, 64 new tokens, replies kept from ending before. Both sides collect `--batches` problems and then update every
  agent's policy once per turn: CoMLRL makes a step for each agent's own model, ours one for the adapter that they share,
  accumulating gradients over 32 rows at a time (1 in `vocabulary`), whose tensors stay in the processor's caches. A third
  row is ours with as many optimizer steps as CoMLRL, each on its share of the replies. 2 problems are CoMLRL's default.
  `tree` has 2 turns and 4 children at every node, 40 replies per problem; `vocabulary` one turn, 32,000 words and 128 new
  tokens.
* `maac`: MAAC in the setting of `one_turn`. CoMLRL's critic is a model of its own, which it steps once with every agent;
  ours is a head on the base that the agents share, stepped with the policy.
* `own_batch`: the first three, where each side takes whichever of `--batches` is fastest for it and ours makes one step per
  batch.
* `cross`: this package only: what crediting the 64 joint actions of 3 agents costs beside the 4 aligned ones.
* `learning`: the embedded default model on the built-in problems with `execution_reward`, until both sides have generated
  `--tokens` tokens, with the same problems per update and a constant learning rate each; then the share of held-out
  problems that either team solves, measured by the same code.
"""

import argparse
import functools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


SETTING = {
    "algorithm": "magrpo",
    "num_agents": 2,
    "num_turns": 1,
    "num_generations": 4,
    "vocab_size": 320,
    "prompt_length": 48,  # words of a problem
    "new_tokens": 64,
    "num_problems": 16,
    "epochs": 4,
    "joint_mode": "align",
    "steps": 1,  # optimizer steps of our side per batch
    "micro_batch": 32,  # rows of one forward and backward pass of our side
}
SPEED = {
    "one_turn": SETTING,
    "tree": SETTING | {"num_turns": 2, "epochs": 1},
    "vocabulary": SETTING | {"vocab_size": 32_000, "new_tokens": 128, "epochs": 1, "micro_batch": 1},
    "maac": SETTING | {"algorithm": "maac"},
}
WANTED = {"one_turn": 5, "tree": 4, "vocabulary": 8, "maac": 5}  # times CoMLRL's tokens per second
OWN_BATCH = ("one_turn", "tree", "vocabulary")
CASES = (*SPEED, "own_batch", "cross", "learning")
LEARNING = {"num_generations": 4, "new_tokens": 32, "batch": 8}  # as recipes/configs/builtin.yaml
DIFFERENCE = (
    "CoMLRL: all parameters of one model per agent. Ours: one LoRA of rank 16 on a base that the agents share."
)


# What a measured process does, on either side


class Work:
    """Counts generated tokens, those after the end of a reply aside, and optimizer steps, whoever makes them."""

    def __init__(self, eos_token_id):
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from transformers import GenerationMixin

        self.tokens = self.updates = 0
        generate = GenerationMixin.generate

        def counted(model, *args, **kwargs):
            output = generate(model, *args, **kwargs)
            sequences = output["sequences"] if isinstance(output, dict) else output
            ends = (sequences[:, kwargs["input_ids"].shape[1] :] == eos_token_id).int()
            self.tokens += (ends.cumsum(1) == ends).sum().item()
            return output

        GenerationMixin.generate = counted
        register_optimizer_step_post_hook(self._count_step)

    def _count_step(self, *args):
        self.updates += 1

    def of(self, train):
        """What `train` does, and how long it takes."""
        self.tokens = self.updates = 0
        started, started_cpu = time.perf_counter(), time.process_time()
        train()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": self.tokens, "updates": self.updates}


def measure_speed(side, setting):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(setting["model"])
    make = {"ours": our_trainer, "comlrl": comlrl_trainer}[side]
    work, problems = Work(tokenizer.eos_token_id), make_problems(setting)
    make(setting | {"batch": 2, "epochs": 1}, tokenizer, problems[:2])()  # warms up
    return work.of(make(setting, tokenizer, problems))


def make_problems(setting):
    """Problems of random words."""
    rng = random.Random(0)
    words = range(setting["num_agents"], setting["vocab_size"] - 2)
    return [
        {"prompt": " ".join(f"w{rng.choice(words)}" for _ in range(setting["prompt_length"]))}
        for _ in range(setting["num_problems"])
    ]


def first_prompt(agent, problem):
    return f"w{agent} {problem['prompt']}"


def next_prompt(prompt, reply):
    return f"{prompt} {reply} w0"


def reward_of(text):
    words = text.split()
    return len(set(words)) / max(1, len(words))


def replies_per_agent(setting):
    """Replies of one agent to one problem, over all turns of the tree."""
    return sum(setting["num_generations"] ** turn for turn in range(1, setting["num_turns"] + 1))


def our_trainer(setting, tokenizer, problems):
    from datasets import Dataset

    from marcog_trl import Agent, MultiAgentGRPOTrainer, MultiAgentPPOTrainer, Workflow

    class Team(Workflow):
        """Agents that write at the same moment and, in a second turn, have their own reply before them."""

        agents = tuple(Agent(f"agent{i}", f"w{i}") for i in range(setting["num_agents"]))
        num_turns = setting["num_turns"]

        def play(self, problem):
            prompts = {agent.name: first_prompt(i, problem) for i, agent in enumerate(self.agents)}
            for _ in range(self.num_turns):
                replies = yield prompts
                prompts = {name: next_prompt(prompts[name], replies[name]) for name in prompts}

        def solution(self, problem, replies):
            return " ".join(replies.values())

    def reward(completions, **kwargs):
        return [reward_of(completion) for completion in completions]

    rows = setting["batch"] * setting["num_agents"] * replies_per_agent(setting) // setting["steps"]
    micro = math.gcd(rows, setting["micro_batch"])
    trainer_class, own = {
        "magrpo": (
            MultiAgentGRPOTrainer,
            {
                "num_turns": setting["num_turns"],
                "turn_tree": setting["num_turns"] > 1,
                "joint_mode": setting["joint_mode"],
                "scale_rewards": "group",
            },
        ),
        "maac": (MultiAgentPPOTrainer, {"critic": "team", "gamma": 1.0, "lam": 1.0, "lam_turn": 0.0}),
    }[setting["algorithm"]]
    args = our_args(
        trainer_class,
        f"{setting['model']}-run",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        steps_per_generation=setting["steps"] * (rows // micro),
        num_generations=setting["num_generations"],
        max_completion_length=setting["new_tokens"],
        merge_for_generation=True,
        generation_kwargs={"suppress_tokens": tokenizer.all_special_ids},
        num_train_epochs=setting["epochs"],
        learning_rate=1e-5,
        **own,
    )
    dataset = Dataset.from_list(problems)
    trainer = trainer_class(setting["model"], reward, args, dataset, processing_class=tokenizer, workflow=Team())
    return trainer.train


def our_args(trainer_class, folder, **kwargs):
    return trainer_class._config_class(
        folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **kwargs,
    )


def comlrl_trainer(setting, tokenizer, problems):
    from comlrl.trainers.actor_critic.maac import MAACTrainer
    from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer
    from datasets import Dataset

    def reward(*replies):
        return [reward_of(" ".join(joint)) for joint in zip(*replies, strict=True)]

    def next_prompts(prompt_history_per_agent, agent_completions, **kwargs):
        histories = zip(prompt_history_per_agent, agent_completions, strict=True)
        return [next_prompt(prompts[-1], reply) for prompts, reply in histories]

    agents = range(setting["num_agents"])
    buffer = setting["batch"] * replies_per_agent(setting)
    is_maac = setting["algorithm"] == "maac"
    args = comlrl_args(
        setting["algorithm"],
        num_agents=len(agents),
        num_generations=setting["num_generations"],
        num_turns=setting["num_turns"],
        external_prompt_passthrough=True,
        max_new_tokens=setting["new_tokens"],
        rollout_buffer_size=buffer if is_maac else buffer // setting["num_generations"],
        num_train_epochs=setting["epochs"],
        agent_learning_rate=1e-5,
    )
    trainer_class, own = (MAACTrainer, {"critics": [setting["model"]]}) if is_maac else (MAGRPOTrainer, {})
    trainer = trainer_class(
        agents=[setting["model"]] * len(agents),
        tokenizer=tokenizer,
        train_dataset=Dataset.from_list(problems),
        reward_func=reward,
        formatters=[functools.partial(first_prompt, agent) for agent in agents],
        external_transition=next_prompts,
        args=args,
        **own | ({} if is_maac else {"num_agents": len(agents)}),
    )
    # MAAC takes this from the model's own generation configuration
    return trainer.train if is_maac else functools.partial(trainer.train, suppress_tokens=tokenizer.all_special_ids)


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


# Learning


def our_learning(setting):
    """Trains a team with this package and saves its adapter."""
    from transformers import AutoTokenizer, TrainerCallback

    from marcog_trl import MultiAgentGRPOTrainer, load_problems

    work = Work(AutoTokenizer.from_pretrained(setting["model"]).eos_token_id)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = work.tokens >= setting["tokens"]

    args = our_args(
        MultiAgentGRPOTrainer,
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
    )
    trainer = MultiAgentGRPOTrainer(
        setting["model"], "execution_reward", args, load_problems("builtin", "train"), callbacks=[Stop()]
    )
    figures = work.of(trainer.train)
    trainer.save_model(setting["folder"])
    return figures


def comlrl_learning(setting):
    """Trains a team with CoMLRL and saves its models; the reward comes from our interpreter, see `judge`."""
    import torch
    from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    work = Work(tokenizer.eos_token_id)
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
        command(setting["python"], "judge", {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def judge():
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


def evaluate(setting):
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


TASKS = {
    "speed": lambda setting: measure_speed(setting["side"], setting),
    "our_learning": our_learning,
    "comlrl_learning": comlrl_learning,
    "evaluate": evaluate,
}


# The process that compares


def command(python, task, setting):
    # -P: this script's folder would put the script in the place of the package comlrl
    return [python, "-P", __file__, "--task", task, json.dumps(setting)]


def run(python, task, setting):
    """One measurement in a process of its own."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        # Memory of tensors up to 32 MiB is kept, or its pages are cleared anew for each of them
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    }
    process = subprocess.run(
        command(python, task, setting), env=os.environ | environment, capture_output=True, text=True
    )
    if process.returncode != 0:
        sys.exit(f"{python}, {task} {setting}:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def make_model(folder, vocab_size):
    """A random Qwen2, and a tokenizer of whole words, so that a reply has the same tokens when it is prompted again."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<end>", *(f"w{i}" for i in range(vocab_size - 2))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config.suppress_tokens = tokenizer.all_special_ids  # no reply ends early
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def take_turns(pythons, settings, rounds):
    """Figures of every competitor, round by round: A, B, A, B, ..."""
    figures = {name: [] for name in settings}
    for _ in range(rounds):
        for name, setting in settings.items():
            figures[name].append(run(pythons[setting["side"]], "speed", setting))
    return figures


def rate(figure):
    return figure["tokens"] / figure["seconds"]


def ratios_of(ours, theirs):
    """Median and range of the ratios of rates, round by round."""
    ratios = [rate(a) / rate(b) for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def make_table(title, *columns):
    from rich.table import Table  # here, because CoMLRL's environment need not have it

    table = Table(title=title, caption=DIFFERENCE)
    for column in columns:
        table.add_column(column, justify="left" if column in ("side", "team") else "right")
    return table


def speed_table(title):
    return make_table(title, "batch", "side", "tokens", "updates", "seconds", "tokens/s", "ratio")


def add_row(table, batch, side, figures, ratio=""):
    middle = sorted(figures, key=rate)[len(figures) // 2]
    table.add_row(
        str(batch), side, str(middle["tokens"]), str(middle["updates"]), f"{middle['seconds']:.1f}",
        f"{statistics.median(map(rate, figures)):,.0f}", ratio,
    )  # fmt: skip


def show(ratios):
    return "{:.2f} ({:.2f} to {:.2f})".format(*ratios)


def compare_speed(case, options, pythons, model):
    table, results = speed_table(f"{case}: wanted {WANTED[case]} x CoMLRL"), {}
    for batch in options.batches:
        setting = SPEED[case] | {"batch": batch, "model": model}
        # optimizer steps that CoMLRL makes while it updates every policy once
        each = setting["num_agents"] * (2 if setting["algorithm"] == "maac" else 1)
        turns = setting["num_turns"]
        settings = {
            "comlrl": setting | {"side": "comlrl"},
            "ours": setting | {"side": "ours", "steps": turns},
            "ours, as many steps": setting | {"side": "ours", "steps": each * turns},
        }
        figures = take_turns(pythons, settings, options.rounds)
        theirs = figures["comlrl"][0]
        for name, steps in (("ours", theirs["updates"] // each), ("ours, as many steps", theirs["updates"])):
            done = {(figure["tokens"], figure["updates"]) for figure in figures[name]}
            if done != {(theirs["tokens"], steps)}:
                sys.exit(f"{case}: {name} did {done} tokens and updates, CoMLRL {theirs}")
        add_row(table, batch, "CoMLRL", figures["comlrl"])
        ratios = {name: ratios_of(figures[name], figures["comlrl"]) for name in settings if name != "comlrl"}
        for name, found in ratios.items():
            add_row(table, batch, name, figures[name], show(found))
        results[batch] = figures | {"ratios": ratios}
    return table, results


def compare_own_batch(case, options, pythons, model):
    table, results = speed_table(f"{case}, where each side takes its fastest batch"), {}
    settings = {
        (side, batch): SPEED[case] | {"side": side, "batch": batch, "model": model}
        for batch in options.batches
        for side in pythons
    }
    figures = take_turns(pythons, settings, options.rounds)
    best = {
        side: max(
            (name for name in figures if name[0] == side), key=lambda name: statistics.median(map(rate, figures[name]))
        )
        for side in pythons
    }
    ratios = ratios_of(figures[best["ours"]], figures[best["comlrl"]])
    for side, title in (("comlrl", "CoMLRL"), ("ours", "ours")):
        for batch in options.batches:
            is_best = best[side] == (side, batch)
            mark = ("best: " + show(ratios) if side == "ours" else "best") if is_best else ""
            add_row(table, batch, title, figures[side, batch], mark)
    results = {f"{side}, {batch}": rounds for (side, batch), rounds in figures.items()}
    return table, results | {"ratios": ratios}


def compare_cross(options, pythons, model):
    table = speed_table("cross with 3 agents and 4 generations: wanted at most 1.3 x the seconds of align")
    results = {}
    for batch in options.batches:
        settings = {
            mode: SETTING | {"num_agents": 3, "joint_mode": mode, "side": "ours", "batch": batch, "model": model}
            for mode in ("align", "cross")
        }
        figures = take_turns(pythons, settings, options.rounds)
        ratios = ratios_of(figures["align"], figures["cross"])
        add_row(table, batch, "ours, align", figures["align"])
        add_row(table, batch, "ours, cross", figures["cross"], show(ratios))
        results[batch] = figures | {"ratios": ratios}
    return table, results


def compare_learning(options, pythons, folder):
    from transformers import AutoTokenizer

    from marcog_trl import Collaboration, load_problems
    from marcog_trl.embedded import build_default_model

    model = build_default_model()
    tokenizer, workflow = AutoTokenizer.from_pretrained(model), Collaboration()
    openings = [next(workflow.play(problem)) for problem in load_problems("builtin", "train")]
    problems = [
        {"index": index}
        | {
            agent: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            for agent, messages in opening.items()
        }
        for index, opening in enumerate(openings)
    ]
    (folder / "problems.json").write_text(json.dumps(problems))
    setting = LEARNING | {
        "model": model, "tokens": options.tokens, "python": sys.executable, "problems": str(folder / "problems.json"),
    }  # fmt: skip
    table = make_table(
        f"built-in problems, {options.tokens:,} generated tokens, learning rates {options.learning_rate} (ours) and "
        f"{options.comlrl_learning_rate} (CoMLRL)",
        *("team", "seed", "tokens", "updates", "seconds", "solved, sampled", "solved, greedy"),
    )

    def add(title, seed, agents, training=None):
        figures = run(sys.executable, "evaluate", setting | {"agents": agents})
        cells = [f"{figures[name]:.3f} ± {figures[f'{name}_interval']:.3f}" for name in ("sampled", "greedy")]
        effort = (
            [str(training["tokens"]), str(training["updates"]), f"{training['seconds']:.0f}"] if training else [""] * 3
        )
        table.add_row(title, seed, *effort, *cells)
        return (training or {}) | figures

    results = {"untrained": add("untrained", "", dict.fromkeys(("helper", "main"), model)), "ours": [], "comlrl": []}
    for seed in range(options.seeds):
        own, their = folder / f"ours{seed}", folder / f"comlrl{seed}"
        training = run(
            pythons["ours"], "our_learning",
            setting | {"seed": seed, "folder": str(own), "learning_rate": options.learning_rate},
        )  # fmt: skip
        results["ours"].append(add("ours", str(seed), dict.fromkeys(("helper", "main"), str(own)), training))
        training = run(
            pythons["comlrl"], "comlrl_learning",
            setting | {"seed": seed, "folder": str(their), "learning_rate": options.comlrl_learning_rate},
        )  # fmt: skip
        agents = {"helper": str(their / "agent_0"), "main": str(their / "agent_1")}
        results["comlrl"].append(add("CoMLRL", str(seed), agents, training))
    return table, results


def versions(python):
    """Versions of what a side is made of."""
    code = (
        "import json, sys, importlib.metadata as m; found = {d.name.lower(): d.version for d in m.distributions()}; "
        "names = ('comlrl', 'marcog-trl', 'trl', 'peft', 'transformers', 'torch'); "
        "print(json.dumps({'python': sys.version.split()[0]} | {name: found[name] for name in names if name in found}))"
    )
    return json.loads(subprocess.run([python, "-P", "-c", code], check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comlrl-python", help="interpreter of the virtual environment that has CoMLRL")
    parser.add_argument("--case", choices=(*CASES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 16], help="problems per batch; divisors of 16")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens that each side generates while it learns")
    parser.add_argument("--seeds", type=int, default=1, help="training runs of each side in `learning`")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="ours, in `learning`")
    parser.add_argument("--comlrl-learning-rate", type=float, default=3e-4, help="CoMLRL's, in `learning`")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    parser.add_argument("--task", nargs=2, metavar=("TASK", "SETTING"), help="one measurement, in this process")
    options = parser.parse_args()
    if options.task is not None:
        task, setting = options.task
        if task == "judge":
            judge()
        else:
            print(json.dumps(TASKS[task](json.loads(setting))))
        return
    needs_comlrl = "comlrl/bin/python of an environment with comlrl==1.4.3 works"
    if options.comlrl_python is None and options.case != "cross":
        parser.error(f"--comlrl-python is missing; {needs_comlrl}")
    if options.comlrl_python is not None and shutil.which(options.comlrl_python) is None:
        parser.error(f"--comlrl-python {options.comlrl_python} is no program; {needs_comlrl}")
    for batch in options.batches:
        if batch < 1 or SETTING["num_problems"] % batch:
            parser.error(f"--batches {batch} does not divide {SETTING['num_problems']} problems; 2 works")
    from rich.console import Console

    pythons = {"ours": sys.executable, "comlrl": options.comlrl_python}
    pythons = {side: python for side, python in pythons.items() if python is not None}
    results = {"versions": {side: versions(python) for side, python in pythons.items()}}
    if "comlrl" in pythons and "comlrl" not in results["versions"]["comlrl"]:
        parser.error(f"--comlrl-python {options.comlrl_python} has no package comlrl; {needs_comlrl}")
    console = Console()
    console.print(results["versions"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in CASES if options.case == "all" else [options.case]:
            if case == "learning":
                tables = {case: compare_learning(options, pythons, folder)}
            elif case == "cross":
                model = make_model(folder / "320", SETTING["vocab_size"])
                tables = {case: compare_cross(options, pythons, model)}
            else:
                compare = compare_own_batch if case == "own_batch" else compare_speed
                tables = {}
                for speed in OWN_BATCH if case == "own_batch" else [case]:
                    vocab_size = SPEED[speed]["vocab_size"]
                    model = make_model(folder / str(vocab_size), vocab_size)
                    tables[speed] = compare(speed, options, pythons, model)
            for key, (table, figures) in tables.items():
                console.print(table)
                results[key if key == case else f"{case}, {key}"] = figures
            if options.output is not None:
                options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
