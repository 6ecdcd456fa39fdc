"""Training reward models on pairs, and scoring with them."""

import math

import datasets
import pairs as made
import pytest
import teams
import torch
from transformers import AutoTokenizer

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer, TeamRewardConfig
from marcog_trl.agents import Slot
from marcog_trl.preferences.reward_model import TeamRewardModel, is_team_reward_model
from marcog_trl.preferences.reward_trainer import TeamRewardTrainer, hold_out_problems, with_transcripts
from marcog_trl.preferences.transcript import transcript
from marcog_trl.rollout.records import Row


def make(model, path, pairs, held_out=None, **options):
    config = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": 2, **teams.QUIET, **options}
    return TeamRewardTrainer(model, TeamRewardConfig(str(path), **config), pairs, held_out)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A trainer that has learned, and the folder in which its model is."""
    path = tmp_path_factory.mktemp("reward") / "model"
    trainer = make(tiny_model, path, *hold_out_problems(made.dataset(tiny_model, 24), 0.25), max_steps=20)
    before = teams.trainable(trainer)
    trainer.train()
    moved = {name for name, value in teams.trainable(trainer).items() if not torch.equal(value, before[name])}
    assert moved == before.keys() and any("score" in name for name in moved)
    trainer.save_model()
    return trainer, path


class TestTranscript:
    def test_has_the_problem_once_then_every_reply_and_an_end(self, tiny_model):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        replies = [made.reply("a", [40, 41, 1]), made.reply("b", [42, 43]), made.reply("a", [44, 1], turn=1)]
        ids = transcript(tokenizer, "def f(x):", replies)
        assert tokenizer.decode(ids) == (
            "<|user|>def f(x):<|end|><|assistant|>"
            f"[a · 1] {tokenizer.decode([40, 41])}<|end|>\n[b · 1] {tokenizer.decode([42, 43])}\n"
            f"[a · 2] {tokenizer.decode([44])}<|end|>\n<|end|>"
        )
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<|end|>"}]
        assert transcript(tokenizer, messages, []).count(tokenizer.eos_token_id) == 2 + 1  # not the problem's own

    def test_begins_with_the_turns_before(self, tiny_model):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        first, second = made.reply("a", [40]), made.reply("a", [41], turn=1)
        pairs = made.as_dataset([made.pair("f", [second], [], history=[first], model=tiny_model)])
        pair = with_transcripts(pairs, tokenizer, "pairs")[0]
        assert pair["chosen_ids"] == transcript(tokenizer, "def f(x):", [first, second])
        assert pair["rejected_ids"] == transcript(tokenizer, "def f(x):", [first])


class TestTraining:
    def test_loss_of_known_scores(self, tiny_model, tmp_path):
        # Margin 1: -log sigmoid(1) = 0.313262; centring adds 0.01 (1.2 + 0.2)^2
        pairs = made.dataset(tiny_model, 2, 1)
        for centred, expected in ((None, 0.313262), (0.01, 0.332862)):
            trainer = make(tiny_model, tmp_path, pairs, center_rewards_coefficient=centred)
            trainer.model = Scores([1.2, 1.2, 0.2, 0.2])
            batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
            assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected, abs=1e-6)

    def test_learns_what_pairs_prefer_and_nothing_from_shuffled_ones(self, trained, tiny_model, tmp_path):
        trainer, _ = trained
        metrics = trainer.evaluate()  # 24 pairs of 6 problems
        assert metrics["eval_accuracy"] > 0.9 and metrics["eval_margin"] > 0
        shuffled = make(
            tiny_model, tmp_path, *hold_out_problems(made.dataset(tiny_model, 24, shuffled=True), 0.25), max_steps=20
        )
        shuffled.train()
        assert 0.25 < shuffled.evaluate()["eval_accuracy"] < 0.75

    def test_a_push_comes_after_all_files(self, trained, tmp_path, monkeypatch):
        trainer, _ = trained
        pushed = []
        monkeypatch.setattr(trainer.args, "push_to_hub", True)
        monkeypatch.setattr(trainer, "push_to_hub", lambda **options: pushed.append(is_team_reward_model(tmp_path)))
        trainer.save_model(str(tmp_path))
        assert pushed == [True]


class Scores(torch.nn.Module):
    """Gives the sequences of a batch these scores."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, **inputs):
        from transformers.modeling_outputs import SequenceClassifierOutput

        assert len(inputs["input_ids"]) == len(self.scores)
        return SequenceClassifierOutput(logits=torch.tensor(self.scores)[:, None])


class TestHoldOut:
    def test_no_problem_is_in_both(self):
        pairs = made.dataset(None, 20, 3)
        train, held_out = hold_out_problems(pairs)
        assert len(set(held_out["task_id"])) == 2 and len(train) + len(held_out) == 60
        assert not set(train["task_id"]) & set(held_out["task_id"])
        assert hold_out_problems(pairs)[1]["task_id"] == held_out["task_id"]
        assert hold_out_problems(pairs, seed=1)[1]["task_id"] != held_out["task_id"]
        assert len(hold_out_problems(made.dataset(None, 2, 1))[1]) == 1


class TestBadInput:
    def test_pairs_of_another_tokenizer(self, tiny_model, tmp_path):
        with pytest.raises(ValueError, match="train_dataset has token ids of another tokenizer than the reward"):
            make(tiny_model, tmp_path, made.dataset(None))

    def test_long_pairs_are_counted_and_left_out(self, tiny_model, tmp_path):
        long = made.pair("g", [made.reply("a", [50] * 200)], [made.reply("a", [51])], model=tiny_model)
        pairs = datasets.concatenate_datasets([made.dataset(tiny_model, 2), made.as_dataset([long])])
        with pytest.warns(UserWarning, match=r"1 of 9 pairs of train_dataset are longer than max_length=100 tokens"):
            trainer = make(tiny_model, tmp_path, pairs, max_length=100)
        assert len(trainer.train_dataset) == 8
        with pytest.raises(ValueError, match=r"8 of 8 pairs .* Set a longer max_length\."):
            make(tiny_model, tmp_path, made.dataset(tiny_model, 2), max_length=10)


