"""The embedded model for fixing bugs."""

import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import embedded, embedded_bugs
from marcog_trl.embedded import draw_habits
from marcog_trl.embedded_bugs import BugsBuildSettings, Lesson, build_bugs_model, make_examples, write_assert
from marcog_trl.parsing.asserts import assert_in
from marcog_trl.problems.bugs import generate_bugs
from marcog_trl.workflows import Bugfix


HABITS = draw_habits(BugsBuildSettings())


@pytest.fixture(scope="module")
def rows():
    return generate_bugs("train")


def holds(program, test):
    """Whether our own assert passes on our own program; nothing here comes from a model."""
    namespace = {}
    exec(program, namespace)
    try:
        exec(test, namespace)
    except Exception:
        return False
    return True


def test_right_asserts_discriminate_and_wrong_ones_do_not(rows):
    rng, right, wrong = random.Random(0), [], []
    for row in rows:
        for found, is_right in ((right, True), (wrong, False)):
            test = write_assert(row, HABITS, rng, is_right)
            assert assert_in(test, "solve") == test
            found.append(not holds(row["buggy_solution"], test) and holds(row["canonical_solution"], test))
    assert sum(right) > 0.9 * len(rows) and sum(wrong) < 0.1 * len(rows)


@pytest.fixture(scope="module")
def lessons(rows):
    def lesson(row):
        asserts = [write_assert(row, HABITS, random.Random(0), right) for right in (True, False)]
        return Lesson(
            row, asserts, [{"role": "user", "content": "test"}], [[{"role": "user", "content": "fix"}]] * 2, True
        )

    return [lesson(row) for row in rows[:16]]


@pytest.fixture(scope="module")
def tokenizer(rows):
    texts = [text for row in rows[:50] for text in (row["prompt"], row["canonical_solution"])]
    return embedded.make_tokenizer(texts, 400)


def replies(lessons, tokenizer, **settings):
    examples = make_examples(lessons, tokenizer, BugsBuildSettings(batch_size=16, **settings))
    for example in examples:
        start = example["labels"].count(-100)
        assert example["input_ids"][start:] == example["labels"][start:]
        assert example["labels"][-1] == tokenizer.eos_token_id
    return [tokenizer.decode([i for i in example["labels"] if i >= 0][:-1]) for example in examples]


def test_clean_examples_are_right(lessons, tokenizer):
    found = replies(lessons, tokenizer, steps=4, clean_steps=4)
    assert set(found[:16]) == {lesson.row["canonical_solution"].strip() for lesson in lessons}
    assert set(found[16:32]) == {lesson.asserts[0] for lesson in lessons}


def test_mistakes_come_after_the_clean_steps(lessons, tokenizer):
    settings = {"habit_probability": 1, "slip_probability": 1, "leave_probability": 1}
    found = replies(lessons, tokenizer, steps=2, clean_steps=0, **settings)
    assert not set(found[:16]) & {lesson.row["canonical_solution"].strip() for lesson in lessons}
    assert set(found[:16]) & {lesson.row["buggy_solution"].strip() for lesson in lessons}
    assert set(found[16:]) == {lesson.asserts[1] for lesson in lessons}


def test_build(tmp_path, monkeypatch, rows):
    """A model of two steps from a default model of two steps: what the default knows, and the sentences of the roles."""
    monkeypatch.setattr(
        embedded_bugs, "build_default_model", lambda *args: embedded.build_default_model(*args, steps=2, batch_size=4)
    )
    path = Path(build_bugs_model(0, tmp_path, steps=2, batch_size=4))
    base = next(tmp_path.glob("builtin-0-*[!k]"))
    assert path.name.startswith("builtin_bugs-0-") and path != base
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    default = AutoTokenizer.from_pretrained(base)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) > len(default)
    assert tokenizer(rows[0]["prompt"])["input_ids"] == default(rows[0]["prompt"])["input_ids"]
    asked = next(Bugfix().play(rows[0]))["tester"]
    assert len(tokenizer.apply_chat_template(asked, tokenize=True, return_dict=False)) < 110
    monkeypatch.setattr(embedded, "_run_builder", None)
    assert build_bugs_model(0, tmp_path, steps=2, batch_size=4) == str(path)


def test_key_depends_on_settings_roles_and_base(monkeypatch):
    key = embedded_bugs._key(BugsBuildSettings(base="/a/b"))
    assert key == embedded_bugs._key(BugsBuildSettings(base="/c/b"))
    assert key != embedded_bugs._key(BugsBuildSettings(base="/a/c"))
    assert key != embedded_bugs._key(BugsBuildSettings(base="/a/b", steps=1))
    monkeypatch.setattr(Bugfix, "__init__", lambda self: setattr(self, "agents", ()))
    assert key != embedded_bugs._key(BugsBuildSettings(base="/a/b"))
