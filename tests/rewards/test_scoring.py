"""What reward functions are given, what they may answer, and that training and evaluation ask them once."""

import asyncio
import functools
import json
import warnings

import pytest
import teams
import torch
from players import finished

from marcog_trl import MultiAgentPPOTrainer, MultiAgentTrainer, evaluate_team
from marcog_trl.execution import Verdict
from marcog_trl.rewards import EpisodeMean, InfrastructureFailure
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.scoring import call_rewards
from marcog_trl.rollout.records import Episode, Turn


def problems(count=4):
    return teams.dataset(
        count,
        test=[["assert f(1)", "assert f(2)"]] * count,
        test_format=["asserts"] * count,
        entry_point=["f"] * count,
    )


class Answers(teams.Pair):
    """Solutions are different programs, so that each is executed."""

    def solution(self, problem, replies):
        return f"def f(x):\n    return {replies!r}"


class Executor:
    """Loses the first `lost` jobs of every call; all others pass half of their tests."""

    def __init__(self, lost=0):
        self.lost = lost
        self.submitted = []

    def submit(self, jobs):
        self.submitted += jobs
        return finished(self.run(jobs))

    def run(self, jobs):
        lost = Verdict("infrastructure", 0, 2, message="no worker")
        return [lost if i < self.lost else Verdict("failed", 1, 2) for i, _ in enumerate(jobs)]

    def close(self):
        pass


def make(model, path, reward, lost=0, trainer_class=MultiAgentTrainer, **options):
    options = {"data": problems(), "workflow": Answers(), **options}
    trainer = teams.make(model, path, trainer_class, reward=reward, **options)
    trainer.team._executor = Executor(lost)
    teams.script(trainer)
    return trainer


class TestCall:
    """The function that training and evaluation call rewards with."""

    def episodes(self):
        def turn(k):
            return Turn({"a": f"a{k}", "b": f"b{k}"}, f"solution {k}", [])

        return [Episode({"prompt": f"problem {n}", "level": n}, turns=[turn(k) for k in range(n)]) for n in (1, 2)]

    def call(self, *funcs, turn, **options):
        return call_rewards(
            funcs, self.episodes(), turn, teams.Pair(), lambda: pytest.fail("no code is run"), **options
        )

    def test_has_the_episodes_of_the_turn_and_their_columns(self):
        def reward(prompts, completions, level, replies, previous_solution, given):
            assert (prompts, completions, level, given) == (["problem 2"], ["solution 1"], [2], "also")
            assert replies == [{"a": "a1", "b": "b1"}] and previous_solution == ["solution 0"]
            return [3.0]

        assert self.call(reward, turn=1, given="also").values.tolist() == [[3.0]]
        assert self.call(reward, turn=2).values.shape == (0, 1)

    def test_keeps_apart_what_functions_return(self):
        async def by_agent(completions, **kwargs):
            return [{"a": 1.0, "b": 2.0}, InfrastructureFailure("no service")]

        def logs(completions, log_extra, log_metric):
            log_extra("seen", completions)
            log_metric("size", EpisodeMean([1.0, 2.0]))
            return [0.5, None]

        call = self.call(by_agent, logs, turn=0)
        assert call.values[0].tolist() == [1.5, 0.5] and call.values[1].isnan().all()
        assert [call.lost(i) for i in range(2)] == [[], ["no service"]]
        score = call.score(0, call.values[0].tolist(), ["a", "b"])
        assert score.columns == {"seen": "solution 0"} and score.metrics == {"size": 1.0}
        assert score.by_agent == {"a": (1.0, 0.5), "b": (2.0, 0.5)}

    def test_keeps_errors_until_all_processes_know(self):
        async def exits(completions, **kwargs):
            raise SystemExit(3)

        call = self.call(exits, lambda completions: 1 / 0, lambda completions: [1.0, 2.0], turn=0)
        failed, divided = call.errors.values()
        assert isinstance(failed, ZeroDivisionError) and "called exit" in str(divided)
        assert call.values[:, 2].tolist() == [1.0, 2.0] and call.values[:, :2].isnan().all()

    def test_an_error_on_chats_says_what_completions_are(self):
        episode = Episode({"prompt": [{"role": "user", "content": "Write f."}]}, turns=self.episodes()[0].turns)
        call = call_rewards([lambda completions: completions[0].strip()], [episode], 0, teams.Pair(), pytest.fail)
        assert "completions are messages" in next(iter(call.errors.values())).__notes__[0]


