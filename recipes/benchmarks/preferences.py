"""
Compares the speed of MADPO with that of CoMLRL 1.4.3 on the same pairs. CoMLRL needs its own virtual environment:

    python -m venv comlrl && comlrl/bin/pip install comlrl==1.4.3 torch==2.13.0
    python recipes/benchmarks/preferences.py --comlrl-python comlrl/bin/python

Both sides run on the same machine with one thread and the same random Qwen2 (hidden size 64, 2 layers), 2 agents, prompts of 48
tokens and replies of up to 64. Nothing in CoMLRL is patched; a subclass gives its `train()` the pairs that it would generate.

Measured are pairs per second of `train()` after a warm-up, in float32, with `--batch` pairs per step and one epoch, and with 320 or
32,000 words; also per CPU second, which other work on the machine disturbs less. CoMLRL trains all parameters of one model per agent
and runs 4 forward and 2 backward passes per pair and agent, with one reply each; ours trains one LoRA of rank 16 that the agents share,
with one forward and one backward pass per step. `reference` is ours with DPO's reference, whose log-probabilities are computed in the
constructor and counted here.
"""

import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path


sys.path.append(str(Path(__file__).parent))  # last, since a file beside this one has the name of a package

import comlrl as comparison  # the file beside this one, or, on CoMLRL's side, the package, which is not used under this name
from common import (
    COMLRL_ENVIRONMENT,
    ON_CPU,
    QUIET,
    make_parser,
    measure_apart,
    read_sides,
    table,
    take_turns,
    with_range,
    write_json,
)


BETA = 0.1
TARGET = 3  # times CoMLRL's pairs per second
AGENTS = ("agent0", "agent1")


def make_pairs(count, vocab_size, eos_token_id=1):
    """Pairs of random replies of 64 tokens that end in EOS: by side, the token ids of each agent."""
    rng = random.Random(0)

    def words(size):
        return [rng.randrange(2, vocab_size) for _ in range(size)]

    pairs = []
    for _ in range(count):
        prompts = [words(48) for _ in AGENTS]
        sides = [[[*words(63), eos_token_id] for _ in AGENTS] for _ in "wl"]
        pairs.append({"prompts": prompts, "chosen": sides[0], "rejected": sides[1]})
    return pairs


# What a measured process does, on either side


def our_trainer(setting, pairs, reference="none"):
    from transformers import AutoTokenizer

    from marcog_trl import Agent, Workflow
    from marcog_trl.preferences import MADPOConfig, MADPOTrainer, save_untrained_team
    from marcog_trl.preferences.pairs import as_dataset, identity

    class Team(Workflow):
        agents = tuple(Agent(name, name) for name in AGENTS)

        def play(self, problem):
            yield {agent.name: problem["prompt"] for agent in self.agents}

        def solution(self, problem, replies):
            return " ".join(replies.values())

    folder = Path(f"{setting['model']}-team")
    save_untrained_team(folder, setting["model"], workflow=Team())
    team = identity(Team(), AutoTokenizer.from_pretrained(folder), None)

    def side(pair, name):
        replies = zip(AGENTS, pair["prompts"], pair[name], strict=True)
        return [
            {"agent": agent, "turn": 0, "act": 0, "prompt_ids": prompt, "completion_ids": ids, "latent": []}
            for agent, prompt, ids in replies
        ]

    rows = [
        {"task_id": str(i), "prompt": "", "turn": 0, "history": [], "team": team}
        | {"chosen": side(pair, "chosen"), "chosen_score": 1.0, "chosen_agent_scores": [1.0, 1.0]}
        | {"rejected": side(pair, "rejected"), "rejected_score": 0.0, "rejected_agent_scores": [0.0, 0.0]}
        for i, pair in enumerate(pairs)
    ]
    args = MADPOConfig(
        f"{setting['model']}-run",
        per_device_train_batch_size=setting["batch"],
        per_device_eval_batch_size=setting["batch"],
        num_train_epochs=1,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=BETA,
        reference=reference,
        **QUIET | ON_CPU,
    )
    return MADPOTrainer(folder, args=args, train_dataset=as_dataset(rows), workflow=Team())


