"""
The embedded model for the task of fixing bugs: the embedded default model, taught the prompts of the `bugfix` workflow.

It keeps the habits of the default model. The fixer makes them in the function that it corrects, and the tester in what its assert
expects, so that reinforcement learning can improve both agents. What the fixer writes does not depend on the result of the assert.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from marcog_trl.embedded import (
    BuildSettings,
    add_wholes,
    build_default_model,
    build_from_arguments,
    build_once,
    draw_habits,
    draw_mistake,
    fit,
    hash_of,
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
INPUTS = {"numbers": "[5, 9, 2, 8, 3]", "n": "23", "text": "'yam plum'"}
"""What the tester calls functions with, by the kind of value that they take."""
PHRASES = (
    *INPUTS.values(),
    "Code:\n",
    "Test: assert solve(",
    "Result: passed",
    "Result: AssertionError: ",
    " does not hold",
)
"""Texts of prompts that become tokens, beside the sentences of the role texts."""
SEEDS = 2  # of the problems

Prompts = list[list[dict[str, str]]]


@dataclass(frozen=True)
class BugsBuildSettings(BuildSettings):
    """
    Settings of this model. Other fields are those of [`BuildSettings`], without `clean_steps` and the sizes: the default model has
    them.

    Args:
        steps (`int`, *optional*, defaults to `700`): Optimizer steps. Batches of the two agents take turns.
        batch_size (`int`, *optional*, defaults to `16`): Replies per step.
        learning_rate (`float`, *optional*, defaults to `2e-3`): Peak of the learning rate.
        base (`str`, *optional*, defaults to `""`): Path of the embedded default model, which is taught.
    """

    steps: int = 700
    batch_size: int = 16
    learning_rate: float = 2e-3
    base: str = ""


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
    """Hash of everything that determines a model. The name of the default model has the hash of what determines that one."""
    named = asdict(settings) | {"base": Path(settings.base).name}
    return hash_of(named, [agent.role for agent in Bugfix().agents], (__file__, bugs.__file__))


def write_assert(row: dict[str, Any], mistakes: Sequence[str | None]) -> str:
    """An assert that computes what the function should return, step by step, with mistakes in the steps."""
    first, second = STEPS[row["first"]], STEPS[row["second"]]
    value = INPUTS[first.takes]
    between = (mistakes[0] or first.code).format(x=value, k=row["first_k"])
    expected = (mistakes[1] or second.code).format(x=f"({between})", k=row["second_k"])
    return f"assert {ENTRY_POINT}({value}) == {expected}"


def write_program(row: dict[str, Any], mistakes: Sequence[str | None]) -> str:
    """The whole code, with mistakes in the steps."""
    first, second = STEPS[row["first"]], STEPS[row["second"]]
    return combine(
        write_aux(first, row["first_k"], mistakes[0]), write_main(second, row["second_k"], first.takes, mistakes[1])
    )


def make_prompts(rows: Sequence[dict[str, Any]], asserts: Sequence[str], executor: CodeExecutor) -> dict[str, Prompts]:
    """Play the workflow on the problems, with these asserts. Returns agent → prompts."""
    plays: list[Any] = [Bugfix().play(row) for row in rows]
    tester = [next(play)["tester"] for play in plays]
    executed = [play.send({"tester": test}) for play, test in zip(plays, asserts, strict=True)]
    verdicts = executor.run([job for request in executed for job in request.jobs])
    fixer = [play.send([verdict])["fixer"] for play, verdict in zip(plays, verdicts, strict=True)]
    return {"tester": tester, "fixer": fixer}


def make_examples(
    tokenizer: PreTrainedTokenizerBase, settings: BugsBuildSettings, executor: CodeExecutor
) -> list[dict[str, list[int]]]:
    """All training examples, in order. Mistakes are drawn again each time that a prompt is repeated."""
    habits, rng = draw_habits(settings), random.Random(f"bug replies {settings.seed}")

    def draw(row: dict[str, Any]) -> list[str | None]:
        steps = {"helper": STEPS[row["first"]], "main": STEPS[row["second"]]}
        return [draw_mistake(step, habits[agent], settings, rng) for agent, step in steps.items()]

    rows = [row for seed in range(SEEDS) for row in generate_bugs("train", seed)]
    prompts = make_prompts(rows, [write_assert(row, draw(row)) for row in rows], executor)
    examples: list[dict[str, list[int]]] = []
    order = (i for _ in itertools.count() for i in rng.sample(range(len(rows)), len(rows)))
    for step in range(settings.steps):
        agent, write = (("tester", write_assert), ("fixer", write_program))[step % 2]
        for _ in range(settings.batch_size):
            i = next(order)
            context = tokenizer.apply_chat_template(
                prompts[agent][i], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            reply = tokenizer(write(rows[i], draw(rows[i])))["input_ids"] + [tokenizer.eos_token_id]
            examples.append({"input_ids": context + reply, "labels": [-100] * len(context) + reply})
    return examples


def _train(settings: BugsBuildSettings, folder: str) -> None:
    """Train the default model, and save it with its tokenizer."""
    torch.set_num_threads(1)  # the order of sums depends on it
    transformers.set_seed(settings.seed)
    model = AutoModelForCausalLM.from_pretrained(settings.base)
    tokenizer = AutoTokenizer.from_pretrained(settings.base)
    add_wholes(tokenizer, [*sentences_of(Bugfix().agents), *PHRASES])
    model.resize_token_embeddings(len(tokenizer))
    with CodeExecutor(isolation="best_effort") as executor:
        examples = make_examples(tokenizer, settings, executor)
    fit(model, tokenizer, examples, settings, folder)


if __name__ == "__main__":
    build_from_arguments(BugsBuildSettings, _train)
