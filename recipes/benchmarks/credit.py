"""
Measures whether credit finds the agent that matters, in teams of two on the built-in problems.

    python recipes/benchmarks/credit.py                        # all conditions, seeds 0 to 2
    python recipes/benchmarks/credit.py --seeds 1 --steps 20 --only useless/group

The helper speaks first, then the main agent. Two teams:

* `useless`: the helper's reply is ignored. The main agent does not read it, and the solution calls the reference's helper.
* `decides`: the helper's reply decides. The main agent reads it, but the solution has the reference's main function.

Four kinds of credit, each with as many replies per step, and so as many tokens: `group` and `counterfactual` of
`MultiAgentGRPOTrainer`, the critic of `MultiAgentPPOTrainer`, and `counterfactual` with that critic (`"auto"`). Lines are 8 episodes
of a problem; branches are 2 replies of the helper and 4 of the main agent to each.

Measured are the variance of each agent's advantages over the run, the mean reward of the first and the last quarter of the steps,
and what a rollout costs: problems, generated tokens and evaluations. A run has a process of its own, and what it measured is in
`--output_dir`, from which it is not run again.
"""

import tempfile
from pathlib import Path
from statistics import fmean

from common import ON_CPU, QUIET, make_parser, run_study, table, with_range


REPLIES = 80  # per step: 5 problems with 8 lines of two replies, or 8 problems with 2 + 8 replies
LINES = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 5}
BRANCHES = {
    "per_device_train_batch_size": 20, "gradient_accumulation_steps": 4, "credit": "counterfactual", "fanout": [2, 4],
}  # fmt: skip
PPO = {"advantage_normalization": "batch"}
CREDITS = {
    "group": ("MultiAgentGRPOTrainer", LINES),
    "counterfactual": ("MultiAgentGRPOTrainer", BRANCHES),
    "critic": ("MultiAgentPPOTrainer", LINES | PPO),
    "counterfactual and critic": ("MultiAgentPPOTrainer", BRANCHES | PPO | {"critic_mix": "auto"}),
}
TEAMS = ("useless", "decides")


def make_workflow(team):
    from marcog_trl import Collaboration, Workflow
    from marcog_trl.agents import with_text
    from marcog_trl.embedded import ROLES
    from marcog_trl.parsing.replies import code_in
    from marcog_trl.parsing.syntax import combine

    class Relay(Workflow):
        """A helper, and a main agent after it, only one of which writes a part of the solution."""

        agents = Collaboration(roles=ROLES).agents
        needs_entry_point = True

        def play(self, problem):
            replies = yield {"helper": self.ask("helper", problem)}
            chat = self.ask("main", problem)
            yield {"main": with_text(chat, replies["helper"]) if team == "decides" else chat}

        def solution(self, problem, replies):
            if team == "decides":
                return combine(code_in(problem, replies["helper"], "aux"), problem["main"])
            return combine(problem["aux"], code_in(problem, replies["main"], problem["entry_point"]))

    return Relay()


def train(team, credit, seed, steps):
    """Trains a team, and returns its log."""
    import marcog_trl
    from marcog_trl.embedded import build_default_model

    name, settings = CREDITS[credit]
    trainer_class = getattr(marcog_trl, name)
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_class._config_class(
            folder,
            max_steps=steps,
            seed=seed,
            num_generations=8,
            generation_batch_size=REPLIES,
            max_completion_length=32,
            learning_rate=1e-3,
            isolation="best_effort",
            **QUIET | ON_CPU | {"logging_steps": 1},
            **settings,
        )
        trainer = trainer_class(
            build_default_model(),
            "execution_reward",
            args,
            marcog_trl.load_problems("builtin", "train"),
            workflow=make_workflow(team),
        )
        trainer.train()
    names = ("reward", "agents/helper/advantage_variance", "agents/main/advantage_variance")
    names += ("ledger/generated_tokens", "ledger/evaluations", "num_tokens")
    return {name: [log[name] for log in trainer.state.log_history if name in log] for name in names}


def run(name, options):
    team, credit, seed = name.split("/")
    return train(team, credit, int(seed), options.steps)


def units(options):
    """Names of the units that are asked for: helper/credit/seed."""
    asked = options.only or [f"{team}/{credit}" for team in TEAMS for credit in CREDITS]
    return [f"{condition}/{seed}" for seed in options.seeds for condition in asked]


def summary(runs):
    """A row of the table: median and range over the seeds."""

    def of(figure):
        return with_range([figure(run) for run in runs])

    quarter = max(1, len(runs[0]["reward"]) // 4)
    return [
        of(lambda run: fmean(run["agents/helper/advantage_variance"])),
        of(lambda run: fmean(run["agents/main/advantage_variance"])),
        of(lambda run: fmean(run["reward"][:quarter])),
        of(lambda run: fmean(run["reward"][-quarter:])),
        f"{fmean(fmean(run['ledger/generated_tokens']) for run in runs):.0f}",
        f"{fmean(fmean(run['ledger/evaluations']) for run in runs):.0f}",
    ]


def report(results):
    figures = ["variance, helper", "variance, main", "reward, first quarter", "last quarter", "tokens"]
    rows = [[*condition.split("/"), *summary(runs)] for condition, runs in results.items()]
    return table(["helper", "credit", *figures, "evaluations"], *rows)


def main():
    parser = make_parser(__doc__, steps=60)
    parser.add_argument("--only", nargs="*", help="conditions, such as useless/group")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/credit"))
    run_study(__file__, parser, lambda options: f"{options.steps}-steps", units, run, report)


if __name__ == "__main__":
    main()
