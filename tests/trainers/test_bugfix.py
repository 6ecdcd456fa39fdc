"""Fixing bugs, from the dataset to the rewards of the agents, and with the trained team."""

import json

import pytest
import teams

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer, Team, evaluate_team, load_problems


@pytest.fixture(scope="module")
def problems():
    return load_problems("builtin_bugs", "train[:2]")


def scripted(tiny_model, path, problems, trainer_class, **options):
    """A trainer whose testers write the second test of the problem or nothing useful, and whose fixers correct the code or do not."""
    trainer = teams.make(
        tiny_model, path, trainer_class, reward="bugfix_reward", data=problems, workflow="bugfix", isolation="best_effort",
        max_completion_length=128, **options,
    )  # fmt: skip

    def ids(text):
        return [*trainer.processing_class(text)["input_ids"], trainer.processing_class.eos_token_id]

    # Rows: two problems, one after the other; of each, two episodes of the agent that speaks
    testers = [ids(text) for row in problems for text in (row["test"][1], "I cannot.")]
    fixers = [ids(row[column]) for row in problems for column in ("canonical_solution", "buggy_solution")]
    teams.recite(trainer, testers, fixers)
    return trainer


@pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer])
def test_each_agent_has_its_reward(tiny_model, tmp_path, problems, trainer_class):
    trainer = scripted(tiny_model, tmp_path, problems, trainer_class)
    calls = []
    submit = trainer.executor.submit  # which `run` calls, too
    trainer.executor.submit = lambda jobs: calls.append(len(jobs)) or submit(jobs)
    trainer.train()
    trainer.executor.close()
    solved = [
        sum(run_test(row["buggy_solution"], test) for test in row["test"]) / len(row["test"]) for row in problems
    ]
    shown = [not run_test(row["buggy_solution"], row["test"][1]) for row in problems]
    fixer = (sum(solved) + 2) / 4
    [tester] = teams.logged(trainer, "agents/tester/reward")
    assert teams.logged(trainer, "agents/fixer/reward") == [pytest.approx(fixer)]
    assert tester == pytest.approx(fixer / 2 + sum(shown) / 8)
    assert teams.logged(trainer, "bugfix_reward/discriminates") == [pytest.approx(sum(shown) / 4)]
    # One call for the asserts on the bugs, one for the solutions, and one for the asserts on references and other programs
    assert calls == [2, 4, 6]


def run_test(program, test):
    """Whether our own test passes on our own program; nothing here comes from a model."""
    namespace = {}
    exec(program, namespace)
    try:
        exec(test, namespace)
    except Exception:
        return False
    return True


def test_the_saved_team_is_evaluated_and_solves(tiny_model, tmp_path, problems):
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentPPOTrainer, reward="bugfix_reward", data=problems, workflow="bugfix",
        isolation="best_effort",
    )  # fmt: skip
    trainer.save_model(str(tmp_path / "team"))
    trainer.executor.close()
    team = Team.from_pretrained(str(tmp_path / "team"), isolation="best_effort")
    figures = evaluate_team(team, problems, 1, output=tmp_path / "evaluation.json")
    assert 0 <= figures["bugfix_reward/usable_assert"] <= 1 and "agents/fixer/tokens" in figures
    records = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [set(record["greedy"]["replies"]) for record in records] == [{"tester", "fixer"}] * 2
    answer = team.solve(problems[0])
    assert [message["agent"] for message in answer.messages] == ["tester", "fixer"] and answer.verdict.total >= 5
    with pytest.raises(ValueError, match="it has no 'buggy_solution', the code that workflow='bugfix' corrects"):
        team.solve({key: value for key, value in problems[0].items() if key != "buggy_solution"})
    team.close()
