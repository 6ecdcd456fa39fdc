"""
Compares MADPO with that of CoMLRL 1.4.3 on the same pairs: its losses, and pairs per second. CoMLRL needs its own virtual environment:

    python -m venv comlrl && comlrl/bin/pip install comlrl==1.4.3 torch==2.13.0
    python recipes/benchmarks/preferences.py --comlrl-python comlrl/bin/python

Both sides run on the same machine with one thread and the same random Qwen2 (hidden size 64, 2 layers), 2 agents, prompts of 48
tokens and replies of up to 64. Nothing in CoMLRL is patched; a subclass gives its `train()` the pairs that it would generate.

* `loss`: the loss of each pair before any training, without a reference policy (CoMLRL has none). CoMLRL's
  differs by its defects alone: ours on the same pairs with the tokens taken away that CoMLRL never trains has its losses. These
  are the last token of each reply and, where padding and end-of-sequence are one token, the one before as well. A reply of one
  token adds a constant.
* `speed`: pairs per second of `train()` after a warm-up, in float32, with `--batch` pairs per step and one epoch, and with 320 or
  32,000 words; also per CPU second, which other work on the machine disturbs less. CoMLRL
  trains all parameters of one model per agent and runs 4 forward and 2 backward passes per pair and agent, with one reply each;
  ours trains one LoRA of rank 16 that the agents share, with one forward and one backward pass per step. `reference` is ours with
  DPO's reference, whose log-probabilities are computed in the constructor and counted here.
"""

import functools
import gc
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path


sys.path.append(str(Path(__file__).parent))  # last, since a file beside this one has the name of a package

import comlrl as comparison  # the file beside this one, or, on CoMLRL's side, the package, which is not used under this name
from common import ON_CPU, QUIET, make_parser, measure_apart, table, take_turns, with_range, write_json


BETA = 0.1
TARGET = 3  # times CoMLRL's pairs per second
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # or comlrl.py would take the place of the package
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "CUDA_VISIBLE_DEVICES": "",
}
AGENTS = ("agent0", "agent1")


def make_pairs(count, vocab_size, eos_token_id, shortest, seed=0):
    """Pairs of random replies that end in EOS, as lists of replies: `prompt_ids` and `completion_ids` of each agent."""
    rng = random.Random(seed)

    def words(size):
        return [rng.randrange(2, vocab_size) for _ in range(size)]

    pairs = []
    for _ in range(count):
        prompts = [words(48) for _ in AGENTS]
        sides = [[[*words(rng.randint(shortest, 64) - 1), eos_token_id] for _ in AGENTS] for _ in "wl"]
        pairs.append({"prompts": prompts, "chosen": sides[0], "rejected": sides[1]})
    return pairs


def without_last(pairs, count):
    """Pairs without the last tokens of every reply."""
    return [pair | {side: [ids[:-count] for ids in pair[side]] for side in ("chosen", "rejected")} for pair in pairs]


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
    if setting.get("pad_is_eos"):
        tokenizer.pad_token = tokenizer.eos_token
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


def our_losses(setting):
    trainer = our_trainer(setting | {"batch": 1}, setting["pairs"])
    trainer.model.eval()  # as in evaluation: one pair per call
    losses = []
    for batch in trainer.get_eval_dataloader(trainer.train_dataset):
        losses.append(trainer.compute_loss(trainer.model, batch).item())
    return losses


def comlrl_losses(setting):
    trainer = comlrl_trainer(setting | {"batch": 1}, setting["pairs"])
    losses = []
    for pair in trainer._build_preference_dataset():
        detached = trainer._detached_agent_deltas([pair])
        losses.append([trainer._agent_preference_loss(i, [pair], detached).item() for i in range(len(AGENTS))])
    return losses


def comlrl_loss_of_nan(setting):
    """CoMLRL's loss of a pair under a model whose weights are NaN."""
    trainer = comlrl_trainer(setting | {"batch": 1}, setting["pairs"][:1])
    for agent in trainer.agents:
        for parameter in agent.parameters():
            parameter.data.fill_(float("nan"))
    (pair,) = trainer._build_preference_dataset()
    return trainer._agent_preference_loss(0, [pair], trainer._detached_agent_deltas([pair])).item()


def measure_speed(setting):
    """Seconds of one epoch over the pairs, after a warm-up over the first of them."""
    few = setting["pairs"][: 2 * setting["batch"]]
    if setting["side"] == "comlrl":
        comlrl_trainer(setting, few).train()
        return timed(comlrl_trainer(setting, setting["pairs"]).train, setting)
    reference = setting["reference"]
    our_trainer(setting, few, reference).train()
    trainer = our_trainer(setting, setting["pairs"], reference)

    def train():
        if reference != "none":
            own = [name for name in trainer.train_dataset.column_names if name.startswith("ref_")]
            trainer._precompute_ref_logps(trainer.train_dataset.remove_columns(own), "train", setting["batch"])
        trainer.train()

    return timed(train, setting)


def timed(train, setting):
    gc.collect()
    started, started_cpu = time.perf_counter(), time.process_time()
    train()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "pairs": len(setting["pairs"])}


TASKS = {
    "our_losses": our_losses,
    "comlrl_losses": comlrl_losses,
    "comlrl_loss_of_nan": comlrl_loss_of_nan,
    "speed": measure_speed,
}


# The process that compares


