"""
Compares what teams, single agents and baselines learn on the built-in problems from equally many generated tokens.

    python recipes/benchmarks/learning.py                                  # runs what is missing, then reports
    python recipes/benchmarks/learning.py --only symmetry/shppo --seeds 0  # one unit; several processes can share the work
    python recipes/benchmarks/learning.py --comlrl-python PATH             # also CoMLRL
    python recipes/benchmarks/learning.py --report                         # tables of the results so far

CoMLRL 1.4.3 needs its own virtual environment: `python -m venv comlrl && comlrl/bin/pip install comlrl==1.4.3 torch==2.13.0`.

A unit is one condition with one seed, and runs in its own process with one thread, so that figures do not depend on the number of
cores. It writes a JSON file to a folder of `--output_dir` for each `--tokens`. Units with a file are not run again, and a unit that
crashes does not affect the others.

All units start from the same model: the embedded default, which learns two more prompts in about two minutes, with its own
mistakes: to write both functions, and to write either of them, each half of the time. It forgets some of what it knew. With
`--default-model`, units train the default itself, which knows more of held-out problems, but only the prompts of `builtin`'s teams.

Families:

* `builtin`: the built-in problems. The prompts tell the agents of a team (helper and main) their roles. A single agent writes both
  functions in one reply, which may be as long as the team's replies together. `cross` is MAGRPO that credits each reply with the
  mean over all replies of the other agent, and CoMLRL's MAGRPO and MAAC train all weights of a model per agent. All update after
  `--problems` problems with `--replies` replies of each agent.
* `symmetry`: the same problems, but both agents read the same prompt, which asks for either function. Only where one wrote
  the helper and the other the main function, whoever did which, is there a solution: such a pair earns 1 and the share of
  tests that it passes, everything else 0. A policy that does not know whose reply it writes gets there half of the time at
  best, 2p(1 − p). Role texts reach LatentNet alone.

Measured are held-out problems (compositions that training never showed): `solved`, of 4 samples each at temperature 1, and
`greedy`. Intervals are 95 % over problems and seeds, crossed: the variance of a mean is s²(means of the seeds) / seeds + s²(means of the problems) /
problems, which is slightly too wide, with Student's t at Satterthwaite's degrees of freedom. With one seed they are over
problems alone. Differences are taken problem by problem and seed by seed first. Evaluations while a unit learns (1 sample
per problem) are not part of its tokens and seconds.
"""

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import yaml
from common import RECIPE_FOLDER, make_parser, run_study
from learning_peers import TwoModels, comlrl
from learning_report import report
from learning_task import SameQuestion, complementary_reward, study_model


CONFIG = RECIPE_FOLDER / "configs" / "builtin.yaml"


# Conditions


@dataclass(frozen=True)
class Condition:
    """
    A team and how it is trained.

    Args:
        label (`str`): Its name in tables.
        trainer (`str`, *optional*, defaults to `"SHPPOTrainer"`): Name of the trainer.
        workflow (`str`, *optional*, defaults to `"collaboration"`): Name of a workflow, or `"same_question"`.
        rewards (`tuple`, *optional*, defaults to `("execution_reward",)`): Reward functions, which are summed.
        settings (`dict`, *optional*): Fields of the configuration, beside those of `recipes/configs/builtin.yaml`.
        trained (`bool`, *optional*, defaults to `True`): Whether it is trained at all.
        peer (`Callable`, *optional*): What trains it, if it is none of the trainers: a function of learning_peers.py.
    """

    label: str
    trainer: str = "SHPPOTrainer"
    workflow: str = "collaboration"
    settings: dict = field(default_factory=dict)
    rewards: tuple = ("execution_reward",)
    trained: bool = True
    peer: Callable | None = None


def of_team(workflow):
    """The conditions that both families have."""
    ppo = {"trainer": "MultiAgentPPOTrainer", "workflow": workflow}
    return {
        "untrained": Condition("untrained team", **ppo, trained=False),
        "shared_ppo": Condition("shared PPO", **ppo),
        "magrpo": Condition("MAGRPO (shared)", "MultiAgentGRPOTrainer", workflow),
        "shppo": Condition("SHPPO, observation", workflow=workflow),
        "separate": Condition("LoRA per agent", workflow=workflow, settings={"parameter_sharing": "separate"}),
    }


