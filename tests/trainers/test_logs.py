"""What a run leaves in its logs: metrics by agent and turn, and an episode to read."""

import pytest
import teams
from datasets import Dataset
from rich.console import Console

from marcog_trl import MultiAgentGRPOTrainer
from marcog_trl.execution import Job, Verdict
from marcog_trl.report.console import episode_trace
from marcog_trl.report.episodes import episode_row
from marcog_trl.rollout.records import Episode, Row, Turn


def test_metrics_are_by_agent_and_turn(tiny_model, tmp_path):
    rewards = iter([[{"a": 1.0, "b": 2.0}] * 2, [{"a": 3.0, "b": 5.0}] * 2])
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(num_turns=2), data=teams.dataset(1),
        reward=lambda completions, **kwargs: next(rewards), reward_weights=[10.0], reward_shift=0.5,
    )  # fmt: skip
    teams.script(trainer)
    trainer.train()
    expected = {
        "agents/a/turn_1/reward": 10.5, "agents/b/turn_1/reward": 20.5, "agents/a/turn_2/reward": 30.5,
        "agents/b/turn_2/reward": 50.5, "agents/a/reward": 20.5, "agents/a/turn_1/return": 41.0,
        "agents/b/turn_2/return": 50.5, "episodes/turns": 2.0, "episodes/ended_early": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert teams.logged(trainer, name) == [pytest.approx(value)], name
    # TRL's own reward metric is the weighted sum of what the functions returned, averaged over agents and turns
    assert teams.logged(trainer, "reward") == [pytest.approx(27.5)]
    for name in ("completion_length", "clipped_ratio"):
        assert len(teams.logged(trainer, f"agents/b/turn_2/{name}")) == 1


@pytest.mark.parametrize("options", [{}, {"mask_truncated_completions": True}], ids=str)
def test_lengths_are_those_of_all_replies_and_of_nothing_else(tiny_model, tmp_path, options):
    """Neither unused slots count, nor is a reply missing that the loss does not see."""
    data = Dataset.from_dict({"prompt": ["def f0(x): more", "def f1(x):"]})
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Short(), data=data,
        per_device_train_batch_size=20, **options,
    )  # fmt: skip
    calls = teams.script(trainer)
    trainer.train()
    replies = [reply for _, answers in calls for reply in answers]
    lengths, ended = [len(r) for r in replies], [len(r) for r in replies if r[-1] == teams.EOS]
    assert 0 < len(ended) < len(replies) < 20
    expected = {"mean_length": sum(lengths) / len(lengths), "min_length": min(lengths), "max_length": max(lengths)}
    expected |= {"clipped_ratio": 1 - len(ended) / len(lengths), "mean_terminated_length": sum(ended) / len(ended)}
    expected |= {"min_terminated_length": min(ended), "max_terminated_length": max(ended)}
    for name, value in expected.items():
        assert teams.logged(trainer, f"completions/{name}") == [pytest.approx(value)], name
    by_agent = [teams.logged(trainer, f"agents/{agent}/clipped_ratio")[0] for agent in "ab"]
    assert min(by_agent) <= expected["clipped_ratio"] <= max(by_agent) and max(by_agent) > 0


class Program(teams.Pair):
    """Solutions that fail in different ways, by the first problem's number of the episode."""

    SOLUTIONS = ("def f(x):\n    return x", "def f(x):\n    return 0", "def g(x):\n    return x", "I do not know.")

    def solution(self, problem, replies):
        return self.SOLUTIONS[problem["number"]]


@pytest.mark.parametrize("options", [{}, {"num_turns": 2}], ids=str)
def test_solved_and_kinds_of_failure_are_shares_of_episodes(tiny_model, tmp_path, options):
    data = teams.dataset(
        4, number=range(4), test=[["assert f(1) == 1"]] * 4, test_format=["asserts"] * 4, entry_point=["f"] * 4
    )
    workflow = Program(num_turns=options.get("num_turns", 1))
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=workflow, data=data, reward="execution_reward",
        isolation="best_effort", eval_dataset=data.select([0, 3]), eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=16 * workflow.num_turns,
    )  # fmt: skip
    teams.script(trainer)
    trainer.train()
    expected = {"tests": 0.25, "wrong_name": 0.25, "no_code": 0.25, "syntax": 0.0, "crash": 0.0, "timeout": 0.0}
    assert {kind: teams.logged(trainer, f"failures/{kind}") for kind in expected} == {
        k: [v] for k, v in expected.items()
    }
    assert teams.logged(trainer, "episodes/solved") == [0.25]
    assert teams.logged(trainer, "eval_episodes/solved") == teams.logged(trainer, "eval_failures/no_code") == [0.5]


