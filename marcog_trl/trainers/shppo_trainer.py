"""Shared-parameter heterogeneous PPO: one adapter, told apart by latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftConfig
from torch import nn
from trl.extras.profiling import profiling_context
from trl.trainer import grpo_trainer

from marcog_trl.agents import Slot
from marcog_trl.heterogeneity import (
    CoreDecoder,
    InferenceNet,
    LatentNet,
    LoraCores,
    adapted_layers,
    check_peft_config,
    fold_adapters,
    latent_distance_range,
    latent_diversity,
    latent_entropy,
    save_split_adapters,
    split_adapter,
    stack_config,
)
from marcog_trl.rollout.engine import encode_prompts
from marcog_trl.rollout.records import Row
from marcog_trl.team.modules import Flight, LatentTargets, TeamModule
from marcog_trl.team.vllm import AgentGeneration, check_served_adapter
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig
from marcog_trl.trainers.multi_agent_ppo_trainer import MultiAgentPPOTrainer
from marcog_trl.trainers.multi_agent_trainer import Rollout
from marcog_trl.trainers.shppo_config import SHPPOConfig


LATENT, INFERENCE = "latent", "inference"


class SHPPOTrainer(MultiAgentPPOTrainer):
    """
    Shared-parameter heterogeneous PPO for a team of LLM agents.

    What is new over [`MultiAgentPPOTrainer`]: each row has a latent, drawn from what its agent observes, and a core
    decoded from the latent that acts between A and B of every LoRA layer. `args.parameter_sharing` switches between this
    (`"latent"`), one adapter for all (`"shared"`) and one adapter per agent (`"separate"`) on the same code path.

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

    Args: see [`MultiAgentTrainer`]. With latents, or an adapter per agent, `target_modules="all-linear"` leaves out
    blocks with experts, which see tokens without their rows.

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
        "team_state", "agent", "z", "obs", "eps", "team_obs", "team_eps", "team_live", "team_return"
    )  # fmt: skip
    args: SHPPOConfig

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        # Of the episodes in flight: what the latents were drawn from, and the draws
        self._embeddings: dict[tuple[int, Slot], torch.Tensor] = {}
        self._latents: dict[tuple[int, Slot], torch.Tensor] = {}
        self._noise: dict[tuple[int, Slot], torch.Tensor] = {}
        self._agent_noise: torch.Tensor | None = None
        self._generator = torch.Generator()
        self._noise_key = -1, 0
        self._probe: tuple[list[int], torch.Tensor] | None = None
        # Of this process since the last log, (N, d + 1): sum of the means μ of each agent, and how many they are
        self._latent_sums: torch.Tensor | None = None
        self._served: AgentGeneration | None = None
        serves = isinstance(args, SHPPOConfig) and args.use_vllm and args.parameter_sharing != "shared"
        # TRL makes its vLLM backend by this name
        with patch.object(grpo_trainer, "VLLMGeneration", self._make_generation) if serves else nullcontext():
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._role_ids = encode_prompts(
            self._tokenizer, [[{"role": "user", "content": agent.role}] for agent in self.workflow.agents]
        )

    @property
    def _has_latents(self) -> bool:
        return self.args.parameter_sharing == "latent"

    def _adapter_config(self, model, peft_config: PeftConfig | None, args: MultiAgentConfig) -> PeftConfig | None:
        assert isinstance(args, SHPPOConfig)
        if args.parameter_sharing != "shared" and peft_config is not None:
            check_peft_config(peft_config)
            if args.use_vllm:
                check_served_adapter(cast(LoraConfig, peft_config))
        config = super()._adapter_config(model, peft_config, args)
        if args.parameter_sharing == "shared":
            return config
        separate = args.parameter_sharing == "separate"
        # B is 0 then, and cores change nothing before it moves
        initial = config.init_lora_weights if isinstance(config, LoraConfig) else None
        self._adapter_starts_at_zero = initial in (True, "gaussian")
        if config is None and separate:
            raise ValueError(
                "parameter_sharing='separate' makes its own adapter, but model has one; pass the base model, and the "
                "adapter's settings as peft_config"
            )
        adapter = cast(LoraConfig, model.peft_config["default"] if config is None else config)
        if config is None:
            adapted_layers(model)
            if args.use_vllm:
                check_served_adapter(adapter)
        return stack_config(adapter, len(self.agents)) if separate else config

    @property
    def _adapts_experts(self) -> bool:
        return self.args.parameter_sharing == "shared"  # otherwise agents must be told apart

    def _make_team(self) -> TeamModule:
        if self.args.parameter_sharing == "shared":
            return super()._make_team()
        cores = LoraCores(self.model)
        networks: dict[str, nn.Module] = {}
        with self._own_randomness():
            value_head = self._make_value_head()
            if self._has_latents:
                obs_size = 2 * self.model.config.get_text_config().hidden_size
                networks = {
                    "core_decoder": CoreDecoder(
                        self.args.latent_size, cores.ranks, self.args.core_scale * self._adapter_starts_at_zero
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
            **super()._grouped_modules(), LATENT: self.team.latent_net, INFERENCE: self.team.inference_net
        }  # fmt: skip

    def _learning_rates(self) -> dict[str, float]:
        return {
            **super()._learning_rates(),
            LATENT: self.args.latent_learning_rate,
            INFERENCE: self.args.inference_learning_rate,
        }

    # Rollout: latents are drawn before a stage speaks, and kept with its rows

    @property
    def _needs_prompt_states(self) -> bool:
        return super()._needs_prompt_states or (self._has_latents and self.args.latent_scope == "observation")

    def _play(self, problems, score):
        self._embeddings.clear()
        self._latents.clear()
        self._noise.clear()
        if self._has_latents:
            self._seed_noise()
        return super()._play(problems, score)

    def _seed_noise(self) -> None:
        """
        Seeds the latents' generator by what the generation batch is, so that a resumed run draws the same noise without
        having saved a state. In agent scope all processes draw the same, whatever their number.
        """
        step, rollouts = self._noise_key  # optimizer steps so far, and rollouts since the last one
        if self.model.training:
            step, rollouts = self.state.global_step, rollouts + 1 if step == self.state.global_step else 0
            self._noise_key = step, rollouts
        process = 0 if self.args.latent_scope == "agent" else self.accelerator.process_index
        batch = (self.args.seed * 1_000_003 + step) * 1_009 + rollouts
        self._generator.manual_seed((batch * 1_009 + process) % 2**63)
        if self.args.latent_scope == "agent":
            before, self._agent_noise = self._agent_noise, self._draw(len(self.agents))
            if self._served is not None and (before is None or not torch.equal(before, self._agent_noise)):
                self._served.stale = True

    def _draw(self, count: int) -> torch.Tensor:
        """Noise of `count` latents, `(count, d)`; in evaluation a latent is its mean."""
        if not self.model.training:
            return torch.zeros(count, self.args.latent_size, device=self.accelerator.device)
        return torch.randn(count, self.args.latent_size, generator=self._generator).to(self.accelerator.device)

    @torch.no_grad()
    def _observe(self, rows: list[Row]) -> None:
        super()._observe(rows)
        if not self._has_latents or self.args.latent_scope == "agent":
            return
        prompts = list({tuple(row.prompt_ids): None for row in rows}) or [(self._tokenizer.eos_token_id,)]
        of_prompt = dict(zip(prompts, self._mean_embeddings([list(ids) for ids in prompts]), strict=True))
        of_role = self._role_means
        for row in rows:
            # One mean over all tokens would drown a role text in a long prompt, and agents asked the same would look the same
            role = of_role[self.agents.index(row.slot.agent)]
            self._embeddings[row.episode, row.slot] = (role + of_prompt[tuple(row.prompt_ids)]) / 2

    def _mean_embeddings(self, ids: list[list[int]]) -> torch.Tensor:
        """Mean of the frozen input embeddings of each list of token ids, `(len(ids), H)`."""
        inputs = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self.accelerator.device)
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        embeddings = self.model.get_input_embeddings()(inputs["input_ids"]).float()
        return (embeddings * mask).sum(1) / mask.sum(1)

    @cached_property
    def _role_means(self) -> torch.Tensor:
        """Mean input embedding of each agent's role text, `(N, H)`; embeddings are frozen, so once is enough."""
        return self._mean_embeddings(self._role_ids)

    @cached_property
    def _role_observations(self) -> torch.Tensor:
        """Observation of each agent's role text alone, `(N, 2H)`; the base model is frozen, so once is enough."""
        return torch.cat([self._role_means, self._prompt_states(self._role_ids)], dim=-1)

    def _row_observations(self, rows: list[Row]) -> torch.Tensor:
        """Observation `[o, h]` of each row, `(R, 2H)`; without rows, one that nothing reads."""
        if self.args.latent_scope == "agent":  # a collective operation under ZeRO-3: also without rows
            return self._role_observations[[self.agents.index(row.slot.agent) for row in rows] or [0]]
        if not rows:
            return torch.zeros(1, self._obs_size, device=self.accelerator.device)
        keys = [(row.episode, row.slot) for row in rows]
        return torch.stack([torch.cat([self._embeddings[key], self._observations[key]]) for key in keys])

    @torch.no_grad()
    def _generation_flight(self, rows: list[Row]) -> Flight:
        if self.args.parameter_sharing == "shared":
            return super()._generation_flight(rows)
        device = self.accelerator.device
        if self.args.parameter_sharing == "separate":
            agents = [self.agents.index(row.slot.agent) for row in rows] or [0]
            return Flight(agent=torch.tensor(agents, device=device), frozen=True)
        assert self.team.latent_net is not None
        obs = self._row_observations(rows)
        mu, sigma = self.team.latent_net(obs)
        if self.args.latent_scope == "agent" and rows:
            assert self._agent_noise is not None
            eps = self._agent_noise[[self.agents.index(row.slot.agent) for row in rows]]
        else:
            eps = self._draw(len(obs))
        z = mu + sigma * eps
        for i, row in enumerate(rows):
            self._latents[row.episode, row.slot], self._noise[row.episode, row.slot] = z[i], eps[i]
        return Flight(z=z, frozen=True)

    @torch.no_grad()
    def _as_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None) -> AbstractContextManager:
        if self.args.parameter_sharing == "shared":
            return super()._as_agent(agent, inputs)
        index = torch.tensor([self.agents.index(agent)], device=self.accelerator.device)
        if self.args.parameter_sharing == "separate":
            return self.team.rows(Flight(agent=index, frozen=True))
        if self.args.latent_scope == "agent":
            obs = self._role_observations[index]
        elif inputs is None:
            raise ValueError(
                "inputs=None, but with latent_scope='observation' an agent depends on its prompt. Pass what the model is "
                f"called with: use_agent({agent!r}, inputs)."
            )
        else:
            masks = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            ids = [row[mask].tolist() for row, mask in zip(inputs["input_ids"], masks, strict=True)]
            embeddings = (self._role_means[index] + self._mean_embeddings(ids)) / 2
            obs = torch.cat([embeddings, self._prompt_states(ids)], dim=-1)
        assert self.team.latent_net is not None
        mu, _ = self.team.latent_net(obs)
        return self.team.rows(Flight(z=mu, frozen=True))

    def _generate_rows(self, rows: list[Row]):
        if self._served is not None:
            self._served.row_agents = [self.agents.index(row.slot.agent) for row in rows] or [0]
        return super()._generate_rows(rows)

    def _make_generation(self, *, model, **kwargs: Any) -> AgentGeneration:
        """In place of TRL's vLLM backend, whose arguments it takes: one that serves every agent's own adapter."""
        config = model.peft_config["default"]
        blocks = len(self.agents) if self.args.parameter_sharing == "separate" else 1
        rank = max([config.r, *config.rank_pattern.values()]) // blocks
        self._served = AgentGeneration(
            model=model,
            num_agents=len(self.agents),
            rank=rank,
            revision=cast(dict, self.args.model_init_kwargs or {}).get("revision"),
            refresh=self._refresh_agents,
            **kwargs,
        )
        return self._served

    @torch.no_grad()
    def _refresh_agents(self) -> None:
        """Gives vLLM the agents' adapters of now, of the rollout's own latents."""
        assert self._served is not None
        with profiling_context(self, "refresh_agents"):
            if self.args.parameter_sharing == "separate":
                self._served.load(split_adapter(self.model, len(self.agents)))
                return
            assert self.team.latent_net is not None and self.team.core_decoder is not None
            mu, sigma = self.team.latent_net(self._role_observations)
            cores = self.team.core_decoder(mu + sigma * self._agent_noise)
            config = self.model.peft_config["default"]
            self._served.load([(state, config) for state in fold_adapters(self.model, cores)])

    @property
    def _obs_size(self) -> int:
        return 2 * self.model.config.get_text_config().hidden_size

    def _make_row_tensors(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        tensors = super()._make_row_tensors(rollout)
        if self.args.parameter_sharing == "separate":
            tensors["agent"] = rollout.agent
        if self._has_latents:
            tensors["z"] = self._by_row(rollout, self._latents)
            if self.args.policy_gradient_to_latent:
                tensors["obs"], tensors["eps"] = self._all_observations(rollout), self._by_row(rollout, self._noise)
        return tensors

    def _all_observations(self, rollout: Rollout) -> torch.Tensor:
        live = [row for row in rollout.rows if row is not None]
        observations = dict(zip([(row.episode, row.slot) for row in live], self._row_observations(live), strict=True))
        return self._by_row(rollout, observations)

    def _team_tensors(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """Every row carries its team-turn, since rows are shuffled over micro-batches: `(B, N, ...)`."""
        rows = self._team_rows(rollout)
        live = rows >= 0
        index = rows.clamp(min=0)
        obs, eps = self._all_observations(rollout)[index], self._by_row(rollout, self._noise)[index]
        return {
            "team_obs": obs * live.unsqueeze(-1),
            "team_eps": eps * live.unsqueeze(-1),
            "team_live": live.float(),
            "team_return": self._team_returns(rollout),
        }

    def _team_rows(self, rollout: Rollout) -> torch.Tensor:
        """Index of every agent's last live row in the turn of each row, -1 where it has none, `(B, N)`."""
        slots = self.workflow.slots
        live = rollout.live.view(-1, len(slots), self._siblings_here)
        index = torch.arange(live.numel(), device=live.device).view_as(live)
        rows = torch.full((*live.shape, len(self.agents)), -1, device=live.device)
        for s, slot in enumerate(slots):
            for other, peer in enumerate(slots):
                if peer.turn == slot.turn:
                    agent = self.agents.index(peer.agent)
                    rows[:, s, :, agent] = torch.where(live[:, other], index[:, other], rows[:, s, :, agent])
        return rows.view(-1, len(self.agents))

    def _team_returns(self, rollout: Rollout) -> torch.Tensor:
        """Mean over the agents of their returns from the row's turn on, `(B,)`."""
        returns = rollout.returns.mean(1)
        return returns[rollout.episodes_of_row[:, 0], rollout.turn]

    def _make_flight(self, rows: dict[str, torch.Tensor], keep: int) -> Flight:
        flight = super()._make_flight(rows, keep)
        flight.agent, flight.z = rows.get("agent"), rows.get("z")
        if self.args.parameter_sharing != "separate":
            flight.agent = None
        # Recomputed at rollout as well, so that the ratio is exactly 1 before the first update
        flight.obs, flight.eps = rows.get("obs"), rows.get("eps")
        if torch.is_grad_enabled() and self._has_latents:
            minmax = self.args.latent_distance == "minmax"
            flight.latent_targets = LatentTargets(
                rows["team_obs"],
                rows["team_eps"],
                rows["team_live"],
                rows["team_return"],
                self.args.latent_entropy_coef,
                self.args.latent_distance_coef,
                self.args.latent_distance,
                self._distance_range if minmax else None,
            )
        return flight

    # Latent losses

    def _assign_credit(self, output: dict[str, Any], rollout: Rollout) -> None:
        super()._assign_credit(output, rollout)
        if not self._has_latents:
            return
        assert self._row_tensors is not None
        self._row_tensors |= self._team_tensors(rollout)
        if self.model.training:
            self._keep_probe(rollout, self._row_tensors)
        episode = rollout.episodes_of_row[:, 0]
        # Each team-turn has weight 1, spread over its live rows
        team_turn = episode * self.workflow.num_turns + rollout.turn
        count = torch.zeros(len(rollout.episodes) * self.workflow.num_turns, device=episode.device)
        count.index_add_(0, team_turn, rollout.live.float())
        output["team_weight"] = rollout.live / count[team_turn].clamp(min=1)
        output["num_team_turns"] = self._sum_over_processes((count > 0).sum().float())
        z = self._by_row(rollout, self._latents)
        team_z = z[self._team_rows(rollout).clamp(min=0)]
        low, high = latent_distance_range(team_z, self._row_tensors["team_live"])
        output["distance_low"] = self.accelerator.gather(low).min()
        output["distance_high"] = self.accelerator.gather(high).max()
        self._log_latents(team_z, rollout, output)

    def _compute_loss(self, model, inputs):
        if self._has_latents:
            self._distance_range = inputs["distance_low"], inputs["distance_high"]
        return super()._compute_loss(model, inputs)

    def _team_loss(self, inputs: dict[str, Any], flight: Flight) -> torch.Tensor:
        loss = super()._team_loss(inputs, flight)
        if flight.latent_loss is not None and flight.inference_loss is not None:
            weight, window = inputs["team_weight"], self._window(inputs["num_team_turns"])
            latent, inference = (flight.latent_loss * weight).sum(), (flight.inference_loss * weight).sum()
            loss = loss + (latent + inference) / window
            self._pool("latent/loss", latent, weight.sum())
            self._pool("latent/inference_loss", inference, weight.sum())
        return loss

    @torch.no_grad()
    def _log_latents(self, team_z: torch.Tensor, rollout: Rollout, output: dict[str, Any]) -> None:
        assert self.team.latent_net is not None and self.team.core_decoder is not None
        tensors = self._row_tensors
        assert tensors is not None
        live, weight = tensors["team_live"], output["team_weight"]
        mu, sigma = self.team.latent_net(tensors["team_obs"])
        cores = self.team.core_decoder(tensors["z"])
        relative = torch.stack([core.flatten(1).norm(dim=1) / core.size(-1) ** 0.5 for core in cores]).mean(0)
        per_agent = weight[:, None] * live / live.sum(1, keepdim=True).clamp(min=1)
        logged = {
            "latent/distance": (latent_diversity(team_z, live) * weight).sum(),
            "latent/entropy": (latent_entropy(sigma, live) * weight).sum(),
            "latent/mu_norm": (mu.norm(dim=-1) * per_agent).sum(),
            "latent/sigma": (sigma.mean(-1) * per_agent).sum(),
            "latent/core_norm": (relative * weight).sum(),
        }
        if self.model.training:
            acts = weight[:, None] * live
            sums = torch.cat([torch.einsum("bn,bnd->nd", acts, mu), acts.sum(0)[:, None]], dim=1)
            self._latent_sums = sums if self._latent_sums is None else self._latent_sums + sums
        totals = self._sum_over_processes(torch.stack([*logged.values(), weight.sum()]))
        for name, value in zip(logged, (totals[:-1] / totals[-1].clamp(min=1e-8)).tolist(), strict=True):
            self._metric(name, value)

    def _keep_probe(self, rollout: Rollout, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the prompt of the first row that has the most agents beside it in its turn, and their latents."""
        team_rows = self._team_rows(rollout)
        chosen = int(((team_rows >= 0).sum(1) * rollout.live).argmax())
        row, others = rollout.rows[chosen], team_rows[chosen]
        if (
            row is None or not rollout.live[chosen]
        ):  # nothing to compare on, but the other processes may have something
            self._probe = [self._tokenizer.eos_token_id], tensors["z"][:1]
        else:
            self._probe = row.prompt_ids, tensors["z"][others[others >= 0]]

    @torch.no_grad()
    def _behavioural_diversity(self) -> float:
        """
        Mean total-variation distance, in [0, 1], between the next-token distributions of two agents on the same prompt; NaN
        where no process has two agents to compare.
        """
        prompt_ids, latents = self._probe  # type: ignore[misc]
        ids = torch.tensor([prompt_ids] * len(latents), device=self.accelerator.device)
        with self.team.rows(Flight(z=latents)), self.accelerator.autocast():
            logits = self.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        p = logits.float().softmax(-1)
        distance = (p[:, None] - p[None]).abs().sum(-1) / 2
        pairs = len(p) * (len(p) - 1)
        return self.accelerator.gather(distance.sum() / pairs).nanmean().item()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._probe is not None and self.model.training:
            diversity = self._behavioural_diversity()
            if not math.isnan(diversity):
                self._metric("agents/behavioural_diversity", diversity)
            self._probe = None
        self.agent_latents = None
        if self._latent_sums is not None and self.model.training:
            sums, self._latent_sums = self._sum_over_processes(self._latent_sums), None
            self.agent_latents = {
                agent: [round(component / count, 5) for component in mu]
                for agent, (*mu, count) in zip(self.agents, sums.tolist(), strict=True)
                if count > 0
            }
        super().log(logs, start_time)

    # Checkpoints

    def team_description(self) -> dict[str, Any]:
        description = super().team_description()
        if self.args.parameter_sharing == "shared":
            return description
        adapter = (
            "is what the agents share, without their latents"
            if self._has_latents
            else "holds those of all agents at once"
        )
        note = (
            f"The adapter beside this file {adapter}, and is no agent by itself. Every agent is an ordinary PEFT adapter in "
            "agents/<name>, which trainer.export_agents and recipes/export.py write. marcog_trl.Team loads the whole team."
        )
        return {**description, "note": note}

    def _module_description(self) -> dict[str, Any]:
        description = {**super()._module_description(), "parameter_sharing": self.args.parameter_sharing}
        if self._has_latents:
            description |= {"latent_scope": self.args.latent_scope, "latent_size": self.args.latent_size}
        return description

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict=state_dict)
        if self.args.parameter_sharing == "separate" and is_peft_model(self.model):
            # The stacked adapter is for continuing the run; the agents' own ones are ordinary adapters
            paths = [self._folder(output_dir) / "agents" / agent for agent in self.agents]
            save_split_adapters(self.model, paths, is_main_process=self.args.should_save)
