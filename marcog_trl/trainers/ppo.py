"""Token-level PPO for teams, with a critic on the policy's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from marcog_trl.agents import Workflow
from marcog_trl.algorithms.advantages import gae, normalize_advantages, value_loss
from marcog_trl.algorithms.critic import NEWEST, ValueHead, pool_team_states, standardize
from marcog_trl.processes import sum_over_processes
from marcog_trl.team.modules import ForwardContext, TeamModule
from marcog_trl.trainers.algorithm import Algorithm, Credit, Mean, loss_mask
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.config import MultiAgentPPOConfig
from marcog_trl.trainers.credit import critic_shares, discounts, next_rows, over_siblings, row_rewards
from marcog_trl.trainers.trainer import MultiAgentTrainer


CRITIC, MOMENTS, VARIANCE = "critic", "critic_mix", "advantage_variance"


class PPO(Algorithm):
    """
    Proximal policy optimisation with a critic: a value head on the policy's last hidden state, generalised advantage estimation
    over the tokens and turns of each agent, and a KL penalty in the loss or the reward. TRL's loss clips the policy.

    Args:
        args ([`MultiAgentPPOConfig`]): Configuration.
        workflow ([`Workflow`]): The team's workflow.

    Source: PPO (https://huggingface.co/papers/1707.06347), GAE (https://huggingface.co/papers/1506.02438), IPPO
    (https://huggingface.co/papers/2011.09533) and MAPPO (https://huggingface.co/papers/2103.01955).
    """

    args: MultiAgentPPOConfig

    def __init__(self, args: MultiAgentPPOConfig, workflow: Workflow):
        super().__init__(args, workflow)
        self._hidden_size = 0

    @property
    def has_critic(self) -> bool:
        """Whether there is a value head."""
        return self.args.critic != "none"

    @property
    def _head(self) -> ValueHead:
        assert self.modules is not None and self.modules.value_head is not None
        return self.modules.value_head

    # The team

    def make_modules(self, model: Any) -> TeamModule:
        return TeamModule(value_head=self._make_value_head(model), critic_backprop=self.args.critic_backprop)

    def _make_value_head(self, model: Any) -> ValueHead | None:
        self._hidden_size = model.config.get_text_config().hidden_size
        return ValueHead(self._hidden_size) if self.has_critic else None

    def parameter_groups(self) -> dict[str, tuple[nn.Module, float | None]]:
        if not self.has_critic:
            return {}
        rate = self.args.critic_learning_rate
        return {
            CRITIC: (self._head, 0.256 / self._head.out.in_features if rate is None else rate)
        }  # wider heads learn faster

    def describe(self) -> dict[str, Any]:
        return {"critic": self.args.critic}

    # Episodes

    @property
    def generates_with_hooks(self) -> bool:
        """Whether generation runs the decoder once for the prompts, then once per token."""
        if self.args.use_vllm or self.args.use_transformers_continuous_batching:
            return False
        # Chunks of a prompt may look like tokens
        return cast(dict, self.args.generation_kwargs or {}).get("prefill_chunk_size") is None

    def begin_rollout(self, step: int, training: bool, process: int) -> dict[str, Any]:
        return {"prompt_states": self.has_critic, "token_states": self.has_critic and self.generates_with_hooks}

    def inputs(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        if not self.has_critic:
            return {}
        state = self._head.states.standardize(self._critic_states(batch))
        batch.values = self._values_of_generation(batch, state)
        return {"critic_state": state}

    def _critic_states(self, batch: TeamBatch) -> torch.Tensor:
        """Returns what the critic knows when each row begins, `(B, H)`: prompt states, layer-normalised."""
        states = batch.of_rows("prompt_state", self._hidden_size)
        if self.args.critic == "agent":
            return standardize(states)
        stage = torch.tensor([-1 if row is None else row.stage for row in batch.rows], device=batch.device)
        rows = batch.row_of
        pooled = pool_team_states(states[rows], stage[rows], batch.agent[rows], live=stage[rows] >= 0)
        # Rows with the same history may be in several episodes, all of which give them the same state
        return standardize(torch.zeros_like(states).index_copy(0, rows.flatten(), pooled.flatten(0, 1)))

    @torch.no_grad()
    def _values_of_generation(self, batch: TeamBatch, state: torch.Tensor) -> torch.Tensor | None:
        """
        Returns V_old, `(B, T)`, computed from the hidden states of generation, which saves a forward pass. `None` if a
        process does not have these states, for example with a vLLM server.
        """
        unknown = any(row is not None and row.token_states is None for row in batch.rows)
        if sum_over_processes(torch.tensor(int(unknown), device=batch.device)).item():
            return None
        unused = torch.zeros(1, self._hidden_size, device=batch.device)
        states = [unused if row is None else row.token_states for row in batch.rows]
        length, size = max(map(len, states)), self.args.per_device_train_batch_size
        values = []
        for start in range(0, len(states), size):
            padded = nn.utils.rnn.pad_sequence(states[start : start + size], batch_first=True)
            padded = nn.functional.pad(padded, (0, 0, 0, length - padded.size(1)))
            values.append(self._head(padded, state[start : start + size]))
        for row in batch.rows:
            if row is not None:
                row.token_states = None  # frees most of the row's memory
        return torch.cat(values)

    # Credit

    @property
    def penalizes_rewards(self) -> bool:
        return self.args.kl_penalty == "reward" and self.args.beta != 0.0

    def credit(self, batch: TeamBatch) -> Credit:
        args, mask = self.args, batch.mask
        if batch.logps is None and (self.penalizes_rewards or (self.has_critic and batch.values is None)):
            batch.run_policy()
        rewards = self._token_rewards(batch)
        following = next_rows(batch)
        discount = discounts(batch, following, args.gamma_turn)
        to_go, _ = gae(rewards, torch.zeros_like(rewards), mask, args.gamma, 1.0, following, discount, 1.0)
        inputs: dict[str, torch.Tensor] = {}
        mixes = self.has_critic and args.critic_share != 1
        if mixes or not self.has_critic:
            baseline = batch.row_returns() - self.group_advantages(batch)
            advantages = (to_go - baseline[:, None]) * mask
        if self.has_critic:
            assert batch.values is not None
            values = nn.functional.pad(batch.values, (0, mask.size(1) - batch.values.size(1)))  # pad_to_multiple_of
            if batch.training:
                values = self._update_critic_moments(values, to_go, batch)
            estimated, returns = gae(rewards, values, mask, args.gamma, args.lam, following, discount, args.lam_turn)
            inputs, subtracted = {"old_values": values, "returns": returns}, values
            if mixes:
                first = values.gather(1, mask.argmax(1, keepdim=True)).squeeze(1)
                share, moments = critic_shares(batch, first, args.critic_share, self.memory.get(MOMENTS))
                self.memory |= {} if moments is None else {MOMENTS: moments}
                self.log("critic/baseline_share", (share * batch.in_loss).sum(), batch.in_loss.sum())
                advantages = (1 - share[:, None]) * advantages + share[:, None] * estimated
                subtracted = (1 - share[:, None]) * baseline[:, None] + share[:, None] * values
            else:
                advantages = estimated
            self._log_critic(subtracted, to_go, mask)
        of_rows = batch.mean_over_tokens(advantages)
        if args.advantage_normalization != "none":
            advantages = self._normalized(advantages, batch)
        return Credit(advantages, of_rows, inputs)

    def _normalized(self, advantages: torch.Tensor, batch: TeamBatch) -> torch.Tensor:
        """
        Returns normalised advantages, `(B, T)`, divided by at least half the standard deviation of earlier batches: where all
        replies earn the same, the errors of the critic would become as large as advantages of other batches.
        """
        agents = batch.agent if self.args.advantage_normalization == "agent" else torch.zeros_like(batch.agent)
        batches, before = advantages.new_tensor(self.memory.get(VARIANCE, [0.0] * 2 * len(self.agents))).chunk(2)
        advantages, variance = normalize_advantages(advantages, batch.mask, agents, before / 4, sum_over_processes)
        if batch.training:
            seen = ~variance.isnan()
            new = torch.lerp(before, variance, (1 / (batches + 1)).clamp(min=NEWEST))
            self.memory[VARIANCE] = [*(batches + seen).tolist(), *torch.where(seen, new, before).tolist()]
        return advantages

    def group_advantages(self, batch: TeamBatch) -> torch.Tensor:
        if self.has_critic:  # what is mixed with the critic does not see the row's own return
            return over_siblings(batch, kind="rloo")
        return super().group_advantages(batch)

    def _token_rewards(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the reward of every token, `(B, T)`: the row's reward at its last live token, minus the KL penalty."""
        mask = batch.mask
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        last = mask.size(1) - 1 - mask.flip(1).argmax(1)
        rewards.scatter_(1, last[:, None], row_rewards(batch, self.args.gamma_turn)[:, None])
        if self.penalizes_rewards:
            assert batch.logps is not None and batch.ref_logps is not None
            kl = batch.logps - batch.ref_logps
            rewards = rewards - self.args.beta * kl
            self.log("kl", (kl * mask).sum(), mask.sum())
        return rewards * mask

    def _update_critic_moments(self, values: torch.Tensor, to_go: torch.Tensor, batch: TeamBatch) -> torch.Tensor:
        """
        Adds a training batch to the moments that the critic knows. Those of states count from the next batch on. Those of returns
        count at once, so that the first batch has values near its mean return: with `lam` below 1, a constant error would favour
        short replies over long ones.

        Args:
            values (`torch.Tensor` of shape `(B, T)`): Values at rollout, in reward units.
            to_go (`torch.Tensor` of shape `(B, T)`): Discounted sum of the rewards from each token on.
            batch ([`TeamBatch`]): The batch.

        Returns:
            `torch.Tensor` of shape `(B, T)`: The values with the new moments, in reward units.
        """
        self._head.states.update(self._critic_states(batch)[batch.mask.any(1)], sum_over_processes)
        return self._head.update_returns(to_go[batch.mask.bool()], values, sum_over_processes)

    def _log_critic(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """
        Logs how well baselines predict what was earned after each token, each `(B, T)`: λ-returns contain the estimates. In double
        precision, because variances are small differences of moments.
        """
        values, returns, count = values.double(), returns.double(), mask.sum()
        error = returns - values
        for name, x in (("value_mean", values), ("return_mean", returns), ("residual_mean", error)):
            self.log(f"critic/{name}", (x * mask).sum(), count)
        for name, x in (("return_square", returns), ("residual_square", error)):
            self.log(f"critic/{name}", (x.square() * mask).sum(), count)

    # Update

    def context(self, inputs: Mapping[str, Any], keep: int, part: int | None = None) -> ForwardContext:
        return ForwardContext(keep=keep, critic_state=inputs.get("critic_state"))

    def loss(self, forward: ForwardContext, inputs: Mapping[str, torch.Tensor], mean: Mean) -> torch.Tensor | None:
        if forward.values is None:
            return None
        mask, scale = loss_mask(inputs), self._head.returns.scale
        values, old, returns = (x / scale for x in (forward.values, inputs["old_values"], inputs["returns"]))
        per_token = value_loss(values, old, returns, mask, self.args.cliprange_value)
        self.log("critic/value_loss", (per_token * mask).sum(), mask.sum())
        total = (per_token * mask * inputs["row_weight"][:, None]).sum()
        return mean(self.args.vf_coef * total, inputs["num_items_in_batch"])


class MultiAgentPPOTrainer(MultiAgentTrainer):
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
    algorithm_class: type[Algorithm] = PPO
    args: MultiAgentPPOConfig
