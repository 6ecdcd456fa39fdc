"""Agents as LoRA requests of a colocated engine: what they are served with, when it changes, and what never does."""

import hashlib

import pytest
import teams
import torch
from datasets import Dataset
from vllm import SamplingParams

from marcog_trl import SHPPOTrainer
from marcog_trl.heterogeneity.fold import fold_adapters


# Longer than the blocks in which vLLM caches prompts (128 tokens on CPU): a stale cache would be used
LONG = [f"def f{i}(x): " + "return x * 2 + aux(x) " * 12 for i in range(4)]
MODES = {
    "latent": {"latent_scope": "agent"},
    "gradient": {"latent_scope": "agent", "policy_gradient_to_latent": True},
    "separate": {"parameter_sharing": "separate"},
    "chain": {"latent_scope": "agent", "workflow": teams.Chain("abc", num_turns=2), "per_device_train_batch_size": 12},
    "unused-slots": {"latent_scope": "agent", "workflow": teams.Short(), "per_device_train_batch_size": 10},
    "scale": {"latent_scope": "agent", "lora": {"use_rslora": True}},
}


def make(model, path, **options):
    trainer = teams.make(
        model,
        path,
        SHPPOTrainer,
        use_vllm=True,
        **{
            "data": Dataset.from_dict({"prompt": LONG}),
            "workflow": teams.Pair("abc"),
            "per_device_train_batch_size": 6,
            "max_steps": 2,
            "learning_rate": 3e-2,
            **options,
        },
    )
    teams.randomize(trainer.modules, scale=0.2)
    return trainer


def refreshes(trainer):
    """The list to which every refresh of the engine adds the adapters that it is given."""
    given = []
    load = trainer.vllm_generation.load

    def watched(adapters):
        given.append([state for state, _ in adapters])
        load(adapters)

    trainer.vllm_generation.load = watched
    return given


