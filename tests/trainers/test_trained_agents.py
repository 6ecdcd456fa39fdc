"""`trained_agents`: the other agents speak, and nothing that is learned depends on them."""

import zlib

import pytest
import teams
import torch
from transformers import TrainerCallback

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer


class Alone(teams.Pair):
    """As `Pair`, but agent b is never asked."""

    def play(self, problem):
        for turn in range(self.num_turns):
            yield {"a": f"{problem['prompt']} a{turn}"}

    def solution(self, problem, replies):
        return replies["a"]


def of_a(completions, replies, **kwargs):
    """Differs between any two replies of agent a."""
    return teams.letters([reply["a"] for reply in replies])


def own(completions, replies, **kwargs):
    """Each agent earns by its own reply, on scales of its own."""
    return [{"a": a, "b": 10 * b} for a, b in ((teams.letters([reply[n]])[0] for n in "ab") for reply in replies)]


def noise_of(rows):
    """Noise of latents that depends on the row alone, not on who else speaks."""
    seeds = [zlib.crc32(repr((row.episode, row.slot)).encode()) for row in rows]
    return torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def step(model, path, trainer=MultiAgentGRPOTrainer, change=None, **options):
    """The trainer after one step on replies from a script, and the gradients of the step."""
    watch = teams.Watch()
    defaults = {"workflow": teams.Pair(), "reward": of_a, "beta": 0.1, "callbacks": [watch], "seed": 3}
    trainer = teams.make(model, path, trainer, **{**defaults, **options})
    teams.script(trainer)
    if isinstance(trainer, MultiAgentPPOTrainer):
        teams.randomize(trainer.modules)
        if trainer.args.critic != "none":
            teams.hold_critic(trainer)  # whose moments are those of the trained agents
    if isinstance(trainer, SHPPOTrainer):
        begin = trainer.algorithm.begin_rollout
        trainer.algorithm.begin_rollout = lambda *args: begin(*args) | {"noise": noise_of}
    if change is not None:
        change(trainer)
    trainer.train()
    [gradients] = watch.gradients
    return trainer, gradients


def check_equal(ours, theirs, scale=1.0):
    assert ours.keys() == theirs.keys()
    assert sum(gradient.abs().sum() for gradient in theirs.values()) > 0
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, scale * theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiAgentGRPOTrainer, {"scale_rewards": "batch"}),
        (MultiAgentGRPOTrainer, {"scale_rewards": "agent", "loss_type": "grpo", "advantage": "rloo"}),
        (MultiAgentGRPOTrainer, {"loss_type": "bnpo", "agent_loss_weighting": "token"}),
        (MultiAgentGRPOTrainer, {"turn_tree": True, "scale_rewards": "batch", "per_device_train_batch_size": 24}),
        (MultiAgentPPOTrainer, {"critic": "agent", "advantage_normalization": "batch"}),
        (SHPPOTrainer, {"critic": "agent", "policy_gradient_to_latent": True}),
        (SHPPOTrainer, {"critic": "agent", "latent_scope": "agent", "latent_distance": "minmax"}),
        (SHPPOTrainer, {"critic": "none", "parameter_sharing": "separate"}),
    ],
    ids=str,
)
def test_agents_that_are_not_trained_count_like_silent_ones(tiny_model, tmp_path, trainer, options):
    turns = 2 if trainer is not SHPPOTrainer else 1
    _, ours = step(
        tiny_model, tmp_path / "a", trainer, workflow=teams.Pair(num_turns=turns), trained_agents=["a"],
        **{"per_device_train_batch_size": 16, **options},
    )  # fmt: skip
    # With one agent that speaks, every weighting of agents is the same
    _, alone = step(
        tiny_model, tmp_path / "b", trainer, workflow=Alone(num_turns=turns),
        **{"per_device_train_batch_size": 16, **options, "agent_loss_weighting": "token"},
    )  # fmt: skip
    check_equal(ours, alone)


