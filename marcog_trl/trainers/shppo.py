"""Shared-parameter heterogeneous PPO: agents share one adapter, and latents make them differ."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig
from torch import nn

from marcog_trl.agents import Workflow
from marcog_trl.heterogeneity.cores import LoraCores, adapted_layers, check_peft_config
from marcog_trl.heterogeneity.fold import fold_adapters, save_adapters, split_adapter, stack_config
from marcog_trl.heterogeneity.losses import behaviour_distance, latent_distance_range, latent_diversity, latent_entropy
from marcog_trl.heterogeneity.networks import CoreDecoder, InferenceNet, LatentNet
from marcog_trl.processes import gather_rows, sum_over_processes, this_process
from marcog_trl.rollout.records import Row
from marcog_trl.team.modules import ForwardContext, LatentTargets, TeamModule
from marcog_trl.team.vllm import check_served_adapter
from marcog_trl.trainers.adapter_targets import adapter_config
from marcog_trl.trainers.algorithm import Credit, Mean, loss_mask
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.config import SHPPOConfig
from marcog_trl.trainers.data import tree_of_process
from marcog_trl.trainers.ppo import PPO, MultiAgentPPOTrainer


LATENT, INFERENCE = "latent", "inference"
ROWS_PER_COMPARED_ROW = 8


class SHPPO(PPO):
    """
    [`PPO`] with a latent per row, sampled from what its agent observes. In every LoRA layer, a core decoded from the latent acts
    between A and B. With `parameter_sharing="separate"`, each agent has ranks of its own in place of latents.

    Args:
        args ([`SHPPOConfig`]): Configuration.
        workflow ([`Workflow`]): The team's workflow.

    Source: Guo et al., Heterogeneous Multi-Agent Reinforcement Learning for Zero-Shot Scalable Collaboration
    (https://huggingface.co/papers/2404.03869).
    """

    args: SHPPOConfig

    def __init__(self, args: SHPPOConfig, workflow: Workflow):
        super().__init__(args, workflow)
        self._adapter_starts_at_zero = True
        self._generator = torch.Generator()
        self._noise_key = -1, 0  # optimizer steps so far, and rollouts since the last one
        self._process = 0
        self._agent_noise: torch.Tensor | None = None
        self._served_noise: torch.Tensor | None = None  # of the latents in vLLM's engine

    @property
    def has_latents(self) -> bool:
        """Whether agents have latents."""
        return self.args.parameter_sharing == "latent"

    @property
    def _is_separate(self) -> bool:
        return self.args.parameter_sharing == "separate"

    # The team

    def adapter_config(self, model: Any, peft_config: PeftConfig | None) -> PeftConfig | None:
        shared = self.args.parameter_sharing == "shared"
        if not shared and peft_config is not None:
            check_peft_config(peft_config)
            if self.serves_agents:
                check_served_adapter(cast(LoraConfig, peft_config))
        config = adapter_config(model, peft_config, self.args, experts=shared)
        if shared:
            return config
        # If B starts at 0, cores have no effect before the first update
        initial = config.init_lora_weights if isinstance(config, LoraConfig) else None
        self._adapter_starts_at_zero = initial in (True, "gaussian")
        if config is None and self._is_separate:
            raise ValueError(
                "parameter_sharing='separate' makes its own adapter, but model already has one. Pass the base model, and the "
                "settings of the adapter as peft_config."
            )
        adapter = cast(LoraConfig, model.peft_config["default"] if config is None else config)
        if config is None:
            adapted_layers(model)
            if self.serves_agents:
                check_served_adapter(adapter)
        return stack_config(adapter, len(self.agents)) if self._is_separate else config

    def make_modules(self, model: Any) -> TeamModule:
        if self.args.parameter_sharing == "shared":
            return super().make_modules(model)
        cores, value_head = LoraCores(model), self._make_value_head(model)
        networks: dict[str, Any] = {}
        if self.has_latents:
            size = self.args.latent_size
            scale = self.args.init_core_scale * self._adapter_starts_at_zero
            networks = {
                "core_decoder": CoreDecoder(size, cores.ranks, scale),
                "latent_net": LatentNet(2 * self._hidden_size, size),
                "inference_net": InferenceNet(2 * self._hidden_size, size),
            }
        return TeamModule(value_head, self.args.critic_backprop, cores, agents=self.agents, **networks)

    def parameter_groups(self) -> dict[str, tuple[nn.Module, float | None]]:
        groups = super().parameter_groups()
        if self.has_latents:
            groups[LATENT] = self._modules.latent_net, self.args.latent_learning_rate
            groups[INFERENCE] = self._modules.inference_net, self.args.inference_learning_rate
        return groups

    @property
    def _modules(self) -> Any:
        return self.modules

    def describe(self) -> dict[str, Any]:
        found = {**super().describe(), "parameter_sharing": self.args.parameter_sharing}
        if self.has_latents:
            found |= {"latent_scope": self.args.latent_scope, "latent_size": self.args.latent_size}
        if self.has_latents or self._is_separate:
            adapter = "is the part that all agents share, without their latents"
            if self._is_separate:
                adapter = "contains the adapters of all agents"
            found["note"] = (
                f"The adapter in this folder {adapter}. It is not an agent. trainer.export_agents and recipes/export.py write "
                "each agent as an ordinary PEFT adapter to agents/<name>. marcog_trl.Team loads the whole team."
            )
        return found

    def save_agents(self, model: Any, paths: list[Path | None], is_main_process: bool) -> None:
        if self._is_separate:  # runs resume from the stacked adapter
            save_adapters(model, split_adapter(model, len(paths), "auto"), paths, is_main_process)

    # Latents: sampled before a stage is generated, and stored in its rows

    def begin_rollout(self, step: int, training: bool, process: int) -> dict[str, Any]:
        options = super().begin_rollout(step, training, process)
        if not self.has_latents:
            return options
        self._seed_noise(step, training, process)
        return {**options, "noise": self._noise_of if training else None}

    def _seed_noise(self, step: int, training: bool, process: int) -> None:
        """
        Seeds the noise from the number of the generation batch, so that a resumed run draws the same noise without a saved
        state. All processes draw the same noise for an agent, and that of a row does not depend on who plays it.
        """
        self._process = process
        if training:
            before, rollouts = self._noise_key
            self._noise_key = step, rollouts + 1 if step == before else 0
        if self.args.latent_scope == "agent":
            batch = (self.args.seed * 1_000_003 + self._noise_key[0]) * 1_009 + self._noise_key[1]
            self._generator.manual_seed((batch * 1_009) % 2**63)
            self._agent_noise = self._draw(len(self.agents)) if training else self._no_noise()

    def _draw(self, count: int) -> torch.Tensor:
        """Draws the noise of `count` latents, `(count, d)`."""
        return torch.randn(count, self.args.latent_size, generator=self._generator).to(this_process().device)

    def _draw_for(self, row: Row) -> torch.Tensor:
        """Draws the noise of a row's latent, `(1, d)`, from its number among the rows of its slot in all processes."""
        args, tree = self.args, tree_of_process(self.tree(training=True))
        problems = args.per_device_train_batch_size * cast(int, args.steps_per_generation) // len(tree.slots)
        rows = next(
            count for level, count in zip(tree.levels, tree.rows_of_slot, strict=True) if row.slot in level.slots
        )
        number = self._process * problems * rows + row.episode
        # A hash, because neighbouring seeds have similar states
        key = repr((args.seed, self._noise_key, self.workflow.slots.index(row.slot), number))
        self._generator.manual_seed(zlib.crc32(key.encode()))
        return self._draw(1)

    def _no_noise(self) -> torch.Tensor:
        """In evaluation, a latent is its mean."""
        return torch.zeros(len(self.agents), self.args.latent_size, device=this_process().device)

    def _noise_of(self, rows: list[Row]) -> torch.Tensor:
        """Returns the noise of the rows' latents, `(R, d)`. Without rows, returns one row that nothing uses."""
        if self.args.latent_scope == "agent" and rows:
            assert self._agent_noise is not None
            return self._agent_noise[[self.agents.index(row.slot.agent) for row in rows]]
        return torch.cat([self._draw_for(row) for row in rows]) if rows else self._no_noise()[:1]

    def inputs(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        inputs = super().inputs(batch)
        if self._is_separate:
            inputs["agent"] = batch.agent
        if self.has_latents:
            inputs["z"] = batch.of_rows("latent", self.args.latent_size)
            if self.args.policy_gradient_to_latent:
                inputs["obs"], inputs["eps"] = self._latent_inputs(batch)
        return inputs

    def _latent_inputs(self, batch: TeamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the observations and the noise of the rows, `(B, 2H)` and `(B, d)`."""
        return batch.of_rows("observation", 2 * self._hidden_size), batch.of_rows("noise", self.args.latent_size)

    # Serving

    @property
    def serves_agents(self) -> bool:
        return self.args.use_vllm and self.args.parameter_sharing != "shared"

    def serve(self, rows: list[Row], training: bool) -> bool:
        noise = self._agent_noise if training and self._agent_noise is not None else self._no_noise()
        known, self._served_noise = self._served_noise, noise
        return known is None or not torch.equal(known, noise)

    @torch.no_grad()
    def served_adapters(self, model: Any, observations: Callable[[], torch.Tensor]) -> list[tuple[dict, LoraConfig]]:
        if self._is_separate:
            return split_adapter(model, len(self.agents))
        assert self._served_noise is not None
        mu, sigma = self._modules.latents(observations())
        return fold_adapters(model, self._modules.cores(mu + sigma * self._served_noise))

    # Credit: the data of all agents in a row's turn, because TRL shuffles rows over micro-batches

    def credit(self, batch: TeamBatch) -> Credit:
        credit = super().credit(batch)
        if self.has_latents:
            credit.inputs |= self._team_inputs(batch)
        return credit

    def _team_inputs(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        """Returns what the latent losses need of each row's turn, `(B, N, ...)` and `(B,)`, and of the whole batch."""
        rows = self._team_rows(batch)
        live, index = rows >= 0, rows.clamp(min=0)
        (obs, eps), z = self._latent_inputs(batch), batch.inputs["z"]
        other_z = z[rows_to_compare_with(batch, rows)]
        # The rows of trained agents in a team's turn share a weight of 1
        team_turn = batch.episodes_of_row[:, 0] * batch.num_turns + batch.turn
        count = torch.zeros(len(batch.episodes) * batch.num_turns, device=batch.device)
        count.index_add_(0, team_turn, batch.in_statistics.float())
        team_return = batch.mean_over_episodes(batch.returns.mean(1))  # from the row's turn on, averaged over agents
        if batch.training:
            self._modules.inference_net.returns.update(team_return[batch.in_statistics], sum_over_processes)
        low, high = latent_distance_range(z[index], live.float())
        _, (lows, highs) = gather_rows(low.view(1), high.view(1))
        inputs = {
            "team_obs": obs[index] * live.unsqueeze(-1),
            "team_eps": eps[index] * live.unsqueeze(-1),
            "team_live": live.float(),
            "team_return": team_return,
            "team_weight": batch.in_statistics / count[team_turn].clamp(min=1),
            "num_team_turns": sum_over_processes((count > 0).sum().float()),
            "other_z": other_z,
            "compares": sum_over_processes((other_z != z).any().float()),
            "distance_low": lows.min(),
            "distance_high": highs.max(),
        }
        self._log_latents(z, z[index], batch, inputs)
        return inputs

    def _team_rows(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the index of every trained agent's last row with a reward in the turn of each row, or -1, `(B, N)`."""
        rows = batch.row_of[batch.first_episode]  # (B, S)
        here = batch.in_statistics[rows] & (batch.turn[rows] == batch.turn[:, None])
        team = torch.full((len(rows), len(self.agents)), -1, device=rows.device)
        for s, slot in enumerate(batch.slots):
            agent = self.agents.index(slot.agent)
            team[:, agent] = torch.where(here[:, s], rows[:, s], team[:, agent])
        return team

    @torch.no_grad()
    def _log_latents(
        self, z: torch.Tensor, team_z: torch.Tensor, batch: TeamBatch, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        live, weight = inputs["team_live"], inputs["team_weight"]
        mu, sigma = self._modules.latent_net(inputs["team_obs"])
        relative = [core.flatten(1).norm(dim=1) / core.size(-1) ** 0.5 for core in self._modules.core_decoder(z)]
        per_agent = weight[:, None] * live / live.sum(1, keepdim=True).clamp(min=1)
        compared = weight * (live.sum(1) > 1)  # an agent that acts alone in a turn has no distance
        self.log("latent/distance", (latent_diversity(team_z, live) * compared).sum(), compared.sum())
        logged = {
            "entropy": latent_entropy(sigma, live) * weight,
            "mu_norm": mu.norm(dim=-1) * per_agent,
            "sigma": sigma.mean(-1) * per_agent,
            "core_norm": torch.stack(relative).mean(0) * weight,
        }
        for name, values in logged.items():
            self.log(f"latent/{name}", values.sum(), weight.sum())

    # Update

    def context(self, inputs: Mapping[str, Any], keep: int, part: int | None = None) -> ForwardContext:
        forward = super().context(inputs, keep, part)
        forward.z = inputs.get("z")
        forward.agent = inputs.get("agent") if self._is_separate else None
        # Also recomputed at rollout, so that the ratio is exactly 1 before the first update
        forward.obs, forward.eps = inputs.get("obs"), inputs.get("eps")
        if part is not None and self.has_latents:
            if self.args.behaviour_distance_coef and bool(inputs["compares"]):
                forward.other_z = inputs["other_z"][: num_compared(len(inputs["z"]), part)]
            scaled = self.args.latent_distance == "minmax"
            forward.latent_targets = LatentTargets(
                inputs["team_obs"],
                inputs["team_eps"],
                inputs["team_live"],
                inputs["team_return"],
                self.args.latent_entropy_coef,
                self.args.latent_distance_coef,
                (inputs["distance_low"], inputs["distance_high"]) if scaled else None,
            )
        return forward

    def loss(self, forward: ForwardContext, inputs: Mapping[str, torch.Tensor], mean: Mean) -> torch.Tensor | None:
        losses = [super().loss(forward, inputs, mean)]
        if forward.latent_loss is not None and forward.inference_loss is not None:
            weight = inputs["team_weight"]
            latent, inference = (forward.latent_loss * weight).sum(), (forward.inference_loss * weight).sum()
            losses.append(mean(latent + inference, inputs["num_team_turns"]))
            self.log("latent/loss", latent, weight.sum())
            self.log("latent/inference_loss", inference, weight.sum())
        if forward.logps is not None and forward.other_logps is not None and len(forward.other_logps):
            distance, count = behaviour_distances(inputs, forward.logps, forward.other_logps)
            rows = len(inputs["z"]) * cast(int, self.args.steps_per_generation)
            # Rows are shuffled, so that compared ones have their share of the tokens on average
            tokens = inputs["num_items_in_batch"] * num_compared(rows) / rows
            losses.append(-mean(self.args.behaviour_distance_coef * distance, tokens))
            self.log("latent/behaviour_distance", distance, count)
        found = [loss for loss in losses if loss is not None]
        return torch.stack(found).sum() if found else None


# What an agent does, compared with what it would do with the latent of another agent


def num_compared(rows: int, index: int = 0) -> int:
    """
    Number of rows of a micro-batch that are compared: one of eight rows of the generation batch, and the first in any case.

    Args:
        rows (`int`): Rows of each micro-batch.
        index (`int`, *optional*, defaults to `0`): Index of the micro-batch in the generation batch.

    Returns:
        `int`: The number.
    """
    before, after = (math.ceil(rows * i / ROWS_PER_COMPARED_ROW) for i in (index, index + 1))
    return after - before


def rows_to_compare_with(batch: TeamBatch, team: torch.Tensor) -> torch.Tensor:
    """
    Finds other agents that read the same prompt. With several, episodes take turns.

    Args:
        batch ([`TeamBatch`]): The batch.
        team (`torch.Tensor` of shape `(B, N)`): Index of every agent's row in the turn of each row, or -1.

    Returns:
        `torch.Tensor` of shape `(B,)`: Index of a row of another agent with the same prompt, or of the row itself.
    """
    known: dict[tuple[int, ...], int] = {}
    numbers = [-1 if row is None else known.setdefault(tuple(row.prompt_ids), len(known)) for row in batch.rows]
    prompt = torch.tensor(numbers, device=team.device)
    own = torch.arange(len(team), device=team.device)
    others = (team >= 0) & (team != own[:, None]) & (prompt[team.clamp(min=0)] == prompt[:, None])
    place = batch.episodes_of_row[:, 0] % others.sum(1).clamp(min=1)
    chosen = others & (others.cumsum(1) - 1 == place[:, None])
    return torch.where(others.any(1), (team * chosen).sum(1), own)


def behaviour_distances(
    inputs: Mapping[str, Any], logps: torch.Tensor, other_logps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Distances of the first rows of a micro-batch, token by token, so that short replies do not count more than long ones.

    Args:
        inputs (`dict`): The micro-batch.
        logps, other_logps (`torch.Tensor` of shape `(B, T)` and `(K, T)`): See [`behaviour_distance`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The sum of the distances over the live tokens, 0 for rows without another agent, and
        the number of live tokens of other rows.
    """
    rows = len(other_logps)
    mask = loss_mask(inputs)[:rows]
    different = (inputs["z"] != inputs["other_z"])[:rows].any(1)
    return (behaviour_distance(logps[:rows], other_logps) * mask).sum(), (mask * different[:, None]).sum()


class SHPPOTrainer(MultiAgentPPOTrainer):
    """
    Shared-parameter heterogeneous PPO for a team of LLM agents.

    Extends [`MultiAgentPPOTrainer`] by a latent per row, sampled from what its agent observes. In every LoRA layer, a core
    decoded from the latent acts between A and B. `args.parameter_sharing` selects this (`"latent"`), one adapter for all
    agents (`"shared"`), or one adapter per agent (`"separate"`).

    Example:

    ```python
    >>> from marcog_trl import SHPPOConfig, SHPPOTrainer, load_problems

    >>> trainer = SHPPOTrainer(
    ...     model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ...     reward_funcs="collaboration_reward",
    ...     args=SHPPOConfig("team", workflow="collaboration"),
    ...     train_dataset=load_problems("humaneval"),
    ... )
    >>> trainer.train()
    ```

    Args: see [`MultiAgentTrainer`]. With latents or one adapter per agent, `target_modules="all-linear"` leaves out blocks
    with experts, because experts do not know which row a token belongs to.

    Source: Guo et al., Heterogeneous Multi-Agent Reinforcement Learning for Zero-Shot Scalable Collaboration
    (https://huggingface.co/papers/2404.03869).
    """

    _tag_names = ["trl", "marcog-trl", "shppo"]
    _name = "SHPPO"
    _paper = {
        "title": "Heterogeneous Multi-Agent Reinforcement Learning for Zero-Shot Scalable Collaboration",
        "id": "2404.03869",
        # docstyle-ignore
        "citation": """\
@article{guo2025heterogeneous,
    title        = {{Heterogeneous Multi-Agent Reinforcement Learning for Zero-Shot Scalable Collaboration}},
    author       = {Xudong Guo and Daming Shi and Junjie Yu and Wenhui Fan},
    year         = 2025,
    journal      = {Neurocomputing},
    eprint       = {arXiv:2404.03869},
}""",
    }
    _config_class = SHPPOConfig
    algorithm_class = SHPPO
    args: SHPPOConfig
