"""Token-level PPO for teams, with a critic on the policy's own hidden states."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from marcog_trl.algorithms.advantages import gae, normalize_advantages, value_loss
from marcog_trl.algorithms.critic import ValueHead, pool_team_states, standardize
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.modules import ForwardContext, TeamModule
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.config import MultiAgentPPOConfig
from marcog_trl.trainers.credit import critic_shares, over_siblings
from marcog_trl.trainers.dataloaders import lent
from marcog_trl.trainers.modules_trainer import ModulesTrainer


CRITIC, MOMENTS = "critic", "critic_mix"


class MultiAgentPPOTrainer(ModulesTrainer):
    """
    PPO for a team of LLM agents that share one model and one adapter.

    Extends [`MultiAgentTrainer`] by a value head on the policy's last hidden state, generalised advantage estimation over
    the tokens and turns of each agent, a value loss, a KL penalty in the loss or the reward, and a learning rate and
    gradient norm for each parameter group.

    Example:

    ```python
    >>> from marcog_trl import MultiAgentPPOConfig, MultiAgentPPOTrainer, load_problems

    >>> trainer = MultiAgentPPOTrainer(
    ...     model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ...     reward_funcs="collaboration_reward",
    ...     args=MultiAgentPPOConfig("team", workflow="collaboration"),
    ...     train_dataset=load_problems("humaneval"),
    ... )
    >>> trainer.train()
    ```

    Args: see [`MultiAgentTrainer`].

    Source: PPO (https://huggingface.co/papers/1707.06347), GAE (https://huggingface.co/papers/1506.02438), IPPO
    (https://huggingface.co/papers/2011.09533) and MAPPO (https://huggingface.co/papers/2103.01955).
    """

    _tag_names = ["trl", "marcog-trl", "multi-agent-ppo"]
    _name = "Multi-Agent PPO"
    _paper = {
        "title": "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games",
        "id": "2103.01955",
        # docstyle-ignore
        "citation": """\
@inproceedings{yu2022surprising,
    title        = {{The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games}},
    author       = {Chao Yu and Akash Velu and Eugene Vinitsky and Jiaxuan Gao and Yu Wang and Alexandre Bayen and Yi Wu},
    year         = 2022,
    booktitle    = {Advances in Neural Information Processing Systems 35, Datasets and Benchmarks Track},
}""",
    }
    _config_class = MultiAgentPPOConfig
    args: MultiAgentPPOConfig
    # The last forward pass, set while TRL computes log-probabilities
    _forward: ForwardContext | None = None

    # The team's modules

    def _build_modules(self) -> TeamModule:
        with self._own_randomness():
            return TeamModule(value_head=self._make_value_head(), critic_backprop=self.args.critic_backprop)

    def _make_value_head(self) -> ValueHead | None:
        if self.args.critic == "none":
            return None
        return ValueHead(self.model.config.get_text_config().hidden_size)

    def _grouped_modules(self) -> dict[str, nn.Module | None]:
        return {CRITIC: self.modules.value_head}

    def _learning_rates(self) -> dict[str, float]:
        rate, head = self.args.critic_learning_rate, self.modules.value_head
        if rate is None and head is not None:
            rate = 0.256 / head.out.in_features  # wider heads learn faster
        return {} if rate is None else {CRITIC: rate}

    # Rollout

    def _playing(self) -> dict[str, Any]:
        return {
            **super()._playing(),
            "prompt_states": self.args.critic != "none",
            "token_states": self.args.critic != "none" and self._generates_with_hooks(),
        }

    def _generates_with_hooks(self) -> bool:
        """Whether generation runs the decoder once for the prompts, then once per token."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return False
        return self.generation_config.prefill_chunk_size is None  # chunks of a prompt may look like tokens

    def _play(self, problems: list[dict[str, Any]], tree: Tree) -> TeamBatch:
        batch = super()._play(problems, tree)
        batch.inputs = self._make_row_tensors(batch)
        batch.values = self._values_of_generation(batch)
        self._row_tensors = batch.inputs
        return batch

    @torch.no_grad()
    def _values_of_generation(self, batch: TeamBatch) -> torch.Tensor | None:
        """
        Returns V_old, `(B, T)`, computed from the hidden states of generation, which saves a forward pass. `None` if a
        process does not have these states, for example with a vLLM server.
        """
        if self.args.critic == "none":
            return None
        unknown = any(row is not None and row.token_states is None for row in batch.rows)
        if self.team.total(int(unknown)):
            return None
        assert self.modules.value_head is not None
        hidden_size = self.model.config.get_text_config().hidden_size
        dead = torch.zeros(1, hidden_size, device=self.accelerator.device)
        states = [dead if row is None else row.token_states for row in batch.rows]
        length = max(map(len, states))
        size = self.args.per_device_train_batch_size
        values = []
        for start in range(0, len(states), size):
            padded = nn.utils.rnn.pad_sequence(states[start : start + size], batch_first=True)
            padded = nn.functional.pad(padded, (0, 0, 0, length - padded.size(1)))
            values.append(self.modules.value_head(padded, batch.inputs["critic_state"][start : start + size]))
        for row in batch.rows:
            if row is not None:
                row.token_states = None  # frees most of the row's memory
        return torch.cat(values)

    def _make_row_tensors(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        """Returns the inputs of forward passes besides token ids, each of shape `(B, ...)`."""
        if self.args.critic == "none":
            return {}
        assert self.modules.value_head is not None
        batch.critic_states = self._critic_states(batch)
        return {"critic_state": self.modules.value_head.states.standardize(batch.critic_states)}

    def _critic_states(self, batch: TeamBatch) -> torch.Tensor:
        """Returns what the critic knows when each row begins, `(B, H)`: prompt states, layer-normalised."""
        states = batch.of_rows("prompt_state", self.model.config.get_text_config().hidden_size)
        if self.args.critic == "agent":
            return standardize(states)
        device = self.accelerator.device
        stage = torch.tensor([-1 if row is None else row.stage for row in batch.rows], device=device)
        # Rows with the same history may be in several episodes, all of which give them the same state
        index = batch.row_of.flatten()
        episode = torch.arange(len(batch.row_of), device=device).repeat_interleave(batch.row_of.size(1))
        pooled = pool_team_states(states[index], episode, stage[index], batch.agent[index], live=stage[index] >= 0)
        return standardize(torch.zeros_like(states).index_copy(0, index, pooled))

    def _forward_context(self, rows: dict[str, torch.Tensor], keep: int) -> ForwardContext:
        """Returns the context of one forward pass."""
        return ForwardContext(keep=keep, critic_state=rows.get("critic_state"))

    def _policy_is_active(self) -> bool:
        """Whether forward passes use the trained adapter, not the reference."""
        layer = next((m for m in self.model.modules() if isinstance(m, BaseTunerLayer)), None)
        return layer is None or (not layer.disable_adapters and "default" in layer.active_adapters)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        if self._row_tensors is None or model is self.ref_model or not self._policy_is_active():
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs
            )
        chunk = batch_size or input_ids.size(0)
        outputs, values = [], []
        # One call per chunk, because the hooks must know the rows of a forward pass
        for start in range(0, input_ids.size(0), chunk):
            part = slice(start, start + chunk)
            rows = {key: tensor[part] for key, tensor in self._row_tensors.items()}
            with self.modules.rows(self._forward_context(rows, logits_to_keep)) as context:
                outputs.append(
                    super()._get_per_token_logps_and_entropies(
                        model, input_ids[part], attention_mask[part], logits_to_keep, **kwargs
                    )
                )
            values.append(context.values)
        self._forward = context  # an update has only one chunk
        logps, entropies, aux_losses = zip(*outputs, strict=True)
        result = (
            torch.cat(logps),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )
        if self._batch is not None and not torch.is_grad_enabled():
            self._batch.logps = result[0]
            self._batch.values = None if values[0] is None else torch.cat(values)
        return result

    # Credit

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        # TRL computes `ref_per_token_logps` if beta is not 0. `_compute_loss` sets beta to 0 with kl_penalty="reward"
        output = super()._generate_and_score_completions(inputs)
        self._row_tensors = None
        return output

    @torch.no_grad()
    def _ensure_rollout_pass(self, output: dict[str, Any], batch: TeamBatch, needs_logps: bool) -> None:
        """
        Makes a forward pass for V_old and, if needed, the old log-probabilities, unless TRL has made one. V_old alone comes
        from generation if possible.
        """
        if batch.logps is None and (needs_logps or batch.values is None):
            args = self.args
            size = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
            self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=size,
            )
            output["old_per_token_logps"] = batch.logps

    def _assign_credit(self, output: dict[str, Any], batch: TeamBatch) -> None:
        args = self.args
        mask = output["completion_mask"] * output["tool_mask"]
        in_reward = args.kl_penalty == "reward" and self.beta != 0.0
        if args.critic != "none" or in_reward:
            self._ensure_rollout_pass(output, batch, needs_logps=in_reward)
        rewards = self._token_rewards(output, batch, mask)
        next_row = self._next_rows(batch)
        discount = self._discounts(batch, next_row)
        to_go, _ = gae(rewards, torch.zeros_like(rewards), mask, args.gamma, 1.0, next_row, discount, 1.0)
        mixes = args.critic == "mixed" or (args.critic != "none" and batch.is_counterfactual)
        if args.critic == "none" or mixes:
            baseline = batch.row_returns() - self._group_advantages(batch)
            advantages = (to_go - baseline[:, None]) * mask
        if args.critic != "none":
            values = batch.values
            assert values is not None
            values = nn.functional.pad(values, (0, mask.size(1) - values.size(1)))  # pad_to_multiple_of
            values = self._update_critic_moments(values, to_go, mask, batch)
            estimated, returns = gae(rewards, values, mask, args.gamma, args.lam, next_row, discount, args.lam_turn)
            output["old_values"], output["returns"] = values, returns
            subtracted = values
            if mixes:
                first = values.gather(1, mask.argmax(1, keepdim=True)).squeeze(1)
                state = cast(dict, self.state.stateful_callbacks)  # which checkpoints hold
                share, moments = critic_shares(batch, first, args.critic_share, state.get(MOMENTS))
                state |= {} if moments is None else {MOMENTS: moments}
                self._pool("critic/baseline_share", (share * batch.in_loss).sum(), batch.in_loss.sum())
                advantages = (1 - share[:, None]) * advantages + share[:, None] * estimated
                subtracted = (1 - share[:, None]) * baseline[:, None] + share[:, None] * values
            else:
                advantages = estimated
            self._log_critic(subtracted, to_go, mask)
        batch.advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        if args.advantage_normalization != "none":
            groups = batch.agent if args.advantage_normalization == "agent" else None
            advantages = normalize_advantages(
                advantages, mask, groups, self._sum_over_processes, len(self.agents) if groups is not None else 1
            )
        weights = self._row_weights(batch, mask)
        output["advantages"] = advantages * weights[:, None]
        output["row_weight"] = weights

    def _group_advantages(self, batch: TeamBatch) -> torch.Tensor:
        if self.args.critic == "mixed":  # what is mixed with the critic does not see the row's own return
            return over_siblings(batch, kind="rloo")
        return super()._group_advantages(batch)

    def _token_rewards(self, output: dict[str, Any], batch: TeamBatch, mask: torch.Tensor) -> torch.Tensor:
        """Returns the reward of every token, `(B, T)`: the row's reward at its last live token, minus the KL penalty."""
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        length = mask.size(1)
        last = length - 1 - mask.flip(1).argmax(1)
        rewards.scatter_(1, last[:, None], self._row_rewards(batch)[:, None])
        if self.args.kl_penalty == "reward" and self.beta != 0.0:
            kl = output["old_per_token_logps"] - output["ref_per_token_logps"]
            rewards = rewards - self.beta * kl
            totals = self._sum_over_processes(torch.stack([(kl * mask).sum(), mask.sum().float()]))
            self._metric("kl", (totals[0] / totals[1].clamp(min=1)).item())
        return rewards * mask

    def _row_rewards(self, batch: TeamBatch) -> torch.Tensor:
        """
        Returns the reward of each row, `(B,)`: the discounted sum of the rewards from its turn up to the agent's next row.
        Rows that are not the agent's last one in a turn have 0.
        """
        returns = batch.row_returns()
        # R_k + γ R_{k+1} + ... up to the next row's turn = return at k - γ^(next - k) · return at the next row
        following = self._next_rows(batch)
        later = torch.where(following >= 0, returns[following.clamp(min=0)], torch.zeros_like(returns))
        return returns - self._discounts(batch, following) * later

    def _discounts(self, batch: TeamBatch, next_row: torch.Tensor) -> torch.Tensor:
        """
        Returns the discount from each row to its agent's next one, `(B,)`: `gamma_turn` to the power of the number of turns
        between them.
        """
        turns = torch.where(next_row >= 0, batch.turn[next_row.clamp(min=0)] - batch.turn, 0)
        return self.args.gamma_turn ** turns.float()

    def _next_rows(self, batch: TeamBatch) -> torch.Tensor:
        """
        Returns the index of the same agent's next trained row in the same episode, or -1, `(B,)`. With counterfactual credit,
        what a row earns includes everything after it.
        """
        if batch.is_counterfactual:
            return torch.full_like(batch.turn, -1)
        rows = batch.row_of[batch.first_episode]  # (B, S)
        own = rows == torch.arange(len(rows), device=rows.device)[:, None]
        later = own.cumsum(1).bool() & ~own & batch.in_loss[rows] & (batch.agent[rows] == batch.agent[:, None])
        following = rows.gather(1, later.int().argmax(1, keepdim=True)).squeeze(1)
        return torch.where(batch.in_loss & later.any(1), following, -1)

    def _update_critic_moments(
        self, values: torch.Tensor, to_go: torch.Tensor, mask: torch.Tensor, batch: TeamBatch
    ) -> torch.Tensor:
        """
        Adds a training batch to the moments that the critic knows. Those of states count from the next batch on. Those of returns
        count at once, so that the first batch has values near its mean return: with `lam` below 1, a constant error would favour
        short replies over long ones.

        Args:
            values (`torch.Tensor` of shape `(B, T)`): Values at batch, in reward units.
            to_go (`torch.Tensor` of shape `(B, T)`): Discounted sum of the rewards from each token on.
            mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens.
            batch ([`TeamBatch`]): The batch.

        Returns:
            `torch.Tensor` of shape `(B, T)`: The values with the new moments, in reward units.
        """
        head = self.modules.value_head
        assert head is not None and batch.critic_states is not None
        if not self.model.training:
            return values
        head.states.update(batch.critic_states[mask.any(1)], self._sum_over_processes)
        return head.update_returns(to_go[mask.bool()], values, self._sum_over_processes)

    def _log_critic(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """
        Logs how well baselines predict what was earned after each token, each `(B, T)`: λ-returns contain the estimates. In double
        precision, because variances are small differences of moments.
        """
        values, returns, count = values.double(), returns.double(), mask.sum()
        error = returns - values
        for name, x in (("value_mean", values), ("return_mean", returns), ("residual_mean", error)):
            self._pool(f"critic/{name}", (x * mask).sum(), count)
        for name, x in (("return_square", returns), ("residual_square", error)):
            self._pool(f"critic/{name}", (x.square() * mask).sum(), count)

    def _pooled_means(self) -> dict[str, float]:
        means = super()._pooled_means()
        if "critic/return_square" in means:
            variance, unexplained = (
                means.pop(f"critic/{name}_square") - means[f"critic/{name}_mean"] ** 2
                for name in ("return", "residual")
            )
            if variance > 1e-12:
                means["critic/explained_variance"] = 1 - unexplained / variance
        return means

    # Update

    def _rows_without_advantage_matter(self) -> bool:
        """They do: the losses of the team's modules are over all rows."""
        return True

    def _compute_loss(self, model, inputs):
        names = self._row_tensor_names
        self._row_tensors = {name: inputs[name] for name in names if name in inputs}
        with lent(self, beta=0.0 if self.args.kl_penalty == "reward" else self.beta):
            loss = super()._compute_loss(model, inputs)
        self._row_tensors = None
        assert self._forward is not None
        loss = loss + self._team_loss(inputs, self._forward)
        self._forward = None
        return loss

    _row_tensor_names: tuple[str, ...] = ("critic_state",)

    def _team_loss(self, inputs: dict[str, Any], forward: ForwardContext) -> torch.Tensor:
        """Returns the losses of the team's modules, from the forward pass of TRL's loss."""
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        loss = torch.zeros((), device=mask.device)
        if forward.values is not None:
            head = self.modules.value_head
            assert head is not None
            values, old, returns = (
                x / head.returns.scale for x in (forward.values, inputs["old_values"], inputs["returns"])
            )
            per_token = value_loss(values, old, returns, mask, self.args.cliprange_value)
            total = (per_token * mask * inputs["row_weight"][:, None]).sum()
            loss = loss + self.args.vf_coef * total / self._loss_window(inputs["num_items_in_batch"])
            self._pool("critic/value_loss", (per_token * mask).sum(), mask.sum())
        return loss

    # Checkpoints

    def _describe_modules(self) -> dict[str, Any]:
        return {"critic": self.args.critic}
