"""
Every trainer with every option that changes how it trains: all parameters move, a saved team comes back, a run resumes exactly.
"""

import pytest
import teams
import torch
from transformers import BitsAndBytesConfig

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.trainers import MultiAgentTrainer


GRPO, PPO, SHPPO = MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
TREE = {"credit": "counterfactual", "fanout": [2, 2], "num_generations": 4, "per_device_train_batch_size": 12}
FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
LATER = {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
# Epochs of 3 rollouts, whose last update accumulates one of them
EPOCHS = {
    "per_device_train_batch_size": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 2, "save_strategy": "epoch",
    "data": teams.dataset(3), "max_steps": -1, "num_train_epochs": 2, "latent_scope": "agent",
}  # fmt: skip
CASES = {
    "base": (MultiAgentTrainer, {}),
    "grpo": (GRPO, {"scale_rewards": "agent", "beta": 0.1}),
    "grpo-turns": (GRPO, {"workflow": teams.Chain(num_turns=2), "turn_weights": [1.0, 0.5], "gamma_turn": 0.9}),
    "grpo-tree": (GRPO, {"workflow": teams.Pair(num_turns=2), "turn_tree": True, "per_device_train_batch_size": 12}),
    "grpo-counterfactual": (GRPO, {**TREE, "scale_rewards": "agent"}),
    "grpo-all-weights": (GRPO, {"full_finetuning": True, "peft_config": None, "learning_rate": 1e-3, "beta": 0.1}),
    "grpo-sequence": (GRPO, {"loss_type": "bnpo", "agent_loss_weighting": "token", "importance_sampling_level": "sequence"}),
    "ppo": (PPO, {}),
    "ppo-turns": (PPO, {"workflow": teams.Chain(num_turns=2), "lam": 0.9, "gamma": 0.98, "gamma_turn": 0.9}),
    "ppo-later": (PPO, LATER),
    "ppo-bf16": (PPO, {"bf16": True, "beta": 0.1}),
    "ppo-accumulation": (PPO, {"loss_type": "grpo", "gradient_accumulation_steps": 2}),
    "ppo-entropy": (PPO, {"entropy_coef": 0.01, "top_entropy_quantile": 0.5}),
    "ppo-backprop": (PPO, {"critic_backprop": True, "delta": 2.0}),
    "ppo-agent": (PPO, {"critic": "agent", "kl_penalty": "reward", "beta": 0.1, "advantage_normalization": "batch"}),
    "ppo-none": (PPO, {"critic": "none", "loss_type": "dr_grpo", "agent_loss_weighting": "token"}),
    "ppo-mixed": (PPO, {"critic_mix": "auto"}),
    "ppo-counterfactual": (PPO, {**TREE, "critic_mix": "auto"}),
    "ppo-dora": (PPO, {"lora": {"use_dora": True}}),
    "ppo-all-weights": (PPO, {"full_finetuning": True, "peft_config": None, "learning_rate": 1e-3}),
    "shppo": (SHPPO, {"lora": {"init_lora_weights": True}}),
    "shppo-turns": (SHPPO, {"workflow": teams.Chain("abc", num_turns=2), "per_device_train_batch_size": 12}),
    "shppo-one-agent": (SHPPO, {"workflow": "single"}),
    "shppo-agent": (SHPPO, {"latent_scope": "agent", "latent_distance": "minmax"}),
    "shppo-gradient": (SHPPO, {"policy_gradient_to_latent": True, **LATER}),
    "shppo-agent-gradient": (SHPPO, {"latent_scope": "agent", "policy_gradient_to_latent": True}),
    "shppo-checkpointing": (SHPPO, {"gradient_checkpointing": True, "bf16": True}),
    "shppo-no-critic": (SHPPO, {"critic": "none"}),
    "shppo-counterfactual": (SHPPO, {**TREE, "critic_mix": 0.5}),
    "shppo-ranks": (SHPPO, {"lora": {"rank_pattern": {"q_proj": 2}}}),
    "shppo-beams": (SHPPO, {"generation": {"num_beams": 3}}),
    "shppo-4-bits": (SHPPO, {"quantization_config": FOUR_BITS}),
    "shppo-rollouts": (SHPPO, {"per_device_train_batch_size": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 3}),
    "shppo-evaluated": (SHPPO, {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": teams.dataset(3)}),
    "shppo-stream": (SHPPO, {"data": teams.dataset(16).to_iterable_dataset()}),
    "shppo-epochs": (SHPPO, EPOCHS),
    "shppo-separate": (SHPPO, {"parameter_sharing": "separate"}),
    "shppo-shared": (SHPPO, {"parameter_sharing": "shared", "lora": {"use_dora": True}}),
}  # fmt: skip
RUN = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear",
    "shuffle_dataset": True,
}  # fmt: skip


def make(model, path, name):
    trainer_class, options = CASES[name]
    workflow = teams.Chain() if options.get("credit") else teams.Pair()
    return teams.make(model, path, trainer_class, **{"workflow": workflow, **RUN, **options})


@pytest.fixture(scope="module", params=CASES)
def run(request, tiny_model, tmp_path_factory):
    """A run of four steps, its weights at the beginning and at the end, and its name."""
    if "4-bits" in request.param:
        pytest.importorskip("bitsandbytes")
    path = tmp_path_factory.mktemp(request.param)
    trainer = make(tiny_model, path, request.param)
    before = teams.trainable(trainer)
    trainer.train()
    return trainer, before, teams.trainable(trainer), request.param


def test_every_parameter_moves(run):
    trainer, before, after, _ = run
    assert not [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    losses = teams.logged(trainer, "loss")
    assert len(losses) == 4 and all(torch.isfinite(torch.tensor(losses)))


def test_a_run_that_resumes_is_the_uninterrupted_one(run, tiny_model):
    whole, _, after, name = run
    resumed = make(tiny_model, whole.args.output_dir, name)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    for key, tensor in teams.trainable(resumed).items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    logged = {key for entry in whole.state.log_history for key in entry if key.endswith(("loss", "reward", "kl"))}
    for key in logged - {"train_loss"}:
        assert teams.logged(resumed, key) == teams.logged(whole, key), key
    if whole.team.modules is not None:  # moments of the critic, too
        state = resumed.team.modules.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in whole.team.modules.state_dict().items())


def test_a_saved_team_comes_back(run, tiny_model, tmp_path):
    trainer, _, after, name = run
    trainer.save_model(str(tmp_path / "saved"))
    again = make(tiny_model, tmp_path / "again", name)
    again.load_team(tmp_path / "saved")
    loaded = teams.trainable(again)
    assert loaded.keys() == after.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in after.items())
