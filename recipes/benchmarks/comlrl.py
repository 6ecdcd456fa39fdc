"""
Compares speed with CoMLRL 1.4.3, which needs its own virtual environment (Python 3.11 or later). For learning, see learning.py.

    python -m venv comlrl && comlrl/bin/pip install comlrl==1.4.3 torch==2.13.0
    python recipes/benchmarks/comlrl.py --comlrl-python comlrl/bin/python

Both sides train on the same machine with one thread, the same model, problems, prompts and reward, and at temperature 1
without truncation. They take turns, and each measurement runs in its own process. CoMLRL is used through its public interface,
and nothing in it is patched. Two of its defaults would make the work unequal and are changed: evaluation during training is off, and
`early_termination_threshold=None` lets all trees grow to their full depth. Seconds are those of
`train()` after a warm-up, tokens are counted in `GenerationMixin.generate` and optimizer updates in `Optimizer.step`, alike
on both sides.

The two differ in what they train: CoMLRL trains all parameters of one model per agent, and generates for one agent and one
history at a time; `MultiAgentGRPOTrainer` trains one LoRA of rank 16 on a base that the agents share, and generates for all
agents, problems and histories of a batch at once.

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
* `0.5b`: MAGRPO with the shape of Qwen2.5-Coder-0.5B, one batch of 2 problems, 16 rows of 64 + 64 tokens,
  ours in micro-batches of 4 rows. CoMLRL needs about 18 GiB in float32.
"""

import functools
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path


sys.path.append(str(Path(__file__).parent))  # last, since this file has the name of a package

from comlrl_learning import comlrl_args
from common import (
    COMLRL_ENVIRONMENT,
    ON_CPU,
    QUIET,
    Work,
    make_parser,
    measure_apart,
    random_model,
    read_sides,
    save_model,
    table,
    take_turns,
    with_range,
    write_json,
)
from throughput import SHAPES


SETTING = {
    "algorithm": "magrpo",
    "shape": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 128},
    "num_agents": 2,
    "num_turns": 1,
    "num_generations": 4,
    "vocab_size": 320,
    "prompt_length": 48,  # words of a problem
    "new_tokens": 64,
    "num_problems": 16,
    "epochs": 4,
    "steps": 1,  # optimizer steps of our side per batch
    "micro_batch": 32,  # rows of one forward and backward pass of our side
    "warm_up": True,
}
# 16 rows of 64 + 64 tokens: one batch, and no other model before it
REAL = {"shape": SHAPES["0.5b"], "vocab_size": 151_936, "prompt_length": 63, "new_tokens": 64, "num_problems": 2}
REAL = SETTING | REAL | {"epochs": 1, "micro_batch": 4, "warm_up": False}
SPEED = {
    "one_turn": SETTING,
    "tree": SETTING | {"num_turns": 2, "epochs": 1},
    "vocabulary": SETTING | {"vocab_size": 32_000, "new_tokens": 128, "epochs": 1, "micro_batch": 1},
    "maac": SETTING | {"algorithm": "maac"},
    "0.5b": REAL,
}
TARGETS = {"one_turn": 5, "tree": 4, "vocabulary": 6, "maac": 5, "0.5b": 3}  # times CoMLRL's tokens per second
DIFFERENCE = (
    "CoMLRL: all parameters of one model per agent. Ours: one LoRA of rank 16 on a base that the agents share."
)


# What a measured process does, on either side


def measure_speed(setting):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(setting["model"])
    make = {"ours": our_trainer, "comlrl": comlrl_trainer}[setting["side"]]
    work, problems = Work(tokenizer.eos_token_id), make_problems(setting)
    if setting["warm_up"]:
        make(setting | {"batch": 2, "epochs": 1}, tokenizer, problems[:2])()
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

    from marcog_trl import (
        Agent,
        MultiAgentGRPOConfig,
        MultiAgentGRPOTrainer,
        MultiAgentPPOConfig,
        MultiAgentPPOTrainer,
        Workflow,
    )

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

    if setting["algorithm"] == "maac":
        trainer_class, config_class = MultiAgentPPOTrainer, MultiAgentPPOConfig
        own = {"critic": "team", "gamma": 1.0, "lam": 1.0, "lam_turn": 0.0}
    else:
        trainer_class, config_class = MultiAgentGRPOTrainer, MultiAgentGRPOConfig
        own = {"num_turns": setting["num_turns"], "turn_tree": setting["num_turns"] > 1, "scale_rewards": "group"}
    rows = setting["batch"] * setting["num_agents"] * replies_per_agent(setting) // setting["steps"]
    micro = math.gcd(rows, setting["micro_batch"])
    args = config_class(
        f"{setting['model']}-run",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        steps_per_generation=setting["steps"] * (rows // micro),
        num_generations=setting["num_generations"],
        max_completion_length=setting["new_tokens"],
        num_train_epochs=setting["epochs"],
        learning_rate=1e-5,
        model_init_kwargs={"dtype": "float32"},
        **QUIET | ON_CPU | own,
    )
    dataset = Dataset.from_list(problems)
    trainer = trainer_class(setting["model"], reward, args, dataset, processing_class=tokenizer, workflow=Team())
    trainer.generation_config.suppress_tokens = tokenizer.all_special_ids  # replies are random words of one length
    return trainer.train


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
        model_config={"dtype": "float32"},
        **own | ({} if is_maac else {"num_agents": len(agents)}),
    )
    # MAAC takes this from the model's own generation configuration
    return trainer.train if is_maac else functools.partial(trainer.train, suppress_tokens=tokenizer.all_special_ids)


