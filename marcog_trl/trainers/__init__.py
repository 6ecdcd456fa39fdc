"""Trainers and their configurations."""

from marcog_trl.trainers.algorithm import Algorithm, Credit
from marcog_trl.trainers.config import MultiAgentConfig, MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig
from marcog_trl.trainers.grpo import GroupRelative, MultiAgentGRPOTrainer
from marcog_trl.trainers.ppo import PPO, MultiAgentPPOTrainer
from marcog_trl.trainers.shppo import SHPPO, SHPPOTrainer
from marcog_trl.trainers.trainer import MultiAgentTrainer


__all__ = [
    "PPO",
    "SHPPO",
    "Algorithm",
    "Credit",
    "GroupRelative",
    "MultiAgentConfig",
    "MultiAgentGRPOConfig",
    "MultiAgentGRPOTrainer",
    "MultiAgentPPOConfig",
    "MultiAgentPPOTrainer",
    "MultiAgentTrainer",
    "SHPPOConfig",
    "SHPPOTrainer",
]
