"""How datasets that users pass to trainers are prompted, and tokenizers that need care."""

import json
import warnings

import pytest
import teams
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, Single, Team


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TESTED = {"test": [["assert f(1)"]] * 4, "test_format": ["asserts"] * 4, "entry_point": ["f"] * 4}
SAID = "roles={'solver': "


def by_turns(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]


def asked(trainer, problems):
    """What a trainer's model reads, in evaluation."""
    prompts = []
    trainer.team.tokenizer.padding_side = "left"
    for episode in trainer.team.play(problems):
        prompts += [trainer._tokenizer.decode(row.prompt_ids) for row in episode.rows]
    return prompts


def warned(caught):
    return [str(warning.message) for warning in caught if SAID in str(warning.message)]


class TestPlainText:
    def test_of_our_problem_sets_becomes_a_chat(self, tiny_model, tmp_path):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, data=teams.dataset(4, **TESTED))
        assert warned(caught) == [] and trainer.args.roles is None
        [prompt] = asked(trainer, [{"prompt": "def f(x):"}])
        [agent] = trainer.workflow.agents
        assert prompt == f"<|user|>{agent.role.replace('{problem}', 'def f(x):')}<|end|><|assistant|>" != "def f(x):"

    @pytest.mark.parametrize("workflow", ["single", Single()])
    def test_of_other_datasets_is_continued_and_said_once(self, tiny_model, tmp_path, workflow):
        with pytest.warns(UserWarning) as caught:
            trainer = teams.make(
                tiny_model, tmp_path, MultiAgentGRPOTrainer, eval_dataset=teams.dataset(2), workflow=workflow
            )
        [message] = warned(caught)
        assert message.startswith("train_dataset has prompts in plain text")
        assert asked(trainer, [{"prompt": "def f(x):", **{k: v[0] for k, v in TESTED.items()}}]) == ["def f(x):"]
        trainer.save_model()
        assert json.loads((tmp_path / "team.json").read_text())["settings"]["roles"] == {"solver": ""}
        team = Team.from_pretrained(tmp_path)
        [episode] = team.play([{"prompt": "def f(x):"}])
        assert episode.rows[0].prompt == "def f(x):"

    @pytest.mark.parametrize("text", ["", "Write f."])
    def test_is_prompted_as_roles_say_without_a_warning(self, tiny_model, tmp_path, text):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, roles={"solver": text})
        assert warned(caught) == []
        expected = f"<|user|>{text}\n\ndef f(x):<|end|><|assistant|>" if text else "def f(x):"
        assert asked(trainer, [{"prompt": "def f(x):"}]) == [expected]

    def test_is_not_said_of_messages_and_without_a_chat_template(self, tiny_model, tmp_path):
        plain = AutoTokenizer.from_pretrained(tiny_model)
        plain.chat_template = None
        chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": "def f(x):"}]] * 4})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, processing_class=plain)
            trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, data=chats)
        assert warned(caught) == []
        assert asked(trainer, [chats[0]]) == ["<|user|>def f(x):<|end|><|assistant|>"]

    def test_in_a_stream_is_recognised_by_its_first_row(self, tiny_model, tmp_path):
        def stream(columns):
            rows = teams.dataset(4, **columns).to_list()
            return Dataset.from_list(rows).to_iterable_dataset().map(dict)

        roles = [
            teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, data=stream(columns)).args.roles
            for columns in ({}, TESTED)
        ]
        assert roles == [{"solver": ""}, None]


class TestSystemPrompt:
    def test_reaches_every_agent_and_is_saved(self, tiny_model, tmp_path):
        trainer = teams.make(
            tiny_model, tmp_path, workflow="collaboration", data=teams.dataset(4, **TESTED), system_prompt="Be brief."
        )
        prompts = asked(trainer, [{"prompt": "def f(x):", "entry_point": "f"}])
        assert len(prompts) == 2 and all(prompt.startswith("<|system|>Be brief.<|end|><|user|>") for prompt in prompts)
        trainer.save_model()
        team = Team.from_pretrained(tmp_path)
        assert asked(trainer, [{"prompt": "def f(x):", "entry_point": "f"}]) == [
            team.tokenizer.decode(row.prompt_ids)
            for row in team.play([{"prompt": "def f(x):", "entry_point": "f"}])[0].rows
        ]
        assert Team.from_pretrained(tmp_path, system_prompt="Be kind.").settings.system_prompt == "Be kind."

    def test_is_refused_where_there_are_no_messages(self, tiny_model, tmp_path):
        with pytest.raises(ValueError, match=r"system_prompt='Be brief\.' needs chat messages, but train_dataset has"):
            teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, system_prompt="Be brief.")
        with pytest.raises(ValueError, match="system_prompt=' ' is blank"):
            teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, system_prompt=" ")


