"""The group-relative family against hand-worked numbers."""

import warnings

import pytest
import teams
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, MultiAgentPPOTrainer


# Rewards of the four episodes (two problems, two generations) in the two turns
FIRST, SECOND = [1.0, 3.0, 0.0, 6.0], [4.0, 0.0, 2.0, 2.0]
RETURNS = torch.tensor([[3.0, 3.0, 1.0, 7.0], [4.0, 0.0, 2.0, 2.0]])  # from each turn on, with gamma_turn=0.5


def advantages(model, path, trainer=MultiAgentGRPOTrainer, workflow=None, **options):
    """Of the rows of each agent, `(turns, episodes)`."""
    rewards = iter([FIRST, SECOND])
    workflow = workflow or teams.Pair(num_turns=2)
    trainer = teams.make(
        model, path, trainer, reward=lambda completions, **kwargs: next(rewards), workflow=workflow,
        data=teams.dataset(2), per_device_train_batch_size=16, gamma_turn=0.5,
        **{"agent_loss_weighting": "token", **options},
    )  # fmt: skip
    teams.script(trainer)
    output = teams.generation_batch(trainer)
    by_row = output["advantages"]
    by_row = by_row[:, 0] if by_row.dim() == 2 else by_row
    # rows: problem, slot (turn 0: a, b; turn 1: a, b), generation
    return by_row.view(2, 2, 2, 2).permute(2, 1, 0, 3).reshape(2, 2, 4)


EXPECTED = {
    "mean": [[0.0, 0.0, -3.0, 3.0], [2.0, -2.0, 0.0, 0.0]],
    "rloo": [[0.0, 0.0, -6.0, 6.0], [4.0, -4.0, 0.0, 0.0]],
    "max": [[0.0, 0.0, -6.0, 0.0], [0.0, -4.0, 0.0, 0.0]],
    "none": RETURNS.tolist(),
}


class TestAdvantage:
    @pytest.mark.parametrize("kind", EXPECTED)
    def test_compares_the_return_with_the_siblings(self, tiny_model, tmp_path, kind):
        found = advantages(tiny_model, tmp_path, advantage=kind)
        for agent in found:
            torch.testing.assert_close(agent, torch.tensor(EXPECTED[kind]))

    def test_scales_divide_and_do_not_centre(self, tiny_model, tmp_path):
        expected = torch.tensor(EXPECTED["mean"])
        group = torch.tensor([[0.0, 0.0, 18**0.5, 18**0.5], [8**0.5, 8**0.5, 0.0, 0.0]])
        found = advantages(tiny_model, tmp_path, scale_rewards="group")
        torch.testing.assert_close(found[0], expected / (group + 1e-4))
        batch = torch.cat([RETURNS, RETURNS]).std()
        found = advantages(tiny_model, tmp_path, scale_rewards="batch", advantage="none")
        torch.testing.assert_close(found[0], RETURNS / (batch + 1e-4))

    def test_the_scale_of_an_agent_is_its_own(self, tiny_model, tmp_path):
        def reward(completions, **kwargs):
            return [{"a": float(i), "b": 10.0 * i} for i in range(len(completions))]

        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, reward=reward, workflow=teams.Pair(), data=teams.dataset(2),
            scale_rewards="agent", num_generations=4, per_device_train_batch_size=8, agent_loss_weighting="token",
        )  # fmt: skip
        teams.script(trainer)
        found = teams.generation_batch(trainer)["advantages"].view(2, 4)
        centred = torch.arange(4.0) - 1.5
        for agent, scale in enumerate((1.0, 10.0)):
            deviation = scale * torch.arange(4.0).std()
            torch.testing.assert_close(found[agent], scale * centred / (deviation + 1e-4))

    @pytest.mark.parametrize("trainer", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
    def test_turns_have_weights(self, tiny_model, tmp_path, trainer):
        options = {} if trainer is MultiAgentGRPOTrainer else {"critic": "none", "advantage_normalization": "none"}
        plain = advantages(tiny_model, tmp_path, trainer, **options)
        weighted = advantages(tiny_model, tmp_path, trainer, turn_weights=[1.5, 0.25], **options)
        torch.testing.assert_close(weighted[:, 0], 1.5 * plain[:, 0])
        torch.testing.assert_close(weighted[:, 1], 0.25 * plain[:, 1])
        assert plain[:, 0].any() and plain[:, 1].any()

    def test_the_rewards_of_each_function_are_normalised_first(self, tiny_model, tmp_path):
        """Agents have rewards of their own, one function does not apply to an episode, and one episode has no reward."""

        def by_agent(completions, **kwargs):
            return [{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0}, None, {"a": 2.0, "b": 8.0}]

        def shared(completions, **kwargs):
            return [100.0, None, None, 300.0]

        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, reward=[by_agent, shared], workflow=teams.Pair(),
            data=teams.dataset(2), num_generations=4, per_device_train_batch_size=8, agent_loss_weighting="token",
            multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5],
        )  # fmt: skip
        teams.script(trainer)
        found = teams.generation_batch(trainer)["advantages"].view(2, 4)
        first = [torch.tensor([-1.0, 1.0, 0.0, 0.0]), torch.tensor([-1.0, -1.0, 0.0, 2.0]) / 3**0.5]
        second = torch.tensor([-1.0, 0.0, 0.0, 1.0]) / 2**0.5
        total = torch.stack([own + 0.5 * second for own in first])
        live = total[:, [0, 1, 3]]
        expected = (total - live.mean()) / (live.std() + 1e-4)
        expected[:, 2] = 0.0
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def some(completions, **kwargs):
    """A reward that applies to some of the completions."""
    return [len(completion) if len(completion) % 3 else None for completion in completions]


