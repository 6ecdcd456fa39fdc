"""What all trainers share: TRL's own scripts, rewards by episode, rows, logs, and what is refused before work starts."""

import asyncio
import glob
import math
import warnings
from types import SimpleNamespace

import pandas as pd
import pytest
import teams
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from players import finished
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from marcog_trl import load_problems
from marcog_trl.evaluation.evaluate import play_and_score
from marcog_trl.execution import Verdict
from marcog_trl.trainers import (
    MultiAgentConfig,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    MultiAgentTrainer,
    SHPPOConfig,
    SHPPOTrainer,
)
from marcog_trl.workflows import make_workflow


CHAT = [[{"role": "system", "content": "Code only."}, {"role": "user", "content": f"def f{i}(x):"}] for i in range(4)]


def grpo_script(trainer_class, config_class, model, path, **options):
    """A user's GRPO script. Returns the trainer and everything that its rewards were given."""
    calls = {"letters": [], "long": [], "rare": []}

    def keep(name, prompts, completions, completion_ids, **kwargs):
        assert kwargs["trainer_state"].max_steps == 3
        calls[name].append((prompts, completions, completion_ids, kwargs["answer"]))
        return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]

    def letters(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
        texts = keep("letters", prompts, completions, completion_ids, **kwargs)
        log_extra("length", [len(text) for text in texts])
        log_metric("longest", float(max(map(len, texts))))
        return teams.letters(texts)

    async def long(prompts, completions, completion_ids, **kwargs):
        await asyncio.sleep(0)
        return [len(text) / 16 for text in keep("long", prompts, completions, completion_ids, **kwargs)]

    def rare(prompts, completions, completion_ids, **kwargs):
        texts = keep("rare", prompts, completions, completion_ids, **kwargs)
        return [None if i % 3 else 1.0 for i, _ in enumerate(texts)]

    class Stages(TrainerCallback):
        seen = []

        def on_step_end(self, args, state, control, **kwargs):
            self.seen.append(state.global_step)

    args = config_class(
        str(path),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=4,
        num_generations_eval=2,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        max_completion_length=6,
        learning_rate=1e-2,
        loss_type="dapo",
        beta=0.1,
        scale_rewards=False,
        reward_weights=[1.0, 0.5, 0.25],
        log_completions=True,
        num_completions_to_print=0,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=3,  # no reply ends early: the means of micro-batches are then the means over tokens, which ours are
        **options.pop("config", {}),
    )
    data = Dataset.from_dict({"prompt": options["prompts"], "answer": list("abcd")})
    trainer = trainer_class(
        model,
        reward_funcs=[letters, long, rare],
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        callbacks=[Stages()],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    )
    trainer.train()
    assert Stages.seen == [1, 2, 3]
    return trainer, calls


class TRLTrainer(GRPOTrainer):
    """TRL's trainer. An evaluation gives its random numbers back, as it does with ours."""

    def evaluate(self, *args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)


class TestGRPOScript:
    """A script for TRL's trainer runs with two names changed."""

    @pytest.fixture(scope="class", params=["plain", "conversational"])
    def runs(self, request, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp(request.param)
        prompts = CHAT if request.param == "conversational" else [chat[1]["content"] for chat in CHAT]
        ours = {"critic": "none", "advantage_normalization": "none"}
        return (
            grpo_script(TRLTrainer, GRPOConfig, tiny_model, path / "trl", prompts=prompts),
            grpo_script(
                MultiAgentPPOTrainer, MultiAgentPPOConfig, tiny_model, path / "marcog", prompts=prompts, config=ours
            ),
        )

    def test_rewards_are_given_what_trl_gives_them(self, runs):
        (_, expected), (_, calls) = runs
        assert all(len(entries) > 3 for entries in expected.values())
        assert calls == expected

    def test_without_a_critic_the_update_is_trl_s_bit_for_bit(self, runs):
        (trl, _), (ours, _) = runs
        assert all(value != 0 for value in teams.logged(ours, "grad_norm"))
        for name in ("loss", "grad_norm", "reward", "kl", "entropy", "rewards/rare/mean", "longest", "eval_loss"):
            assert teams.logged(ours, name) == teams.logged(trl, name), name
        expected, weights = teams.trainable(trl), teams.trainable(ours)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

    def test_the_completions_table_has_trl_s_columns_agents_and_turns(self, runs):
        (trl, _), (ours, _) = runs
        for expected in sorted(glob.glob(f"{trl.args.output_dir}/completions/*.parquet")):
            expected = pd.read_parquet(expected)
            table = pd.read_parquet(f"{ours.args.output_dir}/completions/completions_{expected.step[0]:05d}.parquet")
            assert set(table.agent) == {"solver"} and set(table.turn) == {1}
            pd.testing.assert_frame_equal(table[expected.columns], expected, check_exact=False, atol=1e-6)
        assert glob.glob(f"{ours.args.output_dir}/runs/**/events.out*", recursive=True)

    def test_so_is_the_base_trainer_s(self, tiny_model, tmp_path):
        prompts = [chat[1]["content"] for chat in CHAT]
        trl, _ = grpo_script(TRLTrainer, GRPOConfig, tiny_model, tmp_path, prompts=prompts)
        ours, _ = grpo_script(MultiAgentTrainer, MultiAgentConfig, tiny_model, tmp_path, prompts=prompts)
        expected, weights = teams.trainable(trl), teams.trainable(ours)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


class TestRows:
    def test_extra_columns_have_one_value_per_episode(self, tiny_model, tmp_path):
        def reward(completions, log_extra, **kwargs):
            log_extra("short", [0])
            return [0.0] * len(completions)

        trainer = teams.make(tiny_model, tmp_path, reward=reward)
        teams.script(trainer)
        with pytest.raises(ValueError, match=r"logged 1 values as 'short' for 8 episodes\. Log one value for each"):
            trainer.train()

    def test_the_table_has_agents_turns_and_extra_columns_of_the_rewards(self, tiny_model, tmp_path):
        def reward(completions, turn, log_extra, log_metric, **kwargs):
            log_extra("solution", completions)
            log_metric("episodes", len(completions))
            return [1.0 + turn[0]] * len(completions)

        data = Dataset.from_dict({"prompt": ["def f(x):", "more f(x):"]})
        trainer = teams.make(
            tiny_model,
            tmp_path,
            reward=reward,
            data=data,
            workflow=teams.Short(),
            num_generations=1,
            per_device_train_batch_size=10,
            log_completions=True,
            num_completions_to_print=0,
        )
        teams.script(trainer)
        trainer.train()
        table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
        assert {"advantage", "episode", "problem", "verdict"} <= set(table.columns)
        assert table.agent.tolist() == ["a", "b", "a", "a", "b"] * 2
        assert table.turn.tolist() == [1, 1, 1, 2, 2] * 2
        # The reward of a turn stands on the last row of each agent, and on no row that was not used
        assert [None if math.isnan(value) else value for value in table.reward] == [1, 1, *[None] * 4, 1, 1, 2, 2]
        assert table.index[table.solution.notna()].tolist() == [0, 1, 5, 6, 7, 8, 9]
        assert table.solution[5] == table.solution[7] != table.solution[8] == table.solution[9]
        assert teams.logged(trainer, "episodes") == [(2 + 1) / 2]
        assert teams.logged(trainer, "agents/a/reward") == pytest.approx([(1 + 1 + 2) / 3])


class TestRewards:
    def test_are_called_once_per_turn_with_one_entry_per_episode(self, tiny_model, tmp_path):
        calls = []

        def reward(prompts, completions, completion_ids, replies, turn, verdicts, level, executor, **kwargs):
            previous = kwargs.pop("previous_solution")
            assert previous == ([None] * len(prompts) if not calls else calls[-1][1])
            assert kwargs.pop("previous_verdicts") == [[]] * len(prompts)
            until_now = [[token for row in rows for token in row.completion_ids] for rows in kwargs.pop("rows")]
            earlier = [ids for call in calls for ids in call[2]] or [[]] * len(prompts)
            assert until_now == [[*before, *ids] for before, ids in zip(earlier, completion_ids, strict=True)]
            calls.append((prompts, completions, completion_ids, replies, turn, level))
            assert executor is trainer.executor and verdicts == [[]] * len(prompts)
            assert set(kwargs) == {"advice", "log_extra", "log_metric", "trainer_state", "workflow"}
            return [0.0] * len(prompts)

        trainer = teams.make(
            tiny_model,
            tmp_path,
            reward=reward,
            data=teams.dataset(2, level=["easy", "hard"]),
            workflow=teams.Pair(num_turns=2),
            num_generations=2,
            per_device_train_batch_size=16,
        )
        generated = teams.script(trainer)
        teams.generation_batch(trainer)
        assert len(calls) == 2
        for k, (prompts, completions, completion_ids, replies, turn, level) in enumerate(calls):
            assert prompts == ["def f0(x):"] * 2 + ["def f1(x):"] * 2
            assert level == ["easy"] * 2 + ["hard"] * 2
            assert turn == [k] * 4
            texts = trainer._tokenizer.batch_decode(generated[k][1], skip_special_tokens=True)
            assert [list(reply.values()) for reply in replies] == [texts[i : i + 2] for i in range(0, 8, 2)]
            assert [set(reply) for reply in replies] == [{"a", "b"}] * 4
            assert completions == ["|".join(reply.values()) for reply in replies]
            spoken = generated[k][1]
            assert completion_ids == [spoken[i] + spoken[i + 1] for i in range(0, 8, 2)]

    def test_solutions_are_messages_where_prompts_are(self, tiny_model, tmp_path):
        seen = []

        def reward(completions, **kwargs):
            seen.extend(completions)
            return [0.0] * len(completions)

        trainer = teams.make(tiny_model, tmp_path, reward=reward, data=Dataset.from_dict({"prompt": CHAT}))
        calls = teams.script(trainer)
        teams.generation_batch(trainer)
        texts = trainer._tokenizer.batch_decode(calls[0][1], skip_special_tokens=True)
        assert seen == [[{"role": "assistant", "content": text}] for text in texts]

    def test_a_reward_model_scores_solutions(self, tiny_model, tmp_path):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        trainer = teams.make(tiny_model, tmp_path, reward=model, workflow=teams.Pair())
        calls = teams.script(trainer)
        teams.generation_batch(trainer)
        texts = tokenizer.batch_decode(calls[0][1], skip_special_tokens=True)
        solutions = [f"def f{i // 4}(x):{texts[i]}|{texts[i + 1]}" for i in range(0, 8, 2)]
        batch = tokenizer(solutions, return_tensors="pt", padding=True, padding_side="right")
        with torch.no_grad():
            expected = model.eval()(**batch).logits[:, 0]
        assert trainer._metrics["train"]["agents/a/reward"] == pytest.approx([expected.mean().item()], abs=1e-5)


@pytest.fixture(scope="module")
def builtin():
    return load_problems("builtin", split="train").select(range(40))


class TestDefaults:
    @pytest.mark.parametrize(("workflow", "num_turns"), [("single", 1), ("collaboration", 3), ("pipeline", 2)])
    def test_a_configuration_without_arguments_fits_every_workflow(
        self, tiny_model, tmp_path, monkeypatch, builtin, workflow, num_turns
    ):
        """Batches, checkpoints and evaluation included; model and generation are made small."""
        monkeypatch.chdir(tmp_path)
        args = SHPPOConfig(report_to="none", disable_tqdm=True, logging_steps=1)
        args.workflow, args.num_turns, args.feedback, args.max_steps = workflow, num_turns, "plain", 1
        trainer = SHPPOTrainer(tiny_model, teams.letters, args, builtin, builtin.select(range(3)))
        assert trainer.model.peft_config["default"].r == 16

        class Executor:
            def run(self, jobs):
                return [Verdict("passed", 1, 1, ()) for _ in jobs]

        trainer.team._executor = Executor()
        teams.script(trainer)
        trainer.train()
        assert math.isfinite(trainer.evaluate()["eval_reward"])  # which may be 0
        rows = len(trainer.workflow.slots)
        assert args.per_device_train_batch_size * args.steps_per_generation % (4 * rows) == 0
        assert args.per_device_eval_batch_size % rows == 0


class TestEarlyTermination:
    REWARDS = ([1.0, 3.0, None, 2.0], [5.0, 7.0])  # of four episodes, and of the two that go on

    def make(self, model, path, threshold, rewards=None):
        rewards = iter(rewards or self.REWARDS)
        trainer = teams.make(
            model, path, reward=lambda completions, **kwargs: next(rewards), data=teams.dataset(2),
            workflow=teams.Pair(num_turns=2), per_device_train_batch_size=16, early_termination_threshold=threshold,
        )  # fmt: skip
        return trainer, teams.script(trainer)

    def test_episodes_end_above_the_threshold(self, tiny_model, tmp_path):
        """Those at the threshold go on; masked ones, which nothing can count for, end too."""
        trainer, calls = self.make(tiny_model, tmp_path, 2.0)
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [8, 4]
        # Problem, turn, agent, episode
        live = (output["completion_mask"] * output["tool_mask"]).any(1).view(2, 2, 2, 2)
        assert live[:, 0, 0].tolist() == live[:, 0, 1].tolist() == [[True, True], [False, True]]
        assert live[:, 1, 0].tolist() == live[:, 1, 1].tolist() == [[True, False], [False, True]]
        assert trainer._metrics["train"]["episodes/turns"] == [(2 + 1 + 1 + 2) / 4]

    def test_evaluation_ends_them_as_well(self, tiny_model, tmp_path):
        trainer, calls = self.make(tiny_model, tmp_path, 2.0)
        trainer.model.eval()
        trainer.team._executor = SimpleNamespace(
            submit=lambda jobs: finished([Verdict("failed", 0, 1, ()) for _ in jobs])
        )
        problem = {"prompt": "def f(x):", **{name: column[0] for name, column in TESTED.items()}}
        episodes = play_and_score(trainer.team, trainer.scorer, [problem] * 4)()
        assert [len(prompts) for prompts, _ in calls] == [8, 4]
        assert [len(episode.turns) for episode in episodes] == [2, 1, 1, 2]
        assert [episode.turns[-1].rewards and episode.turns[-1].rewards["a"] for episode in episodes] == [
            5,
            3,
            None,
            7,
        ]

    @pytest.mark.parametrize(
        ("threshold", "rewards", "message"),
        [
            (9.0, ([1.0, 2.0, 3.0, 4.0], [1.0] * 4), "threshold=9.0: in the first batch no episode earned more"),
            (
                0.0,
                ([1.0, 2.0, 3.0, 4.0], []),
                "threshold=0.0: in the first batch every episode earned more in its first",
            ),
        ],
    )
    def test_a_threshold_that_decides_nothing_is_warned_of(self, tiny_model, tmp_path, threshold, rewards, message):
        trainer, _ = self.make(tiny_model, tmp_path, threshold, rewards=rewards)
        with pytest.warns(UserWarning, match=message):
            teams.generation_batch(trainer)


TESTED = {"test": [["assert f(1)"]] * 8, "test_format": ["asserts"] * 8, "entry_point": ["f"] * 8}


class TestFeatures:
    def test_streams_train_and_evaluate_like_datasets(self, tiny_model, tmp_path):
        """The same problems in the same order, as a stream that is read once."""

        def run(stream):
            rows = teams.dataset(6, answer=list("abcdef"))
            seen = []

            def reward(completions, answer, **kwargs):
                seen.append(answer)
                return teams.letters(completions)

            def examples():
                yield from rows

            data = IterableDataset.from_generator(examples) if stream else rows
            trainer = teams.make(
                tiny_model,
                tmp_path,
                reward=reward,
                data=data,
                eval_dataset=data,
                workflow=teams.Chain(),
                max_steps=3,
                num_iterations=2,
                per_device_eval_batch_size=4,
            )
            assert trainer.eval_dataset is data
            trainer.train()
            trained = list(seen)
            trainer.evaluate()
            return (
                trained,
                sorted(answer for call in seen[len(trained) :] for answer in call),
                teams.logged(trainer, "loss"),
            )

        streamed, expected = run(stream=True), run(stream=False)
        assert streamed == expected
        assert streamed[0] == [list("aabb"), list("ccdd")]
        assert streamed[1] == list("abcdef")

    def test_the_entropy_bonus_is_the_same_for_every_loss(self, tiny_model, tmp_path):
        """Slots that nobody used count neither in the loss nor in the bonus."""

        def gradients(loss_type):
            watch = teams.Watch()
            trainer = teams.make(
                tiny_model, tmp_path, MultiAgentTrainer, workflow=teams.Short(), callbacks=[watch], loss_type=loss_type,
                reward=lambda completions, **kwargs: [0.0] * len(completions), entropy_coef=1.0,
                agent_loss_weighting="token", per_device_train_batch_size=40,
                data=Dataset.from_dict({"prompt": ["def f0(x): more", "def f1(x):", "def f2(x):", "def f3(x):"]}),
            )  # fmt: skip
            teams.script(trainer)
            trainer.train()
            return watch.gradients[0]

        expected = gradients("dapo")
        for loss_type in ("grpo", "dr_grpo", "sapo", "luspo", "bnpo"):
            torch.testing.assert_close(gradients(loss_type), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("trainer_class", [MultiAgentTrainer, MultiAgentPPOTrainer])
    def test_continuous_batching_leaves_mode_and_precision_as_they_are(self, tiny_model, tmp_path, trainer_class):
        """TRL turns training on after it, also in an evaluation, and casts all parameters before it."""
        trainer = teams.make(
            tiny_model, tmp_path, trainer_class, workflow=teams.Pair(), use_transformers_continuous_batching=True, bf16=True,
            eval_dataset=teams.dataset(4), eval_strategy="steps", eval_steps=1, max_steps=2, num_generations=4,
            num_generations_eval=1,
        )  # fmt: skip
        model = trainer.model

        def generate_batch(prompt_ids, **kwargs):  # which wants an accelerator
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            return {i: SimpleNamespace(generated_tokens=[11, 12, teams.EOS]) for i in range(len(prompt_ids))}

        model.generate_batch = generate_batch
        trainer.train()
        assert len(teams.logged(trainer, "eval_reward")) == len(teams.logged(trainer, "reward")) == 2
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}

    def test_evaluation_during_training_leaves_training_as_it_is(self, tiny_model, tmp_path):
        def run(**options):
            trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), max_steps=3, **options)
            trainer.train()
            return trainer

        plain = run()
        evaluated = run(eval_strategy="steps", eval_steps=1, eval_dataset=teams.dataset(3), num_generations_eval=2)
        assert len(teams.logged(evaluated, "eval_reward")) == 3
        assert len(teams.logged(evaluated, "eval_agents/b/reward")) == 3
        for name in ("loss", "reward", "entropy"):
            assert teams.logged(evaluated, name) == teams.logged(plain, name)

    def test_a_user_s_adapter_goes_on_with_itself_as_reference(self, tiny_model, tmp_path):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        torch.manual_seed(0)
        model = get_peft_model(base, teams.lora_config(r=2))
        start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        trainer = teams.make(
            model, tmp_path, SHPPOTrainer, peft_config=None, beta=0.5, workflow=teams.Pair(), max_steps=2
        )
        assert set(model.peft_config) == {"default", "ref"}
        trainer.train()
        kl = teams.logged(trainer, "kl")
        assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-6
        for name, tensor in start.items():
            assert not torch.equal(model.get_parameter(name), tensor)
            assert torch.equal(model.get_parameter(name.replace(".default.", ".ref.")), tensor)


