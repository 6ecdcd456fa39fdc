"""
Rounds of learning from preferences: collect pairs → train a reward model (MARLHF) → train the team → evaluate.

The folder of a run holds `round_00/policy` (the team that it begins with), `round_01/pairs.jsonl`, `round_01/policy`,
`round_01/evaluation.json` and so on, and `rounds.json` with the settings that a run which continues must share. A phase writes to a
`.partial` path, which is renamed when it is whole: what has its own name is finished. A run that was killed repeats the phase that it
was in, and ends as if it had not been killed.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import json
import math
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from datasets import Dataset, interleave_datasets
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Trainer
from trl import ModelConfig, get_peft_config, get_quantization_config

from marcog_trl.agents import Workflow
from marcog_trl.checks import Count, NotNegative, Positive, Range, Unit, documented
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.files import read_json, write_json
from marcog_trl.heterogeneity.cores import check_peft_config
from marcog_trl.heterogeneity.fold import stack_config
from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.pairs import PairSettings, check_workflow, collect_preferences, read_pairs, write_pairs
from marcog_trl.preferences.reward_model import TeamRewardModel
from marcog_trl.preferences.reward_trainer import TeamRewardConfig, TeamRewardTrainer, hold_out_problems
from marcog_trl.processes import on_main, this_process
from marcog_trl.report.metrics_file import MetricsFile
from marcog_trl.team.base_models import load_tokenizer
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.description import ADAPTER_FILES, MODULES_FILE, TEAM_FILE, TeamDescription, agents_of
from marcog_trl.team.hub import root_files
from marcog_trl.team.loading import (
    check_has_adapter,
    find_team,
    load_base_model,
    make_modules,
    of_revision,
    settings_with,
)
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.team import Team
from marcog_trl.trainers.adapter_targets import check_start, outside_zero3, resolve_all_linear
from marcog_trl.trainers.checkpointing import delete_checkpoints, last_whole_checkpoint
from marcog_trl.trainers.config import MultiAgentGRPOConfig, SHPPOConfig
from marcog_trl.trainers.grpo import MultiAgentGRPOTrainer
from marcog_trl.trainers.reward_functions import named_reward


ROUNDS_FILE = "rounds.json"
# Settings that a run may continue with others of
_CHANGEABLE = {"num_rounds", "min_pairs", "num_workers", "isolation"}
# Settings of training that it may not
_TRAINING = {
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "seed",
    "beta", "loss_type", "loss_weights", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau",
    "margin", "reference", "gamma_turn", "max_length", "init_core_scale", "num_generations", "num_iterations", "epsilon",
    "epsilon_high", "advantage", "scale_rewards", "turn_weights", "turn_tree", "joint_mode", "reward_model",
    "reward_learning_rate", "reward_num_train_epochs", "reward_batch_size", "reward_max_length", "held_out_problems",
}  # fmt: skip
_MODEL = ("model_name_or_path", "dtype", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit")


# Settings


@documented
@dataclass
class RoundsSettings(PairSettings):
    """
    Settings of rounds of pairs, beside those of [`PairSettings`].

    Args:
        num_rounds (`int`, *optional*, defaults to `1`): Rounds. One is offline: pairs of the first team alone.
        start_team (`str`, *optional*): Folder or Hub repository of a saved team that the first round begins with. By default the
            team is untrained.
        min_pairs (`int`, *optional*, defaults to `32`): Fewer pairs end the run.
        replay_decay (`float`, *optional*, defaults to `1.0`): λ in [0, 1]. A round also trains on pairs of earlier rounds, which
            are drawn with weights ∝ (1 − λ)^age. With 1 it trains on its own pairs alone, with 0 on all alike.
        replay_pairs (`int`, *optional*): Pairs to draw where there is replay. Defaults to as many as the round has itself.
    """

    num_rounds: Count = 1
    start_team: str | None = None
    min_pairs: Count = 32
    replay_decay: Unit = 1.0
    replay_pairs: Count | None = None

    def check_rounds(self) -> None:
        """
        Checks fields of a trainer's configuration that rounds do not support.

        Raises:
            ValueError: If one is set.
        """
        for name, accepted in (("eval_strategy", "no"), ("push_to_hub", False)):
            value = getattr(self, name)
            if value != accepted:
                raise ValueError(
                    f"{name}={value!r} is not supported in rounds: the team is evaluated after every round, and "
                    f"recipes/export.py pushes it. Set {name}={accepted!r}."
                )


@documented
@dataclass
class IterativeMADPOConfig(RoundsSettings, TeamSettings, MADPOConfig):
    """
    Configuration of rounds of MADPO: [`MADPOConfig`] for the training of a round, [`RoundsSettings`], and [`TeamSettings`] for the
    team that the first round begins with. With `start_team`, that team's own settings and base model replace those given here.

    Args:
        init_core_scale (`float`, *optional*, defaults to `1.5`):
            As in [`SHPPOConfig`], for an untrained team with `parameter_sharing="latent"`.
    """

    _VALID_DICT_FIELDS = [
        *MADPOConfig._VALID_DICT_FIELDS, "roles", "endpoints", "expert", "generation_kwargs", "chat_template_kwargs"
    ]  # fmt: skip

    init_core_scale: NotNegative = SHPPOConfig.init_core_scale

    def __post_init__(self):
        MADPOConfig.__post_init__(self)
        TeamSettings.__post_init__(self)
        self.check_rounds()


@documented
@dataclass
class IterativeMARLHFConfig(RoundsSettings, MultiAgentGRPOConfig):
    """
    Configuration of rounds of MARLHF: [`MultiAgentGRPOConfig`] for the reinforcement learning of a round, [`RoundsSettings`], and
    what the reward model of a round is trained with.

    Args:
        reward_model (`str`, *optional*):
            Folder of a saved [`TeamRewardModel`] to use in all rounds. By default every round trains its own, on its pairs.
        reward_learning_rate (`float`, *optional*, defaults to `1e-4`): Learning rate of the reward model.
        reward_num_train_epochs (`float`, *optional*, defaults to `1.0`): Passes over the pairs.
        reward_batch_size (`int`, *optional*, defaults to `8`): Pairs per optimizer step of the reward model and process.
        reward_max_length (`int`, *optional*, defaults to `2048`): Tokens of the longest transcript; pairs with a longer one are
            left out, and their number is reported.
        held_out_problems (`float`, *optional*, defaults to `0.1`): Share of the problems, between 0 and 1, whose pairs measure the
            reward model and do not train it.
        beta (`float`, *optional*, defaults to `0.02`): Coefficient of the KL divergence from the initial team.
    """

    init_core_scale: ClassVar[float] = 1.0  # an untrained team without latents has no cores

    beta: float = field(default=0.02, metadata={"help": "Coefficient of the KL divergence from the initial team."})
    reward_model: str | None = None
    reward_learning_rate: Positive = 1e-4
    reward_num_train_epochs: Positive = 1.0
    reward_batch_size: Count = 8
    reward_max_length: Count = 2048
    held_out_problems: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1

    def __post_init__(self):
        MultiAgentGRPOConfig.__post_init__(self)
        self.check_rounds()
        if self.full_finetuning:
            raise ValueError(
                "full_finetuning=True is not supported in rounds: each continues the adapter of the one before. Set it to False."
            )
        if self.reward_weights is not None:
            raise ValueError(
                f"reward_weights={self.reward_weights} is not supported in rounds: pairs are made by the plain sum of the "
                "rewards. Remove it, or weigh them in one function of your own, such as reward=['my_reward.py:weighed']."
            )


# Rounds


@dataclass(frozen=True)
class Round:
    """
    One round, as its phases see it.

    Args:
        number (`int`): From 1.
        folder (`Path`): Folder of the round, which holds what earlier phases wrote under their names.
        initial (`Path`): Saved team that the first round began with.
        policy (`Path`): Saved team that this round begins with.
        pairs (`Dataset`): Pairs to train on, replayed ones included.
    """

    number: int
    folder: Path
    initial: Path
    policy: Path
    pairs: Dataset


class PreferenceRounds(ABC):
    """
    Runs rounds, and continues those that were begun, on all processes together. Subclasses say how a round trains.

    Args:
        args ([`IterativeMADPOConfig`] or [`IterativeMARLHFConfig`]): Settings. `output_dir` is the folder of the run.
        model ([`~trl.ModelConfig`]): Base model, LoRA and quantization.
        train_dataset (`Dataset`): Problems to collect pairs and to train on.
        test_dataset (`Dataset`, *optional*): Held-out problems.
        reward (`Sequence[str]`, *optional*, defaults to `("execution_reward",)`): Names of the rewards that pairs are made by.
        num_samples (`int`, *optional*, defaults to `4`): Sampled episodes per held-out problem before the first round and after
            each. With 0 nothing is measured.
        identity (`Mapping`, *optional*): What else another run in the same folder must agree on, as JSON can hold it.
        show (`Callable`, *optional*): Called with every trainer before it trains, such as to add callbacks.

    Attributes:
        last (`int`): Number of the round that [`run`] ended with.

    Raises:
        ValueError: If the problems lack what the workflow or the rewards need, agents have tools or speak through endpoints, or
            `start_team` has no adapter.
    """

    def __init__(
        self,
        args: Any,
        model: ModelConfig,
        train_dataset: Dataset,
        test_dataset: Dataset | None = None,
        reward: Sequence[str] = ("execution_reward",),
        num_samples: int = 4,
        identity: Mapping[str, Any] | None = None,
        show: Callable[[Trainer], None] | None = None,
    ):
        self.args = args
        self.model = model
        self.train_dataset = train_dataset
        self.test_dataset = test_dataset
        self.reward = list(reward)
        self.num_samples = num_samples
        self.folder = Path(args.output_dir)
        self._agreed = dict(identity or {})
        self._show = show
        check_workflow(self.workflow)
        funcs = [named_reward(name) for name in self.reward]
        check_dataset("train_dataset", train_dataset, self.workflow, funcs, args.packages)

    def run(self) -> list[dict[str, float]]:
        """
        Runs all rounds.

        Returns:
            `list[dict[str, float]]`: Metrics of the team before the first round and after each; empty if nothing is measured.

        Raises:
            ValueError: If the folder is another run's, or the first round has fewer than `min_pairs` pairs.
        """
        on_main(self._check_folder)
        initial = self.policy(0)
        self._write(initial, lambda path: on_main(partial(self.start, path)), fresh=True)
        results = self._measure(0)
        for number in range(1, self.args.num_rounds + 1):
            pairs = self._pairs(number)
            if len(pairs) < self.args.min_pairs:
                why = (
                    f"Round {number} has {len(pairs)} pairs, fewer than min_pairs={self.args.min_pairs}. Raise num_candidates, "
                    "use more problems or a finer reward, or lower min_pairs."
                )
                if number == 1:
                    raise ValueError(why)
                if this_process().is_main_process:
                    warnings.warn(f"{why} The run ends with the team of round {number - 1}.", stacklevel=2)
                break
            this = Round(number, self._path(number), initial, self.policy(number - 1), pairs)
            for name, phase in (self.before_training() | {"policy": self.train}).items():
                self._write(this.folder / name, partial(phase, this))
            results += self._measure(number)
            self.last = number
        return results

    def policy(self, number: int) -> Path:
        """Folder of the team after a round."""
        return self._path(number) / "policy"

    def _path(self, number: int) -> Path:
        return self.folder / f"round_{number:02}"

    # Phases

    def before_training(self) -> dict[str, Callable[[Round, Path], None]]:
        """Phases between collection and training, by the name of what they write: each gets the round and the path to write."""
        return {}

    @abstractmethod
    def train(self, this: Round, path: Path) -> None:
        """Saves the trained team. The path may hold what a killed run left."""

    def start(self, path: Path) -> None:
        """Saves the team that the first round begins with. Called on one process."""
        if self.args.start_team is not None:
            folder = find_team(self.args.start_team)
            path.mkdir(parents=True)
            for name in root_files(folder):
                shutil.copy(folder / name, path / name)
            return
        with outside_zero3(self.args.deepspeed_plugin):
            save_untrained_team(
                path,
                str(self.model.model_name_or_path),
                TeamSettings.of(self.args),
                cast(LoraConfig, get_peft_config(self.model)),
                rewards=tuple(self.reward),
                init_core_scale=self.args.init_core_scale,
                seed=self.args.seed,
                model_init_kwargs=self.args.model_init_kwargs,
            )

    def collect(self, policy: Path, number: int) -> Dataset:
        """The pairs of a round, which the team saved in `policy` plays."""
        args = self.args
        with self._team(policy) as team:
            return collect_preferences(
                team,
                self.train_dataset,
                reward_funcs=self.reward,
                gamma_turn=args.gamma_turn,
                seed=args.seed * 1009 + number,
                **{f.name: getattr(args, f.name) for f in fields(PairSettings)},
            )

    def evaluate(self, policy: Path, path: Path) -> dict[str, float]:
        """Measures a saved team on the held-out problems, and writes the JSON file `path`. Continues what was interrupted."""
        assert self.test_dataset is not None
        with self._team(policy) as team:
            return evaluate_team(
                team, self.test_dataset, self.num_samples, output=path, overwrite_output=True, reward_funcs=self.reward
            )

    def fit(self, trainer: Trainer, **options: Any) -> None:
        """Trains, shows it, and writes all metrics to the trainer's folder."""
        trainer.add_callback(MetricsFile())
        if self._show is not None:
            self._show(trainer)
        trainer.train(**options)

    # Teams

    @cached_property
    def workflow(self) -> Workflow:
        """The workflow that the first team plays."""
        if self.args.start_team is None:
            return TeamSettings.of(self.args).make_workflow()
        folder = find_team(self.args.start_team)
        saved = TeamDescription.read(folder / TEAM_FILE)
        check_has_adapter(f"start_team={self.args.start_team!r}", saved)
        settings, _ = settings_with(folder, saved, {}, None, self.trust_remote_code)
        return settings.make_workflow()

    @property
    def trust_remote_code(self) -> bool:
        """Whether to run the file of the team's workflow: the user's own, unless it came with another team."""
        return self.args.start_team is None or self.args.trust_remote_code

    @contextmanager
    def _team(self, policy: Path) -> Iterator[Team]:
        """A saved team, loaded on every process as long as it plays."""
        args = self.args
        with outside_zero3(args.deepspeed_plugin):
            team = Team.from_pretrained(
                policy,
                quantization_config=get_quantization_config(self.model),
                model_init_kwargs=args.model_init_kwargs,
                trust_remote_code=self.trust_remote_code,
                num_workers=args.num_workers,
                execution_timeout=args.execution_timeout,
                execution_memory_mb=args.execution_memory_mb,
                isolation=args.isolation,
                packages=args.packages,
            )
        try:
            yield team
        finally:
            team.close()
            del team
            gc.collect()

    # The folder

    def _identity(self) -> dict[str, Any]:
        """Settings that a run that continues this one must share."""
        settings, model = self.args.to_dict(), asdict(self.model)
        team = {f.name for cls in (RoundsSettings, TeamSettings) for f in fields(cls)} - _CHANGEABLE
        file = self.workflow.source_file
        identity = {
            **{name: settings[name] for name in sorted((team | _TRAINING) & settings.keys())},
            **{name: model[name] for name in _MODEL},
            **self._agreed,
            "reward": self.reward,
            "workflow_sha256": None if file is None else hashlib.sha256(file.content).hexdigest(),
        }
        return json.loads(json.dumps(identity))

    def _check_folder(self) -> None:
        """Refuses the folder of another run."""
        file, ours = self.folder / ROUNDS_FILE, self._identity()
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, {"run": ours})
        theirs = read_json(file, "run")["run"]
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key):
                raise ValueError(
                    f"{str(self.folder)!r} holds rounds of another run: {key} is {theirs.get(key)!r}, but {ours.get(key)!r} in "
                    "this run. Set another output_dir."
                )

    @staticmethod
    def _write(path: Path, work: Callable[[Path], None], fresh: bool = False) -> None:
        """Lets `work` write what is not there yet. `fresh`: whether it cannot continue what a killed run left."""
        draft = path.with_name(f"{path.name}.partial")

        def prepare() -> bool:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh and draft.exists():
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
            return path.exists()

        if on_main(prepare):
            return
        work(draft)
        this_process().wait_for_everyone()
        on_main(lambda: draft.rename(path))

    def _pairs(self, number: int) -> Dataset:
        """The pairs of a round, which are collected if they are not there yet, with those that are replayed."""

        def collect(path: Path) -> None:
            pairs = self.collect(self.policy(number - 1), number)
            on_main(lambda: write_pairs(pairs, path))

        self._write(self._path(number) / "pairs.jsonl", collect, fresh=True)
        shards = [read_pairs(self._path(n) / "pairs.jsonl") for n in range(1, number + 1)]
        return replay(shards, self.args.replay_decay, self.args.replay_pairs, number)

    def _measure(self, number: int) -> list[dict[str, float]]:
        if not self.num_samples:
            return []
        path = self._path(number) / "evaluation.json"
        found = on_main(lambda: read_json(path, "figures")["figures"] if path.is_file() else None)
        return [found if found is not None else self.evaluate(self.policy(number), path)]