@pytest.mark.parametrize("trainer", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
def test_the_gradients_of_single_agents_add_up(tiny_model, tmp_path, trainer):
    gradients = {}
    for names in (["a"], ["b"], ["b", "a"], None):
        # Without the KL term, which weighs agents by their tokens
        options = {"reward": own, "beta": 0.0, "trained_agents": names}
        _, gradients[str(names)] = step(tiny_model, tmp_path / str(names), trainer, **options)
    mean = {name: (g + gradients["['b']"][name]) / 2 for name, g in gradients["['a']"].items()}
    assert not all(torch.allclose(g, gradients["['b']"][name]) for name, g in gradients["['a']"].items())
    check_equal(gradients["None"], mean)
    check_equal(gradients["['b', 'a']"], gradients["None"])


@pytest.mark.parametrize("size", [6, 3, 2, 1])
def test_an_update_has_the_rows_of_trained_agents_alone(tiny_model, tmp_path, size):
    """6 rows of 3 agents: 2 to train, with which micro-batches of 2 and 1 rows cannot all be filled."""

    def make(trainer):
        compute = trainer._compute_loss

        def watched(model, inputs):
            seen.append(inputs["agent"].tolist())
            return compute(model, inputs)

        trainer._compute_loss = watched

    seen = []
    options = {"workflow": teams.Pair(("a", "b", "c")), "trained_agents": ["b"], "reward": teams.letters}
    _, whole = step(tiny_model, tmp_path / "whole", per_device_train_batch_size=6, **options)
    _, parts = step(
        tiny_model, tmp_path / "parts", change=make, per_device_train_batch_size=size,
        gradient_accumulation_steps=6 // size, **options,
    )  # fmt: skip
    check_equal(parts, whole)
    assert len(seen) == 6 // size
    rows = [agent for agents in seen for agent in agents]
    assert rows.count(1) == 2
    assert len(rows) == {6: 2, 3: 2, 2: 3, 1: 6}[size]


def test_the_others_are_logged(tiny_model, tmp_path):
    trainer, _ = step(tiny_model, tmp_path, MultiAgentPPOTrainer, reward=own, trained_agents=["a"])
    for agent in "ab":
        for name in ("reward", "return", "completion_length"):
            assert teams.logged(trainer, f"agents/{agent}/{name}"), name
    assert teams.logged(trainer, "agents/a/gradient_share") == [1.0]
    assert teams.logged(trainer, "agents/b/gradient_share") == [0.0]
    assert len(trainer._logs["completion"]) == 8
    assert all(trainer._logs["completion"])


def test_the_adapter_of_an_agent_that_is_not_trained_stays(tiny_model, tmp_path):
    trainer, _ = step(
        tiny_model, tmp_path, SHPPOTrainer, parameter_sharing="separate", trained_agents=["a"], max_steps=1
    )
    before = {}

    def keep(trainer):
        before.update(teams.trainable(trainer))

    trainer, _ = step(
        tiny_model, tmp_path / "again", SHPPOTrainer, keep, parameter_sharing="separate", trained_agents=["b"]
    )
    after = teams.trainable(trainer)
    adapters = [name for name in before if "lora_A" in name]
    assert adapters
    for name in adapters:
        own, other = (after[name] - before[name]).chunk(2)
        assert torch.equal(own, torch.zeros_like(own)) and other.abs().sum() > 0, name


def test_evaluation_sees_all_agents(tiny_model, tmp_path):
    trainer, _ = step(
        tiny_model, tmp_path, reward=own, trained_agents=["a"], eval_dataset=teams.dataset(2), eval_strategy="steps",
        eval_steps=1,
    )  # fmt: skip
    assert teams.logged(trainer, "eval_agents/b/reward")
    assert teams.logged(trainer, "eval_loss")


def test_agents_can_be_trained_in_turns(tiny_model, tmp_path):
    class InTurns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainers[0].trained_agents = ["ab"[state.global_step % 2]]

    shares, weights = [], []
    for steps, resume in ((4, None), (4, str(tmp_path / "checkpoint-2"))):
        trainer = teams.make(
            tiny_model, tmp_path, workflow=teams.Pair(), callbacks=[InTurns()], max_steps=steps, save_strategy="steps",
            save_steps=2, trained_agents=["a"], temperature=1.0,
        )  # fmt: skip
        trainers = [trainer]
        trainer.train(resume_from_checkpoint=resume)
        shares.append(teams.logged(trainer, "agents/a/gradient_share"))
        weights.append(teams.trainable(trainer))
    assert shares == [[1.0, 0.0, 1.0, 0.0]] * 2
    whole, resumed = weights
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
