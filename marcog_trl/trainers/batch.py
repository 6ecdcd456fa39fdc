"""A generation batch: the episodes of this process, and their replies as rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import torch

from marcog_trl.agents import Slot
from marcog_trl.algorithms.advantages import tree_returns
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.rollout.tree import Tree


def rewards_and_returns(
    turns: Sequence[Sequence[Episode]],
    agents: Sequence[str],
    branches: Sequence[int],
    gamma_turn: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Returns what scored episodes earned.

    Args:
        turns (`Sequence[Sequence[Episode]]` of length K): Episodes at the end of each turn. E is the length of the last list.
        agents (`Sequence[str]` of length N): Names of the agents.
        branches (`Sequence[int]` of length K): Joint actions of each turn that follow the same history.
        gamma_turn (`float`): Discount per turn, in [0, 1].
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Precision of the returns.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: Rewards and returns, `(E, N, K)`, and whether the turn was played and is
        not masked, `(E, K)`.
    """
    size, num_turns = len(turns[-1]), len(turns)
    rewards = torch.zeros(size, len(agents), num_turns, dtype=dtype)
    played, counted = torch.zeros(2, size, num_turns, dtype=torch.bool)
    for k, episodes in enumerate(turns):
        for e, episode in enumerate(episodes):
            if len(episode.turns) <= k:
                continue
            of_turn = episode.turns[k].rewards
            if of_turn is not None:
                rewards[e, :, k] = torch.tensor([of_turn[agent] for agent in agents], dtype=dtype)
            played[e, k] = True
            counted[e, k] = of_turn is not None and not episode.masked
    returns, has_reward = tree_returns(rewards, played, counted, branches, gamma_turn)
    return rewards, returns, has_reward