SINGLE = {"max_completion_length": 64, "roles": {"solver": ""}}  # as many tokens for each problem; the text alone
FAMILIES = {
    "builtin": {
        "untrained_single": Condition(
            "untrained single agent", "MultiAgentPPOTrainer", "single", SINGLE, trained=False
        ),
        "single_ppo": Condition("single-agent PPO", "MultiAgentPPOTrainer", "single", SINGLE),
        "single_grpo": Condition(
            "single-agent GRPO", "MultiAgentGRPOTrainer", "single", SINGLE | {"scale_rewards": "group"}
        ),
        **of_team("collaboration"),
        "cross": Condition(
            "MAGRPO, all joint actions",
            "MultiAgentGRPOTrainer",
            settings={"joint_mode": "cross", "advantage": "rloo"},
        ),
        "mareinforce": Condition("MAREINFORCE", "MultiAgentGRPOTrainer", settings={"advantage": "none"}),
        "mareinforce_twice": Condition(
            "MAREINFORCE, two updates per batch",
            "MultiAgentGRPOTrainer",
            settings={"advantage": "none", "num_iterations": 2},
        ),
        "comlrl_magrpo": Condition("CoMLRL, MAGRPO", peer=functools.partial(comlrl, "magrpo")),
        "comlrl_mareinforce": Condition("CoMLRL, MAREINFORCE", peer=functools.partial(comlrl, "mareinforce")),
        "comlrl_maac": Condition("CoMLRL, MAAC", peer=functools.partial(comlrl, "maac")),
    },
    "symmetry": {
        name: replace(condition, rewards=("execution_reward", complementary_reward))
        for name, condition in of_team("same_question").items()
    },
}


# One unit


def make_trainer(condition, model, seed, train_dataset, folder, peft_config=None):
    """The trainer of a condition, which counts what it uses in `used`: tokens, evaluator calls, sandbox seconds."""
    import transformers

    import marcog_trl
    from marcog_trl.embedded import ROLES

    base = getattr(marcog_trl, condition.trainer)
    config_class = base._config_class
    known = {f.name for f in fields(config_class)}
    shipped = {name: value for name, value in yaml.safe_load(CONFIG.read_text()).items() if name in known}

    used = {"tokens": 0, "evaluator_calls": 0, "sandbox_seconds": 0.0}

    class Counting(base.algorithm_class):
        def credit(self, batch):
            executed = dict(pair for e in batch.episodes for turn in e.turns for pair in turn.verdicts)
            used["tokens"] += sum(len(row.completion_ids) for row in batch.rows if row is not None)
            used["evaluator_calls"] += len(executed)
            used["sandbox_seconds"] += sum(verdict.seconds for verdict in executed.values())
            return super().credit(batch)

    transformers.set_seed(seed)
    args = config_class(
        **shipped
        | {
            "output_dir": folder,
            "workflow": "collaboration" if condition.workflow == "same_question" else condition.workflow,
            "lr_scheduler_type": "constant",
            "max_steps": 1_000_000,  # never reached: tokens end the run
            "disable_tqdm": True,
            "seed": seed,
        }
        | ({"roles": ROLES} if condition.workflow == "collaboration" else {})
        | condition.settings
    )
    workflow = SameQuestion() if condition.workflow == "same_question" else None
    trainer = base(
        model, list(condition.rewards), args, train_dataset, workflow=workflow, peft_config=peft_config,
        algorithm=Counting,
    )  # fmt: skip
    trainer.used = used
    return trainer


def measure(trainer, problems, num_samples):
    """Held-out figures, one number per problem."""
    from marcog_trl import evaluate_team

    if isinstance(trainer, TwoModels):
        return trainer.measure(problems, num_samples)

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "evaluation.json")
        evaluate_team(trainer, problems, num_samples, output=output)
        records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]

    def mean(values):
        return sum(values) / len(values)

    return {
        "solved": [mean([e["status"] == "passed" for e in record["samples"]]) for record in records],
        "greedy": [float(record["greedy"]["status"] == "passed") for record in records],
    }


def run_unit(
    condition, seed, model, tokens, train_dataset, test_dataset, points=5, num_samples=4, decay=False, measure=measure
):
    """
    Trains a condition until it has generated `tokens` tokens.

    Args:
        condition (`Condition`): What is trained.
        seed (`int`): Seed of the run.
        model (`str`): Path of the model.
        tokens (`int`): Number of generated tokens, within one generation batch.
        train_dataset, test_dataset (`Dataset`): Training and held-out problems.
        points (`int`, *optional*, defaults to `5`): Parts of the run; an evaluation after each, the last with all samples.
        num_samples (`int`, *optional*, defaults to `4`): Samples per problem at the end.
        decay (`bool`, *optional*, defaults to `False`): Whether learning rates fall linearly to 0, with the tokens.
        measure (`Callable`, *optional*): Another [`measure`].

    Returns:
        `dict`: `final` (figures per problem), `curve` (the same with one sample, by tokens), `ledger` and `history`.
    """
    from transformers import TrainerCallback

    curve, evaluating = [], 0.0

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, lr_scheduler, **kwargs):
            if decay:
                count = len(lr_scheduler.lr_lambdas)
                lr_scheduler.lr_lambdas = [lambda step: max(0, 1 - trainer.used["tokens"] / tokens)] * count

        def on_step_end(self, args, state, control, **kwargs):
            nonlocal evaluating
            used = trainer.used["tokens"]
            control.should_training_stop = used >= tokens
            if used * points >= tokens * (len(curve) + 1) and not control.should_training_stop:
                began = time.perf_counter()
                curve.append({"tokens": used} | measure(trainer, test_dataset, 1))
                evaluating += time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(condition, model, seed, train_dataset, folder)
        trainer.add_callback(Watch())
        began, history = time.perf_counter(), []
        if condition.trained:
            trainer.train()
            history = trainer.state.log_history
        seconds = time.perf_counter() - began - evaluating
        final = measure(trainer, test_dataset, num_samples)
        trainer.executor.close()
    ledger = trainer.used | {"optimizer_steps": trainer.state.global_step, "training_seconds": seconds}
    return {"final": final, "curve": curve, "ledger": ledger, "history": history}


