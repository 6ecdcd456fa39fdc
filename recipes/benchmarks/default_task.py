"""
What replies to the built-in problems do, with greedy decoding: the step that is asked for, that step with a mistake, or something
else.

    python recipes/benchmarks/default_task.py                             # the embedded default model
    python recipes/benchmarks/default_task.py --team outputs/quickstart   # a trained team
    python recipes/benchmarks/default_task.py --model path/to/model

`both` is the share of problems in which both agents do the step that is asked for, with or without a mistake.
"""

import json
import tempfile
from pathlib import Path

from common import make_parser, table

from marcog_trl import Team, evaluate_team, load_problems
from marcog_trl.embedded import ROLES, build_default_model
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.problems.builtin import STEPS, write_aux, write_main
from marcog_trl.team.settings import TeamSettings


KINDS = ("right", "mistake", "another step")


def kind_of(problem, agent, reply):
    """Which of `KINDS` the reply of an agent is."""
    first, second = STEPS[problem["first"]], STEPS[problem["second"]]
    if agent == "helper":
        written = [write_aux(first, problem["first_k"], mistake) for mistake in (None, *first.mistakes)]
    else:
        written = [
            write_main(second, problem["second_k"], first.takes, mistake) for mistake in (None, *second.mistakes)
        ]
    place = written.index(reply.strip()) if reply.strip() in written else len(written)
    return KINDS[0 if place == 0 else 1 if place < len(written) else 2]


def count(team, split):
    """Shares of the kinds of greedy replies, by agent, and of the problems in which both agents do what is asked for."""
    problems = load_problems("builtin", split)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "evaluation.json")
        evaluate_team(team, problems, 1, output=output)
        records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    replies = [record["greedy"]["replies"] for record in records]
    kinds = [
        {agent: kind_of(problem, agent, own[agent]) for agent in ("helper", "main")}
        for problem, own in zip(problems, replies, strict=True)
    ]
    shares = {
        f"{agent}, {kind}": sum(of[agent] == kind for of in kinds) / len(kinds)
        for agent in ("helper", "main")
        for kind in KINDS
    }
    return shares | {"both": sum(KINDS[2] not in of.values() for of in kinds) / len(kinds)}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--team", help="folder of a saved team")
    parser.add_argument("--model", help="name or path of an untrained model; by default, the embedded one")
    parser.add_argument("--splits", nargs="+", default=["train[:120]", "validation", "test"])
    options = parser.parse_args()
    settings = {"workflow": "collaboration", "isolation": "best_effort", "max_completion_length": 48}
    if options.team is not None:
        team = Team.from_pretrained(options.team, isolation="best_effort")
    else:
        team = untrained_team(
            options.model or build_default_model(), TeamSettings(**settings, roles=None if options.model else ROLES)
        )
    shares = {split: count(team, split) for split in options.splits}
    team.close()
    rows = [[split, *(f"{share:.2f}" for share in of.values())] for split, of in shares.items()]
    print(table(("", *shares[options.splits[0]]), *rows))


if __name__ == "__main__":
    main()