def engine_model(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model


def fingerprint(tensors):
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def base_weights(trainer):
    """What must not change: in the engine everything but adapters, in the trainer everything that is not trained."""
    engine = [(name, p) for name, p in engine_model(trainer).named_parameters()]
    assert all(p.numel() for _, p in engine) and any("base_layer" in name for name, _ in engine)
    frozen = [(name, p) for name, p in trainer.model.named_parameters() if not p.requires_grad]
    return fingerprint(engine), fingerprint(frozen)


def difference(trainer, prefix=""):
    """Largest difference of sampled log-probabilities to the trainer's, by generation batch."""
    return teams.logged(trainer, f"{prefix}sampling/sampling_logp_difference/max")


class TestTraining:
    @pytest.mark.parametrize("mode", MODES)
    def test_samples_come_from_the_agents_of_now_over_base_weights_that_stay(self, tiny_model, tmp_path, mode):
        trainer = make(tiny_model, tmp_path, max_steps=4, **MODES[mode])
        given, before, weights = refreshes(trainer), base_weights(trainer), teams.trainable(trainer)
        trainer.train()
        assert len(difference(trainer)) == 4 and max(difference(trainer)) < 1e-3
        assert base_weights(trainer) == before
        after = teams.trainable(trainer)
        assert not [name for name in weights if torch.equal(weights[name], after[name])]
        # One refresh per step: all agents change, and differ
        assert len(given) == 4 and {len(states) for states in given} == {len(trainer.agents)}
        up = next(key for key in given[0][0] if "lora_B" in key)
        served = [state[up] for states in given for state in states]
        for i, one in enumerate(served):
            assert all((one - other).abs().max() > 1e-2 for other in served[:i])

    def test_every_row_of_a_batch_is_answered_by_its_own_agent(self, tiny_model, tmp_path):
        """Three agents are asked the same in one call; the likeliest tokens' log-probabilities tell whose they are."""
        trainer = make(tiny_model, tmp_path, latent_scope="agent")
        generation = trainer.vllm_generation
        calls = []
        generate = generation.llm.generate
        generation.llm.generate = lambda *args, **kwargs: calls.append(kwargs) or generate(*args, **kwargs)
        trainer.train()
        assert len(calls) == 2  # one per stage, whatever the number of agents
        names = [request.lora_name for request in calls[0]["lora_request"]]
        assert names == ["agent-0", "agent-1", "agent-2"] * 2
        prompt = {"prompt_token_ids": list(range(5, 200))}
        answers = generate(
            [prompt] * 6,
            SamplingParams(temperature=0, max_tokens=1, logprobs=1),
            lora_request=calls[0]["lora_request"],
            use_tqdm=False,
        )
        top = [next(iter(answer.outputs[0].logprobs[0].values())).logprob for answer in answers]
        assert top[:3] == pytest.approx(top[3:], abs=1e-5)
        assert min(abs(top[i] - top[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3

    def test_importance_sampling_corrects_for_what_the_engine_sampled_with(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, latent_scope="agent")
        seen = []
        compute_loss = trainer._compute_loss

        def watched(model, inputs):
            seen.append(inputs["importance_sampling_ratio"])
            return compute_loss(model, inputs)

        trainer._compute_loss = watched
        trainer.train()
        assert len(seen) == 2 and all((ratio - 1).abs().max() < 1e-3 for ratio in seen)

    def test_adapters_are_refreshed_once_for_all_steps_on_one_generation_batch(self, tiny_model, tmp_path):
        trainer = make(
            tiny_model, tmp_path, latent_scope="agent", num_iterations=2, steps_per_generation=2, max_steps=8,
            per_device_train_batch_size=3,
        )  # fmt: skip
        given = refreshes(trainer)
        trainer.train()
        assert len(given) == 2 and max(difference(trainer)) < 1e-3

    def test_adapters_are_refreshed_for_each_of_several_generation_batches_of_one_step(self, tiny_model, tmp_path):
        """They have the same weights and prompts, and other latents."""
        trainer = make(
            tiny_model, tmp_path, latent_scope="agent", gradient_accumulation_steps=2, steps_per_generation=1,
            data=Dataset.from_dict({"prompt": LONG[:1] * 2}),
        )  # fmt: skip
        given = refreshes(trainer)
        trainer.train()
        assert len(given) == 4 and max(difference(trainer)) < 1e-3


class TestEvaluation:
    @pytest.mark.parametrize("mode", ["latent", "separate"])
    def test_serves_mean_latents_and_refreshes_when_something_changed(self, tiny_model, tmp_path, mode):
        trainer = make(tiny_model, tmp_path, per_device_eval_batch_size=6, **MODES[mode])
        given = refreshes(trainer)
        trainer.train()
        steps = len(given)
        data = Dataset.from_dict({"prompt": LONG})
        trainer.evaluate(data)
        trainer.evaluate(data)
        assert max(difference(trainer, "eval_")) < 1e-3
        if mode == "separate":  # the weights changed once more, after the last rollout
            assert len(given) == steps + 1
            return
        assert len(given) == steps + 1  # the weights changed, and so did the noise: to none
        mu, _ = trainer.modules.latents(trainer.team.role_observations)
        folded = fold_adapters(trainer.model, trainer.modules.core_decoder(mu))
        for state, (expected, _) in zip(given[-1], folded, strict=True):
            for name, tensor in expected.items():
                torch.testing.assert_close(state[name], tensor)

    def test_the_best_model_is_what_is_served_after_training(self, tiny_model, tmp_path):
        trainer = make(
            tiny_model, tmp_path, latent_scope="agent", max_steps=3, eval_strategy="steps", eval_steps=1, save_steps=1,
            save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=True,
            eval_dataset=Dataset.from_dict({"prompt": LONG[:1]}),
        )  # fmt: skip
        trainer.add_callback(BestIsFirst())
        trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        trainer.evaluate()
        assert difference(trainer, "eval_")[-1] < 1e-3

    def test_episodes_are_played_outside_of_training(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, latent_scope="agent")
        trainer.train()
        trainer.model.eval()
        problems = [{"prompt": LONG[0]}] * 4

        def replies():
            return {tuple(row.completion_ids) for episode in trainer.team.play(problems) for row in episode.rows}

        sampled = replies()
        with trainer.team.greedy():
            likeliest = replies()
        assert len(likeliest) <= 3 < len(sampled)  # one reply per agent


class BestIsFirst(teams.Watch):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_reward"] = -state.global_step