class TestTemplates:
    @pytest.fixture
    def alternating(self, tiny_model):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = ALTERNATING
        return tokenizer

    def test_that_refuse_a_prompt_are_said_before_training(self, tiny_model, tmp_path, alternating):
        user = {"role": "user", "content": "def f(x):"}
        data = Dataset.from_dict(
            {"task_id": ["a", "b", "c", "d"], "prompt": [[user], [user], [user, user], [user, user]]}
        )
        for name, part in (("train_dataset", {"data": data}), ("odd", {"eval_dataset": {"odd": data}})):
            with pytest.raises(ValueError, match=rf"{name}: .* task_id 'c': .* \['user', 'user'\]: Roles must"):
                teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, processing_class=alternating, **part)

    @pytest.mark.parametrize("workflow", ["single", "collaboration", "pipeline", "discussion"])
    def test_that_want_alternating_roles_accept_our_workflows(self, tiny_model, tmp_path, alternating, workflow):
        chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]] * 4
        data = Dataset.from_dict({**TESTED, "prompt": chats})
        trainer = teams.make(
            tiny_model, tmp_path, processing_class=alternating, data=data, workflow=workflow, num_turns=2,
            feedback="plain", reward=by_turns, isolation="best_effort", num_workers=1, per_device_train_batch_size=12,
        )  # fmt: skip
        calls = teams.script(trainer)
        trainer.train()
        prompts = [trainer._tokenizer.decode(ids) for prompt_ids, _ in calls for ids in prompt_ids]
        assert prompts and all(prompt.startswith("<|user|>Be brief.\n\n") for prompt in prompts)
        trainer.executor.close()

    @pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
    def test_whose_turns_end_with_another_token_than_eos_end_replies(self, tiny_model, tmp_path, trainer_class):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.eos_token = "<|system|>"  # as a base model whose template has <|im_end|>, and <|endoftext|> as EOS
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        options = {"processing_class": tokenizer, "max_completion_length": 6}
        trainer = teams.make(model, tmp_path, trainer_class, data=teams.dataset(4, **TESTED), **options)
        assert trainer.eos_token_ids == trainer.team.eos_token_ids == [tokenizer.eos_token_id, end]
        says(trainer.accelerator.unwrap_model(trainer.model), end)
        [episode] = trainer.team.play([{"prompt": "def f(x):"}])
        assert episode.rows[0].completion_ids == [end] and episode.rows[0].text == ""
        trainer.train()
        assert teams.logged(trainer, "completions/clipped_ratio") == [0.0]

    def test_do_not_change_ends_that_the_user_sets(self, tiny_model, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.eos_token = "<|system|>"
        options = {"processing_class": tokenizer, "generation_kwargs": {"eos_token_id": [7]}}
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        trainer = teams.make(model, tmp_path, MultiAgentGRPOTrainer, data=teams.dataset(4, **TESTED), **options)
        assert trainer.generation_config.eos_token_id == [7]


def says(model, token):
    """Makes a model say a token whatever it reads."""
    head = model.get_output_embeddings()
    logits = torch.full((head.weight.size(0),), -1e4)
    logits[token] = 1e4
    head.register_forward_hook(lambda module, args, output: output * 0 + logits)


@pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
def test_a_tokenizer_without_a_pad_token_pads_with_eos(tiny_model, tmp_path, trainer_class):
    def train(**options):
        watch = teams.Watch()
        trainer = teams.make(
            tiny_model, tmp_path, trainer_class, data=teams.dataset(4, **TESTED), workflow="collaboration",
            reward=lambda replies, **kwargs: teams.letters([reply["main"] for reply in replies]), callbacks=[watch], **options,
        )  # fmt: skip
        teams.script(trainer)
        trainer.train()
        return trainer, watch.gradients[0]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    (padded, expected), (other, gradients) = train(), train(processing_class=tokenizer)
    assert other._tokenizer.pad_token_id == other._tokenizer.eos_token_id != padded._tokenizer.pad_token_id
    assert any(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    other.save_model()
    texts = [
        row.text for row in Team.from_pretrained(tmp_path).play([{"prompt": "def f(x):", "entry_point": "f"}])[0].rows
    ]
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("code", "reward"), [("def f(x):\n    return x  # é", 1.0), ("def f(x):\n    return 'é", 0.0)]
)
def test_a_reply_may_be_cut_inside_a_character_of_several_bytes(tiny_model, tmp_path, code, reward):
    test = {**TESTED, "test": [["assert f(1) == 1"]] * 4}
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, reward="execution_reward", data=teams.dataset(4, **test),
        isolation="best_effort", num_workers=1,
    )  # fmt: skip
    whole = trainer._tokenizer(code)["input_ids"]
    cut = whole[: len(trainer._tokenizer(code.partition("é")[0])["input_ids"]) + 1]
    assert trainer._tokenizer.decode(cut).endswith("\N{REPLACEMENT CHARACTER}")
    teams.recite(trainer, [cut] * 8)
    trainer.train()
    assert teams.logged(trainer, "reward") == [reward]
    trainer.executor.close()
