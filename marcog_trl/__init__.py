"""Reinforcement learning of teams of LLM agents, as a plugin of Hugging Face TRL."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from marcog_trl.agents import Agent, Collaboration, Execute, Pipeline, Single, Slot, Workflow, make_workflow
    from marcog_trl.problems import load_problems
    from marcog_trl.rewards import collaboration_reward, execution_reward
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

# Imported when first used: the execution workers and the workflows need neither torch nor trl
_MODULES = {
    "marcog_trl.agents": (
        "Agent", "Collaboration", "Execute", "Pipeline", "Single", "Slot", "Workflow", "make_workflow",
    ),
    "marcog_trl.problems": ("load_problems",),
    "marcog_trl.rewards": ("collaboration_reward", "execution_reward"),
    "marcog_trl.trainers": (
        "MultiAgentConfig", "MultiAgentGRPOConfig", "MultiAgentGRPOTrainer", "MultiAgentPPOConfig",
        "MultiAgentPPOTrainer", "MultiAgentTrainer", "SHPPOConfig", "SHPPOTrainer",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Agent",
    "Collaboration",
    "Execute",
    "MultiAgentConfig",
    "MultiAgentGRPOConfig",
    "MultiAgentGRPOTrainer",
    "MultiAgentPPOConfig",
    "MultiAgentPPOTrainer",
    "MultiAgentTrainer",
    "Pipeline",
    "SHPPOConfig",
    "SHPPOTrainer",
    "Single",
    "Slot",
    "Workflow",
    "collaboration_reward",
    "execution_reward",
    "load_problems",
    "make_workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