# The process that compares


def make_model(folder, vocab_size, shape=SETTING["shape"]):
    """A random Qwen2, and a tokenizer of whole words, so that a reply has the same tokens when it is prompted again."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *(f"w{i}" for i in range(vocab_size - 2))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    model = random_model(tokenizer, **shape, max_position_embeddings=1024)
    model.generation_config.suppress_tokens = tokenizer.all_special_ids  # no reply ends early
    return save_model(folder, model, tokenizer)


def rate(figure):
    return figure["tokens"] / figure["seconds"]


def ratios_of(figures, baseline):
    """Ratios of rates, round by round."""
    return [rate(a) / rate(b) for a, b in zip(figures, baseline, strict=True)]


def compare(competitors, options, pythons):
    """Figures of competitors that take turns."""
    return take_turns(
        competitors,
        options.rounds,
        lambda setting: measure_apart(__file__, setting, pythons[setting["side"]], **COMLRL_ENVIRONMENT),
    )


def row(batch, name, figures, ratios=()):
    middle = sorted(figures, key=rate)[len(figures) // 2]
    speed = statistics.median(map(rate, figures))
    shown = with_range(ratios) if ratios else ""
    memory = [f"{statistics.median(figure[key] for figure in figures):,.0f}" for key in ("peak_mib", "optimizer_mib")]
    seconds = [f"{middle[key]:.1f}" for key in ("seconds", "cpu_seconds")]
    return batch, name, middle["tokens"], middle["updates"], *seconds, f"{speed:,.0f}", *memory, shown


def compare_speed(case, options, pythons, folder):
    """Both sides, ours also with as many optimizer steps: prints a table, and returns the figures."""
    rows, results, base = [], {}, SPEED[case]
    base = base | {"model": make_model(folder / str(base["vocab_size"]), base["vocab_size"], base["shape"])}
    # optimizer steps that CoMLRL makes while it updates every policy once
    each, turns = base["num_agents"] * (2 if base["algorithm"] == "maac" else 1), base["num_turns"]
    for batch in (batch for batch in options.batches if batch <= base["num_problems"]):
        competitors = {
            "comlrl": base | {"batch": batch, "side": "comlrl"},
            "ours": base | {"batch": batch, "side": "ours", "steps": turns},
            "ours, as many steps": base | {"batch": batch, "side": "ours", "steps": each * turns},
        }
        figures = compare(competitors, options, pythons)
        theirs = figures["comlrl"][0]
        for name, steps in (("ours", theirs["updates"] // each), ("ours, as many steps", theirs["updates"])):
            done = {(figure["tokens"], figure["updates"]) for figure in figures[name]}
            if done != {(theirs["tokens"], steps)}:
                sys.exit(f"{case}: {name} did {done} tokens and updates, CoMLRL {theirs}")
        ratios = {name: ratios_of(figures[name], figures["comlrl"]) for name in competitors if name != "comlrl"}
        rows += [row(batch, name, figures[name], ratios.get(name, ())) for name in competitors]
        results[batch] = figures | {"ratios": ratios}
    print(f"\n{case}: target {TARGETS[case]} x CoMLRL\n\n{table(HEADER, *rows)}\n\n{DIFFERENCE}", flush=True)
    return results


HEADER = ("batch", "side", "tokens", "updates", "seconds", "CPU s", "tokens/s", "peak MiB", "optimizer MiB", "ratio")


def main():
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--case", choices=(*SPEED, "all"), default="all")
    parser.add_argument(
        "--batches", type=int, nargs="+", choices=(1, 2, 4, 8, 16), default=[2, 16], help="problems per batch"
    )
    options, pythons, found = read_sides(parser, measure_speed)
    results = {"versions": found}
    with tempfile.TemporaryDirectory() as folder:
        for case in SPEED if options.case == "all" else [options.case]:
            results[case] = compare_speed(case, options, pythons, Path(folder))
            write_json(options.output, results)


if __name__ == "__main__":
    main()
