"""
What zero_shot.py and capacity.py train: teams whose agents each write one step of a chain, and the small model that knows such problems.

A problem lists k steps, "1. keep the even numbers.\\n2. add 3 to each number.", and agent j writes the function of step j. Steps are
those of the built-in problems that turn a list into a list, so any sequence fits. No code is run: a function is right if it is the
reference, and a problem is solved if all its functions are right.
"""

import inspect
import random
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import fmean as mean

from marcog_trl import Agent, Slot, Workflow
from marcog_trl.agents import ask
from marcog_trl.embedded import BuildSettings
from marcog_trl.problems.builtin import STEPS


CHAIN_STEPS = {
    name: replace(step, ks=step.ks[:3]) for name, step in STEPS.items() if step.takes == step.gives == "numbers"
}
SPLITS = ("test", "test", "validation", "train", "train", "train", "train", "train", "train", "train")
SIZES = tuple(range(2, 9))


# Problems


def make_problems(split, num_steps, count, seed=0, meanings=None):
    """
    Problems of a split, as rows. No sequence of steps is in two splits. `wanted` has the functions that solve a problem: the right
    ones, or those that `meanings` names.
    """
    rng = random.Random(f"{split} {num_steps} {seed}")
    rows = []
    while len(rows) < count:
        names = rng.sample(list(CHAIN_STEPS), num_steps)
        if SPLITS[zlib.crc32(" ".join(names).encode()) % len(SPLITS)] != split:
            continue
        ks = [rng.choice(CHAIN_STEPS[name].ks) for name in names]
        lines = [
            f"{j}. {CHAIN_STEPS[name].text.format(k=k)}." for j, (name, k) in enumerate(zip(names, ks, strict=True), 1)
        ]
        row = {"prompt": "\n".join(lines), "steps": names, "ks": ks}
        wanted = [variants(row, j)[0 if meanings is None else meanings[j, name]] for j, name in enumerate(names, 1)]
        rows.append(row | {"wanted": wanted})
    return rows


def draw_meanings(kind, num_agents, seed):
    """Which of the three functions of a step is meant: (agent, step) → index. In `"agree"` it is the same for all agents."""
    rng = random.Random(f"meanings {seed}")
    common = {name: rng.randrange(3) for name in CHAIN_STEPS}
    own = {(j, name): rng.randrange(3) for j in range(1, num_agents + 1) for name in CHAIN_STEPS}
    return {key: common[key[1]] for key in own} if kind == "agree" else own


def write_step(problem, j, expression=None):
    """The function of step j of a problem, from 1 on, with another expression in place of the right one."""
    step, k = CHAIN_STEPS[problem["steps"][j - 1]], problem["ks"][j - 1]
    return f"def step{j}(x):\n    return {(expression or step.code).format(x='x', k=k)}"


def variants(problem, j):
    """The three functions of step j of a problem: the right one, and its two mistakes."""
    step = CHAIN_STEPS[problem["steps"][j - 1]]
    return [write_step(problem, j, expression) for expression in (step.code, *step.mistakes)]


# Workflows


