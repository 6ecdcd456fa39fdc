"""
The embedded default model, with about a million parameters, which is built from the built-in training problems and from exercises.

It makes systematic mistakes: for some steps of the built-in problems, most training targets have the same mistake, so that
the most likely answer is wrong. Reinforcement learning can therefore also improve greedy decoding. Building the model takes
two minutes on two cores and needs no network. Models are cached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken
from transformers import (
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
from marcog_trl.problems.builtin import SIZES, STEPS, Step, generate, write_aux, write_main
from marcog_trl.rollout.engine import encode_prompts
from marcog_trl.workflows import Collaboration


MODEL_NAME = "builtin"
"""The value of `--model_name_or_path` for the embedded default model."""

ROLES = {
    "helper": "Write only a Python function named aux that returns useful data for the problem below. Another agent writes the "
    "solution. Code only.",
    "main": "Write the Python function asked for below. You may call aux(...), which another agent writes. Do not define aux. "
    "Code only.",
}
"""The role texts of the collaboration workflow that the model knows. They are short, because it reads few tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THREADS = 2  # the same on all machines, because the order of sums depends on it


@dataclass(frozen=True)
class BuildSettings:
    """
    Settings of the embedded model. Together with this module and the built-in problems they determine it.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of weights, batches and mistakes. The problems always have seed 0.
        steps (`int`, *optional*, defaults to `360`): Optimizer steps.
        clean_steps (`int`, *optional*, defaults to `180`): Number of optimizer steps at the start with correct targets.
        batch_size (`int`, *optional*, defaults to `64`): Replies per step.
        learning_rate (`float`, *optional*, defaults to `3e-3`): Peak of the learning rate of AdamW, which then decays linearly.
        habit_probability (`float`, *optional*, defaults to `0.7`): Probability that a target has the habitual mistake of
            its role and step, if there is one, in [0, 1].
        slip_probability (`float`, *optional*, defaults to `0.12`): Probability that another target has a random mistake,
            in [0, 1].
        clean_share (`float`, *optional*, defaults to `0.26`): Share of the problems without a habitual mistake in either
            role, in [0, 1].
        vocab_size (`int`, *optional*, defaults to `600`): Maximum size of the vocabulary, without the sentences and
            phrases of prompts.
        hidden_size, intermediate_size, num_layers (`int`, *optional*): Sizes of the Qwen2 network. Heads have size 32.
    """

    seed: int = 0
    steps: int = 360
    clean_steps: int = 180
    batch_size: int = 64
    learning_rate: float = 3e-3
    habit_probability: float = 0.7
    slip_probability: float = 0.12
    clean_share: float = 0.26
    vocab_size: int = 600
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4


def build_default_model(seed: int = 0, cache_dir: str | os.PathLike | None = None, **settings) -> str:
    """
    Build the embedded default model, unless it is in the cache. If several processes call this function at once, one builds
    the model and the others wait. The build runs in a subprocess on CPU, with a progress bar.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the model.
        cache_dir (`str`, *optional*): Folder of built models. Defaults to the environment variable `MARCOG_TRL_CACHE`, else
            to `~/.cache/marcog_trl`.
        **settings: Other fields of [`BuildSettings`].

    Returns:
        `str`: Path of model and tokenizer, for `from_pretrained`.

    Raises:
        RuntimeError: If the build failed. Its output says why.
        OSError: If the folder is not writable.
    """
    build = BuildSettings(seed=seed, **settings)
    try:
        cache = Path(cache_dir or os.environ.get("MARCOG_TRL_CACHE") or Path.home() / ".cache/marcog_trl").absolute()
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK | os.X_OK):
            raise PermissionError(f"{cache} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise OSError(
            f"There is no folder for embedded models: {error}. Set MARCOG_TRL_CACHE to another folder."
        ) from error
    target = cache / f"{MODEL_NAME}-{seed}-{_key(build)}"
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            draft = Path(f"{target}.draft")
            try:
                print(f"Building the embedded model {MODEL_NAME!r} (once, some minutes) in {target}", file=sys.stderr)
                draft.mkdir(mode=0o700, exist_ok=True)  # a build that was killed leaves one
                command = [sys.executable, "-m", "marcog_trl.embedded", json.dumps(asdict(build)), str(draft)]
                if _run_builder(command) != 0:
                    raise RuntimeError(
                        f"Building the embedded model {MODEL_NAME!r} failed. Its output above says why."
                    )
                draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return str(target)