class MADPORounds(PreferenceRounds):
    """
    Rounds of MADPO. See [`MADPOTrainer`].

    Args:
        args, model, train_dataset, test_dataset, reward, num_samples, identity, show: See [`PreferenceRounds`].
    """

    def __init__(self, args: IterativeMADPOConfig, *inputs: Any, **options: Any):
        super().__init__(args, *inputs, **options)
        if args.reference == "round" and args.num_rounds > 1 and this_process().is_main_process:
            warnings.warn(
                f"reference='round' with num_rounds={args.num_rounds} holds the team back as little as one round with "
                f"beta={args.beta / args.num_rounds:.3g} would. Raise beta, or set reference='initial'.",
                stacklevel=2,
            )

    def train(self, this: Round, path: Path) -> None:
        trainer = MADPOTrainer(
            this.policy,
            this.initial if self.args.reference == "initial" else None,
            args=dataclasses.replace(self.args, output_dir=str(path), resume_from_checkpoint=None),
            train_dataset=this.pairs,
            quantization_config=get_quantization_config(self.model),
            trust_remote_code=self.trust_remote_code,
        )
        self.fit(trainer, resume_from_checkpoint=_begun(path))
        trainer.save_model()
        delete_checkpoints(path)


class MARLHFRounds(PreferenceRounds):
    """
    Rounds of MARLHF: a [`TeamRewardTrainer`] on the pairs of a round, then a [`MultiAgentGRPOTrainer`] on its rewards, with the true
    reward beside them.

    Args:
        args, model, train_dataset, test_dataset, reward, num_samples, identity, show: See [`PreferenceRounds`].

    Raises:
        ValueError: If `start_team` is another team than the settings say, or the given reward model has another tokenizer.
    """

    def __init__(self, args: IterativeMARLHFConfig, *inputs: Any, **options: Any):
        super().__init__(args, *inputs, **options)
        base_model = str(self.model.model_name_or_path)
        if args.start_team is not None:
            saved = TeamDescription.read(find_team(args.start_team) / TEAM_FILE)
            base_model, workflow = saved.base_model, TeamSettings.of(args).make_workflow()
            args.model_init_kwargs = of_revision(saved, cast(dict | None, args.model_init_kwargs))
            ours = type(workflow).__name__, workflow.num_turns, agents_of(workflow)
            if ours != (saved.workflow, saved.num_turns, saved.agents):
                raise ValueError(
                    f"start_team={args.start_team!r} has workflow={saved.workflow}, num_turns={saved.num_turns} and agents "
                    f"{saved.names}, but this run has {ours[0]}, {ours[1]} and {[agent.name for agent in workflow.agents]}, or "
                    "other roles. Set workflow, num_turns, num_agents and roles as in the training of that team."
                )
            sharing = saved.settings.get("parameter_sharing", "shared")
            if sharing != "shared":
                raise ValueError(
                    f"start_team={args.start_team!r} has parameter_sharing={sharing!r}, but MARLHF trains one adapter that all "
                    "agents share. Start from a team with parameter_sharing='shared'."
                )
        if args.reward_model is not None:
            with outside_zero3(args.deepspeed_plugin):
                reward_model = TeamRewardModel.from_pretrained(args.reward_model, device="cpu")
            reward_model.check_tokenizer(AutoTokenizer.from_pretrained(base_model))

    def before_training(self) -> dict[str, Callable[[Round, Path], None]]:
        return {"reward_model": self.train_reward_model} if self.args.reward_model is None else {}

    def train_reward_model(self, this: Round, path: Path) -> None:
        """Saves the reward model of a round, and what it is worth on pairs of held-out problems."""
        training, held_out = hold_out_problems(this.pairs, self.args.held_out_problems, self.args.seed)
        trainer = TeamRewardTrainer(
            TeamDescription.read(this.policy / TEAM_FILE).base_model,
            self._reward_config(path),
            training,
            held_out,
            processing_class=AutoTokenizer.from_pretrained(this.policy),
            quantization_config=get_quantization_config(self.model),
        )
        self.fit(trainer)
        trainer.save_model()
        metrics = trainer.evaluate()
        trainer.log_metrics(f"reward model of round {this.number}", metrics)
        trainer.save_metrics("eval", metrics, combined=False)

    def train(self, this: Round, path: Path) -> None:
        args = self.args
        with outside_zero3(args.deepspeed_plugin):  # every process scores with the whole model
            reward_model = TeamRewardModel.from_pretrained(args.reward_model or this.folder / "reward_model")
        if args.deepspeed_plugin is not None:
            # Accelerate keeps the plugin of the reward model's training and refuses another, until arguments are made
            self._reward_config(path)
            args.deepspeed_plugin.set_deepspeed_weakref()
        gold = [named_reward(name) for name in self.reward]
        of_round = copy.copy(args)  # not made anew: what it derived from its fields would be taken for given
        of_round.output_dir, of_round.resume_from_checkpoint = str(path), None
        of_round.reward_weights = [1.0] + [0.0] * len(gold)
        base = load_base_model(
            TeamDescription.read(this.policy / TEAM_FILE).base_model,
            get_quantization_config(self.model),
            args.model_init_kwargs or {},
            None,
        )
        trainer = MultiAgentGRPOTrainer(
            PeftModel.from_pretrained(base, str(this.policy), is_trainable=True),
            [reward_model, *gold],
            of_round,
            self.train_dataset,
            processing_class=load_tokenizer(this.policy),
        )
        if "ref" in trainer.model.peft_config:
            # TRL's reference is the team of this round; KL is to be measured from the first one's
            set_peft_model_state_dict(trainer.model, load_file(this.initial / ADAPTER_FILES[1]), adapter_name="ref")
        self.fit(trainer, resume_from_checkpoint=_begun(path))
        trainer.save_model()
        trainer.team.close()
        delete_checkpoints(path)

    def _reward_config(self, path: Path) -> TeamRewardConfig:
        """Configuration of a round's reward model: on the same devices and in the same types as the team."""
        args = self.args
        same = (
            "bf16", "fp16", "use_cpu", "seed", "report_to", "logging_steps", "gradient_checkpointing",
            "gradient_checkpointing_kwargs", "lr_scheduler_type", "disable_tqdm", "model_init_kwargs",
        )  # fmt: skip
        return TeamRewardConfig(
            str(path),
            per_device_train_batch_size=args.reward_batch_size,
            learning_rate=args.reward_learning_rate,
            num_train_epochs=args.reward_num_train_epochs,
            max_length=args.reward_max_length,
            save_strategy="no",
            **{name: getattr(args, name) for name in same},
        )


