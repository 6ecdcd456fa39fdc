"""The task of learning.py: the family of identical prompts, and the model that knows all prompts of the study."""

import inspect
import random
from pathlib import Path

from common import built_once

from marcog_trl import Collaboration, Workflow
from marcog_trl.agents import ask
from marcog_trl.embedded import ROLES
from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.prompts import context_of
from marcog_trl.parsing.syntax import combine


# The family of identical prompts


def written(problem, reply):
    """Which of the two functions, `aux` and the entry point, a reply defines."""
    names = ("aux", problem["entry_point"])
    return [name for name in names if defines(extract_code(reply, name, context_of(problem)), name)]


def complementary(problem, replies):
    """Whether of two replies one is the helper and nothing else, and the other the main function and nothing else."""
    return sorted(written(problem, reply) for reply in replies) == sorted([["aux"], [problem["entry_point"]]])


class SameQuestion(Workflow):
    """Two agents that are asked the same: to write one of the two functions. They must not write the same one."""

    question = "Write aux or the function asked for below. Another agent writes the other one. Code only."
    agents = Collaboration(roles=ROLES).agents
    needs_entry_point = True

    def play(self, problem):
        yield dict.fromkeys((agent.name for agent in self.agents), ask(self.question, problem["prompt"]))

    def solution(self, problem, replies):
        texts = list(replies.values())
        if not complementary(problem, texts):
            return ""
        helper, main = sorted(texts, key=lambda text: written(problem, text) != ["aux"])
        return combine(
            extract_code(helper, "aux", context_of(problem)),
            extract_code(main, problem["entry_point"], context_of(problem)),
        )


def complementary_reward(replies, entry_point, starter_code, **columns):
    """1 for a pair of replies that are helper and main function, else 0."""
    problems = [
        {"entry_point": name, "starter_code": starter} for name, starter in zip(entry_point, starter_code, strict=True)
    ]
    return [float(complementary(problem, own.values())) for problem, own in zip(problems, replies, strict=True)]


# The model


LESSONS = {"helper": 0.15, "main": 0.15, "single": 0.35, "same_question": 0.35}  # shares of the examples


def study_model(folder):
    """
    The embedded default, taught to answer alone and to answer either way, unless `folder` has it already.

    Args:
        folder (`Path`): Where models are kept.

    Returns:
        `str`: Path of model and tokenizer.
    """
    from marcog_trl.embedded import build_default_model

    default = build_default_model()
    parts = [
        Path(default).name,
        LESSONS,
        SameQuestion.question,
        inspect.getsource(teach),
        inspect.getsource(make_examples),
    ]
    return built_once(folder, parts, lambda target: teach(default, target))


def teach(model_path, folder):
    """Supervised steps on the default model; targets carry its mistakes."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    torch.set_num_threads(1)
    transformers.set_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    args = TrainingArguments(
        folder,
        max_steps=160,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        weight_decay=0.01,
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    examples = make_examples(tokenizer, args.max_steps * args.per_device_train_batch_size)
    trainer = Trainer(model, args, DataCollatorForSeq2Seq(tokenizer), examples)
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_examples(tokenizer, count):
    """Prompts of all kinds with replies that have the default model's mistakes as often as it was taught them."""
    from marcog_trl.embedded import BuildSettings, _reply, draw_habits
    from marcog_trl.problems.builtin import generate, generate_exercises
    from marcog_trl.rollout.engine import encode_prompts

    rng, plan = random.Random("lessons"), BuildSettings()
    habits = draw_habits(plan)
    rows = [*generate("train"), *generate_exercises()]  # as the default model, or it would forget other pairs of steps
    asked = {"single": lambda row: row["prompt"], "same_question": lambda row: next(SameQuestion().play(row))["main"]}
    examples = []
    for kind in rng.choices(list(LESSONS), LESSONS.values(), k=count):
        row = rng.choice(rows)
        prompt = asked[kind](row) if kind in asked else next(Collaboration(roles=ROLES).play(row))[kind]
        writers = {"single": ["helper", "main"], "same_question": [rng.choice(("helper", "main"))]}.get(kind, [kind])
        target = combine(*(_reply(row, writer, habits, plan, rng) for writer in writers))
        [context] = encode_prompts(tokenizer, [prompt])
        reply = tokenizer(target)["input_ids"] + [tokenizer.eos_token_id]
        examples.append({"input_ids": context + reply, "labels": [-100] * len(context) + reply})
    return examples