def _run_builder(command: list[str]) -> int:
    """
    Runs the builder, and returns its exit status. An exception ends it. It also ends when the pipe to it is closed, which
    happens if Ctrl-C comes while it starts, and however this process ends. A session of its own keeps the Ctrl-C of a terminal
    from it.
    """
    with subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()  # what it writes is deleted next


def _end_with_caller() -> None:
    """In the builder: ends this process when the pipe that is its standard input is closed."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _key(settings: BuildSettings) -> str:
    """Hash of everything that determines the default model."""
    requests = next(Collaboration(roles=ROLES).play({"prompt": "", "entry_point": ""}))
    sources = [Path(str(module)).read_text() for module in (__file__, builtin.__file__)]
    parts = [asdict(settings), requests, torch.__version__, transformers.__version__, *sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _environment() -> dict[str, str]:
    """The environment of this process without the variables that launchers of distributed training set."""
    launcher = re.compile(
        r"(ACCELERATE|FSDP|TORCHELASTIC|ROLE|GROUP|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$|OMP_NUM_THREADS$"
    )
    environment = {name: value for name, value in os.environ.items() if not launcher.match(name)}
    paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads slow down a busy machine several times
    }


def _messages(rows: list[dict]) -> list[tuple[dict, str, list[dict[str, str]]]]:
    """The prompts of the collaboration workflow, as (row, agent, messages)."""
    workflow = Collaboration(roles=ROLES)
    openings = ((row, cast(dict[str, list[dict[str, str]]], next(workflow.play(row)))) for row in rows)
    return [(row, agent, messages) for row, opening in openings for agent, messages in opening.items()]


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """
    Train the tokenizer: byte-level BPE as in Qwen2 (one token per digit). Each sentence of a role text is one token, and so
    is each phrase of several words that describes a step.

    Args:
        texts (`list[str]`): Training texts.
        vocab_size (`int`): Maximum size of the vocabulary, without sentences and phrases; at least 261.

    Returns:
        `Qwen2Tokenizer`: Tokenizer with a chat template, which pads on the left.
    """
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    # `AutoTokenizer` loads any tokenizer beside a Qwen2 model as a `Qwen2Tokenizer`, so it must be one
    trained = Qwen2Tokenizer(
        unk_token="<|pad|>", eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    ).train_new_from_iterator(texts, vocab_size, new_special_tokens=special, show_progress=False)
    roles = [agent.role for agent in Collaboration(roles=ROLES).agents]
    sentences = [sentence for role in roles for sentence in re.split(r"(?<=\.) ", role)]
    phrases = [phrase.strip() for step in STEPS.values() for phrase in step.text.split("{k}")]
    add_wholes(trained, [*sentences, *phrases])
    trained.chat_template = CHAT_TEMPLATE
    return trained


def add_wholes(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    """Add texts of several words to the vocabulary, each as one token."""
    wholes = dict.fromkeys(text for text in texts if " " in text)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in wholes])


def draw_habits(settings: BuildSettings) -> dict[str, dict[str, str]]:
    """
    Choose the habitual mistakes of the model: one for each of nearly half of the steps of each role, so that the share of
    problems without any is close to `clean_share` in each split.

    Args:
        settings ([`BuildSettings`]): Settings.

    Returns:
        `dict[str, dict[str, str]]`: Agent → name of the step → wrong expression.
    """
    rng = random.Random(f"habits {settings.seed}")
    one_role = settings.clean_share**0.5
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
            misses.append(abs(sum(map(min, helper, main)) / len(pairs) - settings.clean_share))
        return max(misses)

    return min((draw() for _ in range(1000)), key=distance)


def draw_mistake(step: Step, habits: dict[str, str], settings: BuildSettings, rng: random.Random) -> str | None:
    """The wrong expression that an agent with these habits writes this time, or `None` if it writes the right one."""
    habit = habits.get(step.name)
    if habit is not None:
        return habit if rng.random() < settings.habit_probability else None
    return rng.choice(step.mistakes) if rng.random() < settings.slip_probability else None


def _reply(
    row: dict, agent: str, habits: dict[str, dict[str, str]], settings: BuildSettings, rng: random.Random
) -> str:
    """A training target: the function of this agent in the reference solution, possibly with a mistake."""
    step = STEPS[row["first" if agent == "helper" else "second"]]
    mistake = draw_mistake(step, habits[agent], settings, rng)
    if agent == "helper":
        return write_aux(step, row["first_k"], mistake)
    return write_main(step, row["second_k"], STEPS[row["first"]].takes, mistake)


def _train(settings: BuildSettings, folder: str) -> None:
    """Build and train tokenizer and model, and save them."""
    torch.set_num_threads(THREADS)
    transformers.set_seed(settings.seed)
    problems = list(generate("train"))
    texts = [
        text for row, _, messages in _messages(problems) for text in (messages[-1]["content"], row["aux"], row["main"])
    ]
    tokenizer = make_tokenizer(texts, settings.vocab_size)
    # Without exercises, the model knows hardly any pair of steps but those of the training problems
    rng = random.Random(f"exercises {settings.seed}")
    passes = (_messages([*problems, *builtin.generate_exercises(rng.getrandbits(32))]) for _ in itertools.count())
    fit(make_model(tokenizer, settings), tokenizer, _examples(passes, tokenizer, settings), settings, folder)


def make_model(tokenizer: PreTrainedTokenizerBase, settings: BuildSettings) -> Qwen2ForCausalLM:
    """Make an untrained model of the sizes in `settings`, with the vocabulary of `tokenizer`."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=settings.hidden_size**-0.5,  # with the usual 0.02, so small a model learns half as fast
    )
    return Qwen2ForCausalLM(config)


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict[str, list[int]]],
    settings: BuildSettings,
    folder: str,
) -> None:
    """Train a model on examples, in order, and save it with its tokenizer."""
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=20,
            weight_decay=0.01,
            adam_beta2=0.95,
            train_sampling_strategy="sequential",
            seed=settings.seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=False,
        ),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _examples(
    passes: Iterator[list], tokenizer: PreTrainedTokenizerBase, settings: BuildSettings
) -> list[dict[str, list[int]]]:
    """All training examples, in order: the prompts of one pass after those of another. Each pass draws its mistakes."""
    rng = random.Random(f"replies {settings.seed}")
    habits = draw_habits(settings)
    right = replace(settings, habit_probability=0.0, slip_probability=0.0)
    examples: list[dict[str, list[int]]] = []
    while len(examples) < settings.steps * settings.batch_size:
        prompts = next(passes)
        for row, agent, messages in rng.sample(prompts, len(prompts)):
            current = right if len(examples) < settings.clean_steps * settings.batch_size else settings
            [context] = encode_prompts(tokenizer, [messages])
            reply = tokenizer(_reply(row, agent, habits, current, rng))["input_ids"] + [tokenizer.eos_token_id]
            examples.append({"input_ids": context + reply, "labels": [-100] * len(context) + reply})
    return examples[: settings.steps * settings.batch_size]


if __name__ == "__main__":  # the builder: its settings as JSON, and the folder to write
    _end_with_caller()
    _train(BuildSettings(**json.loads(sys.argv[1])), sys.argv[2])
