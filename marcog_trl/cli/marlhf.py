"""Trains a team with MARLHF from a command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from peft import PeftModel, set_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import get_quantization_config

from marcog_trl.cli.endings import Kept
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.cli.rounds import RoundsRun, train_in_rounds
from marcog_trl.files import write_json
from marcog_trl.preferences.marlhf_config import IterativeMARLHFConfig
from marcog_trl.preferences.reward_config import TeamRewardConfig
from marcog_trl.preferences.reward_model import TeamRewardModel
from marcog_trl.preferences.reward_report import report_rows, reward_model_report
from marcog_trl.preferences.reward_trainer import TeamRewardTrainer, hold_out_problems
from marcog_trl.preferences.rounds import Phase, Round
from marcog_trl.processes import on_main, this_process
from marcog_trl.team.description import ADAPTER_FILES, TEAM_FILE, TeamDescription, agents_of
from marcog_trl.team.loading import check_has_adapter, find_team, load_base_model
from marcog_trl.team.settings import TeamSettings
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.trainers.checkpointing import delete_checkpoints, last_whole_checkpoint
from marcog_trl.trainers.grpo import MultiAgentGRPOTrainer
from marcog_trl.trainers.reward_functions import named_reward


REPORT_FILE = "report.json"


def train(recipe: TrainingRecipe, argv: Sequence[str] | None = None, kept: Kept | None = None) -> None:
    """Runs rounds of MARLHF. See [`train_in_rounds`]."""
    train_in_rounds(recipe, argv, kept, marlhf_phases)


def marlhf_phases(run: RoundsRun) -> tuple[Phase, Mapping[str, Phase]]:
    """The phases that train a reward model, and a team with it."""
    args = run.args
    base_model = str(run.model.model_name_or_path)
    if args.start_team is not None:
        saved = TeamDescription.read(find_team(args.start_team) / TEAM_FILE)
        check_has_adapter(f"start_team={args.start_team!r}", saved)
        base_model, workflow = saved.base_model, TeamSettings.of(args).make_workflow()
        ours = type(workflow).__name__, workflow.num_turns, agents_of(workflow)
        if ours != (saved.workflow, saved.num_turns, saved.agents):
            raise ValueError(
                f"start_team={args.start_team!r} has workflow={saved.workflow}, num_turns={saved.num_turns} and agents "
                f"{saved.names}, but this run has {ours[0]}, {ours[1]} and {[agent.name for agent in workflow.agents]}, or other "
                "roles. Set workflow, num_turns, num_agents and roles as in the training of that team."
            )
        sharing = saved.settings.get("parameter_sharing", "shared")
        if sharing != "shared":
            raise ValueError(
                f"start_team={args.start_team!r} has parameter_sharing={sharing!r}, but MARLHF trains one adapter that all agents "
                "share. Start from a team with parameter_sharing='shared'."
            )
    if args.reward_model is not None:
        with outside_zero3(args.deepspeed_plugin):
            model = TeamRewardModel.from_pretrained(args.reward_model, device="cpu")
        model.check_tokenizer(AutoTokenizer.from_pretrained(base_model))

    def train_reward_model(this: Round, path: Path) -> None:
        base = TeamDescription.read(this.policy / TEAM_FILE).base_model
        training, held_out = hold_out_problems(this.pairs, args.held_out_problems, args.seed)
        trainer = TeamRewardTrainer(
            base,
            _reward_config(args, path),
            training,
            processing_class=AutoTokenizer.from_pretrained(this.policy),
            quantization_config=get_quantization_config(run.model),
        )
        run.fit(trainer)
        trainer.save_model()
        report = reward_model_report(trainer.reward_model(), held_out)
        if this_process().is_main_process:
            write_json(path / REPORT_FILE, report)
            table = Table("", "", "95 %", title=f"Reward model of round {this.number}")
            for row in report_rows(report):
                table.add_row(*row)
            Console().print(table)

    def train_round(this: Round, path: Path) -> None:
        with outside_zero3(args.deepspeed_plugin):  # every process scores with the whole model
            reward_model = TeamRewardModel.from_pretrained(args.reward_model or this.folder / "reward_model")
        if args.deepspeed_plugin is not None:
            # Accelerate keeps the plugin of the reward model's training and refuses another, until arguments are made
            _reward_config(args, path)
            args.deepspeed_plugin.set_deepspeed_weakref()
        gold = [named_reward(name) for name in run.script.reward]
        of_round = copy.copy(args)  # not made anew: what it derived from its fields would be taken for given
        of_round.output_dir, of_round.resume_from_checkpoint = str(path), None
        of_round.reward_weights = [1.0] + [0.0] * len(gold)
        base = load_base_model(
            TeamDescription.read(this.policy / TEAM_FILE).base_model,
            get_quantization_config(run.model),
            args.model_init_kwargs or {},
            None,
        )
        trainer = MultiAgentGRPOTrainer(
            PeftModel.from_pretrained(base, str(this.policy), is_trainable=True),
            [reward_model, *gold],
            of_round,
            run.train_dataset,
            processing_class=AutoTokenizer.from_pretrained(this.policy, padding_side="left"),
        )
        if "ref" in trainer.model.peft_config:
            # TRL's reference is the team of this round; KL is to be measured from the first one's
            set_peft_model_state_dict(trainer.model, load_file(this.initial / ADAPTER_FILES[1]), adapter_name="ref")
        begun = on_main(lambda: last_whole_checkpoint(path) is not None)
        run.fit(trainer, resume_from_checkpoint=True if begun else None)
        trainer.save_model()
        trainer.team.close()
        delete_checkpoints(path)

    return train_round, {} if args.reward_model is not None else {"reward_model": train_reward_model}


def _reward_config(args: IterativeMARLHFConfig, path: Path) -> TeamRewardConfig:
    """Configuration of a round's reward model: on the same devices and in the same types as the team."""
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
