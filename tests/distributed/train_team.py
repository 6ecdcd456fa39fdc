"""
Trains tiny teams, on as many processes as it is launched with, and writes what came out: see `test_modes.py`.

    accelerate launch --config_file recipes/zero3.yaml --num_processes 2 tests/distributed/train_team.py MODEL OUT RUN ...

Every RUN is one of those below. One launch makes several, since starting Python takes longer than training here.
"""

import gc
import os
import random
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tool_model import build_tool_model, call, multiply
from transformers import AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

from marcog_trl import (
    Agent,
    MADPOConfig,
    MADPOTrainer,
    MultiAgentGRPOConfig,
    MultiAgentGRPOTrainer,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    SHPPOConfig,
    SHPPOTrainer,
    Team,
    TeamRewardConfig,
    TeamRewardModel,
    TeamRewardTrainer,
    Workflow,
    save_untrained_team,
)
from marcog_trl.evaluation.evaluate import play_and_score
from marcog_trl.preferences.pairs import Candidate, as_dataset, describe_pair, identity, identity_of
from marcog_trl.processes import on_main
from marcog_trl.team.settings import TeamSettings
from marcog_trl.trainers.adapter_targets import outside_zero3


gc.freeze()  # accelerate collects garbage at the end of every training, and imports leave many objects
LONG = [True, False, False, False, False, True, True, True]


class Pair(Workflow):
    """Two agents at once, and once more where the problem is a long one: in a turn, a process may have nobody."""

    agents = (Agent("writer", "Write the function."), Agent("critic", "Say what is wrong with the function."))
    num_turns = 2

    def play(self, problem):
        replies = yield {agent.name: self._ask(agent, problem, "") for agent in self.agents}
        if problem["long"]:
            yield {agent.name: self._ask(agent, problem, replies["writer"]) for agent in self.agents}

    def _ask(self, agent, problem, draft):
        return [{"role": "user", "content": f"{agent.role} {problem['prompt']} {draft}"}]

    def solution(self, problem, replies):
        return replies["writer"]


class Rare(Pair):
    """The critic does not speak on one problem: if it alone is trained, the process of that problem has no row to train on."""

    def play(self, problem):
        agents = self.agents if problem["prompt"] != "Problem 1." else self.agents[:1]
        yield {agent.name: self._ask(agent, problem, "") for agent in agents}


def reward(completions, replies, **kwargs):
    """A number for each agent that depends on its text alone; now and then none for the episode."""
    rewards = []
    for completion, by_agent in zip(completions, replies, strict=True):
        if zlib.crc32(completion.encode()) % 7 == 0:
            rewards.append(None)
        else:
            silent = {} if "solver" in by_agent else {"critic": 0.0}
            rewards.append(silent | {agent: len(text) % 5 / 5 for agent, text in by_agent.items()})
    return rewards


def odd_problems_tie(completions, prompts, **kwargs):
    """Siblings earn the same in every other problem: in an update, one of two processes has no row with an advantage."""
    rewards = [zlib.crc32(completion.encode()) % 7 / 7 for completion in completions]
    return [1.0 if int(prompt[-2]) % 2 else reward for prompt, reward in zip(prompts, rewards, strict=True)]


class Recorded:
    """In place of sampling: the n-th reply to a prompt is always the same, on every process."""

    def _generate_single_turn(self, prompt_ids, *args):
        seen = self._replies_elsewhere(prompt_ids)
        completions = []
        for ids in map(tuple, prompt_ids):
            dice = random.Random(f"{ids} {seen[ids]}")
            seen[ids] += 1
            completions.append([dice.randrange(70, 250) for _ in range(dice.randint(1, 9))])
            completions[-1].append(self._tokenizer.eos_token_id)
        return completions, None

    def _replies_elsewhere(self, prompt_ids):
        return Counter()


class RecordedPPOTrainer(Recorded, MultiAgentPPOTrainer):
    pass


class RecordedGRPOTrainer(Recorded, MultiAgentGRPOTrainer):
    pass