class TestLayout:
    def test_several_optimizer_steps_of_a_rollout_are_said(self, tiny_model, tmp_path):
        """With the number of accumulated batches that makes one of them, which then is not said."""
        options = {"workflow": teams.Pair(), "num_generations": 4, "per_device_train_batch_size": 2}
        message = (
            r"Each rollout is used for 4 optimizer steps: it has 8 rows, because it holds whole problems of 8 rows "
            r"\(num_generations=4 x 2 slots\), and a step has 2\. Set gradient_accumulation_steps=4 "
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a trainer that only evaluates has no rollouts to train on
            trainer = teams.make(tiny_model, tmp_path, max_steps=1, **options)
        assert (trainer.args.steps_per_generation, trainer.args.generation_batch_size) == (4, 8)
        with pytest.warns(UserWarning, match=message):
            trainer.train()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            teams.make(tiny_model, tmp_path, max_steps=1, gradient_accumulation_steps=4, **options).train()
        assert not [warning for warning in caught if "Each rollout" in str(warning.message)]


def test_a_prompt_beyond_the_context_is_said_once(tiny_model, tmp_path):
    data = Dataset.from_dict({"prompt": ["def f(x): " * 400] * 2})
    trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair(num_turns=2), data=data, max_steps=1)
    with pytest.warns(UserWarning, match=r"exceeds the model's context of 1024 tokens") as caught:
        trainer.train()
    assert len([warning for warning in caught if "context" in str(warning.message)]) == 1


def with_tests():
    return teams.dataset(8, entry_point=["f"] * 8, test=[["assert f(1)"]] * 8, test_format=["asserts"] * 8)


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("single", {"feedback": "passed", "visible_tests": 3}, {}),
        ("single", {"visible_tests": None}, {}),
        ("collaboration", {"feedback": "plain", "visible_tests": -1}, {}),
    ],
)
def test_team_json_describes_a_workflow_instance(tiny_model, tmp_path, name, options, settings):
    workflow = make_workflow(name, num_turns=2, **options)
    trainer = teams.make(tiny_model, tmp_path, data=with_tests(), workflow=workflow)
    described = trainer.team.description.to_dict()["settings"]
    expected = {"num_turns": 2, **options, **settings}
    assert {key: described[key] for key in expected} == expected
    # What was described agrees with the instance when the team is made again
    teams.make(tiny_model, tmp_path / "again", data=with_tests(), workflow=workflow, **expected)
