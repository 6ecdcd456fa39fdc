"""Trainers and their configurations."""

from marcog_trl.trainers.config import MultiAgentConfig, MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig
from marcog_trl.trainers.multi_agent_grpo_trainer import MultiAgentGRPOTrainer
from marcog_trl.trainers.multi_agent_ppo_trainer import MultiAgentPPOTrainer
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.shppo_trainer import SHPPOTrainer


__all__ = [
    "MultiAgentConfig",
    "MultiAgentGRPOConfig",
    "MultiAgentGRPOTrainer",
    "MultiAgentPPOConfig",
    "MultiAgentPPOTrainer",
    "MultiAgentTrainer",
    "SHPPOConfig",
    "SHPPOTrainer",
]
