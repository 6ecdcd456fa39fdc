"""The episodes of a run: what is written, that a run never fails because of it, and how they are read."""

import datasets
import pytest
from teams import Pair, dataset, make, script

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer
from marcog_trl.cli.main import main
from marcog_trl.report.episodes import COLUMNS, EpisodeLog, read_rows, side_by_side, spread, write_rows


def run(model, path, trainer=MultiAgentGRPOTrainer, resume=None, **options):
    options = {"workflow": Pair(), "max_steps": 2, "max_logged_episodes": 4, **options}
    made = make(model, path, trainer, **options)
    script(made)
    made.train(resume_from_checkpoint=resume)
    return made


def row(step, task="t", status="passed", reward=1.0, solution="code", **more):
    message = {"agent": "a", "turn": 1, "prompt": "p", "reply": solution, "tokens": 3, "truncated": False}
    return {
        "step": step, "split": "train", "process": 0, "task_id": task, "problem": f"problem {task}", "generation": 0,
        "messages": [{**message, "logprob": -1.0, "advantage": 0.5, "left_out": "", "reward": reward}],
        "solution": solution, "status": status, "message": "", "tests_passed": 1, "tests": 2, "earlier_turns": [],
        "results": [], "reward": reward, "rewards": [], "masked": False, "execution_seconds": 0.1, **more,
    }  # fmt: skip


class TestTraining:
    def test_writes_whole_conversations(self, tiny_model, tmp_path):
        trainer = run(tiny_model, tmp_path, workflow=Pair(num_turns=2), data=dataset(4, task_id=list("wxyz")))
        rows = read_rows(tmp_path)
        assert {row["step"] for row in rows} == {1, 2} and all(row["split"] == "train" for row in rows)
        for found in rows:
            assert [(m["agent"], m["turn"]) for m in found["messages"]] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
            assert all(m["prompt"] == f"{found['problem']} {m['agent']}{m['turn'] - 1}" for m in found["messages"])
            assert found["solution"] == "|".join(m["reply"] for m in found["messages"][2:])
            assert [turn["solution"] for turn in found["earlier_turns"]] == [
                "|".join(m["reply"] for m in found["messages"][:2])
            ]
            assert all(m["advantage"] is not None and m["left_out"] == "" for m in found["messages"])
            assert {(r["turn"], r["agent"]) for r in found["rewards"]} == {(t, a) for t in (1, 2) for a in "ab"}
        assert {row["task_id"] for row in rows} <= set("wxyz")
        assert trainer.reward_func_names == ["letters"] and rows[0]["rewards"][0]["function"] == "letters"

    def test_is_read_by_datasets(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path / "run")
        loaded = datasets.load_dataset(
            "parquet", data_dir=str(tmp_path / "run" / "episodes"), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert loaded.features == COLUMNS and len(loaded) == 8

    def test_spreads_a_limited_number_over_the_problems(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path, max_steps=1, data=dataset(2, task_id=["x", "y"]), max_logged_episodes=2)
        assert [row["task_id"] for row in read_rows(tmp_path)] == ["x", "y"]

    def test_writes_every_few_steps(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path, max_steps=5, log_episodes_steps=2)
        assert {row["step"] for row in read_rows(tmp_path)} == {1, 2, 4}

    def test_writes_evaluations(self, tiny_model, tmp_path):
        run(
            tiny_model,
            tmp_path,
            eval_dataset=dataset(2),
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=4,
        )
        assert {(row["step"], row["split"]) for row in read_rows(tmp_path)} == {
            (1, "train"), (1, "eval"), (2, "train"), (2, "eval")
        }  # fmt: skip

    def test_writes_none_if_asked(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path, max_logged_episodes=0)
        assert not (tmp_path / "episodes").exists()

    def test_drops_what_came_after_the_checkpoint(self, tiny_model, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1}
        run(tiny_model, tmp_path, max_steps=3, **options)
        first = [row for row in read_rows(tmp_path) if row["step"] == 1]
        run(tiny_model, tmp_path, max_steps=2, resume=str(tmp_path / "checkpoint-1"), **options)
        rows = read_rows(tmp_path)
        assert {row["step"] for row in rows} == {1, 2} and rows[: len(first)] == first
        run(tiny_model, tmp_path, max_steps=1)
        assert {row["step"] for row in read_rows(tmp_path)} == {1}

    def test_says_why_replies_are_not_in_the_loss(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path, trained_agents=["a"], max_steps=1)
        left_out = {m["agent"]: m["left_out"] for row in read_rows(tmp_path) for m in row["messages"]}
        assert left_out == {"a": "", "b": "the agent is not trained"}

    def test_goes_on_if_nothing_can_be_written(self, tiny_model, tmp_path, caplog):
        (tmp_path / "episodes").write_text("in the way")
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer, max_steps=3)
        assert trainer.state.global_step == 3
        assert caplog.text.count("Episodes are no longer written") == 1


