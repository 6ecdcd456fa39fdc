"""
The embedded default model: about a million parameters, built on the spot from the built-in training problems.

It is able but wrong in a systematic way: for some steps of the built-in problems its training targets carry the same
mistake again and again, so that its likeliest answer is wrong and reinforcement learning has something to win by greedy
decoding too. It needs no network, takes two minutes on two cores, and is kept in a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Trainer,
    TrainingArguments,
)

from marcog_trl.problems import builtin
from marcog_trl.problems.builtin import SIZES, STEPS, generate, write_aux, write_main
from marcog_trl.workflows import Collaboration


MODEL_NAME = "builtin"
"""What recipes take as `--model_name_or_path` to mean the embedded default model."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THREADS = 2  # on every machine, because the order of sums depends on it


@dataclass(frozen=True)
class Recipe:
    """
    Everything that determines the embedded model, beside the code of this module and of the built-in problems.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of weights, batches and mistakes. The problems are those of seed 0.
        steps (`int`, *optional*, defaults to `360`): Optimizer steps.
        clean_steps (`int`, *optional*, defaults to `180`): How many of them come first, with targets that are right.
        batch_size (`int`, *optional*, defaults to `64`): Replies per step.
        learning_rate (`float`, *optional*, defaults to `4e-3`): Peak of AdamW's learning rate, which then falls linearly.
        habit_probability (`float`, *optional*, defaults to `0.7`): How often a target carries the mistake that is usual
            for its role and step, where there is one, in [0, 1].
        slip_probability (`float`, *optional*, defaults to `0.12`): How often another target carries some mistake, in
            [0, 1].
        clean_share (`float`, *optional*, defaults to `0.26`): Share of problems with no usual mistake in either role, in
            [0, 1].
        vocab_size (`int`, *optional*, defaults to `600`): Most entries of the vocabulary, sentences and phrases of prompts
            aside.
        hidden_size, intermediate_size, num_layers (`int`, *optional*): Sizes of the Qwen2 network; heads are of size 32.
    """

    seed: int = 0
    steps: int = 360
    clean_steps: int = 180
    batch_size: int = 64
    learning_rate: float = 4e-3
    habit_probability: float = 0.7
    slip_probability: float = 0.12
    clean_share: float = 0.26
    vocab_size: int = 600
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4


def build_default_model(seed: int = 0, cache_dir: str | os.PathLike | None = None, **recipe) -> str:
    """
    Build the embedded default model, unless the cache has it already. However many processes call this at once, one
    builds and the others wait. The build runs in a process of its own, on CPU, with a progress bar.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the model.
        cache_dir (`str`, *optional*): Folder of built models; by default `MARCOG_TRL_CACHE` of the environment, or
            `~/.cache/marcog_trl`, or, where that cannot be written, a folder of the user's own for temporary files.
        **recipe: Other fields of [`Recipe`].

    Returns:
        `str`: Folder of model and tokenizer, for `from_pretrained`.

    Raises:
        RuntimeError: If the build failed; its own output says why.
        OSError: If the folder cannot be written.
    """
    plan = Recipe(seed=seed, **recipe)
    cache = Path(cache_dir or os.environ.get("MARCOG_TRL_CACHE") or _own_cache()).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"no folder for the embedded default model: {error}; MARCOG_TRL_CACHE=/a/folder/of/yours works"
        ) from error
    target = cache / f"builtin-{seed}-{_key(plan)}"
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            print(f"Building the embedded default model (once, about two minutes) in {target}", file=sys.stderr)
            draft = tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache)
            try:
                command = [sys.executable, "-m", "marcog_trl.embedded", json.dumps(asdict(plan)), draft]
                # In a session of its own, so that Ctrl-C reaches it through this process, which ends it
                if subprocess.run(command, env=_environment(), start_new_session=True).returncode != 0:
                    raise RuntimeError(f"building the embedded default model failed: {' '.join(command)}")
                os.rename(draft, target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return str(target)


def _own_cache() -> Path:
    """The folder in the user's home, or, where that cannot be written, one among temporary files that is nobody else's."""
    try:
        folder = Path.home() / ".cache" / "marcog_trl"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        cause = f"{folder} cannot be written"
    except (OSError, RuntimeError) as error:  # the latter where no home is known
        cause = str(error)
    folder = Path(tempfile.gettempdir()) / f"marcog_trl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"no folder for the embedded default model: {cause}, and others may write to {folder}; "
            "MARCOG_TRL_CACHE=/a/folder/of/yours works"
        )
    warnings.warn(
        f"the embedded default model is kept in {folder}, for {cause}; MARCOG_TRL_CACHE names another folder",
        stacklevel=3,
    )
    return folder


