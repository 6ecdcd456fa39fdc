"""
Trains a team with multi-agent PPO.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_ppo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_ppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from endings import Kept, interrupts, one_line
from trl import get_peft_config, get_quantization_config

from marcog_trl import MultiAgentPPOConfig, MultiAgentPPOTrainer, evaluate_team
from marcog_trl.cli.launch import Recipe, check_run, parse, resume_choice, set_max_steps
from marcog_trl.report.results import plot_curves, print_table, write_results
from marcog_trl.team.hub import PushError
from marcog_trl.trainers.checkpoints import (
    CheckpointError,
    check_checkpoint,
    delete_checkpoints,
    full_disk_explained,
    last_whole_checkpoint,
    only_run_in,
    start_from,
)


DEFAULT_CONFIG = Path(__file__).parent / "configs" / "builtin.yaml"
TEAM = {"workflow": "collaboration"}


def train(trainer_class, config_class, reward_funcs=None, argv=None, recipe=None):
    kept = Kept()
    with interrupts(kept), ExitStack() as stack:
        name = ""
        started = time.perf_counter()
        try:
            recipe = recipe or Recipe(defaults=TEAM)
            recipe = replace(recipe, defaults={"write_report": True, **recipe.defaults})
            script_args, training_args, model_args = parse(config_class, DEFAULT_CONFIG, argv, recipe)
            set_max_steps(training_args, script_args.num_steps)
            train_dataset, test_dataset = script_args.load_splits()
            stack.enter_context(only_run_in(training_args.output_dir))
            resume = resume_choice(training_args.resume_from_checkpoint)
            checkpoint = start_from(training_args, resume, script_args.overwrite_output_dir)
            check_run(script_args, training_args, model_args)
            name = model_args.model_name_or_path
            trainer = trainer_class(
                model=name,
                reward_funcs=reward_funcs or script_args.reward,
                args=training_args,
                train_dataset=train_dataset,
                eval_dataset=script_args.eval_split(test_dataset) if training_args.eval_strategy != "no" else None,
                quantization_config=get_quantization_config(model_args),
                peft_config=get_peft_config(model_args),
            )
            trainer.get_optimizer_cls_and_kwargs(training_args, trainer.model)  # which may need a package
            if checkpoint is not None:
                check_checkpoint(trainer, checkpoint)
            trainer.accelerator.print(f"Code execution: {trainer.executor.isolation}")
        except (ValueError, ImportError, PushError) as error:  # ImportError: what a way of loading the model takes
            sys.exit(f"error: {' '.join(str(error).split())}")
        except OSError as error:  # a model that is not there, or no folder for the embedded one
            sys.exit(f"error: {name and f'while loading {name!r}: '}{' '.join(str(error).split())}")
        with one_line(CheckpointError, PushError):
            run(trainer, script_args, test_dataset, checkpoint, started, kept)


def run(trainer, script_args, test_dataset, checkpoint, started, kept):
    """Evaluates the untrained team, trains it, saves it, evaluates it, and pushes it."""
    accelerator, args = trainer.accelerator, trainer.args
    output_dir = Path(args.output_dir)
    results = {}
    if script_args.num_samples:
        accelerator.print(f"Evaluating the untrained team on {len(test_dataset)} held-out problems ...")
        results["untrained"] = evaluate_team(trainer, test_dataset, script_args.num_samples, sampling="stream")
    if script_args.overwrite_output_dir:
        delete_checkpoints(output_dir)
    kept.now = lambda: kept_by_training(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    if script_args.save_final_model:
        trainer.save_model(args.output_dir, _internal_call=True)  # which does not push: that comes last
        kept.now = lambda: (
            f"The trained team is in {output_dir}. Measure it with: python recipes/evaluate.py --adapter {output_dir}"
        )
    if script_args.num_samples:
        accelerator.print("Evaluating the trained team ...")
        results["trained"] = evaluate_team(trainer, test_dataset, script_args.num_samples, sampling="stream")
    if accelerator.is_main_process:
        adapter = str(output_dir) if script_args.save_final_model else "not saved (save_final_model=false)"
        results |= {"seconds": time.perf_counter() - started, "adapter": adapter}
        with full_disk_explained(output_dir, output_dir):
            write_results(output_dir / "results.json", results)
            if script_args.num_samples:
                print_table(results, f"{len(test_dataset)} held-out problems, {script_args.num_samples} samples each")
            if script_args.save_final_model:
                trainer.create_model_card(output_dir.name, script_args.dataset_name)  # with the results
            if trainer.report is not None:
                trainer.report.write(results)
                print(f"Report: {output_dir / 'report.html'}")
            drawn = plot_curves(trainer.state.log_history, trainer.agents, output_dir / "curves.png")
        curves = output_dir / "curves.png" if drawn else "none, for no step was logged; --logging_steps 1 logs all"
        print(f"Adapter: {adapter}\nCurves: {curves}\nFigures: {output_dir / 'results.json'}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def kept_by_training(trainer):
    """What a run that was interrupted while it trained has left, and how to go on."""
    step = f"Training was at step {trainer.state.global_step} of {trainer.state.max_steps}."
    checkpoint = last_whole_checkpoint(trainer.args.output_dir)
    if checkpoint is None:
        return f"{step} No checkpoint was kept: --save_strategy steps --save_steps 10 keeps one every 10 steps."
    return f"{step} {checkpoint} was kept: the same command with --resume_from_checkpoint true continues from it."


def train_actor_critic(critic, sections):
    """MultiAgentPPO with the settings that make it an actor-critic: one update per rollout, and `return − V`."""
    fixed = {"critic": critic, "gamma": 1, "lam": 1, "lam_turn": 0, "num_iterations": 1}
    recipe = Recipe(sections, defaults=TEAM, fixed=fixed, elsewhere="train_ppo.py")
    train(MultiAgentPPOTrainer, MultiAgentPPOConfig, recipe=recipe)


if __name__ == "__main__":
    train(MultiAgentPPOTrainer, MultiAgentPPOConfig, recipe=Recipe(("ppo",), defaults=TEAM))