class SplitGroups:
    """Siblings lie on all processes: those before have had as many of each prompt."""

    def _replies_elsewhere(self, prompt_ids):
        return Counter(map(tuple, prompt_ids * self.accelerator.process_index))


class RecordedSingleTrainer(SplitGroups, RecordedGRPOTrainer):
    pass


class RecordedSinglePPOTrainer(SplitGroups, RecordedPPOTrainer):
    pass


class WithTool(Pair):
    """The writer may call a tool, and does so in some of its replies."""

    agents = (replace(Pair.agents[0], tools=[multiply]), Pair.agents[1])


class RecordedToolTrainer(RecordedGRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *args):
        completions, _ = super()._generate_single_turn(prompt_ids, *args)
        texts = self._tokenizer.batch_decode(prompt_ids)
        made = self._tokenizer(call(a=3, b=4))["input_ids"]
        calls = ["# Tools" in text and ids[0] % 3 == 0 for text, ids in zip(texts, completions, strict=True)]
        return [made if calls[i] else ids for i, ids in enumerate(completions)], None


class RecordedSHPPOTrainer(Recorded, SHPPOTrainer):
    pass


# Some nodes end early, and half of the problems have one turn only: processes have different numbers of nodes
TREE = {"turn_tree": True, "early_termination_threshold": 0.4, "per_device_train_batch_size": 12, "gamma_turn": 0.5}
BRANCHES = {"credit": "counterfactual", "fanout": [2, 2], "num_generations": 4, "critic_mix": "auto"}
BRANCHES |= {"per_device_train_batch_size": 12, "advantage_normalization": "batch"}
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
SINGLE = {"workflow": "single", "num_generations": 4, "per_device_train_batch_size": 4 // PROCESSES}
SINGLE |= {"gradient_accumulation_steps": 1, "scale_rewards": "group", "num_generations_eval": 4}
# The first returns have a mean of 0 in units of the critic: all that the bias has as a gradient is rounding, which Adam enlarges
SIBLINGS = {**SINGLE, "critic_mix": "auto", "max_steps": 4, "adam_epsilon": 1e-4}
# Where one weight of LoRA has hardly any gradient, Adam enlarges the rounding of that
OBSERVATION = {"policy_gradient_to_latent": True, "max_grad_norm": 0.5, "adam_epsilon": 1e-6}
RECORDED = {
    "tree": (RecordedGRPOTrainer, MultiAgentGRPOConfig, TREE),
    "counterfactual": (RecordedPPOTrainer, MultiAgentPPOConfig, BRANCHES),
    "ppo": (RecordedPPOTrainer, MultiAgentPPOConfig, {"num_iterations": 2, "max_steps": 4}),
    "agent": (RecordedSHPPOTrainer, SHPPOConfig, {"latent_scope": "agent", "latent_distance": "minmax"}),
    "observation": (RecordedSHPPOTrainer, SHPPOConfig, OBSERVATION),
    "unclipped": (RecordedSHPPOTrainer, SHPPOConfig, {}),
    "checkpointing": (RecordedSHPPOTrainer, SHPPOConfig, {"gradient_checkpointing": True}),
    "separate": (RecordedSHPPOTrainer, SHPPOConfig, {"parameter_sharing": "separate"}),
    "some": (RecordedSHPPOTrainer, SHPPOConfig, {"trained_agents": ["critic"]}),
    "tools": (RecordedToolTrainer, MultiAgentGRPOConfig, {"max_completion_length": 100}),
    "full": (RecordedPPOTrainer, MultiAgentPPOConfig, {"full_finetuning": True, "gradient_checkpointing": True}),
    # A script for GRPOTrainer: two processes have half of a group each, and make one step of it
    "single": (RecordedSingleTrainer, MultiAgentGRPOConfig, SINGLE),
    "siblings": (RecordedSinglePPOTrainer, MultiAgentPPOConfig, SIBLINGS),
    "ties": (RecordedGRPOTrainer, MultiAgentGRPOConfig, {"beta": 0.0}),
}


def later_is_worse(completions, trainer_state, **kwargs):
    """Makes the first evaluation the best one."""
    return [-float(trainer_state.global_step)] * len(completions)


def make_trainer(model, folder, trainer_class, config_class, options, reward_func=reward, workflow=None):
    args = config_class(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4 // PROCESSES,
            "num_generations": 2,
            "max_completion_length": 6,
            "beta": 0.02,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-6,  # or Adam would divide rounding by gradients near 0
            **({"critic_learning_rate": 1e-3} if issubclass(config_class, MultiAgentPPOConfig) else {}),
            "max_steps": 3,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "shuffle_dataset": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "isolation": "best_effort",
            "report_to": "none",
            "disable_tqdm": True,
            "ddp_timeout": 120,
            **options,
        },
    )
    if args.deepspeed_plugin is not None:
        # Or none of the small tensors would be sharded
        args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    test = {"test": ["assert f(1)"], "test_format": "asserts", "entry_point": "f"}
    problems = [{"prompt": f"Problem {i}.", "long": long, **test} for i, long in enumerate(LONG)]
    return trainer_class(
        model,
        reward_func,
        args,
        train_dataset=Dataset.from_list(problems),
        eval_dataset=Dataset.from_list(problems[:3]),
        peft_config=None
        if args.full_finetuning
        else LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"),
        workflow=None if "workflow" in options else workflow or (Rare() if "trained_agents" in options else Pair()),
    )