def load_default_model(
    seed: int = 0, cache_dir: str | os.PathLike | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Build or find the embedded default model and load it.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the model.
        cache_dir (`str`, *optional*): As in [`build_default_model`].

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: Model and tokenizer.
    """
    path = build_default_model(seed, cache_dir)
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def _key(plan: Recipe) -> str:
    """Hash of everything that determines a model: settings, sources, prompts, versions."""
    requests = next(Collaboration().play({"prompt": "", "entry_point": ""}))
    parts = [asdict(plan), requests, torch.__version__, transformers.__version__]
    sources = [Path(str(module)).read_text() for module in (__file__, builtin.__file__)]
    return hashlib.sha256(json.dumps([*parts, *sources], sort_keys=True).encode()).hexdigest()[:16]


def _environment() -> dict[str, str]:
    """This process's environment without what a launcher set for its distributed training."""
    launcher = re.compile(
        r"(ACCELERATE|FSDP|TORCHELASTIC|ROLE|GROUP|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$|OMP_NUM_THREADS$"
    )
    environment = {name: value for name, value in os.environ.items() if not launcher.match(name)}
    paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin slow a busy machine down several times
    }


def _messages(rows: list[dict]) -> list[tuple[dict, str, list[dict[str, str]]]]:
    """(row, agent, messages): what the agents of a collaboration read."""
    workflow = Collaboration()
    openings = ((row, cast(dict[str, list[dict[str, str]]], next(workflow.play(row)))) for row in rows)
    return [(row, agent, messages) for row, opening in openings for agent, messages in opening.items()]


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """
    Train the tokenizer: byte-level BPE as Qwen2's (digits one by one). Every sentence of the agents' role texts is one
    token, and so is every phrase of several words that describes a step.

    Args:
        texts (`list[str]`): What to train on.
        vocab_size (`int`): Most entries, sentences and phrases aside; at least 261.

    Returns:
        `Qwen2Tokenizer`: Tokenizer with chat template, padding on the left.
    """
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    # `AutoTokenizer` makes a `Qwen2Tokenizer` of every tokenizer that lies beside a Qwen2 model, so it must be one
    trained = Qwen2Tokenizer(
        unk_token="<|pad|>", eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    ).train_new_from_iterator(texts, vocab_size, new_special_tokens=special, show_progress=False)
    sentences = [sentence for agent in Collaboration().agents for sentence in re.split(r"(?<=\.) ", agent.role)]
    phrases = [phrase.strip() for step in STEPS.values() for phrase in step.text.split("{k}")]
    wholes = dict.fromkeys(text for text in (*sentences, *phrases) if " " in text)
    trained.add_tokens([AddedToken(text, normalized=False) for text in wholes])
    trained.chat_template = CHAT_TEMPLATE
    return trained