def comlrl_trainer(setting, pairs):
    import torch
    from comlrl.trainers.preference.madpo import AgentPreferenceTensors, MADPOConfig, MADPOTrainer, PreferencePair
    from datasets import Dataset
    from transformers import AutoTokenizer

    class Given(MADPOTrainer):
        """CoMLRL's trainer on given pairs, in place of those that it would generate."""

        def _build_preference_dataset(self, **kwargs):
            return [
                PreferencePair(
                    prompts=["", ""], winner_completions=["", ""], loser_completions=["", ""], winner_reward=1.0,
                    loser_reward=0.0, candidate_reward_mean=0.5,
                    agent_tensors=[
                        AgentPreferenceTensors(*map(torch.tensor, tensors))
                        for tensors in zip(pair["prompts"], pair["chosen"], pair["rejected"], strict=True)
                    ],
                )
                for pair in pairs
            ]  # fmt: skip

    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    args = MADPOConfig(
        num_train_epochs=1,
        agent_learning_rate=1e-5,
        num_agents=len(AGENTS),
        agent_devices="cpu",
        dpo_beta=BETA,
        train_batch_size=setting["batch"],
        eval_interval=0,
    )
    return Given(
        agents=[setting["model"]] * len(AGENTS),
        num_agents=len(AGENTS),
        tokenizer=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": ""}]),
        reward_func=lambda *replies: [0.0],
        formatters=[lambda item: ""] * len(AGENTS),
        args=args,
    )


def measure_speed(setting):
    """Seconds of one epoch over the pairs, after a warm-up over the first of them."""
    pairs = make_pairs(setting["pairs"], setting["vocab_size"])
    few = pairs[: 2 * setting["batch"]]
    gc.collect()
    if setting["side"] == "comlrl":
        comlrl_trainer(setting, few).train()
        return timed(comlrl_trainer(setting, pairs).train)
    reference = setting["reference"]
    our_trainer(setting, few, reference).train()
    trainer = our_trainer(setting, pairs, reference)

    def train():
        if reference != "none":
            own = [name for name in trainer.train_dataset.column_names if name.startswith("ref_")]
            trainer._precompute_ref_logps(trainer.train_dataset.remove_columns(own), "train", setting["batch"])
        trainer.train()

    return timed(train)


def timed(train):
    started, started_cpu = time.perf_counter(), time.process_time()
    train()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - started_cpu}


# The process that compares


def compare_speed(options, pythons, folder):
    """Pairs per second, with a small and a large vocabulary."""
    results = {}

    def measure(setting):
        return measure_apart(__file__, setting, pythons[setting["side"]], **COMLRL_ENVIRONMENT)

    for vocab_size, count in ((320, options.pairs), (32_000, max(2 * options.batch, options.pairs // 16))):
        base = {"model": comparison.make_model(folder / str(vocab_size), vocab_size), "vocab_size": vocab_size}
        base |= {"batch": options.batch, "pairs": count}
        competitors = {
            "CoMLRL": base | {"side": "comlrl"},
            "ours": base | {"side": "ours", "reference": "none"},
            "ours, with a reference": base | {"side": "ours", "reference": "initial"},
        }
        figures = take_turns(competitors, options.rounds, measure)
        rows, ratios = [], {}
        for name, rounds in figures.items():
            cells = [name]
            for clock in ("seconds", "cpu_seconds"):
                rates = [count / one[clock] for one in rounds]
                theirs = [count / one[clock] for one in figures["CoMLRL"]]
                ratios[f"{name}, {clock}"] = [own / their for own, their in zip(rates, theirs, strict=True)]
                cells += [f"{statistics.median(rates):.1f}", with_range(ratios[f"{name}, {clock}"])]
            rows.append(cells)
        header = ("", "pairs/s", "ratio", "pairs per CPU second", "ratio")
        print(f"\n{vocab_size} words, {count} pairs, {options.batch} per step: target {TARGET} x CoMLRL\n")
        print(table(header, *rows), flush=True)
        results[vocab_size] = figures | {"ratios": ratios}
    return results


def main():
    options, pythons, found = read_sides(make_parser(__doc__, rounds=3, pairs=256, batch=4), measure_speed)
    with tempfile.TemporaryDirectory() as folder:
        results = {"versions": found, "speed": compare_speed(options, pythons, Path(folder))}
    write_json(options.output, results)


if __name__ == "__main__":
    main()
