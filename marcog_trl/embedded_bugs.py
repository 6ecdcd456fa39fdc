"""
The embedded model for the task of fixing bugs: the embedded default model, taught the prompts of the `bugfix` workflow.

It makes systematic mistakes, too. For some steps of the built-in problems, its tester usually writes
an assert that does not discriminate, and its fixer usually leaves the bug in the code, less often if the assert has shown the bug.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from marcog_trl.embedded import (
    BuildSettings,
    add_wholes,
    build_default_model,
    build_once,
    draw_habits,
    end_with_caller,
    fit,
    sentences_of,
)
from marcog_trl.execution import CodeExecutor
from marcog_trl.parsing.syntax import combine
from marcog_trl.problems import bugs
from marcog_trl.problems.bugs import generate_bugs
from marcog_trl.problems.builtin import ENTRY_POINT, STEPS, write_aux, write_main
from marcog_trl.workflows import Bugfix


BUGS_MODEL_NAME = "builtin_bugs"
"""The value of `--model_name_or_path` for the embedded model of this task."""
INPUTS = {"numbers": "[3, 8, 5, 12, 7, 6]", "n": "23", "text": "'plum melon'"}
"""What the tester calls functions with, by the kind of value that they take."""
PHRASES = (
    *INPUTS.values(),
    "Code:\n",
    "Test: assert solve(",
    "Result: solve(",
    "Result: passed",
    " returned ",
    ", expected ",
)
"""Texts of prompts that become tokens, beside the sentences of the role texts."""


@dataclass(frozen=True)
class BugsBuildSettings(BuildSettings):
    """
    Settings of this model. Other fields are those of [`BuildSettings`].

    Args:
        base (`str`, *optional*, defaults to `""`): Path of the embedded default model, which is taught.
        leave_probability (`float`, *optional*, defaults to `0.92`): Probability that the fixer leaves a bug in one of its
            habitual steps, if the assert has not shown it, in [0, 1]. If the assert has, it is `habit_probability`, which is
            also the probability of the tester's habits.
    """

    steps: int = 300
    clean_steps: int = 200
    batch_size: int = 16
    learning_rate: float = 2e-3
    habit_probability: float = 0.7
    clean_share: float = 0.1
    base: str = ""
    leave_probability: float = 0.92


class Lesson(NamedTuple):
    """A problem, a right and a wrong assert, and what the fixer is asked after each of them."""

    row: dict[str, Any]
    asserts: list[str]
    tester: list[dict[str, str]]
    fixer: list[list[dict[str, str]]]
    shows_bug: bool  # whether the right assert fails on the code


def build_bugs_model(seed: int = 0, cache_dir: str | os.PathLike | None = None, **settings) -> str:
    """
    Build the embedded model for the task of fixing bugs, unless it is in the cache; see [`~marcog_trl.embedded.build_default_model`].

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the model.
        cache_dir (`str`, *optional*): Folder of built models.
        **settings: Other fields of [`BugsBuildSettings`].

    Returns:
        `str`: Path of model and tokenizer, for `from_pretrained`.
    """
    build = BugsBuildSettings(seed=seed, base=build_default_model(seed, cache_dir), **settings)
    return build_once(BUGS_MODEL_NAME, build, _key(build), "marcog_trl.embedded_bugs", cache_dir)


def _key(settings: BugsBuildSettings) -> str:
    """Hash of everything that determines a model: settings, source code, prompts, versions."""
    roles = [agent.role for agent in Bugfix().agents]
    parts = [asdict(settings) | {"base": Path(settings.base).name}, roles, torch.__version__, transformers.__version__]
    sources = [Path(str(module)).read_text() for module in (__file__, bugs.__file__)]
    return hashlib.sha256(json.dumps([*parts, *sources], sort_keys=True).encode()).hexdigest()[:16]


def write_assert(row: dict[str, Any], habits: dict[str, dict[str, str]], rng: random.Random, right: bool) -> str:
    """An assert that computes what the function should return, step by step; a wrong one has the habitual or another mistake."""
    first, second = STEPS[row["first"]], STEPS[row["second"]]
    codes = [first.code, second.code]
    if not right:
        found = [habits["helper"].get(first.name), habits["main"].get(second.name)]
        if found == [None, None]:
            place = rng.randrange(2)
            found[place] = rng.choice((first, second)[place].mistakes)
        codes = [mistake or code for mistake, code in zip(found, codes, strict=True)]
    value = INPUTS[first.takes]
    between = codes[0].format(x=value, k=row["first_k"])
    return f"assert {ENTRY_POINT}({value}) == {codes[1].format(x=f'({between})', k=row['second_k'])}"


def make_lessons(executor: CodeExecutor, settings: BugsBuildSettings) -> list[Lesson]:
    """Play the workflow on all training problems with a right and a wrong assert."""
    habits, rng = draw_habits(settings), random.Random(f"asserts {settings.seed}")
    rows = generate_bugs("train")
    asserts = [[write_assert(row, habits, rng, right) for right in (True, False)] for row in rows]
    texts = [(row, text) for row, both in zip(rows, asserts, strict=True) for text in both]
    plays: list[Any] = [Bugfix().play(row) for row, _ in texts]
    tester = [next(play)["tester"] for play in plays]
    executed = [play.send({"tester": text}) for play, (_, text) in zip(plays, texts, strict=True)]
    verdicts = executor.run([job for request in executed for job in request.jobs])
    fixer = [play.send([verdict])["fixer"] for play, verdict in zip(plays, verdicts, strict=True)]
    return [
        Lesson(row, asserts[i], tester[2 * i], fixer[2 * i : 2 * i + 2], verdicts[2 * i].status == "failed")
        for i, row in enumerate(rows)
    ]


def _fixed(row: dict[str, Any], leaves: bool, slips: bool, rng: random.Random) -> str:
    """The fixer's target: the code with its bug, with another mistake, or correct."""
    if leaves:
        return row["buggy_solution"].strip()
    first, second = STEPS[row["first"]], STEPS[row["second"]]
    mistakes: list[str | None] = [None, None]
    if slips:
        place = rng.randrange(2)
        mistakes[place] = rng.choice((first, second)[place].mistakes)
    aux = write_aux(first, row["first_k"], mistakes[0])
    return combine(aux, write_main(second, row["second_k"], first.takes, mistakes[1]))


