"""Token-level PPO: credit against hand-worked numbers, exact ratios, and what a row may and may not touch."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import teams
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.agents import Slot
from marcog_trl.team.vllm import LanguageModelGeneration


def fixed_values(trainer, values):
    """Makes the critic say these numbers, row by row, whatever it sees."""
    values = torch.tensor(values)
    teams.hold_critic(trainer)
    trainer.modules.value_head.forward = lambda hidden, state: values[: len(hidden), : hidden.size(1)]


def gradients(model, path, trainer=MultiAgentPPOTrainer, **options):
    """Gradients of the first optimizer step on scripted rollouts, with everything away from its start."""
    watch = teams.Watch()
    trainer = teams.make(model, path, trainer, callbacks=[watch], **options)
    teams.randomize(trainer.modules)
    teams.script(trainer)
    trainer.train()
    return watch.gradients


def assert_equal_gradients(left, right, tolerance=2e-5):
    """Equal up to a share of the largest entry of each tensor."""
    assert left.keys() == right.keys()
    for name, expected in right.items():
        largest = expected.abs().max().item()
        assert (left[name] - expected).abs().max().item() <= tolerance * max(largest, 1e-3), name
    assert all(expected.any() for name, expected in right.items() if "lora" in name)


class Once(teams.Pair):
    """Two turns, the second of agent a alone."""

    def __init__(self):
        super().__init__(num_turns=2)
        self.slots = (Slot("a"), Slot("b"), Slot("a", turn=1))

    def play(self, problem):
        yield {"a": "x", "b": "y"}
        yield {"a": "z"}

    def solution(self, problem, replies):
        return replies["a"]


class Uneven(teams.Pair):
    """Agent a speaks twice in the first of three turns and not in the second, b in the first two."""

    slots = (Slot("a"), Slot("a", act=1), Slot("b"), Slot("b", turn=1), Slot("a", turn=2))

    def __init__(self):
        super().__init__(num_turns=3)

    def play(self, problem):
        prompt = problem["prompt"]
        yield {"a": f"{prompt} a", "b": f"{prompt} b"}
        yield {"a": f"{prompt} a again"}
        yield {"b": f"{prompt} b1"}
        yield {"a": f"{prompt} a2"}

    def solution(self, problem, replies):
        return "".join(replies.values())


class TestCredit:
    REPLIES = ([[11, 12], [13, 14, 15]], [[16, teams.EOS], [17]])

    def make(self, model, path, **options):
        def reward(turn, replies, **kwargs):
            return [{"a": 1.0, "b": 0.5} if turn[0] == 0 else {"a": 2.0, "b": -1.0} for _ in replies]

        options = {
            "reward": reward,
            "workflow": teams.Pair(num_turns=2),
            "num_generations": 1,
            "per_device_train_batch_size": 4,
            "gamma": 0.9,
            "lam": 0.8,
            "gamma_turn": 0.5,
            "lam_turn": 0.4,
            "advantage_normalization": "none",
            **options,
        }
        trainer = teams.make(model, path, **options)
        teams.recite(trainer, *self.REPLIES)
        return trainer

    VALUES = [
        [0.1, 0.2, 9.0],
        [0.5, -0.5, 0.25],
        [0.3, 0.4, 9.0],
        [1.0, 9.0, 9.0],
    ]  # rows a0, b0, a1, b1; 9 on padding

    def test_two_agents_over_two_turns(self, tiny_model, tmp_path):
        trainer = self.make(tiny_model, tmp_path)
        fixed_values(trainer, self.VALUES)
        output = teams.generation_batch(trainer)
        # From the end: δ = r + γ V' − V, or r + γ_turn V' − V where the next token is of the next turn, and
        # A = δ + γ λ A', or δ + γ_turn λ_turn A' there
        a1 = 2 - 0.4
        a0 = 0 + 0.9 * 0.4 - 0.3 + 0.72 * a1
        a = [0.9 * 0.2 - 0.1 + 0.72 * (1 + 0.5 * 0.3 - 0.2 + 0.2 * a0), 1 + 0.5 * 0.3 - 0.2 + 0.2 * a0, a0, a1]
        b1 = -1 - 1.0
        b2 = 0.5 + 0.5 * 1.0 - 0.25 + 0.2 * b1
        b = [0.9 * -0.5 - 0.5 + 0.72 * (0.9 * 0.25 + 0.5 + 0.72 * b2), 0.9 * 0.25 + 0.5 + 0.72 * b2, b2, b1]
        assert a == pytest.approx([0.938528, 1.1924, 1.212, 1.6])
        assert b == pytest.approx([-0.24656, 0.977, 0.35, -2.0])
        expected = torch.tensor([[a[0], a[1], 0], [b[0], b[1], b[2]], [a[2], a[3], 0], [b[3], 0, 0]])
        torch.testing.assert_close(output["advantages"], expected)
        live = output["completion_mask"].bool()
        torch.testing.assert_close(output["returns"][live], (expected + torch.tensor(self.VALUES))[live])
        assert torch.equal(output["old_values"], torch.tensor(self.VALUES))

    def test_a_reward_without_a_row_goes_discounted_to_the_agent_s_last_row(self, tiny_model, tmp_path):
        trainer = self.make(tiny_model, tmp_path, workflow=Once(), gamma=1.0, lam=1.0, per_device_train_batch_size=3)
        teams.recite(trainer, [[11, 12], [13, 14, 15]], [[16]])
        output = teams.generation_batch(trainer)
        value = (2 * (1 + 0.5 * 2) + 3 * 0 + 2) / 6  # of every token: the mean return, at which the critic starts
        b = 0.5 + 0.5 * -1.0
        a0, a1 = 1 + 0.5 * (value + 0.4 * (2 - value)), 2.0
        torch.testing.assert_close(output["returns"], torch.tensor([[a0, a0, 0], [b, b, b], [a1, 0, 0]]))

    @pytest.mark.parametrize("options", [{"critic": "none"}, {"critic": "agent", "lam": 1.0}])
    def test_the_turn_discount_counts_turns_and_not_rows(self, tiny_model, tmp_path, options):
        """Two acts in one turn have no discount between them, and a turn without a row of the agent has one."""
        rewards = [[0.0, 0.0], [0.0, 0.0], [4.0, 8.0]]
        trainer = teams.make(
            tiny_model,
            tmp_path,
            reward=lambda turn, **kwargs: rewards[turn[0]],
            workflow=Uneven(),
            data=teams.dataset(1),
            gamma_turn=0.5,
            advantage_normalization="none",
            agent_loss_weighting="token",
            per_device_train_batch_size=10,
            **options,
        )
        teams.script(trainer)
        output = teams.generation_batch(trainer)
        # Slots a, a again, b, then b, then a: returns of turns 0, 1, 2 are 1 | 2, 2 | 4 and 4 | 8
        returns = torch.tensor([1.0, 2, 1, 2, 1, 2, 2, 4, 4, 8])
        if options["critic"] == "none":
            mean = returns.view(-1, 2).mean(1, keepdim=True)
            torch.testing.assert_close(output["advantages"][:, 0], (returns.view(-1, 2) - mean).flatten())
        else:
            torch.testing.assert_close(output["returns"][:, 0], returns)

    def test_advantages_are_normalised_and_agents_weigh_the_same(self, tiny_model, tmp_path):
        for over in ("agent", "batch"):
            trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair(), advantage_normalization=over)
            teams.randomize(trainer.modules)
            teams.script(trainer)
            output = teams.generation_batch(trainer)
            mask, agent = output["completion_mask"].bool(), output["agent"]
            count = torch.stack([mask[agent == i].sum() for i in (0, 1)])
            assert count[0] != count[1]
            torch.testing.assert_close(output["row_weight"], (count.sum() / (2 * count))[agent])
            advantages = output["advantages"] / output["row_weight"][:, None]
            for i in (0, 1) if over == "agent" else (slice(None),):
                own = agent == i if over == "agent" else i
                assert advantages[own][mask[own]].mean().item() == pytest.approx(0, abs=1e-5)
                squares = (advantages[own].square() * mask[own]).sum(1) / mask[own].sum(1)
                assert squares.mean().item() == pytest.approx(1, abs=1e-3)

    def test_nearly_equal_advantages_stay_small(self, tiny_model, tmp_path):
        earned = [[0.5, 0.51, 0.5, 0.51], [0.0, 1.0, 0.0, 1.0]]
        trainer = teams.make(tiny_model, tmp_path, reward=lambda **kwargs: earned.pop(), per_device_train_batch_size=4)
        teams.script(trainer)
        teams.hold_critic(trainer)
        for expected in (1, 0.02):
            output = teams.generation_batch(trainer)
            mask = output["completion_mask"]
            squares = (output["advantages"].square() * mask).sum(1) / mask.sum(1)
            assert squares.mean().sqrt().item() == pytest.approx(expected, abs=1e-3)
        assert trainer.state.stateful_callbacks["advantage_variance"] == pytest.approx([2.0, 0.125], abs=1e-3)

    def test_an_agent_that_comes_later_has_its_own_memory(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair())
        for agent in (0, 0, 1):
            batch = SimpleNamespace(agent=torch.tensor([agent, agent]), mask=torch.ones(2, 1), training=True)
            trainer.algorithm._normalized(torch.tensor([[0.0], [2.0]]), batch)
        assert trainer.algorithm.memory["advantage_variance"] == [2.0, 1.0, 1.0, 1.0]

    def test_tokens_may_decide_the_weight_of_an_agent(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair(), agent_loss_weighting="token")
        teams.script(trainer)
        assert torch.equal(teams.generation_batch(trainer)["row_weight"], torch.ones(8))
        trainer = teams.make(tiny_model, tmp_path, workflow=Once(), loss_type="grpo", per_device_train_batch_size=6)
        teams.script(trainer)
        weight = teams.generation_batch(trainer)["row_weight"]
        # By rows, of which a has two thirds
        torch.testing.assert_close(weight, torch.tensor([0.75, 0.75, 1.5, 1.5, 0.75, 0.75]))


class TestKL:
    def test_in_the_reward_falls_on_every_token(self, tiny_model, tmp_path):
        options = {"workflow": teams.Pair(), "beta": 0.7, "lam": 1.0, "advantage_normalization": "none"}
        trainer = teams.make(tiny_model, tmp_path, kl_penalty="reward", **options)
        teams.script(trainer)
        output = teams.generation_batch(trainer)
        mask = output["completion_mask"]
        kl = (output["old_per_token_logps"] - output["ref_per_token_logps"]) * mask
        assert kl.abs().max() > 1e-3
        task = teams.make(tiny_model, tmp_path, kl_penalty="loss", **options)
        teams.script(task)
        returns = teams.generation_batch(task)["returns"]
        to_go = kl.flip(1).cumsum(1).flip(1)
        torch.testing.assert_close(output["returns"], (returns - 0.7 * to_go) * mask, atol=1e-5, rtol=1e-5)
        trainer.log({})
        assert teams.logged(trainer, "kl") == [pytest.approx((kl.sum() / mask.sum()).item(), abs=1e-6)]

    @pytest.mark.parametrize(("kl_penalty", "expected"), [("reward", False), ("loss", True)])
    def test_acts_in_one_place_only(self, tiny_model, tmp_path, kl_penalty, expected):
        watch = teams.Watch()
        trainer = teams.make(tiny_model, tmp_path, beta=0.7, vf_coef=0.0, kl_penalty=kl_penalty, callbacks=[watch])
        teams.script(trainer)
        teams.change_credit(trainer, teams.without_advantages)
        trainer.train()
        moved = [name for name, gradient in watch.gradients[0].items() if "lora" in name and gradient.any()]
        assert bool(moved) == expected
        assert len(teams.logged(trainer, "kl")) == 1


def no_states(trainer):
    """Generation does not keep hidden states, as with vLLM."""
    begin = trainer.algorithm.begin_rollout
    trainer.algorithm.begin_rollout = lambda *args: begin(*args) | {"token_states": False}


RATIO_MODES = {
    "ppo": (MultiAgentPPOTrainer, {}),
    "no-critic": (MultiAgentPPOTrainer, {"critic": "none", "gradient_accumulation_steps": 1}),
    "kl-reward": (MultiAgentPPOTrainer, {"kl_penalty": "reward", "beta": 0.1}),
    "observation": (SHPPOTrainer, {}),
    "agent-scope": (SHPPOTrainer, {"latent_scope": "agent"}),
    "gradient-to-latent": (SHPPOTrainer, {"policy_gradient_to_latent": True}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
    "dropout": (SHPPOTrainer, {"lora": {"lora_dropout": 0.3}}),
    "checkpointing": (SHPPOTrainer, {"gradient_checkpointing": True}),
    "bf16": (SHPPOTrainer, {"bf16": True}),
}


class TestRatio:
    @pytest.mark.parametrize("mode", RATIO_MODES)
    def test_is_one_before_the_first_update(self, tiny_model, tmp_path, mode):
        """On several micro-batches, unused slots among them, with rows in another order than at rollout."""
        trainer_class, options = RATIO_MODES[mode]
        options = {"steps_per_generation": 4, "gradient_accumulation_steps": 4, **options}
        data = Dataset.from_dict({"prompt": ["def f(x):", "more f(x):"]})
        trainer = teams.make(
            tiny_model,
            tmp_path,
            trainer_class,
            data=data,
            workflow=teams.Short(),
            per_device_train_batch_size=5,
            learning_rate=0.0,
            epsilon=1e-5,  # some CPUs round a row by its place in the micro-batch and in memory
            **options,
        )
        teams.randomize(trainer.modules)
        no_states(trainer)  # a pass over the rollouts gives the old log-probabilities
        told, rows, compute_loss = [], [], trainer._compute_loss
        trainer.on_activity = told.append
        trainer._compute_loss = lambda model, inputs: rows.append(len(inputs["agent"])) or compute_loss(model, inputs)
        trainer.train()
        assert "log-probabilities of replies 11 to 14 of 14" in told  # without the six unused rows
        assert set(rows) == {4}  # equally many in each part, so two of the unused ones stay
        for name in ("low_mean", "high_mean", "region_mean"):  # of ratios that are not 1
            assert teams.logged(trainer, f"clip_ratio/{name}") == [0]


class TestBatches:
    """Of SHPPO, whose losses contain those of PPO."""

    @pytest.mark.parametrize("workflow", [teams.Pair(), teams.Chain(num_turns=2)])
    def test_accumulation_gives_the_update_of_one_batch(self, tiny_model, tmp_path, workflow):
        def run(size, steps):
            return gradients(
                tiny_model,
                tmp_path,
                SHPPOTrainer,
                workflow=workflow,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                beta=0.1,
            )

        [whole] = run(8, 1)
        [accumulated] = run(1, 8)
        assert_equal_gradients(accumulated, whole)

    def test_several_updates_share_a_generation_batch_evenly(self, tiny_model, tmp_path):
        """With a learning rate of 0, the updates of a generation batch average to the update of the whole."""
        options = {"workflow": teams.Pair(), "learning_rate": 0.0, "critic_learning_rate": 0.0}
        options |= {"latent_learning_rate": 0.0, "inference_learning_rate": 0.0}
        [whole] = gradients(tiny_model, tmp_path, SHPPOTrainer, **options)
        parts = gradients(
            tiny_model,
            tmp_path,
            SHPPOTrainer,
            per_device_train_batch_size=2,
            steps_per_generation=4,
            gradient_accumulation_steps=2,
            max_steps=2,
            **options,
        )
        assert len(parts) == 2
        assert_equal_gradients({name: (parts[0][name] + parts[1][name]) / 2 for name in whole}, whole)


def silent_about(prompt):
    """The reward `letters`, and None on the problems with this prompt."""

    def reward(prompts, completions, **kwargs):
        rewards = teams.letters(completions)
        return [None if p == prompt else r for p, r in zip(prompts, rewards, strict=True)]

    return reward


class Spare(teams.Pair):
    """[`Pair`] with slots that nobody uses."""

    def __init__(self):
        super().__init__()
        self.slots = (Slot("a"), Slot("b"), Slot("a", act=1), Slot("b", act=1))


class TestDeadRows:
    """Of SHPPO, whose losses contain those of PPO."""

    OPTIONS = [
        {},
        {"loss_type": "grpo"},
        {"beta": 0.1, "loss_type": "sapo", "agent_loss_weighting": "token"},
        {"loss_type": "dr_grpo", "agent_loss_weighting": "token", "advantage_normalization": "batch"},
        {"loss_type": "bnpo", "agent_loss_weighting": "token", "beta": 0.1},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("loss_type", "dapo"))
    def test_a_masked_episode_leaves_no_trace(self, tiny_model, tmp_path, options):
        options = {"workflow": teams.Pair(), "num_generations": 2, "latent_distance": "minmax", **options}
        [masked] = gradients(
            tiny_model,
            tmp_path,
            SHPPOTrainer,
            data=teams.dataset(4),
            reward=silent_about("def f3(x):"),
            per_device_train_batch_size=16,
            **options,
        )
        [without] = gradients(
            tiny_model, tmp_path, SHPPOTrainer, data=teams.dataset(3), per_device_train_batch_size=12, **options
        )
        assert_equal_gradients(masked, without)

    def test_one_turn_without_a_reward_masks_the_whole_episode(self, tiny_model, tmp_path):
        def reward(prompts, completions, turn, **kwargs):
            return [None if turn[0] == 1 and "f1" in prompt else 1.0 for prompt in prompts]

        trainer = teams.make(tiny_model, tmp_path, reward=reward, workflow=teams.Chain(num_turns=2), num_generations=1)
        calls = teams.script(trainer)
        output = teams.generation_batch(trainer)
        live = (output["completion_mask"] * output["tool_mask"]).any(1)
        assert live.tolist() == [True] * 4 + [False] * 4
        lengths = [len(replies[0]) for _, replies in calls]
        assert output["num_items_in_batch"] == sum(lengths)
        assert not output["advantages"][4:].any()
        assert not output["row_weight"][:4].eq(0).any()
        assert trainer._metrics["train"]["episodes/masked"] == [0.5]

    @pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("loss_type", "dapo"))
    def test_unused_slots_leave_no_trace(self, tiny_model, tmp_path, options):
        [spare] = gradients(
            tiny_model, tmp_path, SHPPOTrainer, workflow=Spare(), per_device_train_batch_size=16, **options
        )
        [plain] = gradients(
            tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), per_device_train_batch_size=8, **options
        )
        assert_equal_gradients(spare, plain)

    @pytest.mark.parametrize("size", [1, 2])
    def test_the_entropy_bonus_and_the_logs_do_not_depend_on_micro_batches(self, tiny_model, tmp_path, size):
        """Half of the slots are unused, so that some micro-batches hold nothing."""

        def run(size):
            watch = teams.Watch()
            trainer = teams.make(
                tiny_model, tmp_path, MultiAgentPPOTrainer, workflow=Spare(), callbacks=[watch], entropy_coef=1.0, beta=0.1,
                reward=lambda completions, **kwargs: [1.0] * len(completions), advantage_normalization="none",
                per_device_train_batch_size=size, gradient_accumulation_steps=16 // size,
            )  # fmt: skip
            teams.randomize(trainer.modules)
            teams.script(trainer)
            trainer.train()
            logs = {name: teams.logged(trainer, name)[0] for name in ("entropy", "kl", "critic/value_loss")}
            return watch.gradients[0], logs

        (whole, expected), (split, logs) = run(16), run(size)
        assert_equal_gradients(split, whole)
        assert logs == pytest.approx(expected, rel=1e-4) and min(logs.values()) > 0.01

    def test_truncated_completions_can_be_masked(self, tiny_model, tmp_path):
        """In any turn: the reward of a turn that is cut off is not earned by another row."""
        trainer = teams.make(
            tiny_model,
            tmp_path,
            workflow=teams.Pair(num_turns=2),
            mask_truncated_completions=True,
            per_device_train_batch_size=16,
            reward=lambda turn, completions, **kwargs: [1.0 + turn[0]] * len(completions),
            advantage_normalization="none",
            lam=1.0,
        )
        teams.script(trainer, length=3)
        output = teams.generation_batch(trainer)
        ended = (output["completion_ids"] == teams.EOS).any(1)
        mask = (output["completion_mask"] * output["tool_mask"]).bool()
        assert torch.equal(mask.any(1), ended)
        assert output["num_items_in_batch"] == mask.sum()
        assert not output["advantages"][~ended].any()
        # Rows: problem, turn, agent, generation. At λ=1, returns are the rewards from here on
        first, second = ended.view(2, 2, 4).transpose(0, 1).flatten(1)
        assert {(True, False), (False, True), (True, True)} <= set(zip(first.tolist(), second.tolist(), strict=True))
        returns = torch.where(mask, output["returns"], 0).amax(1).view(2, 2, 4).transpose(0, 1).flatten(1)
        assert torch.equal(returns[0], 3.0 * first) and torch.equal(returns[1], 2.0 * second)


class TestCritic:
    def values(self, model, path, replies, workflow, **options):
        """Values of the rows of one episode, `(S, T)`, and its pooled prompt states."""
        trainer = teams.make(
            model,
            path,
            workflow=workflow,
            num_generations=1,
            per_device_train_batch_size=len(workflow.slots),
            **options,
        )
        teams.randomize(trainer.modules)
        teams.hold_critic(trainer)
        teams.recite(trainer, *replies)
        output = teams.generation_batch(trainer)
        return output["old_values"], output["critic_state"]

    @pytest.mark.parametrize("mode", ["ppo", "observation", "agent-scope", "separate"])
    def test_old_values_come_from_generation_as_from_a_forward_pass(self, tiny_model, tmp_path, mode):
        """With prompts of different lengths, unused slots, and replies that end early."""
        trainer_class, options = RATIO_MODES[mode]
        passes, outputs = [], {}
        for known in (True, False):
            data = Dataset.from_dict({"prompt": ["def f(x):", "more f(x): a longer prompt"]})
            trainer = teams.make(
                tiny_model,
                tmp_path,
                trainer_class,
                data=data,
                workflow=teams.Short(),
                per_device_train_batch_size=5,
                steps_per_generation=4,
                gradient_accumulation_steps=4,
                max_completion_length=12,
                generation={"suppress_tokens": list(range(2, 250))},
                **options,
            )
            teams.randomize(trainer.modules)
            count = []
            forward = trainer._get_per_token_logps_and_entropies
            trainer._get_per_token_logps_and_entropies = lambda *a, **k: count.append(1) or forward(*a, **k)  # noqa: B023
            if not known:
                no_states(trainer)
            torch.manual_seed(3)
            outputs[known] = teams.generation_batch(trainer)
            passes.append(len(count))
        assert passes == [0, 1]
        mask = (outputs[True]["completion_mask"] * outputs[True]["tool_mask"]).bool()
        assert len(set(mask.sum(1).tolist())) > 2
        assert torch.equal(outputs[True]["completion_ids"], outputs[False]["completion_ids"])
        old, expected = outputs[True]["old_values"][mask], outputs[False]["old_values"][mask]
        assert expected.std() > 0.01
        torch.testing.assert_close(old, expected, rtol=0, atol=2e-5)

    @pytest.mark.parametrize("critic", ["team", "agent"])
    def test_no_reply_changes_its_own_value(self, tiny_model, tmp_path, critic):
        """In a chain, where later prompts contain it: the values of a and b before and along a's other reply."""
        stages = [[[20, 21, 22]], [[30, 31, 32]], [[40, 41, 42]]]
        other = [[[20, 99, 98]], *stages[1:]]
        chain = teams.Chain("abc")
        values, state = self.values(tiny_model, tmp_path, stages, chain, critic=critic)
        changed, changed_state = self.values(tiny_model, tmp_path, other, chain, critic=critic)
        # V before the first and the second token of a see nothing of what follows
        torch.testing.assert_close(changed[0, :2], values[0, :2])
        assert (changed[0, 2] - values[0, 2]).abs() > 1e-4
        assert (changed[1] - values[1]).abs().amin() > 1e-4  # b reads it
        # c does not, but its team critic sees what b was asked
        assert ((changed[2] - values[2]).abs().amin() > 1e-5) == (critic == "team")
        torch.testing.assert_close(changed_state[0], state[0])
        assert (changed_state[1] - state[1]).abs().amax() > 1e-4
        assert ((changed_state[2] - state[2]).abs().amax() > 1e-4) == (critic == "team")

    def explained(self, model, path, size):
        """The explained variance of each step of a run in which every other prompt earns something."""

        def reward(prompts, **kwargs):
            return [size * ("1" in prompt) for prompt in prompts]

        trainer = teams.make(
            model,
            path,
            reward=reward,
            max_steps=40,
            learning_rate=0.0,
            critic_learning_rate=None,
        )
        teams.script(trainer)
        trainer.train()
        return teams.logged(trainer, "critic/explained_variance")

    def test_learns_what_prompts_earn_whatever_the_size_of_rewards(self, tiny_model, tmp_path):
        """With the default learning rate, and with rewards of 0 for some prompts and of another size for the others."""
        explained = [self.explained(tiny_model, tmp_path / str(size), size) for size in (0.1, 10.0)]
        assert explained[0][0] < 0.2 and explained[0][-1] > 0.9
        assert explained[1] == pytest.approx(explained[0], abs=1e-3)

    @pytest.mark.parametrize("share", [None, "auto"])
    def test_is_measured_against_what_was_earned(self, tiny_model, tmp_path, share):
        """Whatever lambda is: λ-returns contain the estimates themselves."""
        found = []
        for lam in (1.0, 0.5, 0.0):
            trainer = teams.make(
                tiny_model, tmp_path / str(lam), lam=lam, critic_mix=share, max_steps=2, learning_rate=0.0,
                reward=lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
            )  # fmt: skip
            teams.script(trainer)
            fixed_values(trainer, torch.rand(8, 6, generator=torch.Generator().manual_seed(0)).tolist())
            trainer.train()
            found.append(teams.logged(trainer, "critic/explained_variance"))
        assert found[1] == found[2] == pytest.approx(found[0], abs=1e-5) and found[0][0] < 0

    @pytest.mark.parametrize("workflow", [None, teams.Pair()])
    def test_is_mixed_with_the_other_episodes(self, tiny_model, tmp_path, workflow):
        """With one slot, the episodes of a problem may be on several processes."""
        rewards = [[1.0, 0.0, 0.4], [1.0, 0.0, 0.4]]
        trainer = teams.make(
            tiny_model, tmp_path, data=teams.dataset(1), num_generations=3, critic_mix="auto",
            reward=lambda completions, **kwargs: rewards.pop(), per_device_train_batch_size=6 if workflow else 3,
            advantage_normalization="none", agent_loss_weighting="token", **({"workflow": workflow} if workflow else {}),
        )  # fmt: skip
        teams.script(trainer)
        teams.hold_critic(trainer, 0.5)
        alone = torch.tensor([1 - 0.2, -0.7, 0.4 - 0.5])  # no batch has told yet what the critic is worth
        output = teams.generation_batch(trainer)
        torch.testing.assert_close(output["advantages"][:3, 0], alone)
        returns = output["returns"][:, 0].tolist()
        assert returns == pytest.approx([1.0, 0.0, 0.4] * (len(returns) // 3))  # what the critic itself learns
        known = trainer.state.stateful_callbacks["critic_mix"]
        variance = torch.tensor([1.0, 0.0, 0.4]).var().item()
        assert known[0] == pytest.approx([variance, (1.4 / 3 - 0.5) ** 2 - variance / 3, 1.0], abs=1e-6)
        known[0] = [0.08, 0.01, 1.0]
        output = teams.generation_batch(trainer)
        critic = torch.tensor([0.5, -0.5, -0.1])
        torch.testing.assert_close(output["advantages"][:3, 0], 0.2 * alone + 0.8 * critic)

    def test_an_evaluation_teaches_a_mix_nothing(self, tiny_model, tmp_path):
        trainer = teams.make(
            tiny_model, tmp_path, eval_dataset=teams.dataset(2), num_generations_eval=2, critic_mix="auto"
        )
        trainer.train()
        state = json.dumps(trainer.state.stateful_callbacks)
        modules = {name: tensor.clone() for name, tensor in trainer.modules.state_dict().items()}
        trainer.evaluate()
        assert "critic_mix" in state and json.dumps(trainer.state.stateful_callbacks) == state
        for name, tensor in trainer.modules.state_dict().items():
            assert torch.equal(tensor, modules[name]), name

    @pytest.mark.parametrize("lam", [0.95, 1.0])
    def test_starts_at_the_mean_return_of_the_first_batch(self, tiny_model, tmp_path, lam):
        """Whatever lambda is, and then follows the mean of the batches."""
        rewards = iter([0.0, 0.25, 0.75, 1.0])
        trainer = teams.make(
            tiny_model, tmp_path, workflow=teams.Pair(), max_steps=4, lam=lam, vf_coef=0.0,
            reward=lambda completions, **kwargs: [next(rewards)] * len(completions),
        )  # fmt: skip
        teams.script(trainer)
        trainer.train()
        assert teams.logged(trainer, "critic/value_mean") == pytest.approx([0, 0.125, 1 / 3, 0.5])
        trainer._save(str(tmp_path / "saved"))
        again = teams.make(tiny_model, tmp_path, workflow=teams.Pair())
        again._load_modules(str(tmp_path / "saved"))
        torch.testing.assert_close(again.modules.value_head.returns.mean, torch.tensor(0.5))


class TestVLLM:
    def test_is_sent_the_language_model_alone(self, tiny_model, tmp_path):
        """The adapter merged, and none of the team's modules: through TRL's own iteration over the parameters."""
        trainer = teams.make(tiny_model, tmp_path)
        generation = VLLMGeneration.__new__(VLLMGeneration)
        generation.model = trainer.model
        generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
        assert any(name.startswith("marcog_team.") for name, _ in generation._iter_named_params())
        without = LanguageModelGeneration(generation)
        sent = {name: tensor.clone() for name, tensor in without._iter_named_params()}
        without.temperature = 0.5  # they are one backend
        assert generation.temperature == 0.5
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        assert sent.keys() == dict(base.named_parameters()).keys()
        name = "model.layers.0.self_attn.q_proj.weight"
        assert (sent[name] - base.get_parameter(name)).abs().max() > 1e-4


class TestOptimizer:
    def test_groups_have_their_own_learning_rates_and_decay(self, tiny_model, tmp_path):
        rates = {"learning_rate": 0.01, "critic_learning_rate": 0.02}
        rates |= {"latent_learning_rate": 0.03, "inference_learning_rate": 0.04}
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), weight_decay=0.5, **rates)
        trainer.create_optimizer()
        names = {id(p): name for name, p in trainer.model.named_parameters() if p.requires_grad}
        seen = []
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                seen.append(name)
                expected = next((r for r in ("value_head", "latent_net", "inference_net") if r in name), "policy")
                expected = {"value_head": 0.02, "latent_net": 0.03, "inference_net": 0.04, "policy": 0.01}[expected]
                assert group["lr"] == expected, name
                assert group["weight_decay"] == (0.0 if name.endswith("bias") else 0.5), name
        assert sorted(seen) == sorted(names.values())

    def test_groups_are_clipped_on_their_own(self, tiny_model, tmp_path):
        watch = teams.Watch()
        trainer = teams.make(
            tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), callbacks=[watch], max_grad_norm=1e-3
        )
        teams.randomize(trainer.modules)
        teams.script(trainer)
        trainer.train()
        squares = {"value_head": 0.0, "latent_net": 0.0, "inference_net": 0.0, "policy": 0.0}
        for name, gradient in watch.gradients[0].items():
            squares[next((group for group in squares if group in name), "policy")] += gradient.square().sum().item()
        # A joint norm would leave all but one of them far below
        assert {group: square**0.5 for group, square in squares.items()} == pytest.approx(
            dict.fromkeys(squares, 1e-3), rel=1e-3
        )
        for name in ("grad_norm", "grad_norm/critic", "grad_norm/latent", "grad_norm/inference"):
            assert teams.logged(trainer, name)[0] > 1e-3

    def test_a_gradient_scaler_is_applied_once(self, tiny_model, tmp_path, monkeypatch):
        """With fp16, accelerate scales the loss, and unscales gradients at every clipping, of which there are several."""

        def run(scaled):
            trainer = teams.make(
                tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), max_grad_norm=0.1, max_steps=2
            )
            teams.script(trainer)
            if scaled:
                monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
                monkeypatch.setattr(trainer.accelerator, "autocast", nullcontext)
                trainer.accelerator.native_amp = True
                trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            trainer.train()
            return [teams.logged(trainer, name) for name in ("grad_norm", "grad_norm/critic", "grad_norm/latent")]

        for scaled, expected in zip(run(True), run(False), strict=True):
            assert scaled == pytest.approx(expected, rel=2e-2)  # of forward passes in half precision