def run_peer(train, seed, model, tokens, train_dataset, test_dataset, points=5, num_samples=4, **settings):
    """The same for a condition with a `peer`, `train`; `settings` are passed to it."""
    with tempfile.TemporaryDirectory() as folder:
        saved, ledger = train(seed, model, tokens, train_dataset, folder, points, **settings)
        *before, (_, last) = saved
        curve = [{"tokens": used} | measure(team(), test_dataset, 1) for used, team in before]
        final = measure(last(), test_dataset, num_samples)
    return {"final": final, "curve": curve, "ledger": ledger, "history": []}


def unit_of(name, condition, options):
    """A function that runs units of a condition with the batches and the interpreter of the command line."""
    if condition.peer is None:
        rows = options.problems * options.replies * (1 if condition.workflow == "single" else 2)
        sizes = {"per_device_train_batch_size": rows, "num_generations": options.replies}
        settings = condition.settings | sizes
        return functools.partial(run_unit, replace(condition, settings=settings), decay=options.decay)
    settings = {}
    if name.startswith("comlrl"):
        settings = {"batch": options.problems, "num_generations": options.replies}
        settings |= {"python": options.comlrl_python, "learning_rate": options.comlrl_learning_rate}
    return functools.partial(run_peer, condition.peer, **settings)


def run(name, options):
    from marcog_trl import load_problems
    from marcog_trl.embedded import build_default_model

    family, condition, seed = name.split("/")
    problems = load_problems("builtin", "train"), load_problems("builtin", options.split)
    unit = unit_of(condition, FAMILIES[family][condition], options)
    model = build_default_model() if options.default_model else study_model(options.output_dir)
    return unit(int(seed), model, options.tokens, *problems, options.points)


def units(options):
    """
    Names of the units that are asked for: family/condition/seed. What is not trained has one seed. With `--default-model` these
    are units of `builtin`'s teams.
    """
    names = []
    for seed in options.seeds:
        for family, conditions in FAMILIES.items():
            for name, condition in conditions.items():
                named = {name, f"{family}/{name}"} & set(options.only or ())
                chosen = not options.only or family in options.only
                if name.startswith("comlrl") and options.comlrl_python is None:
                    if named:
                        sys.exit(f"error: {family}/{name} needs CoMLRL. Set --comlrl-python.")
                    continue
                if options.default_model and (family, condition.workflow) != ("builtin", "collaboration"):
                    if f"{family}/{name}" in named:
                        sys.exit(f"error: The default model does not know {family}/{name}. Leave out --default-model.")
                    continue
                if (named or chosen) and (condition.trained or seed == options.seeds[0]):
                    names.append(f"{family}/{name}/{seed}")
    if not names:
        sys.exit("error: The default model knows only the teams of builtin. Leave out --default-model.")
    return names


def folder_name(options):
    """Folder of results that cannot be compared with others."""
    rate = "" if options.comlrl_learning_rate is None else f"-comlrl-{options.comlrl_learning_rate}"
    decay = "-decay" if options.decay else ""
    model = "-default-model" if options.default_model else ""
    batch = f"{options.problems}x{options.replies}-replies"
    return f"{options.tokens}-tokens-{batch}-{options.points}-points-{options.split}{rate}{decay}{model}"


def main():
    parser = make_parser(__doc__, tokens=130_000, points=5, problems=8, replies=4)
    known = [f"{family}/{name}" for family, conditions in FAMILIES.items() for name in conditions]
    known += [part for name in known for part in name.split("/")]
    parser.add_argument(
        "--only", nargs="+", choices=known, metavar="NAME", help="family, condition or family/condition"
    )
    parser.add_argument("--decay", action="store_true", help="decay learning rates linearly to 0, except for CoMLRL")
    parser.add_argument("--default-model", action="store_true", help="train the embedded default as it is")
    parser.add_argument("--comlrl-python", help="interpreter of CoMLRL's environment; without it, CoMLRL is left out")
    parser.add_argument("--comlrl-learning-rate", type=float, help="another learning rate for CoMLRL")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning"))
    run_study(__file__, parser, folder_name, units, run, lambda results: report(results, FAMILIES))


if __name__ == "__main__":
    main()
