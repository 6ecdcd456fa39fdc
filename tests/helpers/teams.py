"""Small teams, trainers in one line, and rollouts from a script, for all tests."""

import inspect
import zlib
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from marcog_trl.agents import Agent, Slot, Workflow
from marcog_trl.rollout.records import Row
from marcog_trl.trainers import (
    MultiAgentConfig,
    MultiAgentGRPOConfig,
    MultiAgentGRPOTrainer,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    MultiAgentTrainer,
    SHPPOConfig,
    SHPPOTrainer,
)


CONFIGS = {
    MultiAgentTrainer: MultiAgentConfig,
    MultiAgentGRPOTrainer: MultiAgentGRPOConfig,
    MultiAgentPPOTrainer: MultiAgentPPOConfig,
    SHPPOTrainer: SHPPOConfig,
}
# A training of a few short steps, on any machine, that writes nothing
QUIET = {
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False, "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "lr_scheduler_type": "constant",
}  # fmt: skip
VOCABULARY = 300  # of the tiny model, special tokens and the rarest left out
EOS = 1


class Pair(Workflow):
    """Agents that speak at the same moment, once per turn; prompts name the agent and the turn."""

    def __init__(self, names=("a", "b"), num_turns=1):
        self.agents = tuple(Agent(name, f"You are {name}.") for name in names)
        self.num_turns = num_turns

    def play(self, problem):
        for turn in range(self.num_turns):
            yield {agent.name: f"{problem['prompt']} {agent.name}{turn}" for agent in self.agents}

    def solution(self, problem, replies):
        return "|".join(replies[agent.name] for agent in self.agents)


class Chain(Pair):
    """Agents that speak one after the other; each prompt ends in the reply before."""

    def play(self, problem):
        text = ""
        for turn in range(self.num_turns):
            for agent in self.agents:
                replies = yield {agent.name: f"{problem['prompt']} {agent.name}{turn}{text}"}
                text = " " + replies[agent.name]

    def solution(self, problem, replies):
        return replies[self.agents[-1].name]


class Short(Pair):
    """A second act of agent a, and a second turn, in problems that ask for them: other episodes leave slots unused."""

    def __init__(self):
        super().__init__(num_turns=2)
        self.slots = (Slot("a"), Slot("b"), Slot("a", act=1), Slot("a", turn=1), Slot("b", turn=1))

    def play(self, problem):
        prompt = problem["prompt"]
        yield {"a": f"{prompt} a", "b": f"{prompt} b"}
        if "more" in prompt:
            yield {"a": f"{prompt} again"}
            yield {"a": f"{prompt} a1", "b": f"{prompt} b1"}


def dataset(count=4, **columns):
    return Dataset.from_dict({"prompt": [f"def f{i}(x):" for i in range(count)], **columns})


def letters(completions, **kwargs):
    """A reward that differs between any two completions."""
    return [sum(map(ord, completion)) % 17 / 8 - 1 for completion in completions]


def make(model, path, trainer=MultiAgentPPOTrainer, reward=letters, data=..., lora=None, generation=None, **options):
    """
    A trainer of a few short steps. `options` are fields of its configuration, or arguments of the trainer.

    LoRA's B is random by default, so that the adapter acts and all of it has a gradient from the first step on. `generation` are
    options of `generate` that the configuration refuses.
    """
    names = inspect.signature(GRPOTrainer).parameters.keys() | {"workflow", "algorithm"}
    arguments = {name: options.pop(name) for name in names & options.keys() if not isinstance(options[name], str)}
    arguments.setdefault("peft_config", lora_config(**(lora or {})))
    config = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_grad_norm": 1e9,
        "weight_decay": 0.0,
        "shuffle_dataset": False,
        "max_logged_episodes": 0,
        **QUIET,
        **options,
    }
    if issubclass(trainer, MultiAgentPPOTrainer):
        config.setdefault("critic_learning_rate", 1e-2)
    data = dataset() if data is ... else data
    made = trainer(model, reward, CONFIGS[trainer](str(path), **config), data, **arguments)
    if generation:
        made.generation_config.update(**generation)
    return made


def lora_config(**options):
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return LoraConfig(task_type="CAUSAL_LM", **options)


def script(trainer, seed=0, length=6):
    """
    Makes every reply of the trainer's model random tokens, which depend on the prompt and on how often it was asked.

    Returns the list to which every generate call adds its `(prompt ids, completion ids)`.
    """
    asked = Counter()
    calls = []

    def reply(prompt):
        asked[prompt] += 1
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, prompt, asked[prompt])).encode()))
        size = int(torch.randint(2, length + 1, (), generator=generator))
        tokens = torch.randint(5, VOCABULARY, (size,), generator=generator).tolist()
        return tokens if size == length else [*tokens[:-1], EOS]

    def generate(prompt_ids, *rest):
        replies = [reply(tuple(prompt)) for prompt in prompt_ids]
        calls.append((prompt_ids, replies))
        return replies, None

    trainer._generate_single_turn = generate
    return calls


def recite(trainer, *calls):
    """Makes the model reply with the given token ids: one list of replies per generate call."""
    remaining = iter(calls)
    trainer._generate_single_turn = lambda prompt_ids, *rest: (next(remaining), None)


def hold_critic(trainer, mean=0.0):
    """
    Keeps the moments of the critic, and of the network that judges latents: states are as they are, and values have this mean and a
    scale of 1.
    """
    head, inference = trainer.modules.value_head, trainer.modules.inference_net
    held = [(head.returns, mean), (head.states, 0.0)] + ([(inference.returns, mean)] if inference is not None else [])
    for moments, value in held:
        moments.mean.fill_(value)
        moments.square.fill_(value**2 + 1)
        moments.update = lambda values, sums: None


def change_credit(trainer, change):
    """Passes the credit of every batch through `change(batch, credit)`, which may alter it."""
    algorithm = trainer.algorithm
    credit_of = algorithm.credit

    def credit(batch):
        credit = credit_of(batch)
        change(batch, credit)
        return credit

    algorithm.credit = credit


def without_advantages(batch, credit):
    credit.advantages = torch.zeros_like(credit.advantages)


def randomize(module, seed=0, scale=0.05):
    """Moves a module away from its start, where zeros would hide what it does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)


class Watch(TrainerCallback):
    """Keeps the gradients of every optimizer step, and what was logged."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        )


def trainable(trainer):
    """Copies of the trainable parameters, by name."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def logged(trainer, name):
    """The values of a metric, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def generation_batch(trainer):
    """The scored generation batch of the trainer's first step, with the rows that no update trains on."""
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    with mock.patch("marcog_trl.trainers.trainer.rows_to_train", lambda batch, output, parts: output):
        return trainer._generate_and_score_completions(rows)


PROMPT = list(range(20, 60))


@torch.no_grad()
def live_logits(trainer, agent):
    """What the agent says after PROMPT, in the way in which evaluation plays it."""
    row = Row(0, Slot(agent), 0, "", PROMPT)
    trainer.model.eval()
    with nullcontext() if trainer.team._contexts is None else trainer.team._contexts.as_rows([row], None, False):
        return trainer.model(input_ids=torch.tensor([PROMPT])).logits