@pytest.mark.parametrize(
    ("options", "favoured"),
    [
        ({"advantage": "none", "loss_type": "grpo"}, "loss_type='grpo' favours short"),
        ({"advantage": "max", "loss_type": "sapo", "agent_loss_weighting": "token"}, "loss_type='sapo' favours long"),
        ({"advantage": "none", "mask_truncated_completions": True}, "mask_truncated_completions=True favours short"),
        ({"advantage": "mean", "loss_type": "grpo", "mask_truncated_completions": True}, None),
        ({"advantage": "max"}, None),
    ],
    ids=str,
)
def test_baselines_that_favour_lengths_warn(tiny_model, tmp_path, options, favoured):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, **options).train()
    found = [str(warning.message) for warning in caught if "favours" in str(warning.message)]
    assert len(found) == (favoured is not None) and all(favoured in text for text in found)


class TestSingleAgent:
    @pytest.mark.parametrize(
        "options",
        [
            {"scale_rewards": "group", "loss_type": "grpo"},
            {"scale_rewards": "none", "loss_type": "dr_grpo"},
            {"scale_rewards": "batch", "loss_type": "dapo"},
            {"multi_objective_aggregation": "normalize_then_sum", "loss_type": "grpo", "reward_weights": [1.0, 0.3]},
            # Truncated completions leave the loss, and stay in the baseline
            {"mask_truncated_completions": True, "loss_type": "dapo", "max_completion_length": 24},
            {"mask_truncated_completions": True, "loss_type": "grpo", "max_completion_length": 24},
            {"full_finetuning": True},
        ],
        ids=["grpo", "dr-grpo", "batch", "gdpo", "truncated", "truncated-grpo", "all-weights"],
    )
    def test_is_grpo(self, tiny_model, tmp_path, options):
        """The same rollouts, losses and weights as with TRL's own trainer, step by step."""
        whole = options.pop("full_finetuning", False)
        common = {
            "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6,
            "optim": "sgd",  # Adam would enlarge what rounding makes
            "learning_rate": 0.1, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
            "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True, "disable_dropout": True,
            "beta": 0.1, "seed": 3, "scale_rewards": "group", **options,
        }  # fmt: skip
        data = Dataset.from_dict({"prompt": [f"def f{i}(x):" for i in range(4)]})
        rewards = [teams.letters, some] if "reward_weights" in options else teams.letters
        runs = []
        for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (MultiAgentGRPOTrainer, MultiAgentGRPOConfig)):
            own = {"full_finetuning": True} if whole and trainer_class is MultiAgentGRPOTrainer else {}
            args = config_class(str(tmp_path / config_class.__name__), **common, **own)
            torch.manual_seed(0)
            adapter = None if whole else teams.lora_config()
            trainer = trainer_class(tiny_model, rewards, args, data, peft_config=adapter)
            trainer.train()
            runs.append((teams.logged(trainer, "loss"), teams.trainable(trainer)))
        (expected, weights), (losses, found) = runs
        assert len(expected) == 2 and any(abs(loss) > 1e-6 for loss in expected)
        assert losses == pytest.approx(expected, rel=1e-4, abs=1e-7)
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_the_card_has_the_name_of_the_algorithm(tiny_model, tmp_path):
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, advantage="none")
    trainer.save_model()
    trainer.create_model_card()
    assert "trained with MAREINFORCE" in " ".join((tmp_path / "README.md").read_text().split())