def _begun(path: Path) -> bool | None:
    """`True` if a training's folder has a whole checkpoint, from which it resumes, else `None`."""
    return True if on_main(lambda: last_whole_checkpoint(path) is not None) else None


# Replay


def replay(shards: Sequence[Dataset], decay: float, total: int | None = None, seed: int = 0) -> Dataset:
    """
    Draws pairs of several rounds, each at most once.

    Args:
        shards (`Sequence[Dataset]`): Pairs of the rounds so far, the oldest first.
        decay (`float`): λ in [0, 1]. Rounds are drawn with weights ∝ (1 − λ)^age. With 1, the result is the last shard.
        total (`int`, *optional*): Pairs to draw. Defaults to as many as the last shard has.
        seed (`int`, *optional*, defaults to `0`): Seed.

    Returns:
        `Dataset`: At most `total` pairs.
    """
    # A shard without pairs does not know the type of its prompts
    weights = {age: (1 - decay) ** age for age, shard in enumerate(reversed(shards)) if len(shard)}
    if decay == 1 or len(shards) == 1 or not weights:
        return shards[-1]
    shuffled = [shards[-1 - age].shuffle(seed=seed, keep_in_memory=True) for age in weights]
    shares = [weight / math.fsum(weights.values()) for weight in weights.values()]
    drawn = interleave_datasets(shuffled, shares, seed, stopping_strategy="all_exhausted_without_replacement")
    return drawn.select(range(min(len(drawn), len(shards[-1]) if total is None else total)))


