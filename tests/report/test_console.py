"""What a run prints: one short line per log, and what the trainer does after silence."""

import re
from types import SimpleNamespace

import pytest
import teams

from marcog_trl import ConsoleCallback, MetricsFile
from marcog_trl.report import console as printing


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set, in place of the process's own."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(printing.time, "monotonic", lambda: clock.now)
    return clock


def log(**more):
    metrics = {"reward": 0.25, "episodes/solved": 0.125, "entropy": 0.5, "tokens_per_second": 1234.4}
    return metrics | {f"agents/{agent}/reward": 0.25 for agent in ("helper", "main")} | more


def state(step=0, main=True):
    return SimpleNamespace(global_step=step, max_steps=20, is_world_process_zero=main)


def begun(**options):
    console = ConsoleCallback()
    console.on_train_begin(None, state(**options), None)
    return console


def lines(capsys, *logs):
    """What a run prints of these logs, without their steps."""
    console = begun()
    for entry in logs:
        console.on_log(None, state(), None, logs=entry)
    return [line.removeprefix("step 0 of 20").strip() for line in capsys.readouterr().out.splitlines()]


def test_one_short_line_per_log(clock, capsys):
    console = begun(step=2)
    clock.now += 30  # 10 seconds a step
    console.on_log(None, state(5), None, logs=log())
    console.on_log(None, state(5), None, logs={"eval_reward": 0.5, "eval_episodes/solved": 0.25, "eval_runtime": 7.0})
    console.on_log(None, state(5), None, logs={"eval_hard_reward": 0.5, "eval_hard_runtime": 7.0})
    console.on_log(None, state(20), None, logs=log())
    console.on_log(None, state(20), None, logs={"train_runtime": 100.0, "train_loss": 0.1})
    assert capsys.readouterr().out.splitlines() == [
        "step 5 of 20  reward 0.250  solved 0.125  entropy 0.500  tokens/s 1,234  0:02:30 left",
        "step 5 of 20  held-out problems: reward 0.500  solved 0.250  in 0:00:07",
        "step 5 of 20  held-out problems: reward 0.500  in 0:00:07",
        "step 20 of 20  reward 0.250  solved 0.125  entropy 0.500  tokens/s 1,234",
        "step 20 of 20  trained in 0:01:40",
    ]


def test_rewards_of_agents_are_shown_where_they_differ(capsys):
    (line,) = lines(capsys, log(**{"agents/main/reward": 0.75, "agents/main/turn_1/reward": 0.75}))
    assert "helper 0.250  main 0.750  entropy" in line


def test_a_trainer_on_preferences_shows_its_accuracy(capsys):
    of_madpo = {"loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 0.25, "entropy": 0.1}
    of_reward_model = {"loss": 0.5, "accuracy": 0.75, "margin": 0.25}
    assert lines(capsys, of_madpo, of_reward_model) == [
        "loss 0.500  accuracy 0.750  margin 0.250  entropy 0.100",
        "loss 0.500  accuracy 0.750  margin 0.250",
    ]


def test_what_a_trainer_does_is_said_after_silence(clock, capsys):
    console = begun(step=3)
    for seconds, activity in ((14.9, "early"), (0.2, "judging 8 episodes"), (14.9, "early"), (0.2, "learning")):
        clock.now += seconds
        console.tell(activity)
    console.on_log(None, state(4), None, logs=log())
    console.on_train_end(None, state(20), None)
    clock.now += 100
    console.tell("after the end")
    *activities, line = capsys.readouterr().out.splitlines()
    assert activities == ["step 4 of 20  judging 8 episodes", "step 4 of 20  learning"]
    assert line.startswith("step 4 of 20  reward")


def test_a_trainer_tells_what_it_does(tiny_model, tmp_path):
    trainer = teams.make(
        tiny_model, tmp_path, workflow=teams.Chain(), gradient_accumulation_steps=2, per_device_train_batch_size=4,
        generation={"min_new_tokens": 6}, num_iterations=2,
    )  # fmt: skip
    told = []
    trainer.on_activity = told.append
    trainer.train()
    each = [f"token {i} of at most 6" for i in range(1, 7)]
    assert told == [
        *(f"a: writing 4 replies{end}" for end in ("", *(f", {token}" for token in each))),
        *(f"b: writing 4 replies{end}" for end in ("", *(f", {token}" for token in each))),
        "log-probabilities of replies 1 to 4 of 8",
        "log-probabilities of replies 5 to 8 of 8",
        "judging 4 episodes",
        "learning from part 1 of 2 of the replies",
        "learning from part 2 of 2 of the replies",
    ]


def test_a_trainer_with_a_console_has_no_progress_bar_and_says_what_it_trains(tiny_model, tmp_path, capsys):
    trainer = teams.make(
        tiny_model, tmp_path, workflow=teams.Pair(), callbacks=[ConsoleCallback(), MetricsFile()], disable_tqdm=False
    )
    assert repr(trainer.team).startswith("TrainingTeam(a, b; workflow Pair, base model ")
    teams.script(trainer)
    trainer.train()
    printed = capsys.readouterr()
    said = r"Training LoRA of rank 4 on 7 kinds of layers: [\d.]+ of [\d.]+ million parameters, learning rate 0.01\n"
    assert (
        re.search(said, printed.out) and re.search(r"\nstep 1 of 1  reward ", printed.out) and "1/1" not in printed.err
    )
    assert repr(trainer).startswith("MultiAgentPPOTrainer(TrainingTeam(a, b; ") and "LoRA of rank 4" in repr(trainer)
    assert (tmp_path / "metrics.jsonl").is_file()