def test_a_step_is_shared_by_processes(tmp_path):
    logs = [EpisodeLog(tmp_path, 1, 8, process, 4) for process in range(4)]
    assert [len(log.chosen([None] * 16, 1, "train")) for log in logs] == [2] * 4
    assert spread(10, 4) == [0, 2, 5, 7] and spread(2, 4) == [0, 1]


class TestSideBySide:
    def test_takes_a_problem_of_each_kind(self):
        rows = []
        for step in (1, 9):
            rows += [
                row(step, "learnt", "passed" if step == 9 else "failed", 1.0 if step == 9 else 0.0),
                row(step, "forgotten", "failed" if step == 9 else "passed", 0.0 if step == 9 else 1.0),
                row(step, "solved"),
                row(step, "unsolved", "failed", 0.0),
                row(step, "cheat", "failed", 0.9),
            ]
        found = {chosen["kind"]: chosen for chosen in side_by_side(rows)}
        assert {kind: chosen["problem"] for kind, chosen in found.items()} == {
            "learnt": "problem learnt", "forgotten": "problem forgotten", "solved": "problem solved",
            "not solved": "problem unsolved", "most reward without passing": "problem cheat",
        }  # fmt: skip
        assert [episode["step"] for episode in found["learnt"]["episodes"]] == [1, 9]

    def test_shows_the_first_a_middle_and_the_last_step(self):
        [found] = side_by_side([row(step) for step in (1, 2, 5, 8, 9)], problems=1)
        assert [episode["step"] for episode in found["episodes"]] == [1, 5, 9]

    def test_of_nothing_is_nothing(self):
        assert side_by_side([]) == []


@pytest.fixture
def written(tmp_path):
    rows = [row(1, "x", "failed", 0.0, "def f(): pass"), row(1, "y"), row(5, "x", solution="def f(): return 1")]
    rows.append(row(6, "z[/a]", solution="[/INST] return [v] :smile:"))  # as markup, an error
    write_rows(tmp_path / "episodes" / "train-0000001-0-0.parquet", rows)
    (tmp_path / "episodes" / "all.parquet").touch()  # somebody's own
    return str(tmp_path)


class TestCommand:
    @pytest.mark.parametrize(
        ("flags", "shown", "absent"),
        [
            ([], ["x", "y", "failed", "1.000"], []),
            (["--step", "6"], ["z[/a]", "[/INST] return [v] :smile:"], ["failed"]),
            (["--show", "4"], ["episode 4, step 6, z[/a]", "return [v]"], []),
            (["--step", "5"], ["def f(): return 1"], ["failed", "y"]),
            (["--problem", "y"], ["code"], ["def f()"]),
            (["--status", "failed"], ["def f(): pass"], ["return 1"]),
            (["--min_reward", "0.5", "--sort", "reward"], ["return 1", "code"], ["pass "]),
            (["--show", "1"], ["episode 1, step 1, x", "a is asked", "def f(): pass", "failed: 1 of 2 tests passed"], ["return 1"]),
            (["--problem", "x", "--diff", "1", "5"], ["-def f(): pass", "+def f(): return 1", "step 5: passed"], []),
        ],
    )  # fmt: skip
    def test_shows_what_is_asked(self, written, capsys, monkeypatch, flags, shown, absent):
        monkeypatch.setenv("COLUMNS", "140")
        assert main(["episodes", written, *flags]) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in shown) and not any(text in printed for text in absent)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--step", "7"], "step=7"),
            (["--status", "pased"], "status='pased'"),
            (["--agent", "b"], "agent='b'"),
            (["--sort", "beauty"], "sort='beauty'"),
            (["--min_reward", "7"], "No episode"),
            (["--show", "9"], "9"),
            (["--diff", "1", "5"], "--problem"),
            (["--problem", "x", "--diff", "1", "6"], "6"),
            (["--stauts", "failed"], "--status"),
            (["--limit", "-2"], "limit=-2"),
        ],
    )
    def test_says_what_is_wrong_in_one_line(self, written, capsys, flags, said):
        with pytest.raises(SystemExit) as stopped:
            main(["episodes", written, *flags])
        line = capsys.readouterr().err.strip().splitlines()[-1:] if stopped.value.code == 2 else [str(stopped.value)]
        assert said in line[-1] and len(line[-1].splitlines()) == 1

    def test_says_that_there_are_none(self, tmp_path):
        with pytest.raises(SystemExit, match="has no episodes"):
            main(["episodes", str(tmp_path)])