# The team that a first round begins with


def save_untrained_team(
    path: str | Path,
    model: str,
    settings: TeamSettings | None = None,
    peft_config: LoraConfig | None = None,
    workflow: Workflow | str | None = None,
    rewards: tuple[str, ...] = ("execution_reward",),
    init_core_scale: float = SHPPOConfig.init_core_scale,
    seed: int = 0,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """
    Saves a team on an untrained model, with an adapter that changes nothing yet.

    [`Team.from_pretrained`] and [`MADPOTrainer`] load it. Call it on one process.

    Args:
        path (`str` or `Path`): Folder to write.
        model (`str`): Name or path of the base model.
        settings ([`TeamSettings`], *optional*): Workflow, generation, and what agents share. The default workflow is `"single"`.
        peft_config ([`~peft.LoraConfig`], *optional*): Defaults to LoRA of rank 16 on all linear layers.
        workflow ([`Workflow`] or `str`, *optional*): The team's workflow, if it is not a built-in one.
        rewards (`tuple[str, ...]`, *optional*, defaults to `("execution_reward",)`): Names of the team's rewards.
        init_core_scale (`float`, *optional*, defaults to `1.5`): As in [`SHPPOConfig`].
        seed (`int`, *optional*, defaults to `0`): Seed of the adapter and of the team's networks.
        model_init_kwargs (`Mapping`, *optional*): Keyword arguments for the base model's `from_pretrained`.

    Raises:
        ValueError: If the settings do not fit the workflow, or the adapter does not support `settings.parameter_sharing`.
    """
    path, settings = Path(path), settings or TeamSettings()
    played = settings.make_workflow(workflow)
    config = peft_config or LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    check_start(config)
    config = dataclasses.replace(config, revision=(model_init_kwargs or {}).get("revision"))
    sharing = settings.parameter_sharing
    if sharing != "shared":
        check_peft_config(config)
    base = load_base_model(model, None, model_init_kwargs or {}, "cpu")
    if config.target_modules == "all-linear":
        config = dataclasses.replace(config, target_modules=resolve_all_linear(base, experts=sharing == "shared"))
    if sharing == "separate":
        config = stack_config(config, len(played.agents))
    described: dict[str, Any] = {"parameter_sharing": sharing}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: PeftModel = get_peft_model(base, config)
        if settings.has_latents:
            described |= {"latent_scope": settings.latent_scope, "latent_size": settings.latent_size}
            scale = init_core_scale * (config.init_lora_weights in (True, "gaussian"))
            modules = make_modules(adapted, settings, [agent.name for agent in played.agents], scale)
            path.mkdir(parents=True, exist_ok=True)
            save_file(modules.state_dict(), path / MODULES_FILE, metadata={"format": "pt"})
    adapted.save_pretrained(str(path))
    load_tokenizer(model).save_pretrained(path)
    TeamDescription.of("", adapted, played, rewards, settings, described).write(path)