def weights_of(trainer):
    """The whole trainable tensors."""
    weights = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            if is_deepspeed_zero3_enabled():
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    weights[name] = parameter.detach().cpu().clone()
            else:
                weights[name] = parameter.detach().cpu().clone()
    return weights


def result_of(trainer, before=None):
    """What a test wants to know; an error where the processes disagree, or where a mode is not what it says."""
    if is_deepspeed_zero3_enabled():
        assert all(parameter.numel() == 0 for parameter in trainer.model.parameters()), "not everything is sharded"
    weights, history = weights_of(trainer), trainer.state.log_history[:-1]
    timing = ("step_time", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    logs = [{key: value for key, value in entry.items() if not key.startswith(timing)} for entry in history]
    everywhere = gather_object([(weights, logs)])
    for other_weights, other_logs in everywhere[1:]:
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights), "ranks differ"
        assert str(logs) == str(other_logs), "ranks log different numbers"
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in weights.items()} if before else {}
    stage = trainer.accelerator.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else None
    mode = trainer.accelerator.num_processes, trainer.accelerator.distributed_type.value, stage
    return {"weights": weights, "logs": logs, "moved": moved, "mode": mode}


def recorded(model, folder, name):
    trainer_class, config_class, options = RECORDED[name]
    if name == "tools":
        model = str(folder / "model")
        on_main(lambda: build_tool_model(model))
    reward_func, workflow = odd_problems_tie if name == "ties" else reward, WithTool() if name == "tools" else None
    trainer = make_trainer(model, folder, trainer_class, config_class, options, reward_func, workflow)
    before = weights_of(trainer)
    trainer.train()
    trainer.save_model()
    return result_of(trainer, before)


def resumed(model, folder, name):
    """Sampled rollouts: a run that is evaluated before and meanwhile, and one that continues its checkpoint."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    trainer_class, config_class = SHPPOTrainer, SHPPOConfig
    if name == "resumed_full":
        trainer_class, config_class, options = (
            MultiAgentPPOTrainer,
            MultiAgentPPOConfig,
            {**options, "full_finetuning": True},
        )
    whole = make_trainer(model, folder, trainer_class, config_class, options)
    whole.model.eval()
    problems = list(whole.eval_dataset.select([whole.accelerator.process_index]))
    episodes = play_and_score(whole.team, whole.scorer, problems)()
    assert len(episodes[0].turns) == 1 + episodes[0].problem["long"]
    whole.model.train()
    whole.train()
    second = make_trainer(model, folder, trainer_class, config_class, options)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"whole": result_of(whole), "resumed": result_of(second)}


def best(model, folder, name):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
    trainer = make_trainer(model, folder, SHPPOTrainer, SHPPOConfig, options, later_is_worse)
    trainer.train()
    return result_of(trainer)


def make_pairs(team, size=0, count=8):
    """Pairs of random replies with latents of this size, the same on every process. `team` is the team's identity."""
    dice = random.Random(0)

    def side():
        return [
            {
                "agent": agent.name, "turn": turn, "act": 0, "latent": [dice.uniform(-1, 1) for _ in range(size)],
                "prompt_ids": [dice.randrange(70, 250) for _ in range(dice.randint(2, 9))],
                "completion_ids": [dice.randrange(70, 250) for _ in range(dice.randint(1, 6))],
            }
            for turn in range(dice.randint(1, 2)) for agent in Pair.agents
        ]  # fmt: skip

    problem = {"prompt": "Problem."}
    sides = [(Candidate(side(), 1.0, (1.0, 1.0)), Candidate(side(), 0.0, (0.0, 0.0))) for _ in range(count)]
    return as_dataset([describe_pair(team, problem, i, *pair) for i, pair in enumerate(sides)])