@dataclass
class TeamBatch:
    """
    One generation batch of this process: what was played, and after [`TeamBatch.close`] also what it earned.

    Rows are sorted by problem, then as [`~marcog_trl.rollout.tree.Tree`] says. E episodes have K turns, N agents and S slots.

    Args:
        tree ([`~marcog_trl.rollout.tree.Tree`]): Where the episodes of a problem branch.
        turns (`list[list[Episode]]` of length K): Episodes at the end of each turn, sorted by problem. E is the length of the
            last list.
        agents (`list[str]` of length N): Names of the agents.
        slots (`Sequence[Slot]` of length S): The slots of the workflow.
        trained_agents (`Sequence[str]`): Names of the agents that are trained.
        device (`torch.device`): Device of the tensors.
        training (`bool`, *optional*, defaults to `True`): Whether it is a batch of training, not of evaluation.
        spread_siblings (`int`, *optional*): Size of the groups of siblings, if they may be on other processes.

    Attributes:
        rows (`list[Row | None]` of length B): The rows of the team's model. `None` if the episode did not use the slot, or its
            agent speaks through an endpoint.
        replies (`list[Row | None]` of length B): The same with those of agents behind endpoints.
        agent, turn (`torch.Tensor` of shape `(B,)`): Index of the row's agent, and its turn.
        episodes_of_row (`torch.Tensor` of shape `(B, M)`): Indices of the episodes that contain the row, in the list of its
            turn, also for unused rows. M is 1, or larger if joint actions share replies.
        row_of (`torch.Tensor` of shape `(E, S)`): The row of each slot in each episode, also for unused rows.
        agent_is_trained (`torch.Tensor` of shape `(B,)`): Whether the row's agent is trained.
        is_used (`torch.Tensor` of shape `(B,)`): Whether the slot is used and, once the batch is closed, has a reward.
        in_loss (`torch.Tensor` of shape `(B,)`): Whether the row is in the loss. Truncated rows under
            `mask_truncated_completions` are not, but their rewards count in the group baseline.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on tokens in the loss, once the log-probabilities are computed.
        values, logps, ref_logps (`torch.Tensor` of shape `(B, T)`, *optional*): What the critic, the policy and the reference gave
            for each token at rollout, if it was computed.
        run_policy (`Callable`): Runs the policy over the batch, which sets `logps` and `values`, on all processes.
        advantages (`torch.Tensor` of shape `(B,)`, *optional*): Advantage of each row in reward units, once it is credited.
        inputs (`dict[str, torch.Tensor]`): Inputs of forward passes besides token ids, each of shape `(B, ...)`.
        scores (`torch.Tensor` of shape `(E, K, F)`): Value of each reward function, averaged over agents. NaN if it gave none.
        rewards, returns (`torch.Tensor` of shape `(E, N, K)`): Reward of each agent in each turn, and return from that turn on.
            0 without a reward.
        has_reward (`torch.Tensor` of shape `(E, K)`): Whether the turn was played and is not masked.
    """

    tree: Tree
    turns: list[list[Episode]]
    agents: list[str]
    slots: Sequence[Slot]
    trained_agents: InitVar[Sequence[str]]
    device: torch.device
    training: bool = True
    spread_siblings: int | None = None
    rows: list[Row | None] = field(init=False)
    replies: list[Row | None] = field(init=False)
    agent: torch.Tensor = field(init=False)
    turn: torch.Tensor = field(init=False)
    episodes_of_row: torch.Tensor = field(init=False)
    row_of: torch.Tensor = field(init=False)
    agent_is_trained: torch.Tensor = field(init=False)
    is_used: torch.Tensor = field(init=False)
    in_loss: torch.Tensor = field(init=False)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    mask: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    values: torch.Tensor | None = None
    logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    run_policy: Callable[[], None] = lambda: None
    advantages: torch.Tensor | None = None
    # Once the batch is closed
    scores: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    returns: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    has_reward: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self, trained_agents: Sequence[str]):
        tree, device = self.tree, self.device
        problems = torch.arange(len(self.episodes) // tree.joint_actions[-1])[:, None, None]
        self.replies = [None] * (len(problems) * len(tree.slots))
        for k, episodes in enumerate(self.turns):
            for e, episode in enumerate(episodes):
                problem, node = divmod(e, tree.joint_actions[k])
                for row in episode.rows:
                    if row.slot.turn == k:
                        self.replies[problem * len(tree.slots) + tree.places[row.slot][node]] = row
        self.rows = [None if row is None or row.completion is not None else row for row in self.replies]
        of_slot = tree.slots * len(problems)
        turn = torch.tensor([slot.turn for slot in of_slot])
        first_episode = problems.flatten().repeat_interleave(len(tree.slots)) * torch.tensor(tree.joint_actions)[turn]
        episodes_of_row = torch.tensor(tree.episodes_of_row).repeat(len(problems), 1) + first_episode[:, None]
        self.agent = torch.tensor([self.agents.index(slot.agent) for slot in of_slot], device=device)
        self.turn, self.episodes_of_row = turn.to(device), episodes_of_row.to(device)
        self.row_of = (torch.tensor(tree.path(self.slots)) + problems * len(tree.slots)).flatten(0, 1).to(device)
        self.agent_is_trained = torch.tensor([slot.agent in trained_agents for slot in of_slot], device=device)
        self.is_used = self.in_loss = torch.tensor([row is not None for row in self.replies], device=device)

    def close(self, gamma_turn: float = 1.0) -> None:
        """
        Takes the rewards of the episodes, once all turns are scored, and computes returns.

        Args:
            gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn, in [0, 1].
        """
        first = self.episodes[0].turns[0].score
        assert first is not None
        self.scores = torch.full((len(self.episodes), self.num_turns, len(first.values)), torch.nan)
        for k, episodes in enumerate(self.turns):
            for e, episode in enumerate(episodes):
                if len(episode.turns) > k and (score := episode.turns[k].score) is not None:
                    self.scores[e, k] = torch.tensor(score.values)
        found = rewards_and_returns(self.turns, self.agents, self.tree.branches, gamma_turn)
        self.rewards, self.returns, self.has_reward = (tensor.to(self.device) for tensor in found)
        self.is_used = self.is_used & self.has_reward[self.episodes_of_row, self.turn[:, None]].any(1)

    @property
    def episodes(self) -> list[Episode]:
        """The finished episodes."""
        return self.turns[-1]

    @property
    def num_turns(self) -> int:
        """Number of turns of the workflow."""
        return len(self.turns)

    @property
    def is_counterfactual(self) -> bool:
        """Whether siblings are replies in exactly the same context."""
        return self.tree.by_stage

    @property
    def siblings(self) -> list[int]:
        """Sizes of the groups of siblings of this process, in the order of the rows."""
        return self.tree.siblings * (len(self.rows) // len(self.tree.slots))

    @property
    def first_episode(self) -> torch.Tensor:
        """Index of the first episode that contains the row, in the list of the last turn, `(B,)`."""
        descendants = self.tree.joint_actions[-1] // torch.tensor(self.tree.joint_actions, device=self.device)
        return self.episodes_of_row[:, 0] * descendants[self.turn]

    @property
    def in_statistics(self) -> torch.Tensor:
        """Whether the row is used and its agent is trained, `(B,)`. Statistics of advantages are over these rows."""
        return self.is_used & self.agent_is_trained

    @functools.cached_property
    def last_act(self) -> torch.Tensor:
        """Whether the row is its agent's last one in the turn, `(B,)`."""
        turn_of = [None if row is None else (row.episode, row.slot.agent, row.slot.turn) for row in self.replies]
        # Later rows of the same agent and turn replace earlier ones
        last_row = {turn: i for i, turn in enumerate(turn_of)}
        return torch.tensor([last_row[turn] == i for i, turn in enumerate(turn_of)], device=self.device)

    def of_rows(self, name: str, size: int) -> torch.Tensor:
        """Stacks a field of the rows, `(B, size)`, with zeros for unused rows."""
        found = [None if row is None else getattr(row, name) for row in self.rows]
        nothing = torch.zeros(size, device=self.device)  # if only endpoints replied
        zero = torch.zeros_like(next((tensor for tensor in found if tensor is not None), nothing))
        return torch.stack([zero if tensor is None else tensor for tensor in found])

    def row_returns(self) -> torch.Tensor:
        """Returns the return of the row's agent from the row's turn on, `(B,)`. 0 for rows without a reward."""
        return self.of_agent(self.returns) * self.is_used

    def row_scores(self) -> torch.Tensor:
        """Returns the value of each reward function, `(B, F)`. NaN for rows that are not their agent's last one in a turn."""
        rows = torch.full((len(self.rows), self.scores.size(2)), torch.nan, device=self.device)
        scored = self.is_used & self.last_act
        rows[scored] = self.mean_over_episodes(self.scores.to(rows))[scored]
        return rows

    def mean_over_episodes(self, values: torch.Tensor) -> torch.Tensor:
        """Maps `(E, K, ...)` to rows, `(B, ...)`: the mean over the episodes with a reward that contain the row, or 0."""
        of_row = values[self.episodes_of_row, self.turn[:, None]]
        counted = self.has_reward[self.episodes_of_row, self.turn[:, None]].view(
            *of_row.shape[:2], *[1] * (of_row.dim() - 2)
        )
        total = torch.where(counted, of_row, torch.zeros_like(of_row)).sum(1)
        return total / counted.sum(1).clamp(min=1)

    def mean_over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Maps `(B, T)` to rows, `(B,)`: the mean over the tokens in the loss. Leaves values of rows as they are."""
        return values if values.dim() == 1 else (values * self.mask).sum(1) / self.mask.sum(1).clamp(min=1)

    def of_agent(self, values: torch.Tensor) -> torch.Tensor:
        """Maps `(E, N, K)` to rows, `(B,)`: the mean for the row's agent and turn."""
        by_agent = self.mean_over_episodes(values.transpose(1, 2))
        return by_agent.gather(1, self.agent[:, None]).squeeze(1)
