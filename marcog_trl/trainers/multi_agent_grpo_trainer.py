"""Group-relative policy optimisation for teams: MAGRPO, MARLOO, MAReMax and MAREINFORCE."""

from __future__ import annotations

import torch

from marcog_trl.advantages import group_advantages
from marcog_trl.trainers.multi_agent_grpo_config import MultiAgentGRPOConfig
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer, Rollout


class MultiAgentGRPOTrainer(MultiAgentTrainer):
    """
    GRPO for a team of LLM agents that share one model and one adapter.

    What is new over [`~trl.GRPOTrainer`]: episodes of a workflow in place of completions, returns over turns, one baseline
    per slot, four kinds of it (`args.advantage`), and loss weights by agent and turn. With the `single` workflow,
    `advantage="mean"` and `scale_rewards="group"` it is GRPO itself; with `scale_rewards="none"` and
    `loss_type="dr_grpo"` it is Dr. GRPO. There is no critic.

    Example:

    ```python
    >>> from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, load_problems

    >>> trainer = MultiAgentGRPOTrainer(
    ...     model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ...     reward_funcs="collaboration_reward",
    ...     args=MultiAgentGRPOConfig("team", workflow="collaboration", advantage="rloo"),
    ...     train_dataset=load_problems("humaneval"),
    ... )
    >>> trainer.train()
    ```

    Args: see [`MultiAgentTrainer`].

    Source: MAGRPO (https://huggingface.co/papers/2508.04652), GRPO (https://huggingface.co/papers/2402.03300), RLOO
    (https://huggingface.co/papers/2402.14740) and ReMax (https://huggingface.co/papers/2310.10505).
    """

    _tag_names = ["trl", "marcog-trl", "magrpo"]
    _name = "MAGRPO"
    _paper = {
        "title": "LLM Collaboration With Multi-Agent Reinforcement Learning",
        "id": "2508.04652",
        # docstyle-ignore
        "citation": """\
@article{liu2025llm,
    title        = {{LLM Collaboration With Multi-Agent Reinforcement Learning}},
    author       = {Shuo Liu and Zeyu Liang and Xueguang Lyu and Christopher Amato},
    year         = 2025,
    eprint       = {arXiv:2508.04652},
}""",
    }
    _config_class = MultiAgentGRPOConfig
    args: MultiAgentGRPOConfig

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.scale_rewards == "agent":
            self.scale_rewards = "none"  # TRL knows no such scale, and its advantages are replaced

    def _group_advantages(self, rollout: Rollout) -> torch.Tensor:
        return group_advantages(
            self._row_returns(rollout),
            self._group_size,
            kind=self.args.advantage,
            mask=rollout.live,
            scale=self.args.scale_rewards,
            agents=rollout.agent,
            sums=self._sum_over_processes,
        )