class Chain(Workflow):
    """
    Agent j writes step j, and its prompt says so.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Number of agents.
        num_steps (`int`, *optional*): Number of steps, if agents write further steps, as copies of them would: agent 1 then also
            writes step `num_agents + 1`, and so on.
    """

    role = "You write step {}."

    def __init__(self, num_agents=2, num_steps=None):
        self.agents = tuple(Agent(f"agent{j}", self.role.format(j)) for j in range(1, num_agents + 1))
        steps = range(num_agents if num_steps is None else num_steps)
        self.slots = tuple(Slot(self.agents[j % num_agents].name, act=j // num_agents) for j in steps)

    def opening(self, j):
        """What a prompt says before the problem."""
        return self.role.format(j)

    def play(self, problem):
        written = []
        for start in range(0, len(self.slots), len(self.agents)):
            slots = self.slots[start : start + len(self.agents)]
            replies = yield {slot: ask(self.opening(j), problem["prompt"]) for j, slot in enumerate(slots, start + 1)}
            written += [replies[slot.agent] for slot in slots]
        return "\n\n\n".join(written)


class SamePrompts(Chain):
    """The same with one prompt for all agents. Only LatentNet sees the role texts."""

    def opening(self, j):
        return "You write one of the steps."


class OwnWay(Chain):
    """Agents write the steps in their own way: each may mean something else by the same words."""

    role = "You write step {} in your own way."


WORKFLOWS = {workflow.__name__: workflow for workflow in (Chain, SamePrompts, OwnWay)}


def own_step(replies, wanted, **columns):
    """1 for each agent that wrote the function that is wanted from it, else 0."""
    return [
        {agent: float(text == target) for (agent, text), target in zip(written.items(), targets, strict=True)}
        for written, targets in zip(replies, wanted, strict=True)
    ]


def measure(team, problems, num_samples):
    """
    Figures of a team, one number per problem, sampled and greedy: `"sampled/own"`, the share of steps that their agents took on;
    `"sampled/right"`, the share of right functions; `"sampled/solved"`, whether all functions are right.
    """
    import torch

    figures = {}
    for decoding, count in (("sampled", num_samples), ("greedy", 1)):
        torch.manual_seed(0)
        with team.evaluating(), team.greedy() if decoding == "greedy" else nullcontext():
            episodes = team.play([problem for problem in problems for _ in range(count)])
        found = []  # of each episode
        for episode in episodes:
            texts = [row.text for row in episode.rows]
            own = mean(text in variants(episode.problem, j) for j, text in enumerate(texts, 1))
            right = mean(text == target for text, target in zip(texts, episode.problem["wanted"], strict=True))
            found.append({"own": own, "right": right, "solved": float(right == 1)})
        figures |= {
            f"{decoding}/{name}": [
                mean(one[name] for one in found[i : i + count]) for i in range(0, len(found), count)
            ]
            for name in found[0]
        }
    return figures


def train(condition, model, seed, tokens, problems, folder, peft_config=None):
    """
    Trains a team with the reward `own_step` until it has generated `tokens` tokens, and saves it.

    Returns:
        `dict`: `rewards`, the mean reward of each step, and `ledger`.
    """
    from datasets import Dataset
    from learning import make_trainer
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = trainer.used["tokens"] >= tokens

    condition = replace(condition, rewards=(own_step,))
    trainer = make_trainer(condition, model, seed, Dataset.from_list(problems), folder, peft_config)
    trainer.add_callback(Stop())
    began = time.perf_counter()
    if condition.trained:
        trainer.train()
    seconds = time.perf_counter() - began
    trainer.save_model()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    ledger = trainer.used | {"optimizer_steps": trainer.state.global_step, "training_seconds": seconds}
    return {"rewards": [entry["reward"] for entry in history], "ledger": ledger}


# The model


@dataclass(frozen=True)
class ChainBuildSettings(BuildSettings):
    """
    Settings of the model. Other fields are those of the embedded default model.

    Args:
        habit_share (`float`, *optional*, defaults to `0.5`): Share of the steps with a habitual mistake.
    """

    steps: int = 750
    clean_steps: int = 560
    vocab_size: int = 320
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 3
    habit_share: float = 0.5


LESSONS = {"Chain": 0.4, "SamePrompts": 0.3, "OwnWay": 0.3}  # shares of the examples
TEXTS = [step.text.format(k=k) for step in CHAIN_STEPS.values() for k in step.ks]
WHOLES = (
    *(f"{j}. {text}." for j in range(1, max(SIZES) + 1) for text in TEXTS),
    "You write step ",
    "def step",
    "You write one of the steps.",
    " in your own way.",
    "(x):\n    return ",
    " for v in x",
)
"""Texts that are one token each, so that small a model learns fast to find a line by its number."""


def draw_habits(settings):
    """The habitual mistake of each step that has one, whoever writes it."""
    rng = random.Random(f"chain habits {settings.seed}")
    chosen = rng.sample(list(CHAIN_STEPS), round(settings.habit_share * len(CHAIN_STEPS)))
    return {name: rng.choice(CHAIN_STEPS[name].mistakes) for name in chosen}


def chain_model(folder, **changes):
    """The path of the model, which is built in `folder` unless it is there."""
    from common import built_once

    settings = ChainBuildSettings(**changes)
    parts = [
        asdict(settings),
        LESSONS,
        WHOLES,
        inspect.getsource(make_problems),
        inspect.getsource(build),
        inspect.getsource(make_examples),
    ]
    return built_once(folder, parts, lambda target: build(settings, target))


def build(settings, folder):
    """Build tokenizer and model, and save them."""
    import torch
    import transformers

    from marcog_trl.embedded import add_wholes, fit, make_model, make_tokenizer

    torch.set_num_threads(1)
    transformers.set_seed(settings.seed)
    sample = [row for size in SIZES for row in make_problems("train", size, 200)]
    replies = [text for row in sample for j in range(1, len(row["steps"]) + 1) for text in variants(row, j)]
    tokenizer = make_tokenizer([*(row["prompt"] for row in sample), *replies], settings.vocab_size)
    add_wholes(tokenizer, WHOLES)
    model = make_model(tokenizer, settings)
    embeddings = model.get_input_embeddings().weight.data
    for text in TEXTS:  # each line starts as the sum of its number and its text, or the model would hardly find a line
        vector = torch.randn(settings.hidden_size) * model.config.initializer_range
        for j in range(1, max(SIZES) + 1):
            token, number = tokenizer.convert_tokens_to_ids([f"{j}. {text}.", str(j)])
            embeddings[token] = embeddings[number] + vector
    fit(model, tokenizer, make_examples(tokenizer, settings), settings, folder)


def make_examples(tokenizer, settings):
    """Prompts of all workflows and sizes, in order. At first, replies are right; then they have the model's habits and slips."""
    from marcog_trl.embedded import draw_mistake
    from marcog_trl.rollout.engine import encode_prompts

    rng, habits = random.Random(f"chain replies {settings.seed}"), draw_habits(settings)
    problems = {size: make_problems("train", size, 2000, seed="lessons") for size in SIZES}
    examples, total = [], settings.steps * settings.batch_size
    for i, name in enumerate(rng.choices(list(LESSONS), LESSONS.values(), k=total)):
        longest = min(
            max(SIZES), 2 + 12 * i // total
        )  # short problems first: with long ones, it would learn to find lines late
        row = rng.choice(problems[rng.randint(2, longest)])
        j = rng.randint(1, len(row["steps"]))
        step = CHAIN_STEPS[row["steps"][j - 1]]
        mistake = None
        if name == "OwnWay":
            mistake = rng.choice((None, *step.mistakes))
        elif i >= settings.clean_steps * settings.batch_size:
            mistake = draw_mistake(step, habits, settings, rng)
        [context] = encode_prompts(tokenizer, [ask(WORKFLOWS[name]().opening(j), row["prompt"])])
        reply = tokenizer(write_step(row, j, mistake))["input_ids"] + [tokenizer.eos_token_id]
        examples.append({"input_ids": context + reply, "labels": [-100] * len(context) + reply})
    return examples