def compare_losses(options, pythons, model, run):
    """Losses of pairs on both sides, and ours without the tokens that CoMLRL does not train."""
    setting = {"model": model, "vocab_size": 320}
    pairs = make_pairs(min(64, options.pairs), 320, eos_token_id=1, shortest=4)
    one_token = [pairs[0] | {"chosen": [[1], [1]], "rejected": [[1], [1]]}]
    rows, results = [], {}
    for name, given, dropped in (("pad is not EOS", {}, 1), ("pad is EOS", {"pad_is_eos": True}, 2)):
        theirs = run(["comlrl_losses", setting | given | {"pairs": pairs}], pythons["comlrl"])
        ours, defective = (
            run(["our_losses", setting | {"pairs": those}], pythons["ours"])
            for those in (pairs, without_last(pairs, dropped))
        )
        # Every agent has the same loss: the others' parts are constants
        apart = max(abs(own - of_ours) for of_pair, of_ours in zip(theirs, defective, strict=True) for own in of_pair)
        difference = statistics.fmean(abs(of_pair[0] - of_ours) for of_pair, of_ours in zip(theirs, ours, strict=True))
        rows.append((name, f"{statistics.fmean(of[0] for of in theirs):.6f}", f"{statistics.fmean(ours):.6f}",
                     f"{difference:.4f}", f"{apart:.1e}"))  # fmt: skip
        results[name] = {"comlrl": theirs, "ours": ours, "ours without the tokens": defective, "largest": apart}
        if apart > 1e-4:  # of sums of several hundred nats in float32
            sys.exit(f"{name}: without the tokens that CoMLRL does not train, the losses differ by {apart}.")
    results["one token"] = run(["comlrl_losses", setting | {"pairs": one_token}], pythons["comlrl"])[0][0]
    results["NaN"] = run(["comlrl_loss_of_nan", setting | {"pairs": pairs}], pythons["comlrl"])
    header = ("", "CoMLRL", "ours", "mean difference", "largest, ours without these tokens")
    print(f"\nmean loss of {len(pairs)} pairs\n\n{table(header, *rows)}\n", flush=True)
    print(
        f"CoMLRL: {results['one token']:.6f} for replies of one token, {results['NaN']} for weights of NaN", flush=True
    )
    return results


def compare_speed(options, pythons, folder, run):
    """Pairs per second, with a small and a large vocabulary."""
    results = {}
    for vocab_size, count in ((320, options.pairs), (32_000, max(2 * options.batch, options.pairs // 16))):
        base = {"model": comparison.make_model(folder / str(vocab_size), vocab_size), "batch": options.batch}
        base["pairs"] = make_pairs(count, vocab_size, eos_token_id=1, shortest=64)
        competitors = {
            "CoMLRL": base | {"side": "comlrl"},
            "ours": base | {"side": "ours", "reference": "none"},
            "ours, with a reference": base | {"side": "ours", "reference": "initial"},
        }
        figures = take_turns(
            competitors, options.rounds, lambda setting: run(["speed", setting], pythons[setting["side"]])
        )
        rows, ratios = [], {}
        for name, rounds in figures.items():
            cells = [name]
            for clock in ("seconds", "cpu_seconds"):
                rates = [one["pairs"] / one[clock] for one in rounds]
                theirs = [one["pairs"] / one[clock] for one in figures["CoMLRL"]]
                ratios[f"{name}, {clock}"] = [own / their for own, their in zip(rates, theirs, strict=True)]
                cells += [f"{statistics.median(rates):.1f}", with_range(ratios[f"{name}, {clock}"])]
            rows.append(cells)
        header = ("", "pairs/s", "ratio", "pairs per CPU second", "ratio")
        print(f"\n{vocab_size} words, {count} pairs, {options.batch} per step: target {TARGET} x CoMLRL\n")
        print(table(header, *rows), flush=True)
        results[vocab_size] = figures | {"ratios": ratios}
    return results


def main():
    parser = make_parser(__doc__, rounds=3, pairs=256, batch=4)
    parser.add_argument("--comlrl-python", help="interpreter of the virtual environment that has CoMLRL")
    parser.add_argument("--case", choices=("loss", "speed", "all"), default="all")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    parser.add_argument(
        "--task", type=json.loads, help="[task, file of its setting]: one measurement, in this process"
    )
    options = parser.parse_args()
    if options.task is not None:
        name, setting = options.task
        print(json.dumps(TASKS[name](json.loads(Path(setting).read_text()))))
        return
    if options.comlrl_python is None or shutil.which(options.comlrl_python) is None:
        parser.error("--comlrl-python must be bin/python of an environment with comlrl==1.4.3.")
    pythons = {"comlrl": options.comlrl_python, "ours": sys.executable}
    results = {"versions": {side: comparison.versions(python) for side, python in pythons.items()}}
    print(results["versions"])
    with tempfile.TemporaryDirectory() as folder:
        model = comparison.make_model(Path(folder) / "model", 320)
        run = functools.partial(run_task, Path(folder) / "setting.json")
        if options.case != "speed":
            results["loss"] = compare_losses(options, pythons, model, run)
        if options.case != "loss":
            results["speed"] = compare_speed(options, pythons, Path(folder), run)
    write_json(options.output, results)


def run_task(file, task, python):
    """A measurement in a process of its own. Its setting goes through a file, since pairs are too long for a command line."""
    name, setting = task
    file.write_text(json.dumps(setting))
    return measure_apart(__file__, [name, str(file)], python, **ENVIRONMENT)


if __name__ == "__main__":
    main()