def reward_model(model, folder, name):
    pairs = make_pairs(identity(Pair(), AutoTokenizer.from_pretrained(model), None))
    args = TeamRewardConfig(
        str(folder), per_device_train_batch_size=2 // PROCESSES, gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=4,
        save_strategy="no", max_grad_norm=0.5, logging_steps=1, report_to="none", disable_tqdm=True, ddp_timeout=120,
    )  # fmt: skip
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    trainer = TeamRewardTrainer(model, args, pairs)
    before = weights_of(trainer)
    trainer.train()
    result = result_of(trainer, before)  # first: outside of training, ZeRO-3 keeps what a forward pass gathered
    trainer.save_model()
    with outside_zero3(args.deepspeed_plugin):
        saved = TeamRewardModel.from_pretrained(folder)
    transcripts = trainer.train_dataset["chosen_ids"]
    scores = trainer.reward_model().score(transcripts)
    return {**result, "scores": scores, "saved": saved.score(transcripts), "mean": saved.mean, "std": saved.std}


def madpo(model, folder, name):
    """A run with another team as the reference, and one that continues its checkpoint."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    settings = {"parameter_sharing": "latent", "num_turns": 2}
    config = MADPOConfig(str(folder))  # first, because it may shard what is loaded from now on

    def save():
        with outside_zero3(config.deepspeed_plugin):
            for seed, team in enumerate(("start", "reference")):
                # The reference has the same latents, since only adapters and cores are trained
                save_untrained_team(folder / team, model, TeamSettings(**settings), lora, Pair(), seed=seed)
            weights = load_file(folder / "start" / "team_modules.safetensors")
            save_file({**weights, "core_decoder.cores.weight": -weights["core_decoder.cores.weight"]},
                      folder / "reference" / "team_modules.safetensors")  # fmt: skip

    on_main(save)
    with outside_zero3(config.deepspeed_plugin):
        team = Team.from_pretrained(folder / "start", workflow=Pair())
    pairs = make_pairs(identity_of(team), team.settings.latent_size)
    results = []
    for resume in (None, True):
        args = MADPOConfig(
            str(folder), per_device_train_batch_size=2 // PROCESSES, gradient_accumulation_steps=2, learning_rate=1e-3,
            max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=2, lr_scheduler_type="linear", max_grad_norm=0.5,
            logging_steps=1, report_to="none", disable_tqdm=True, gamma_turn=0.5, num_train_epochs=2, ddp_timeout=120,
        )  # fmt: skip
        if args.deepspeed_plugin is not None:
            args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        trainer = MADPOTrainer(folder / "start", folder / "reference", args, train_dataset=pairs, workflow=Pair())
        before = weights_of(trainer)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        trainer.save_model()
        results.append(result_of(trainer, before))
    return {**results[0], "resumed": results[1]}


def main():
    model, out, *runs = sys.argv[1:]
    for name in runs:
        special = {function.__name__: function for function in (resumed, best, madpo, reward_model)}
        run = {**special, "resumed_full": resumed}.get(name, recorded)
        result = run(model, Path(out) / name, name)
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(result, Path(out) / f"{name}.pt")


if __name__ == "__main__":
    main()
