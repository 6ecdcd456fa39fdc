"""Rows whose advantages are all 0 are not in the forward passes of an update, and its weights are those with them."""

import pytest
import teams
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, OPTConfig, XGLMConfig
from trl import GRPOTrainer

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer


def even_problems_tie(completions, prompts, **kwargs):
    """Siblings earn the same in every other problem. A mean of 0.1s is not 0.1 in float32."""
    rewards = teams.letters(completions)
    return [
        0.1 if prompt in ("def f0(x):", "def f2(x):") else reward
        for prompt, reward in zip(prompts, rewards, strict=True)
    ]


def all_tie(completions, **kwargs):
    return [0.1] * len(completions)


def train(model, path, skips, trainer=MultiAgentGRPOTrainer, **options):
    """The trainer after its steps, their gradients, and the shapes of what went through the model."""
    watch, shapes = teams.Watch(), []
    defaults = {
        "workflow": teams.Pair(), "reward": even_problems_tie, "num_generations": 3, "callbacks": [watch], "seed": 3,
        "per_device_train_batch_size": 6, "gradient_accumulation_steps": 4, "weight_decay": 0.1, "max_steps": 2,
        "optim": "sgd",  # Adam divides rounding by gradients near 0
    }  # fmt: skip
    trainer = teams.make(model, path, trainer, **{**defaults, **options})
    teams.script(trainer)
    if not skips:
        trainer.algorithm.skips_rows = False
    decoder = trainer._causal_lm.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape) if module.training else None,
        with_kwargs=True,
    )
    trainer.train()
    return trainer, watch.gradients, shapes


def rows(shapes):
    return sum(shape[0] for shape in shapes)


def check_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "group", "agent_loss_weighting": "token"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "agent_loss_weighting": "token"},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4},
        {"trained_agents": ["b"], "loss_type": "grpo"},
    ],
    ids=str,
)
def test_weights_are_those_with_all_rows(tiny_model, tmp_path, options):
    ours, gradients, shapes = train(tiny_model, tmp_path / "a", True, **options)
    theirs, expected, all_shapes = train(tiny_model, tmp_path / "b", False, **options)
    for one, other in zip(gradients, expected, strict=True):
        assert sum(gradient.abs().sum() for gradient in other.values()) > 0
        check_equal(one, other)
    check_equal(teams.trainable(ours), teams.trainable(theirs))
    assert len(shapes) == len(all_shapes)  # processes run the same number of micro-batches
    # Log-probabilities before the first of several steps are of all rows
    assert rows(shapes) <= 0.75 * rows(all_shapes)
    for name in ("loss", "grad_norm", "clip_ratio/region_mean"):
        assert teams.logged(ours, name) == pytest.approx(teams.logged(theirs, name), rel=1e-4, abs=1e-6)


OF_ALL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
DROPS = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
# Wide embeddings, so that positions matter as much as they do after pretraining
ABSOLUTE = {
    "learned": GPT2Config(n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, **OF_ALL),
    "learned, from the mask": OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32, init_std=0.3, **DROPS, **OF_ALL
    ),
    "sinusoidal": XGLMConfig(d_model=32, ffn_dim=64, num_layers=2, attention_heads=2, init_std=0.3, **DROPS, **OF_ALL),
    "rotary, by the longest row": LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
        initializer_range=0.3, rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 100.0}, **OF_ALL,
    ),
}  # fmt: skip


@pytest.fixture(params=ABSOLUTE)
def absolute(request, tiny_model):
    """A model, and the tokenizer of the tiny one."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = ABSOLUTE[request.param]
    config.vocab_size = len(tokenizer)
    return lambda: AutoModelForCausalLM.from_config(config), tokenizer


def test_so_are_those_of_models_with_absolute_positions(absolute, tmp_path):
    make_model, tokenizer = absolute
    runs = []
    for skips in (True, False):
        torch.manual_seed(0)
        prompts = [f"def f{i}(x):" + " x" * (5 * i) for i in range(4)]  # of different lengths
        runs.append(
            train(
                make_model(),
                tmp_path / str(skips),
                skips,
                processing_class=tokenizer,
                data=teams.dataset(prompt=prompts),
                reward=lambda completions, prompts, **kwargs: [
                    0.1 if " x x" in prompt else reward
                    for prompt, reward in zip(prompts, teams.letters(completions), strict=True)
                ],
            )
        )
    (_, gradients, shapes), (_, expected, all_shapes) = runs
    assert rows(shapes) <= 0.75 * rows(all_shapes)
    for one, other in zip(gradients, expected, strict=True):
        assert sum(gradient.abs().sum() for gradient in other.values()) > 0
        check_equal(one, other)


def test_a_batch_without_any_advantage_is_a_step_like_others(tiny_model, tmp_path):
    ours, [first, _], shapes = train(tiny_model, tmp_path / "a", True, reward=all_tie)
    theirs, _, _ = train(tiny_model, tmp_path / "b", False, reward=all_tie)
    assert set(shapes) == {(1, 2)}  # a token of a prompt and one of a reply
    assert not any(gradient.any() for gradient in first.values())
    check_equal(teams.trainable(ours), teams.trainable(theirs))  # which weight decay has changed
    assert ours.state.global_step == 2
    assert not teams.logged(ours, "entropy")  # nothing was measured
    assert teams.logged(ours, "advantages/zero") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiAgentGRPOTrainer, {"beta": 0.1}),
        (MultiAgentGRPOTrainer, {"entropy_coef": 0.1}),
        (MultiAgentGRPOTrainer, {"top_entropy_quantile": 0.5}),
        (MultiAgentGRPOTrainer, {"loss_type": "bnpo", "agent_loss_weighting": "token"}),
        (MultiAgentPPOTrainer, {"critic": "team"}),
    ],
    ids=str,
)
def test_all_rows_stay_where_they_matter(tiny_model, tmp_path, trainer, options):
    _, _, shapes = train(tiny_model, tmp_path, True, trainer, reward=all_tie, max_steps=1, **options)
    assert shapes[-4:] == [shapes[-1]] * 4 and shapes[-1][0] == 6


def test_padding_of_a_micro_batch_is_that_of_its_own_rows(tiny_model, tmp_path):
    """Here, of one row each: without padding."""
    _, _, shapes = train(tiny_model, tmp_path, True, per_device_train_batch_size=1, gradient_accumulation_steps=24)
    assert len({length for _, length in shapes}) > 3


def test_the_head_sees_what_predicts_replies_alone(tiny_model, tmp_path):
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair())
    teams.script(trainer)
    batch = teams.generation_batch(trainer)
    ids, mask = (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    rest = (ids, mask, batch["completion_ids"].size(1))
    seen = []

    def model(**inputs):
        output = trainer.model(**inputs)
        seen.append(output.log_probs.shape)
        return output

    trainer.accelerator.unwrap_model = lambda found: trainer.model
    with torch.no_grad():
        ours = trainer._get_per_token_logps_and_entropies(model, *rest, compute_entropy=True)
        theirs = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, *rest, compute_entropy=True)
    assert seen == [(1, batch["completion_mask"].sum())]
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert other.shape == batch["completion_ids"].shape
        torch.testing.assert_close(one, other)
