import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from marcog_trl import embedded
from marcog_trl.embedded import BuildSettings, build_default_model, draw_habits
from marcog_trl.problems.builtin import SIZES, STEPS, generate
from marcog_trl.workflows import Collaboration


TINY = {"steps": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A model of two steps, built by two callers at once, as processes of a launcher would."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
            patch.setenv(name, value)
        paths = list(pool.map(lambda _: build_default_model(0, cache, **TINY), range(2)))
    assert paths[0] == paths[1]
    return Path(paths[0])


@pytest.fixture(scope="module")
def rows():
    return list(generate("train"))


def test_one_of_several_callers_builds(built):
    assert [path for path in built.parent.iterdir() if path.is_dir()] == [built]


def test_cached_model_is_not_built_again(built, monkeypatch):
    monkeypatch.setattr(embedded, "_run_builder", None)
    assert build_default_model(0, built.parent, **TINY) == str(built)
    monkeypatch.setenv("MARCOG_TRL_CACHE", str(built.parent))
    assert build_default_model(0, **TINY) == str(built)


@pytest.mark.parametrize("home", ["missing", "read-only", "unknown"])
def test_a_home_that_cannot_be_written(home, tmp_path, monkeypatch):
    monkeypatch.delenv("MARCOG_TRL_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/proc/nohome" if home == "missing" else str(tmp_path))
    if home == "read-only":  # of root, whom permissions do not keep out, too
        monkeypatch.setattr(embedded.os, "access", lambda path, mode: False)
    elif home == "unknown":
        monkeypatch.setattr(embedded.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(OSError, match=r"no folder for embedded models: .*\. Set MARCOG_TRL_CACHE to another folder"):
        build_default_model(0, **TINY)


def test_build_is_deterministic_by_seed(built, tmp_path, monkeypatch):
    def build(command):
        """In this process, which has imported everything."""
        embedded._train(BuildSettings(**json.loads(command[-2])), command[-1])
        return 0

    threads = torch.get_num_threads()
    monkeypatch.setattr(embedded, "_run_builder", build)
    weights = AutoModelForCausalLM.from_pretrained(built).state_dict()
    again = AutoModelForCausalLM.from_pretrained(build_default_model(0, tmp_path, **TINY)).state_dict()
    other = AutoModelForCausalLM.from_pretrained(build_default_model(1, tmp_path, **TINY)).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not all(torch.equal(weights[name], other[name]) for name in weights)
    torch.set_num_threads(threads)


def test_failed_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_run_builder", lambda command: 1)
    with pytest.raises(RuntimeError, match="Building the embedded model 'builtin' failed"):
        build_default_model(0, tmp_path, **TINY)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("interrupted", ["while it starts", "while it runs"])
def test_an_interruption_ends_the_builder(interrupted, tmp_path, monkeypatch):
    """Ctrl-C can come before the caller knows the process that it has started."""
    builders = []

    class Interrupted(subprocess.Popen):
        waited = False

        def _execute_child(self, *args):
            super()._execute_child(*args)
            builders.append(self)
            if interrupted == "while it starts":
                raise KeyboardInterrupt

        def wait(self, timeout=None):
            first, self.waited = not self.waited, True
            if interrupted == "while it runs" and first:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(embedded.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_default_model(0, tmp_path, **TINY)
    assert builders[0].wait() == -signal.SIGKILL  # 0 if it had built the model
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_model_and_tokenizer(built, rows):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    assert model.config.model_type == "qwen2"
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert 5e5 < model.num_parameters() < 2e6
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for text in (rows[0]["prompt"], rows[0]["canonical_solution"], "größer\tλ\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
    for messages in next(Collaboration(roles=embedded.ROLES).play(rows[0])).values():
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert len(ids) < 80
        assert tokenizer.decode(ids).endswith("<|end|><|assistant|>")


def test_tokenizer_is_the_same_after_loading(rows, tmp_path):
    """`AutoTokenizer` has its own opinion on the tokenizers of Qwen2 models."""
    texts = [text for row in rows[:50] for text in (row["prompt"], row["canonical_solution"])]
    tokenizer = embedded.make_tokenizer(texts, 400)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert [loaded(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
    assert loaded.padding_side == tokenizer.padding_side == "left"
    phrase = "keep the even numbers"
    assert len(loaded(phrase)["input_ids"]) == 1


def test_habits_leave_the_share_of_problems_that_was_asked_for():
    for seed in range(3):
        plan = BuildSettings(seed=seed)
        habits = draw_habits(plan)
        for split in SIZES:
            problems = generate(split)
            clean = [row["first"] not in habits["helper"] and row["second"] not in habits["main"] for row in problems]
            assert sum(clean) / len(problems) == pytest.approx(plan.clean_share, abs=0.1)
        for agent in ("helper", "main"):
            assert 0.25 < len(habits[agent]) / len(STEPS) < 0.7
    assert (
        draw_habits(BuildSettings(seed=1)) == draw_habits(BuildSettings(seed=1)) != draw_habits(BuildSettings(seed=2))
    )