def test_a_smaller_last_batch_of_an_evaluation_counts_by_its_episodes(tiny_model, tmp_path):
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(), eval_dataset=teams.dataset(5, earns=[*range(5)]),
        reward=lambda earns, **kwargs: [float(number) for number in earns], per_device_eval_batch_size=8,
    )  # fmt: skip
    assert trainer.evaluate()["eval_reward"] == 2
    assert trainer.predict(teams.dataset(5, earns=[*range(5)])).metrics["test_reward"] == 2


def test_shares_of_the_gradient_do_not_depend_on_how_rows_are_split(tiny_model, tmp_path):
    """One batch of eight rows, or eight of one."""

    def run(batch_size):
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(), max_steps=2,
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size,
            steps_per_generation=8 // batch_size,
        )  # fmt: skip
        teams.script(trainer)
        trainer.train()
        return teams.logged(trainer, "agents/a/gradient_share")

    assert run(8) == pytest.approx(run(1), rel=1e-4)


def test_without_tests_nothing_is_solved_or_fails(tiny_model, tmp_path):
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair())
    teams.script(trainer)
    trainer.train()
    assert not [name for name in trainer.state.log_history[0] if "failures" in name or "solved" in name]


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2}], ids=str)
def test_tokens_per_second_are_those_of_the_steps(tiny_model, tmp_path, options):
    """Each token once, also if several steps are made of a rollout."""
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(), max_steps=4, logging_steps=2, **options
    )
    teams.script(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "tokens_per_second" in log]
    tokens = [log["tokens_per_second"] * log["step_time"] * 2 for log in logs]
    assert len(tokens) == 2 and sum(tokens) == pytest.approx(logs[-1]["num_tokens"], rel=1e-4)


@pytest.mark.parametrize("siblings", [1, 2])
def test_how_siblings_differ_is_logged_where_there_are_any(tiny_model, tmp_path, siblings):
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, eval_dataset=teams.dataset(2), num_generations_eval=siblings
    )
    teams.script(trainer)
    metrics = trainer.evaluate()
    for name in ("eval_reward_std", "eval_frac_reward_zero_std"):
        assert len(teams.logged(trainer, name)) == siblings - 1
    assert ("eval_reward_std" in metrics) == (siblings > 1)


def test_an_episode_can_be_read_turn_by_turn(capsys):
    rows, turns = [], []
    for k, (status, passed, reward) in enumerate([("failed", 1, 0.5), ("passed", 2, 1.0)]):
        prompt = [{"role": "user", "content": f"question {k}"}]
        rows.append(Row(0, teams.Slot("solver", turn=k), k, prompt, [1], [2, 3], text=f"answer {k}"))
        verdict = Verdict(status, passed, 2, message="" if status == "passed" else "expected 3")
        turns.append(
            Turn({"solver": f"answer {k}"}, f"code {k}", [(Job("", ["assert 1"]), verdict)], {"solver": reward})
        )
    console = Console(width=80, record=True)
    console.print(episode_trace(episode_row(Episode({"prompt": "p"}, rows, turns), [], [3]), "an episode"))
    text = console.export_text()
    order = [
        "an episode", "turn 1 of 2", "solver is asked", "question 0", "solver writes", "answer 0", "code 0",
        "failed: 1 of 2 tests passed. expected 3", "0.500", "turn 2 of 2", "question 1", "answer 1", "code 1",
        "passed: 2 of 2 tests passed", "1.000",
    ]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("number", "shown"), [(None, 2), (5, 2), (1, 1), (0, 0)])
def test_log_completions_prints_at_most_two_episodes(tiny_model, tmp_path, capsys, number, shown):
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(num_turns=2), data=teams.dataset(2),
        per_device_train_batch_size=16, log_completions=True, num_completions_to_print=number,
    )  # fmt: skip
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count("an episode of step 1") == shown == printed.count("turn 2 of 2")
    assert "Completion" not in printed  # the head of TRL's table of rows
    if shown:
        assert "b is asked" in printed and "def f0(x): b1" in printed
    assert ("def f1(x): a0" in printed) == (shown == 2)  # not two siblings of one problem


def test_an_episode_shows_every_message_of_a_prompt():
    prompt = [{"role": "system", "content": "You are a coder."}, {"role": "user", "content": "Write f."}]
    episode = Episode({"prompt": "p"}, [Row(0, teams.Slot("solver"), 0, prompt, [1], [2])], [Turn({}, "", [])])
    console = Console(width=80, record=True)
    console.print(episode_trace(episode_row(episode, [], []), "an episode"))
    text = console.export_text()
    assert "system: You are a coder." in text and "user: Write f." in text