class TestScoring:
    def test_is_that_of_training_bit_for_bit(self, trained):
        trainer, path = trained
        loaded = TeamRewardModel.from_pretrained(path)
        pair = trainer.eval_dataset[0]
        batch = trainer.data_collator([pair])
        trainer.model.eval()
        with torch.no_grad():
            in_training = trainer.model(**batch).logits.squeeze(-1).tolist()
        sides = [pair["chosen"], pair["rejected"]]
        rows = [[row_of(reply) for reply in side] for side in sides]
        rewards = loaded([pair["prompt"]] * 2, rows=rows, turn=[0, 0])
        assert rewards == [(score - loaded.mean) / loaded.std for score in in_training]
        assert trainer.reward_model().score([pair["chosen_ids"], pair["rejected_ids"]]) == in_training

    def test_is_that_of_training_under_autocast(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, made.dataset(tiny_model, 4), bf16=True, max_steps=1, learning_rate=1e-3)
        trainer.train()
        trainer.save_model()
        pair = trainer.train_dataset[0]
        with torch.no_grad(), trainer.compute_loss_context_manager():
            in_training = trainer.model(**trainer.data_collator([pair])).logits.squeeze(-1).tolist()
        loaded = TeamRewardModel.from_pretrained(tmp_path)
        ids = [pair["chosen_ids"], pair["rejected_ids"]]
        assert loaded.autocast == "bfloat16" and loaded.score(ids) == in_training
        loaded.autocast = None
        assert loaded.score(ids) != in_training

    def test_is_standardised_on_the_training_transcripts(self, trained):
        trainer, path = trained
        loaded = TeamRewardModel.from_pretrained(path)
        data = trainer.train_dataset
        episodes = {}  # one that is in several pairs counts once
        for side in ("chosen", "rejected"):
            for ids, prompt, replies in zip(data[f"{side}_ids"], data["prompt"], data[side], strict=True):
                episodes[tuple(ids)] = prompt, [row_of(reply) for reply in replies]
        prompts, rows = zip(*episodes.values(), strict=True)
        rewards = loaded(prompts, rows=rows, turn=[0] * len(rows))
        rewards = torch.tensor(rewards)
        assert rewards.mean().item() == pytest.approx(0, abs=1e-4)
        assert rewards.std(correction=0).item() == pytest.approx(1, abs=1e-4)

    def test_turns_sum_to_the_whole_episode(self, trained):
        _, path = trained
        loaded = TeamRewardModel.from_pretrained(path)
        rows = [row_of(made.reply(agent, [40 + turn, 60], turn)) for turn in range(3) for agent in "ab"]
        parts = [loaded(["p"], rows=[rows[: 2 * k + 2]], turn=[k])[0] for k in range(3)]
        replies = [made.reply(row.slot.agent, row.completion_ids, row.slot.turn) for row in rows]
        (whole,) = loaded.score([transcript(loaded.tokenizer, "p", replies)])
        assert sum(parts) == pytest.approx((whole - loaded.mean) / loaded.std, abs=1e-4)
        # Episodes of different turns in one call
        assert loaded(["p", "p"], rows=[rows[:2], rows], turn=[0, 2]) == pytest.approx([parts[0], parts[2]], abs=1e-4)


def row_of(reply):
    return Row(0, Slot(reply["agent"], reply["turn"]), 0, "", [], reply["completion_ids"])


class TestAsReward:
    @pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer])
    def test_trains_a_team_with_the_true_reward_beside_it(self, trained, tiny_model, tmp_path, trainer_class):
        _, path = trained
        trainer = teams.make(
            tiny_model, tmp_path, trainer_class, [TeamRewardModel.from_pretrained(path), teams.letters],
            workflow=teams.Pair(num_turns=2), reward_weights=[1.0, 0.0], per_device_train_batch_size=16, beta=0.02,
        )  # fmt: skip
        played = []
        score = trainer.scorer.score
        trainer.scorer.score = lambda episodes, *rest: (played.append(episodes), score(episodes, *rest))[1]
        trainer.train()
        (log,) = [entry for entry in trainer.state.log_history if "rewards/reward_model/mean" in entry]
        assert math.isfinite(log["rewards/letters/mean"]) and "kl" in log
        model = trainer.scorer.funcs[0]
        for episode in played[-1]:
            replies = [made.reply(row.slot.agent, row.completion_ids, row.slot.turn) for row in episode.rows]
            (whole,) = model.score([transcript(model.tokenizer, episode.problem["prompt"], replies)])
            total = sum(turn.rewards["a"] for turn in episode.turns)
            assert total == pytest.approx((whole - model.mean) / model.std, abs=1e-4)

    def test_of_another_tokenizer_is_refused_before_training(self, trained, tiny_model, tmp_path):
        _, path = trained
        model = TeamRewardModel.from_pretrained(path)
        model.tokenizer.add_tokens(["another"])
        with pytest.raises(ValueError, match=r"the reward model has another vocabulary than the team"):
            teams.make(tiny_model, tmp_path, reward=[model])
        model.tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        model.tokenizer.chat_template = "{{ messages }}"
        with pytest.raises(ValueError, match=r"the reward model has another chat template than the team"):
            teams.make(tiny_model, tmp_path, reward=[model])