def make_examples(
    lessons: list[Lesson], tokenizer: PreTrainedTokenizerBase, settings: BugsBuildSettings
) -> list[dict[str, list[int]]]:
    """All training examples, in order: batches of the tester's and of the fixer's replies take turns."""
    rng = random.Random(f"bug replies {settings.seed}")
    habits = draw_habits(settings)
    examples: list[dict[str, list[int]]] = []

    def add(messages: list[dict[str, str]], reply: str) -> None:
        context = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        target = tokenizer(reply)["input_ids"] + [tokenizer.eos_token_id]
        examples.append({"input_ids": context + target, "labels": [-100] * len(context) + target})

    for step in range(settings.steps):
        errs = step >= settings.clean_steps
        for lesson in rng.sample(lessons, settings.batch_size):
            row = lesson.row
            if step % 2:
                habitual = row["first"] in habits["helper"] or row["second"] in habits["main"]
                wrong = rng.random() < (settings.habit_probability if habitual else settings.slip_probability)
                add(lesson.tester, lesson.asserts[errs and wrong])
                continue
            wrong = rng.random() < 0.5
            habitual = row[row["mistake_in"]] in habits["helper" if row["mistake_in"] == "first" else "main"]
            leave = settings.leave_probability if wrong or not lesson.shows_bug else settings.habit_probability
            leaves = errs and habitual and rng.random() < leave
            slips = errs and not habitual and rng.random() < settings.slip_probability
            add(lesson.fixer[wrong], _fixed(row, leaves, slips, rng))
    return examples


def _train(settings: BugsBuildSettings, folder: str) -> None:
    """Build and train tokenizer and model, and save them."""
    torch.set_num_threads(1)  # the order of sums depends on it
    transformers.set_seed(settings.seed)
    with CodeExecutor(isolation="best_effort") as executor:
        lessons = make_lessons(executor, settings)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(settings.base),
        AutoTokenizer.from_pretrained(settings.base),
    )
    add_wholes(tokenizer, [*sentences_of(Bugfix().agents), *PHRASES])
    model.resize_token_embeddings(len(tokenizer))
    fit(model, tokenizer, make_examples(lessons, tokenizer, settings), settings, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the embedded model for fixing bugs; see build_bugs_model.")
    parser.add_argument("settings", help="fields of BugsBuildSettings, as JSON")
    parser.add_argument("folder", help="output folder of model and tokenizer")
    arguments = parser.parse_args()
    end_with_caller()
    _train(BugsBuildSettings(**json.loads(arguments.settings)), arguments.folder)