def draw_habits(plan: Recipe) -> dict[str, dict[str, str]]:
    """
    Choose the mistakes that the model is to make as a habit: for nearly half of the steps of each role, one mistake each,
    so that in every split about the wished-for share of problems is free of them.

    Args:
        plan (`Recipe`): Seed and share.

    Returns:
        `dict[str, dict[str, str]]`: Agent → step's name → mistaken expression.
    """
    rng = random.Random(f"habits {plan.seed}")
    one_role = plan.clean_share**0.5
    splits = [[(row["first"], row["second"]) for row in generate(split)] for split in SIZES]

    def draw() -> dict[str, dict[str, str]]:
        steps = {agent: [step for step in STEPS.values() if rng.random() > one_role] for agent in ("helper", "main")}
        return {agent: {step.name: rng.choice(step.mistakes) for step in steps[agent]} for agent in steps}

    def distance(habits: dict[str, dict[str, str]]) -> float:
        misses = []
        for pairs in splits:
            helper = [first not in habits["helper"] for first, _ in pairs]
            main = [second not in habits["main"] for _, second in pairs]
            misses += [abs(sum(role) / len(pairs) - one_role) for role in (helper, main)]
            misses.append(abs(sum(map(min, helper, main)) / len(pairs) - plan.clean_share))
        return max(misses)

    return min((draw() for _ in range(1000)), key=distance)


def _reply(row: dict, agent: str, habits: dict[str, dict[str, str]], plan: Recipe, rng: random.Random) -> str:
    """A target: the reference's function of this agent, or one with a mistake."""
    step = STEPS[row["first" if agent == "helper" else "second"]]
    habit = habits[agent].get(step.name)
    mistake = None
    if habit is not None and rng.random() < plan.habit_probability:
        mistake = habit
    elif habit is None and rng.random() < plan.slip_probability:
        mistake = rng.choice(step.mistakes)
    if agent == "helper":
        return write_aux(step, row["first_k"], mistake)
    return write_main(step, row["second_k"], STEPS[row["first"]].takes, mistake)


def _train(plan: Recipe, folder: str) -> None:
    """Make tokenizer and model, train, save. Runs in a process of its own."""
    torch.set_num_threads(THREADS)
    transformers.set_seed(plan.seed)
    rows = list(generate("train"))
    prompts = _messages(rows)
    texts = [text for row, _, messages in prompts for text in (messages[-1]["content"], row["aux"], row["main"])]
    tokenizer = make_tokenizer(texts, plan.vocab_size)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.hidden_size // 32,
        num_key_value_heads=plan.hidden_size // 32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=plan.hidden_size**-0.5,  # with the usual 0.02 so small a model wakes up twice as slowly
    )
    model = Qwen2ForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=plan.steps,
            per_device_train_batch_size=plan.batch_size,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=20,
            weight_decay=0.01,
            adam_beta2=0.95,
            train_sampling_strategy="sequential",
            seed=plan.seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=False,
        ),
        train_dataset=_examples(prompts, tokenizer, plan),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _examples(prompts: list, tokenizer: PreTrainedTokenizerBase, plan: Recipe) -> list[dict[str, list[int]]]:
    """One example per reply of the whole training, in order; mistakes are drawn anew whenever a prompt comes back."""
    rng = random.Random(f"replies {plan.seed}")
    habits = draw_habits(plan)
    right = replace(plan, habit_probability=0.0, slip_probability=0.0)
    contexts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        for _, _, messages in prompts
    ]
    examples: list[dict[str, list[int]]] = []
    while len(examples) < plan.steps * plan.batch_size:
        for i in rng.sample(range(len(prompts)), len(prompts)):
            row, agent, _ = prompts[i]
            current = right if len(examples) < plan.clean_steps * plan.batch_size else plan
            reply = tokenizer(_reply(row, agent, habits, current, rng))["input_ids"] + [tokenizer.eos_token_id]
            examples.append({"input_ids": contexts[i] + reply, "labels": [-100] * len(contexts[i]) + reply})
    return examples[: plan.steps * plan.batch_size]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the embedded default model; see build_default_model.")
    parser.add_argument("recipe", help="fields of Recipe as JSON")
    parser.add_argument("folder", help="where to write model and tokenizer")
    arguments = parser.parse_args()
    _train(Recipe(**json.loads(arguments.recipe)), arguments.folder)
