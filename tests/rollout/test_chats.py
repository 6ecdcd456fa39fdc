"""Chats for tokenizers of all kinds: with templates that refuse or drop messages, and with other ends of turns."""

import pytest
from transformers import AutoTokenizer

from marcog_trl.rollout.chats import end_of_turn, with_system_prompt
from marcog_trl.rollout.engine import encode_prompts


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant!') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
)
"""As Gemma's: no system message, and no two messages of one role in a row."""
DROPPING = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SYSTEM, USER, REPLY = (
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", "Hi."), ("assistant", "Yo."))
)


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def text_of(tokenizer, prompt, **options):
    return tokenizer.decode(encode_prompts(tokenizer, [prompt], **options)[0])


class TestSystemPrompt:
    def test_begins_every_chat_that_has_no_system_message(self, tokenizer):
        assert with_system_prompt([USER, REPLY, USER], "Be kind.") == [
            {"role": "system", "content": "Be kind."}, USER, REPLY, USER,
        ]  # fmt: skip
        for prompt in ([SYSTEM, USER], "def f(x):"):
            assert with_system_prompt(prompt, "Be kind.") == prompt
        assert with_system_prompt([USER], None) == [USER]
        assert text_of(tokenizer, with_system_prompt([USER], "Be kind.")) == (
            "<|system|>Be kind.<|end|><|user|>Hi.<|end|><|assistant|>"
        )

    @pytest.mark.parametrize("template", [ALTERNATING, DROPPING])
    def test_goes_into_the_first_message_of_the_user_where_the_template_takes_none(self, tokenizer, template):
        tokenizer.chat_template = template
        end = "<|end|>" if template is ALTERNATING else ""
        begin = f"[user]Be brief.\n\nHi.{end}"
        assert text_of(tokenizer, [SYSTEM, USER], add_generation_prompt=False) == begin
        assert text_of(tokenizer, [SYSTEM, USER, REPLY, USER], add_generation_prompt=False) == (
            f"{begin}[assistant]Yo.{end}[user]Hi.{end}"
        )

    def test_stays_where_it_is_if_the_template_takes_it(self, tokenizer):
        assert "<|system|>Be brief.<|end|>" in text_of(tokenizer, [SYSTEM, USER])

    def test_cannot_inject_special_tokens(self, tokenizer):
        tokenizer.chat_template = ALTERNATING
        [ids] = encode_prompts(tokenizer, [[{**SYSTEM, "content": "a<|end|>b"}, USER]])
        assert ids.count(tokenizer.eos_token_id) == 1


def test_messages_that_the_template_refuses_are_an_error_with_their_roles(tokenizer):
    tokenizer.chat_template = ALTERNATING
    with pytest.raises(ValueError, match=r"roles \['user', 'user'\]: Conversation roles must alternate.* in turn"):
        encode_prompts(tokenizer, [[USER, USER]])


class TestEndOfTurn:
    @pytest.mark.parametrize(
        ("template", "end"),
        [
            ("{% for m in messages %}{{ m.content }}<|user|>{% endfor %}", "<|user|>"),
            ("{% for m in messages %}{{ m.content }}\n<|end|>\n{% endfor %}", "<|end|>"),
            ("{% for m in messages %}{{ m.content }}\n### {% endfor %}", None),
            (
                "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('One question.') }}{% endif %}",
                None,
            ),
            (None, None),
        ],
    )
    def test_is_the_special_token_after_a_reply(self, tokenizer, template, end):
        tokenizer.chat_template = template
        assert end_of_turn(tokenizer, {}) == (None if end is None else tokenizer.convert_tokens_to_ids(end))

    def test_may_depend_on_the_arguments_of_the_template(self, tokenizer):
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<|user|>' if short else '' }}{% endfor %}"
        assert end_of_turn(tokenizer, {}) is None
        assert end_of_turn(tokenizer, {"short": True}) == tokenizer.convert_tokens_to_ids("<|user|>")
