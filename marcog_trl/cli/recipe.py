"""
The training recipes: which trainer each runs, with which settings. `marcog-trl train RECIPE` runs them.

This module imports no library: they take seconds, in which Ctrl-C already ends with one line.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marcog_trl.checks import instead_of
from marcog_trl.cli.console import RunStatus, begin, one_line


CONFIGS = Path(__file__).parent / "configs"
"""The configurations that the package brings, which `--config` takes by name."""


@dataclass(frozen=True)
class TrainingRecipe:
    """
    A trainer and its settings.

    Args:
        name (`str`): What the command line calls it.
        trainer (`str`): Name of the trainer, such as `"SHPPOTrainer"`. Its configuration is `"SHPPOConfig"`, unless
            `config_name` is given.
        about (`str`): What the recipe does, for `--help`.
        sections (`tuple[str, ...]`): Sections of algorithms that the recipe reads in CoMLRL's files.
        default_config (`str`, *optional*, defaults to `"builtin"`): The configuration that applies where the command line names
            neither a file nor a model.
        defaults (`dict`, *optional*): Settings that apply where nothing else is given.
        fixed (`dict`, *optional*): Settings that define the recipe. They replace those of a file; on the command line, other
            values are refused.
        elsewhere (`str`, *optional*): The recipe that accepts other values of the fixed settings.
        module (`str`, *optional*, defaults to `"train"`): Module of `marcog_trl.cli` whose `train` runs the recipe.
        config_name (`str`, *optional*): Name of the configuration.
    """

    name: str
    trainer: str
    about: str
    sections: tuple[str, ...]
    default_config: str | None = "builtin"
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"workflow": "collaboration"})
    fixed: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: str = ""
    module: str = "train"
    config_name: str = ""

    @property
    def config(self) -> str:
        """Name of the trainer's configuration."""
        return self.config_name or self.trainer.removesuffix("Trainer") + "Config"


_PPO = TrainingRecipe("ppo", "MultiAgentPPOTrainer", "multi-agent PPO", ("ppo",))
_ACTOR_CRITIC = {"gamma": 1, "lam": 1, "lam_turn": 0, "num_iterations": 1}
_RECIPES = (
    TrainingRecipe("shppo", "SHPPOTrainer", "SHPPO: agents on one adapter, told apart by latents", ("shppo", "ppo")),
    _PPO,
    TrainingRecipe(
        "magrpo",
        "MultiAgentGRPOTrainer",
        "MAGRPO; with --advantage rloo, max or none: MARLOO, MAReMax or MAREINFORCE",
        ("magrpo", "marloo", "maremax", "mareinforce"),
    ),
    TrainingRecipe(
        "grpo",
        "MultiAgentGRPOTrainer",
        "GRPO of one agent, the baseline of teams",
        ("grpo",),
        defaults={"scale_rewards": "group"},
        fixed={"workflow": "single", "advantage": "mean"},
        elsewhere="magrpo",
    ),
    replace(
        _PPO,
        name="iac",
        about="independent actor-critic: PPO in one step, with a critic that sees the agent's own row",
        sections=("iac", "ac", "ippo"),
        fixed={"critic": "agent", **_ACTOR_CRITIC},
        elsewhere="ppo",
    ),
    replace(
        _PPO,
        name="maac",
        about="multi-agent actor-critic: the same, with a critic that also sees what the others were asked",
        sections=("maac", "mappo"),
        fixed={"critic": "team", **_ACTOR_CRITIC},
        elsewhere="ppo",
    ),
    TrainingRecipe(
        "madpo",
        "MADPOTrainer",
        "MADPO, on preferences between the team's own episodes, in rounds",
        ("madpo", "madpo_iter"),
        default_config="builtin-madpo",
        module="rounds",
        config_name="IterativeMADPOConfig",
    ),
    TrainingRecipe(
        "marlhf",
        "MultiAgentGRPOTrainer",
        "MARLHF, with a reward model that is learned from such preferences, in rounds",
        ("marlhf", "marlhf_iter"),
        default_config="builtin-marlhf",
        defaults={"workflow": "collaboration", "write_report": True},
        module="rounds",
        config_name="IterativeMARLHFConfig",
    ),
)
RECIPES = {recipe.name: recipe for recipe in _RECIPES}
"""Name → recipe."""

_HELP = """usage: marcog-trl train RECIPE [flags]

{recipes}

Without a model, a recipe trains the embedded one on the built-in problems. --config takes a file, or one of these:

  {configs}

`marcog-trl train RECIPE --help` shows the flags. On several GPUs: accelerate launch -m marcog_trl train RECIPE [flags]."""


def main(argv: Sequence[str], status: RunStatus) -> int:
    """
    Runs `marcog-trl train`.

    Args:
        argv (`list[str]`): The name of a recipe, and its flags.
        status ([`RunStatus`]): Told what an interruption leaves behind.

    Returns:
        `int`: The exit status, 0.

    Raises:
        SystemExit: With one line, if anything in the command line, the data, the model or the output folder is wrong.
    """
    name, *flags = argv or ["--help"]
    if name in ("--help", "-h"):
        recipes = "\n".join(f"  {name:10}{recipe.about}" for name, recipe in RECIPES.items())
        print(_HELP.format(recipes=recipes, configs="\n  ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))))
        return 0
    with one_line(ValueError):
        if name not in RECIPES:
            raise ValueError(f"unknown recipe {name}. {instead_of(name, RECIPES)}")
    begin("Loading PyTorch and TRL")
    importlib.import_module(f"marcog_trl.cli.{RECIPES[name].module}").train(RECIPES[name], flags, status)
    return 0


def config_file(name: str) -> Path:
    """
    Finds the file of `--config`.

    Args:
        name (`str`): A file, or the name of a configuration of the package, such as `"qwen2.5-coder-1.5b"`.

    Returns:
        `Path`: The file, which may be missing.

    Raises:
        ValueError: If the name is neither.
    """
    own = {path.stem: path for path in CONFIGS.glob("*.yaml")}
    if Path(name).exists() or "/" in name or (name not in own and name.endswith((".yaml", ".yml"))):
        return Path(name)
    if name not in own:
        raise ValueError(f"--config {name} is neither a file nor a configuration. {instead_of(name, sorted(own))}")
    return own[name]
