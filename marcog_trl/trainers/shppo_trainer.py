"""Shared-parameter heterogeneous PPO: agents share one adapter, and latents make them differ."""

from __future__ import annotations

from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftConfig
from torch import nn

from marcog_trl.agents import Workflow
from marcog_trl.heterogeneity import (
    CoreDecoder,
    InferenceNet,
    LatentNet,
    LoraCores,
    adapted_layers,
    check_peft_config,
    latent_distance_range,
    latent_diversity,
    latent_entropy,
    save_split_adapters,
    stack_config,
)
from marcog_trl.rollout.records import Row
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.modules import ForwardContext, LatentTargets, TeamModule
from marcog_trl.team.vllm import check_served_adapter
from marcog_trl.trainers.adapter_targets import adapter_config
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.comparison import behaviour_distances, num_compared, rows_to_compare_with
from marcog_trl.trainers.config import SHPPOConfig
from marcog_trl.trainers.multi_agent_ppo_trainer import MultiAgentPPOTrainer
from marcog_trl.trainers.served_agents import ServedAgents


LATENT, INFERENCE = "latent", "inference"


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
    _row_tensor_names = (
        "critic_state", "agent", "z", "other_z", "obs", "eps", "team_obs", "team_eps", "team_live", "team_return"
    )  # fmt: skip
    args: SHPPOConfig
    _agent_noise: torch.Tensor | None = None
    _noise_key = -1, 0
    _compares = False  # whether rows have other agents' latents to be compared with
    # Log-probabilities of the rows that were compared, with their own latents and with others, (K, T) each
    _compared: tuple[torch.Tensor, torch.Tensor] | None = None
    _served: ServedAgents | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        workflow: Workflow | str | None = None,
    ):
        self._generator = torch.Generator()
        self._serves = isinstance(args, SHPPOConfig) and args.use_vllm and args.parameter_sharing != "shared"
        if self._serves:
            args.use_vllm = False  # TRL would start its own engine
        try:
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
                workflow=workflow,
            )
        finally:
            if self._serves:
                args.use_vllm = True
        self._served = ServedAgents(self) if self._serves else None

    @property
    def _has_latents(self) -> bool:
        return self.args.parameter_sharing == "latent"

    def _adapter_config(self, model, peft_config: PeftConfig | None) -> PeftConfig | None:
        args = self.args
        if args.parameter_sharing != "shared" and peft_config is not None:
            check_peft_config(peft_config)
            if self._serves:
                check_served_adapter(cast(LoraConfig, peft_config))
        config = adapter_config(model, peft_config, args, experts=args.parameter_sharing == "shared")
        if args.parameter_sharing == "shared":
            return config
        separate = args.parameter_sharing == "separate"
        # If B starts at 0, cores have no effect before the first update
        initial = config.init_lora_weights if isinstance(config, LoraConfig) else None
        self._adapter_starts_at_zero = initial in (True, "gaussian")
        if config is None and separate:
            raise ValueError(
                "parameter_sharing='separate' makes its own adapter, but model already has one. Pass the base model, and the "
                "settings of the adapter as peft_config."
            )
        adapter = cast(LoraConfig, model.peft_config["default"] if config is None else config)
        if config is None:
            adapted_layers(model)
            if self._serves:
                check_served_adapter(adapter)
        return stack_config(adapter, len(self.agents)) if separate else config

    def _build_modules(self) -> TeamModule:
        if self.args.parameter_sharing == "shared":
            return super()._build_modules()
        cores = LoraCores(self.model)
        networks: dict[str, nn.Module] = {}
        with self._own_randomness():
            value_head = self._make_value_head()
            if self._has_latents:
                obs_size = 2 * self.model.config.get_text_config().hidden_size
                networks = {
                    "core_decoder": CoreDecoder(
                        self.args.latent_size, cores.ranks, self.args.init_core_scale * self._adapter_starts_at_zero
                    ),
                    "latent_net": LatentNet(obs_size, self.args.latent_size, sigma_min=self.args.sigma_min),
                    "inference_net": InferenceNet(obs_size, self.args.latent_size),
                }
        return TeamModule(
            value_head,
            self.args.critic_backprop,
            cores,
            agents=self.agents,
            **networks,  # type: ignore[arg-type]
        )

    def _grouped_modules(self) -> dict[str, nn.Module | None]:
        return {
            **super()._grouped_modules(), LATENT: self.modules.latent_net, INFERENCE: self.modules.inference_net
        }  # fmt: skip

    def _learning_rates(self) -> dict[str, float]:
        return {
            **super()._learning_rates(),
            LATENT: self.args.latent_learning_rate,
            INFERENCE: self.args.inference_learning_rate,
        }

    # Rollout: latents are sampled before a stage is generated, and stored in its rows

    def _playing(self) -> dict[str, Any]:
        if not self._has_latents:
            return super()._playing()
        self._seed_noise()
        return {**super()._playing(), "noise": self._noise_of if self.model.training else None}

    def _noise_of(self, rows: list[Row]) -> torch.Tensor:
        """Returns the noise of the rows' latents, `(R, d)`. Without rows, returns one row that nothing uses."""
        if self.args.latent_scope == "agent" and rows:
            assert self._agent_noise is not None
            return self._agent_noise[[self.agents.index(row.slot.agent) for row in rows]]
        return self._draw(max(1, len(rows)))

    def _seed_noise(self) -> None:
        """
        Seeds the noise from the number of the generation batch, so that a resumed run draws the same noise without a saved
        state. With `latent_scope="agent"`, all processes draw the same noise.
        """
        step, rollouts = self._noise_key  # optimizer steps so far, and rollouts since the last one
        if self.model.training:
            step, rollouts = self.state.global_step, rollouts + 1 if step == self.state.global_step else 0
            self._noise_key = step, rollouts
        process = 0 if self.args.latent_scope == "agent" else self.accelerator.process_index
        batch = (self.args.seed * 1_000_003 + step) * 1_009 + rollouts
        self._generator.manual_seed((batch * 1_009 + process) % 2**63)
        if self.args.latent_scope == "agent":
            self._agent_noise = self._draw(len(self.agents))

    def _draw(self, count: int) -> torch.Tensor:
        """Draws the noise of `count` latents, `(count, d)`. It is 0 in evaluation, so that a latent is its mean."""
        if not self.model.training:
            return torch.zeros(count, self.args.latent_size, device=self.accelerator.device)
        return torch.randn(count, self.args.latent_size, generator=self._generator).to(self.accelerator.device)

    def _before_generation(self, rows: list[Row]) -> None:
        if self._served is not None:
            self._served.prepare(rows)

    def _make_row_tensors(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        tensors = super()._make_row_tensors(batch)
        if self.args.parameter_sharing == "separate":
            tensors["agent"] = batch.agent
        if self._has_latents:
            tensors["z"] = batch.of_rows("latent", self.args.latent_size)
            if self.args.policy_gradient_to_latent:
                tensors["obs"], tensors["eps"] = self._latent_inputs(batch)
        return tensors

    def _latent_inputs(self, batch: TeamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the observations and the noise of the rows, `(B, 2H)` and `(B, d)`."""
        obs_size = 2 * self.model.config.get_text_config().hidden_size
        return batch.of_rows("observation", obs_size), batch.of_rows("noise", self.args.latent_size)

    def _team_tensors(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        """Returns the data of all agents in each row's turn, `(B, N, ...)`. TRL shuffles rows over micro-batches."""
        rows = self._team_rows(batch)
        live = rows >= 0
        index = rows.clamp(min=0)
        obs, eps = self._latent_inputs(batch)
        return {
            "team_obs": obs[index] * live.unsqueeze(-1),
            "team_eps": eps[index] * live.unsqueeze(-1),
            "team_live": live.float(),
            "team_return": self._team_returns(batch),
            "other_z": batch.inputs["z"][rows_to_compare_with(batch, rows)],
        }

    def _team_rows(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the index of every trained agent's last live row in the turn of each row, or -1, `(B, N)`."""
        rows = batch.row_of[batch.first_episode]  # (B, S)
        here = batch.in_statistics[rows] & (batch.turn[rows] == batch.turn[:, None])
        team = torch.full((len(rows), len(self.agents)), -1, device=rows.device)
        for s, slot in enumerate(self.workflow.slots):
            agent = self.agents.index(slot.agent)
            team[:, agent] = torch.where(here[:, s], rows[:, s], team[:, agent])
        return team

    def _team_returns(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the return from the row's turn on, averaged over agents, `(B,)`."""
        return batch.mean_over_episodes(batch.returns.mean(1))

    def _forward_context(self, rows: dict[str, torch.Tensor], keep: int) -> ForwardContext:
        forward = super()._forward_context(rows, keep)
        forward.agent, forward.z = rows.get("agent"), rows.get("z")
        if self.args.parameter_sharing != "separate":
            forward.agent = None
        # Also recomputed at batch, so that the ratio is exactly 1 before the first update
        forward.obs, forward.eps = rows.get("obs"), rows.get("eps")
        if torch.is_grad_enabled() and self._has_latents:
            forward.other_z = rows["other_z"][: self._num_compared(len(rows["z"]))]
            minmax = self.args.latent_distance == "minmax"
            forward.latent_targets = LatentTargets(
                rows["team_obs"],
                rows["team_eps"],
                rows["team_live"],
                rows["team_return"],
                self.args.latent_entropy_coef,
                self.args.latent_distance_coef,
                self.args.latent_distance,
                self._distance_range if minmax else None,
            )
        return forward

    # Latent losses

    def _num_compared(self, rows: int) -> int:
        """Returns how many rows of a micro-batch are compared."""
        if not self._compares or not self.args.behaviour_distance_coef:
            return 0
        return num_compared(rows, self._step % cast(int, self.args.steps_per_generation))

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        rows = len(input_ids)
        compared = self._num_compared(rows) if torch.is_grad_enabled() else 0
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            model,
            torch.cat([input_ids, input_ids[:compared]]),
            torch.cat([attention_mask, attention_mask[:compared]]),
            logits_to_keep,
            batch_size=batch_size,
            **kwargs,
        )
        if compared:
            self._compared = logps[:compared], logps[rows:]
        return logps[:rows], None if entropies is None else entropies[:rows], aux_loss

    def _assign_credit(self, output: dict[str, Any], batch: TeamBatch) -> None:
        super()._assign_credit(output, batch)
        if not self._has_latents:
            return
        batch.inputs |= self._team_tensors(batch)
        different = batch.inputs["other_z"] != batch.inputs["z"]
        output["compares"] = self._sum_over_processes(different.any().float())
        episode = batch.episodes_of_row[:, 0]
        # The live rows of trained agents in a team's turn share a weight of 1
        team_turn = episode * self.workflow.num_turns + batch.turn
        count = torch.zeros(len(batch.episodes) * self.workflow.num_turns, device=episode.device)
        count.index_add_(0, team_turn, batch.in_statistics.float())
        output["team_weight"] = batch.in_statistics / count[team_turn].clamp(min=1)
        output["num_team_turns"] = self._sum_over_processes((count > 0).sum().float())
        z = batch.of_rows("latent", self.args.latent_size)
        team_z = z[self._team_rows(batch).clamp(min=0)]
        low, high = latent_distance_range(team_z, batch.inputs["team_live"])
        output["distance_low"] = self.accelerator.gather(low).min()
        output["distance_high"] = self.accelerator.gather(high).max()
        self._log_latents(team_z, batch, output)

    def _compute_loss(self, model, inputs):
        if self._has_latents:
            self._distance_range = inputs["distance_low"], inputs["distance_high"]
            self._compares = bool(inputs["compares"])
        return super()._compute_loss(model, inputs)

    def _team_loss(self, inputs: dict[str, Any], forward: ForwardContext) -> torch.Tensor:
        loss = super()._team_loss(inputs, forward)
        if forward.latent_loss is not None and forward.inference_loss is not None:
            weight, window = inputs["team_weight"], self._loss_window(inputs["num_team_turns"])
            latent, inference = (forward.latent_loss * weight).sum(), (forward.inference_loss * weight).sum()
            loss = loss + (latent + inference) / window
            self._pool("latent/loss", latent, weight.sum())
            self._pool("latent/inference_loss", inference, weight.sum())
        if self._compared is not None:
            distance, count = behaviour_distances(inputs, *self._compared)
            self._compared = None
            rows = len(inputs["z"]) * cast(int, self.args.steps_per_generation)
            # Rows are shuffled, so that compared ones have their share of the tokens on average
            window = self._loss_window(inputs["num_items_in_batch"] * num_compared(rows) / rows)
            loss = loss - self.args.behaviour_distance_coef * distance / window
            self._pool("latent/behaviour_distance", distance, count)
        return loss

    @torch.no_grad()
    def _log_latents(self, team_z: torch.Tensor, batch: TeamBatch, output: dict[str, Any]) -> None:
        assert self.modules.latent_net is not None and self.modules.core_decoder is not None
        tensors = batch.inputs
        live, weight = tensors["team_live"], output["team_weight"]
        mu, sigma = self.modules.latent_net(tensors["team_obs"])
        cores = self.modules.core_decoder(tensors["z"])
        relative = torch.stack([core.flatten(1).norm(dim=1) / core.size(-1) ** 0.5 for core in cores]).mean(0)
        per_agent = weight[:, None] * live / live.sum(1, keepdim=True).clamp(min=1)
        logged = {
            "latent/distance": (latent_diversity(team_z, live) * weight).sum(),
            "latent/entropy": (latent_entropy(sigma, live) * weight).sum(),
            "latent/mu_norm": (mu.norm(dim=-1) * per_agent).sum(),
            "latent/sigma": (sigma.mean(-1) * per_agent).sum(),
            "latent/core_norm": (relative * weight).sum(),
        }
        totals = self._sum_over_processes(torch.stack([*logged.values(), weight.sum()]))
        for name, value in zip(logged, (totals[:-1] / totals[-1].clamp(min=1e-8)).tolist(), strict=True):
            self._metric(name, value)

    # Checkpoints

    def _describe_team(self) -> TeamDescription:
        description = super()._describe_team()
        if self.args.parameter_sharing != "shared":
            adapter = (
                "is the part that all agents share, without their latents"
                if self._has_latents
                else "contains the adapters of all agents"
            )
            description.note = (
                f"The adapter in this folder {adapter}. It is not an agent. trainer.export_agents and recipes/export.py write "
                "each agent as an ordinary PEFT adapter to agents/<name>. marcog_trl.Team loads the whole team."
            )
        return description

    def _describe_modules(self) -> dict[str, Any]:
        description = {**super()._describe_modules(), "parameter_sharing": self.args.parameter_sharing}
        if self._has_latents:
            description |= {"latent_scope": self.args.latent_scope, "latent_size": self.args.latent_size}
        return description

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict=state_dict)
        if self.args.parameter_sharing == "separate" and is_peft_model(self.model):
            # Runs resume from the stacked adapter. The agents are also saved as ordinary adapters
            folder, own = self._folder(output_dir) / "agents", self.team.own_agents
            paths = [folder / agent if agent in own else None for agent in self.agents]
            save_split_adapters(self.model, paths, is_main_process=self.args.should_save)
