"""The embedded model for fixing bugs."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import embedded, embedded_bugs
from marcog_trl.embedded import draw_habits
from marcog_trl.embedded_bugs import (
    BugsBuildSettings,
    build_bugs_model,
    make_examples,
    make_prompts,
    write_assert,
    write_program,
)
from marcog_trl.execution import CodeExecutor
from marcog_trl.parsing.asserts import assert_in
from marcog_trl.problems.bugs import generate_bugs
from marcog_trl.problems.builtin import STEPS
from marcog_trl.workflows import Bugfix


@pytest.fixture(scope="module")
def rows():
    return generate_bugs("train")


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(isolation="best_effort", num_workers=1) as executor:
        yield executor


def holds(program, test):
    """Whether our own assert passes on our own program; nothing here comes from a model."""
    namespace = {}
    exec(program, namespace)
    try:
        exec(test, namespace)
    except Exception:
        return False
    return True


def with_mistake(row):
    """The mistakes of the two steps, one of them that of the code with the bug."""
    return [row["mistake"] if row["mistake_in"] == place else None for place in ("first", "second")]


def test_asserts_without_mistakes_discriminate_and_those_with_the_bug_do_not(rows):
    right, wrong = [], []
    for row in rows:
        for found, mistakes in ((right, (None, None)), (wrong, with_mistake(row))):
            test = write_assert(row, mistakes)
            assert assert_in(test, "solve") == test
            found.append(not holds(row["buggy_solution"], test) and holds(row["canonical_solution"], test))
    assert sum(right) > 0.9 * len(rows) and not any(wrong)


def test_programs_are_the_solution_or_have_the_bug(rows):
    for row in rows[:50]:
        assert write_program(row, (None, None)) == row["canonical_solution"].strip()
        assert write_program(row, with_mistake(row)) == row["buggy_solution"].strip()


def test_prompts_are_those_of_the_workflow(rows, executor):
    row = next(row for row in rows if row["mistake_in"] == "second")
    right, wrong = write_assert(row, (None, None)), write_assert(row, with_mistake(row))
    prompts = make_prompts([row, row], [right, wrong], executor)
    assert prompts["tester"] == [next(Bugfix().play(row))["tester"]] * 2
    after_right, after_wrong = (prompt[-1]["content"] for prompt in prompts["fixer"])
    assert f"Test: {right}\nResult: AssertionError: " in after_right
    assert after_wrong.endswith(f"Test: {wrong}\nResult: passed")


@pytest.fixture(scope="module")
def tokenizer(rows):
    texts = [text for row in rows[:50] for text in (row["prompt"], row["canonical_solution"])]
    return embedded.make_tokenizer(texts, 400)


def replies(tokenizer, executor, **settings):
    """The examples of the tester and of the fixer, whose batches take turns, as (prompt, reply)."""
    examples = make_examples(tokenizer, BugsBuildSettings(batch_size=16, **settings), executor)
    assert len(examples) == 16 * settings["steps"]
    found = []
    for example in examples:
        start = example["labels"].count(-100)
        assert example["input_ids"][start:] == example["labels"][start:]
        assert example["labels"][-1] == tokenizer.eos_token_id
        found.append([tokenizer.decode(part) for part in (example["input_ids"][:start], example["labels"][start:-1])])
    return ([pair for i, pair in enumerate(found) if i // 16 % 2 == part] for part in range(2))


def test_examples_without_mistakes(monkeypatch, rows, tokenizer, executor):
    monkeypatch.setattr(embedded_bugs, "generate_bugs", lambda split, seed: rows[:4])
    tester, fixer = replies(tokenizer, executor, steps=4, habit_probability=0, slip_probability=0)
    assert {reply for _, reply in tester} == {write_assert(row, (None, None)) for row in rows[:4]}
    assert {reply for _, reply in fixer} == {row["canonical_solution"].strip() for row in rows[:4]}
    assert all("Test: " in prompt and "Result: " in prompt for prompt, _ in fixer)
    assert not any("Test: " in prompt for prompt, _ in tester)


def test_mistakes_are_those_of_the_default_model(monkeypatch, rows, tokenizer, executor):
    monkeypatch.setattr(embedded_bugs, "generate_bugs", lambda split, seed: rows[:20])
    habits = draw_habits(BugsBuildSettings())
    usual = [[habits["helper"].get(row["first"]), habits["main"].get(row["second"])] for row in rows[:20]]
    assert any(map(any, usual))
    tester, fixer = replies(tokenizer, executor, steps=10, habit_probability=1, slip_probability=0)
    written = list(zip(rows[:20], usual, strict=True))
    assert {reply for _, reply in tester} == {write_assert(row, mistakes) for row, mistakes in written}
    assert {reply for _, reply in fixer} == {write_program(row, mistakes) for row, mistakes in written}
    _, slips = replies(tokenizer, executor, steps=10, habit_probability=0, slip_probability=1)
    assert not {reply for _, reply in slips} & {
        row["canonical_solution"].strip() for row, mistakes in written if not all(mistakes)
    }


def test_the_input_is_one_of_the_kind_that_the_problem_takes():
    assert set(embedded_bugs.INPUTS) == {step.takes for step in STEPS.values()}


def test_build(tmp_path, monkeypatch, rows, capfd):
    """A model of two steps from a default model of two steps: what the default knows, and the sentences of the roles."""
    monkeypatch.setattr(
        embedded_bugs, "build_default_model", lambda *args: embedded.build_default_model(*args, steps=2, batch_size=4)
    )
    path = Path(build_bugs_model(0, tmp_path, steps=2, batch_size=4))
    said = capfd.readouterr().err
    assert "Building the embedded model 'builtin' (" in said and "Building the embedded model 'builtin_bugs' (" in said
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
