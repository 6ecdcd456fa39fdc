"""Reinforcement learning of teams of LLM agents, as a plugin of Hugging Face TRL."""

# ruff: noqa: F401 -- names for type checkers

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from marcog_trl.agents import Agent, Consult, Execute, Slot, Workflow
    from marcog_trl.endpoints import Endpoint
    from marcog_trl.evaluation.evaluate import evaluate_team
    from marcog_trl.execution import python_tool
    from marcog_trl.preferences import (
        IterativeMADPOConfig,
        IterativeMARLHFConfig,
        MADPOConfig,
        MADPORounds,
        MADPOTrainer,
        MARLHFRounds,
        PreferenceRounds,
        Round,
        TeamRewardConfig,
        TeamRewardModel,
        TeamRewardTrainer,
        collect_preferences,
        hold_out_problems,
        save_untrained_team,
    )
    from marcog_trl.problems import load_problems
    from marcog_trl.report.console import ConsoleCallback
    from marcog_trl.report.metrics_file import MetricsFile
    from marcog_trl.rewards import (
        class_reward,
        collaboration_reward,
        coverage_reward,
        delta_reward,
        divided_work_reward,
        execution_reward,
        graded_reward,
        make_reward,
        program_reward,
    )
    from marcog_trl.team.settings import TeamSettings
    from marcog_trl.team.team import Team
    from marcog_trl.trainers import (
        MultiAgentConfig,
        MultiAgentGRPOConfig,
        MultiAgentGRPOTrainer,
        MultiAgentPPOConfig,
        MultiAgentPPOTrainer,
        MultiAgentTrainer,
        SHPPOConfig,
        SHPPOTrainer,
    )
    from marcog_trl.workflows import (
        Centralized,
        ClassTeam,
        Collaboration,
        Coverage,
        Discussion,
        Module,
        Pipeline,
        Program,
        Single,
        make_workflow,
    )

# Imported when first used: the execution workers and the workflows need neither torch nor trl
_MODULES = {
    "marcog_trl.agents": ("Agent", "Consult", "Execute", "Slot", "Workflow"),
    "marcog_trl.endpoints": ("Endpoint",),
    "marcog_trl.preferences": (
        "IterativeMADPOConfig", "IterativeMARLHFConfig", "MADPOConfig", "MADPORounds", "MADPOTrainer", "MARLHFRounds",
        "PreferenceRounds", "Round", "TeamRewardConfig", "TeamRewardModel", "TeamRewardTrainer",
        "collect_preferences", "hold_out_problems", "save_untrained_team",
    ),
    "marcog_trl.problems": ("load_problems",),
    "marcog_trl.rewards": (
        "class_reward", "collaboration_reward", "coverage_reward", "delta_reward", "divided_work_reward",
        "execution_reward", "graded_reward", "make_reward", "program_reward",
    ),
    "marcog_trl.report.console": ("ConsoleCallback",),
    "marcog_trl.report.metrics_file": ("MetricsFile",),
    "marcog_trl.trainers": (
        "MultiAgentConfig", "MultiAgentGRPOConfig", "MultiAgentGRPOTrainer", "MultiAgentPPOConfig",
        "MultiAgentPPOTrainer", "MultiAgentTrainer", "SHPPOConfig", "SHPPOTrainer",
    ),
    "marcog_trl.evaluation.evaluate": ("evaluate_team",),
    "marcog_trl.execution": ("python_tool",),
    "marcog_trl.team.settings": ("TeamSettings",),
    "marcog_trl.team.team": ("Team",),
    "marcog_trl.workflows": (
        "Centralized", "ClassTeam", "Collaboration", "Coverage", "Discussion", "Module", "Pipeline", "Program",
        "Single", "make_workflow",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