def live_episodes(output):
    """Of two problems with two episodes each, by two agents: which episodes train."""
    live = (output["completion_mask"] * output["tool_mask"]).any(1).view(2, 2, 2)
    assert torch.equal(live[:, 0], live[:, 1])  # both agents or none
    return live[:, 0].flatten().tolist()


@needs_tests
def naive(verdicts, **kwargs):
    """Does not know of infrastructure: a verdict that is none is a 0."""
    return [pairs[-1][1].passed / pairs[-1][1].total for pairs in verdicts]


def judge(completions, **kwargs):
    """Its service fails for the first episode."""
    return [InfrastructureFailure("HTTP 500"), *[1.0] * (len(completions) - 1)]


def silent(completions, **kwargs):
    return [None] * len(completions)


@pytest.mark.filterwarnings("ignore:.*infrastructure failed")
class TestInfrastructure:
    @pytest.mark.parametrize("trainer_class", [MultiAgentTrainer, MultiAgentPPOTrainer])
    @pytest.mark.parametrize(
        ("reward", "lost"),
        [
            (["execution_reward", teams.letters], 1),
            ([teams.letters, "graded_reward"], 1),
            ([naive, teams.letters], 1),
            ([judge, teams.letters], 0),
            (["execution_reward", "delta_reward", teams.letters], 1),
        ],
    )  # fmt: skip
    def test_its_failure_masks_the_episode_whatever_others_say(
        self, tiny_model, tmp_path, trainer_class, reward, lost
    ):
        trainer = make(tiny_model, tmp_path, reward, lost, trainer_class)
        output = teams.generation_batch(trainer)
        assert live_episodes(output) == [False, True, True, True]
        assert trainer._metrics["train"]["episodes/masked"] == [1 / 4]
        assert not output["advantages"][[0, 2]].any()

    def test_none_means_that_a_reward_does_not_apply(self, tiny_model, tmp_path):
        def partly(completions, **kwargs):
            return [None, *[1.0] * (len(completions) - 1)]

        trainer = make(tiny_model, tmp_path, [partly, teams.letters])
        assert live_episodes(teams.generation_batch(trainer)) == [True] * 4
        trainer = make(tiny_model, tmp_path, [partly])
        assert live_episodes(teams.generation_batch(trainer)) == [False, True, True, True]

    def test_a_workflow_s_verdict_is_asked_for_again(self, tiny_model, tmp_path):
        """Where the executor failed while the episode was played."""
        from marcog_trl.agents import Execute
        from marcog_trl.problems import solution_job

        class Tries(Answers):
            def play(self, problem):
                replies = yield {agent.name: f"{problem['prompt']} {agent.name}" for agent in self.agents}
                yield Execute([solution_job(problem, self.solution(problem, replies))])

        trainer = make(tiny_model, tmp_path, [naive], workflow=Tries())
        trainer.team._executor.run = lambda jobs: [Verdict("infrastructure", 0, 2) for _ in jobs]
        trainer.team._executor.submit = lambda jobs: finished([Verdict("passed", 2, 2) for _ in jobs])
        assert live_episodes(teams.generation_batch(trainer)) == [True] * 4
        assert trainer._metrics["train"]["rewards/naive/mean"] == [1.0]

    def test_it_is_warned_of_once(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, ["execution_reward", teams.letters], lost=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            teams.generation_batch(trainer)
            teams.generation_batch(trainer)
        found = [str(w.message) for w in caught if "infrastructure" in str(w.message)]
        assert len(found) == 1
        assert found[0].startswith("2 of 4 episodes could not be scored because the infrastructure failed")
        assert "no worker" in found[0]


def asked_once(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
    """TRL's documented keywords, spelled out."""
    assert trainer_state.global_step == 0
    log_extra("length", [len(completion) for completion in completions])
    log_metric("lengths", sum(map(len, completions)) / len(completions))
    assert len(prompts) == len(completions) == len(completion_ids)
    return teams.letters(completions)


async def awaited(completions, prompts):
    await asyncio.sleep(0)
    return teams.letters(completions)


class Scorer:
    __name__ = "scorer"

    def __call__(self, completions, *, level):
        assert set(level) == {"easy"}
        return teams.letters(completions)


def weighted(completions, replies, weight):
    assert all(set(reply) == {"a", "b"} for reply in replies)
    return [weight * reward for reward in teams.letters(completions)]


class TestSignature:
    @pytest.mark.parametrize(
        "reward", [asked_once, awaited, Scorer(), functools.partial(weighted, weight=1.0)],
        ids=["function", "async", "object", "partial"],
    )  # fmt: skip
    def test_functions_are_given_what_they_take(self, tiny_model, tmp_path, reward):
        data = teams.dataset(4, level=["easy"] * 4)
        trainer = make(tiny_model, tmp_path, [reward], data=data, workflow=teams.Pair())
        plain = make(tiny_model, tmp_path, [teams.letters], data=data, workflow=teams.Pair())
        output, expected = teams.generation_batch(trainer), teams.generation_batch(plain)
        assert torch.equal(output["advantages"], expected["advantages"])
        if reward is asked_once:
            assert trainer._metrics["train"]["lengths"][0] > 0
            assert all(length > 0 for length in trainer._logs["extra"]["length"])

    def test_what_is_missing_is_python_s_own_error(self, tiny_model, tmp_path):
        def reward(completions, difficulty):
            return teams.letters(completions)

        trainer = make(tiny_model, tmp_path, [reward])
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'difficulty'"):
            teams.generation_batch(trainer)


def test_silence_of_all_rewards_is_warned_of_once(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, [silent])
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            teams.generation_batch(trainer)
    [message] = [str(w.message) for w in caught if "have returned only None" in str(w.message)]
    assert "'silent'" in message and "not trained on" in message


class Counted:
    """An async reward that needs tests, logs metrics of its own, and counts what it is asked."""

    __name__ = "counted"
    needs_tests = True

    def __init__(self):
        self.calls = []

    def score(self, completions, log_metric):
        self.calls.append(len(completions))
        log_metric("mine", 2.0)
        log_metric("solved", 7.0)
        log_metric("agents/a/share", EpisodeMean([float(i) for i, _ in enumerate(completions)]))
        log_metric("agents/b/share", 3.0)
        return [0.5] * len(completions)


def evaluated(trainer, path, **options):
    figures = evaluate_team(trainer, trainer.train_dataset, num_samples=2, output=path / "e.json", **options)
    records = [json.loads(line) for line in (path / "e.jsonl").read_text().splitlines()]
    return figures, records


class TestEvaluation:
    @pytest.mark.parametrize("sampling", ["keyed", "stream"])
    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    def test_asks_rewards_once_and_keeps_what_they_log(self, tiny_model, tmp_path, asynchronous, sampling):
        counted = Counted()

        @needs_tests
        def sync_reward(completions, log_metric, **kwargs):
            return counted.score(completions, log_metric)

        @needs_tests
        async def async_reward(completions, log_metric, **kwargs):
            await asyncio.sleep(0)
            return counted.score(completions, log_metric)

        reward = async_reward if asynchronous else sync_reward
        trainer = make(tiny_model, tmp_path, [reward])
        figures, records = evaluated(trainer, tmp_path, sampling=sampling)
        assert counted.calls == [8, 4]  # samples, greedy episodes
        assert figures["reward"] == figures[f"rewards/{reward.__name__}"] == 0.5
        assert figures["mine"] == 2 and figures["agents/b/share"] == 3
        assert figures["solved"] == 0 and figures["logged/solved"] == 7
        shares = [episode["components"]["agents/a/share"] for record in records for episode in record["samples"]]
        assert sorted(shares) == list(range(8)) and figures["agents/a/share"] == 3.5
        assert not trainer._pending_metrics and not trainer._pending_extra_logs

    def test_every_solution_is_executed_once(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, ["execution_reward", "graded_reward"])
        figures, _ = evaluated(trainer, tmp_path)
        jobs = trainer.team._executor.submitted
        assert len(jobs) == len(set(jobs)) == 12
        assert figures["execution_reward/pass_rate"] == figures["graded_reward/pass_rate"] == 0.5

    def test_a_failure_is_masked_or_raised_as_in_training(self, tiny_model, tmp_path):
        def broken(completions, **kwargs):
            error = ZeroDivisionError("a defect")
            error.add_note("what to do")
            raise error

        trainer = make(tiny_model, tmp_path, [broken])
        with pytest.raises(ZeroDivisionError, match="a defect"):
            evaluate_team(trainer, trainer.train_dataset, num_samples=1)
        trainer = make(tiny_model, tmp_path, [broken], on_reward_error="mask")
        with pytest.warns(UserWarning, match="on_reward_error='mask' excludes .* what to do"):
            figures, records = evaluated(trainer, tmp_path)
        assert figures["reward"] == 0 and records[0]["samples"][0]["reward"] is None
        assert figures["tests_passed"] == 0.5

    def test_an_infrastructure_failure_has_no_reward(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, [judge, teams.letters])
        with pytest.warns(UserWarning, match="the infrastructure failed: HTTP 500"):
            _, records = evaluated(trainer, tmp_path)
        samples = [episode for record in records for episode in record["samples"]]
        assert [episode["reward"] is None for episode in samples] == [True, *[False] * 7]

    @pytest.mark.parametrize("num_turns", [1, 2])
    def test_what_agents_wrote_is_told_apart_from_what_the_team_wrote(self, tiny_model, tmp_path, num_turns):
        """`class_reward/agents/coder/methods` beside `class_reward/methods`, also of a later turn."""
        skeleton = "class Counter:\n    def up(self):\n        pass\n\n    def down(self):\n        pass\n"
        test = (
            "import unittest\nclass T(unittest.TestCase):\n"
            "    def test_up(self):\n        self.assertEqual(Counter().up(), 1)\n"
        )
        data = teams.dataset(
            2, entry_point=["Counter"] * 2, starter_code=[skeleton] * 2, test=[test] * 2, test_format=["unittest"] * 2
        )
        trainer = make(
            tiny_model, tmp_path, ["class_reward"], data=data, workflow="classeval", num_turns=num_turns,
            per_device_train_batch_size=8, feedback="plain", max_completion_length=64,
        )  # fmt: skip
        texts = ["class Counter:\n    def up(self):\n        return 1", "no code"]
        ids = [trainer._tokenizer(text)["input_ids"] for text in texts]
        trainer.team._generate = lambda rows, sampler=None: [ids[i % 2] for i, _ in enumerate(rows)]
        figures, records = evaluated(trainer, tmp_path)
        components = records[0]["samples"][0]["components"]
        first, second = trainer.agents
        assert components["class_reward/methods"] == figures["class_reward/methods"] == 0.5
        assert components[f"class_reward/agents/{first}/methods"] == 0.5
        assert components[f"class_reward/agents/{second}/methods"] == 0.0
