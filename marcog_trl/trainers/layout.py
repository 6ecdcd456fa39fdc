"""Layout of a generation batch: groups and rows of its episodes, and batch sizes that hold whole problems."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset

from marcog_trl.rollout.records import Episode, Row, Score
from marcog_trl.rollout.tree import Tree
from marcog_trl.trainers.config import MultiAgentConfig


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


@dataclass
class Rollout:
    """
    One generation batch of this process.

    Rows are sorted by problem, then as [`~marcog_trl.rollout.tree.Tree`] says.

    Args:
        tree ([`~marcog_trl.rollout.tree.Tree`]): Where the episodes of a problem branch.
        turns (`list[list[Episode]]` of length K): Episodes at the end of each turn, sorted by problem. E is the length of the
            last list.
        rows (`list[Row | None]` of length B): The rows of the team's model. `None` if the episode did not use the slot, or its
            agent speaks through an endpoint.
        replies (`list[Row | None]` of length B): The same with those of agents behind endpoints.
        wait (`Callable`, *optional*): Waits for the verdicts on the solutions of the last turn.
        scores (`torch.Tensor` of shape `(E, K, F)`): Value of each reward function, averaged over agents. NaN before scoring,
            and if the function returned `None`.
        agent (`torch.Tensor` of shape `(B,)`): Index of the row's agent.
        turn (`torch.Tensor` of shape `(B,)`): Turn of the row.
        episodes_of_row (`torch.Tensor` of shape `(B, M)`): Indices of the episodes that contain the row, in the list of its
            turn, also for unused rows. M is 1, or larger if joint actions share replies.
        row_of (`torch.Tensor` of shape `(E, S)`): The row of each slot in each episode, also for unused rows.
        live (`torch.Tensor` of shape `(B,)`): Whether the slot is used and, after scoring, not masked.
        learns (`torch.Tensor` of shape `(B,)`): Whether the row's agent is trained.
        trained (`torch.Tensor` of shape `(B,)`): Whether the row is live and in the loss. Rows truncated under
            `mask_truncated_completions` are not in the loss, but their rewards count in the group baseline.
        rewards, returns (`torch.Tensor` of shape `(E, N, K)`): Reward of each agent in each turn, and return from that
            turn on. 0 before scoring, and without a reward.
        counted (`torch.Tensor` of shape `(E, K)`): Whether the turn was played and is not masked.
    """

    tree: Tree
    turns: list[list[Episode]]
    rows: list[Row | None]
    replies: list[Row | None]
    wait: Callable[[], None] | None
    scores: torch.Tensor
    agent: torch.Tensor
    turn: torch.Tensor
    episodes_of_row: torch.Tensor
    row_of: torch.Tensor
    live: torch.Tensor
    learns: torch.Tensor
    trained: torch.Tensor
    rewards: torch.Tensor
    returns: torch.Tensor
    counted: torch.Tensor

    # Inputs of forward passes besides token ids, each `(B, ...)`; values and log-probabilities at rollout, `(B, T)`
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None
    critic_states: torch.Tensor | None = None  # before they are standardised, `(B, H)`
    logps: torch.Tensor | None = None
    # Advantage of each row before it is normalised or weighted, `(B,)`
    advantages: torch.Tensor | None = None

    @classmethod
    def of(
        cls, trainer: MultiAgentTrainer, tree: Tree, turns: list[list[Episode]], wait: Callable[[], None] | None
    ) -> Rollout:
        """Makes a batch before scoring."""
        device, agents, slots = trainer.accelerator.device, trainer.agents, trainer.workflow.slots
        problems = torch.arange(len(turns[-1]) // tree.joint_actions[-1])[:, None, None]
        rows: list[Row | None] = [None] * (len(problems) * len(tree.slots))
        for k, episodes in enumerate(turns):
            for e, episode in enumerate(episodes):
                problem, node = divmod(e, tree.joint_actions[k])
                for row in episode.rows:
                    if row.slot.turn == k:
                        rows[problem * len(tree.slots) + tree.places[row.slot][node]] = row
        of_slot = tree.slots * len(problems)
        turn = torch.tensor([slot.turn for slot in of_slot])
        first_episode = problems.flatten().repeat_interleave(len(tree.slots)) * torch.tensor(tree.joint_actions)[turn]
        num_episodes, num_turns = len(turns[-1]), len(turns)
        live = torch.tensor([row is not None for row in rows], device=device)
        return cls(
            tree=tree,
            turns=turns,
            rows=[None if row is None or row.outside is not None else row for row in rows],
            replies=rows,
            wait=wait,
            scores=torch.full((num_episodes, num_turns, len(trainer.reward_funcs)), torch.nan),
            agent=torch.tensor([agents.index(slot.agent) for slot in of_slot], device=device),
            turn=turn.to(device),
            episodes_of_row=(torch.tensor(tree.episodes_of_row).repeat(len(problems), 1) + first_episode[:, None]).to(
                device
            ),
            row_of=(torch.tensor(tree.path(slots)) + problems * len(tree.slots)).flatten(0, 1).to(device),
            live=live,
            learns=torch.tensor([slot.agent in trainer.trained_agents for slot in of_slot], device=device),
            trained=live,
            rewards=torch.zeros(num_episodes, len(agents), num_turns, device=device),
            returns=torch.zeros(num_episodes, len(agents), num_turns, device=device),
            counted=torch.zeros(num_episodes, num_turns, dtype=torch.bool, device=device),
        )

    def take_scores(self, agents: list[str]) -> torch.Tensor:
        """Copies the rewards of the episodes, and returns whether each turn was played, `(E, K)`."""
        rewards = torch.zeros(self.rewards.shape)
        played, counted = torch.zeros(2, *self.counted.shape, dtype=torch.bool)
        for k, episodes in enumerate(self.turns):
            for e, episode in enumerate(episodes):
                if len(episode.turns) <= k:
                    continue
                turn = episode.turns[k]
                assert turn.score is not None
                self.scores[e, k] = torch.tensor(turn.score.values)
                if turn.rewards is not None:
                    rewards[e, :, k] = torch.tensor([turn.rewards[agent] for agent in agents])
                played[e, k] = True
                counted[e, k] = turn.rewards is not None and not episode.masked
        self.rewards.copy_(rewards)
        self.counted.copy_(counted)
        return played.to(self.counted.device)

    def score_of(self, row: Row) -> Score | None:
        """Returns the score of a row's turn. If several episodes contain the row, takes the first."""
        turn = row.slot.turn
        return self.turns[turn][row.episode].turns[turn].score

    @property
    def episodes(self) -> list[Episode]:
        """The finished episodes."""
        return self.turns[-1]

    @property
    def first_episode(self) -> torch.Tensor:
        """Index of the first episode that contains the row, in the list of the last turn, `(B,)`."""
        descendants = self.tree.joint_actions[-1] // torch.tensor(self.tree.joint_actions, device=self.turn.device)
        return self.episodes_of_row[:, 0] * descendants[self.turn]

    @property
    def learning(self) -> torch.Tensor:
        """Whether the row is live and its agent is trained, `(B,)`. Statistics of the losses are over these rows."""
        return self.live & self.learns

    @property
    def siblings(self) -> list[int]:
        """Sizes of the groups of siblings, in the order of the rows."""
        return self.tree.siblings * (len(self.rows) // len(self.tree.slots))

    @functools.cached_property
    def last_act(self) -> torch.Tensor:
        """Whether the row is its agent's last one in the turn, `(B,)`."""
        turn_of = [None if row is None else (row.episode, row.slot.agent, row.slot.turn) for row in self.replies]
        # Later rows of the same agent and turn replace earlier ones
        last_row = {turn: i for i, turn in enumerate(turn_of)}
        return torch.tensor([last_row[turn] == i for i, turn in enumerate(turn_of)], device=self.live.device)

    def of_rows(self, name: str, size: int) -> torch.Tensor:
        """Stacks a field of the rows, `(B, size)`, with zeros for unused rows."""
        found = [None if row is None else getattr(row, name) for row in self.rows]
        nothing = torch.zeros(size, device=self.live.device)  # if only endpoints replied
        zero = torch.zeros_like(next((tensor for tensor in found if tensor is not None), nothing))
        return torch.stack([zero if tensor is None else tensor for tensor in found])

    def row_returns(self) -> torch.Tensor:
        """Returns the return of the row's agent from the row's turn on, `(B,)`. 0 for rows that are not live."""
        return self.of_agent(self.returns) * self.live

    def mean_over_episodes(self, values: torch.Tensor) -> torch.Tensor:
        """Maps `(E, K, ...)` to rows, `(B, ...)`: the mean over the counted episodes that contain the row, or 0."""
        of_row = values[self.episodes_of_row, self.turn[:, None]]
        counted = self.counted[self.episodes_of_row, self.turn[:, None]].view(
            *of_row.shape[:2], *[1] * (of_row.dim() - 2)
        )
        total = torch.where(counted, of_row, torch.zeros_like(of_row)).sum(1)
        return total / counted.sum(1).clamp(min=1)

    def of_agent(self, values: torch.Tensor) -> torch.Tensor:
        """Maps `(E, N, K)` to rows, `(B,)`: the mean for the row's agent and turn."""
        by_agent = self.mean_over_episodes(values.transpose(1, 2))
        return by_agent.gather(1, self.agent[:, None]).squeeze(1)


# Batch sizes


def fit_batches(trainer: MultiAgentTrainer, args: MultiAgentConfig, train_dataset: Any) -> None:
    """
    Sets the batch sizes and `save_steps` that `args` leaves open, and checks the others.

    Raises:
        ValueError: If a batch does not hold whole problems, or `train_dataset` is smaller than a generation batch.
    """
    _fit_train_batch(trainer, args, train_dataset)
    _fit_eval_batch(trainer, args)
    _fit_save_steps(args)


def _fit_train_batch(trainer: MultiAgentTrainer, args: MultiAgentConfig, train_dataset: Any) -> None:
    tree, num_processes = trainer._tree(training=True), args.world_size
    whole = len(tree.slots)
    # Number of processes over which the rows of a problem are spread
    spread = num_processes if trainer._splits_groups(training=True) else 1
    if args.auto_generation_batch:
        # The smallest number of micro-batches that holds whole problems and whole accumulation windows
        micro_batches = whole // math.gcd(whole, args.per_device_train_batch_size * spread)
        args.steps_per_generation = math.lcm(micro_batches, args.gradient_accumulation_steps)
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * num_processes
    # The configuration sets these
    assert args.steps_per_generation is not None and args.generation_batch_size is not None
    rows = args.per_device_train_batch_size * args.steps_per_generation * spread
    layout = f"{whole} rows ({_factors(trainer, tree)})"
    if rows % whole:
        fitting = math.lcm(whole, args.per_device_train_batch_size * spread) * (num_processes // spread)
        where = f" on each of {num_processes} processes" if spread < num_processes else ""
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} cannot hold whole problems of {layout}{where}. Set "
            f"generation_batch_size={fitting}."
        )
    if isinstance(train_dataset, Dataset) and len(train_dataset) < args.generation_batch_size // whole:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} problems, but a generation batch of "
            f"generation_batch_size={args.generation_batch_size} rows needs {args.generation_batch_size // whole}. Add "
            "problems, or set a smaller generation_batch_size."
        )


def _factors(trainer: MultiAgentTrainer, tree: Tree) -> str:
    """What the number of rows of a training problem consists of."""
    args = trainer.args
    if args.credit == "counterfactual":
        return " + ".join(
            str(rows * len(level.slots)) for rows, level in zip(tree.rows_of_slot, tree.levels, strict=True)
        )
    kind = "slots" if len(tree.siblings) == len(trainer.workflow.slots) else "groups of a tree"
    return f"num_generations={args.num_generations} x {len(tree.siblings)} {kind}"


def _fit_eval_batch(trainer: MultiAgentTrainer, args: MultiAgentConfig) -> None:
    assert args.num_generations_eval is not None and args.per_device_eval_batch_size is not None
    tree = trainer._tree(training=False)
    whole = len(tree.slots)
    spread = args.world_size if trainer._splits_groups(training=False) else 1
    if args.auto_eval_batch:
        args.per_device_eval_batch_size = whole * max(1, math.ceil(8 / whole))
    elif args.per_device_eval_batch_size * spread % whole:
        unit = whole // math.gcd(whole, spread)
        raise ValueError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} cannot hold whole problems of {whole} rows "
            f"(num_generations_eval={args.num_generations_eval} x {len(tree.siblings)} slots). Set "
            f"per_device_eval_batch_size={unit * math.ceil(args.per_device_eval_batch_size / unit)}."
        )


def _fit_save_steps(args: MultiAgentConfig) -> None:
    """A run that resumes inside a generation cycle would have other rollouts than an uninterrupted run."""
    assert args.save_steps is not None
    if args.auto_save_steps:
        cycle = generation_cycle(args)
        # The best model must be both saved and evaluated at the same step
        best = _evaluates_by_steps(args) and args.load_best_model_at_end
        unit = math.lcm(cycle, int(cast(float, args.eval_steps))) if best else cycle
        args.save_steps = unit * math.ceil(args.save_steps / unit)


def _evaluates_by_steps(args: MultiAgentConfig) -> bool:
    return args.eval_strategy == "steps" and args.eval_steps is not None and args.eval_steps >= 1


def generation_cycle(args: MultiAgentConfig) -> int:
    """Returns the number of optimizer steps between two steps that begin with a new rollout."""
    micro_batches = cast(int, args.steps_per_generation) * args.num_iterations
    return math.lcm(micro_batches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps


def warn_of_schedule(trainer: Any) -> None:
    """Warns if a rollout is used for several steps, or if no run can resume from some of the checkpoints."""
    args = trainer.args
    steps_per_generation, accumulation = cast(int, args.steps_per_generation), args.gradient_accumulation_steps
    if args.auto_generation_batch and steps_per_generation > accumulation:
        tree = trainer._tree(training=True)
        warnings.warn(
            f"Each rollout is used for {steps_per_generation // accumulation} optimizer steps: it has "
            f"{args.generation_batch_size} rows, because it holds whole problems of {len(tree.slots)} rows "
            f"({_factors(trainer, tree)}), and a step has "
            f"{cast(int, args.generation_batch_size) * accumulation // steps_per_generation}. Set "
            f"gradient_accumulation_steps={steps_per_generation} for one step per rollout.",
            stacklevel=3,
        )
    cycle = generation_cycle(args)
    name = {"steps": "save_steps", "best": "eval_steps" if _evaluates_by_steps(args) else None}.get(args.save_strategy)
    interval = 0 if name is None else getattr(args, name)
    if interval % cycle:
        # A value below 1 is a share of the run, and may fall on any step
        fitting = cycle * math.ceil((interval if interval >= 1 else 500) / cycle)
        warnings.warn(
            f"{name}={interval} saves inside a generation cycle of {cycle} optimizer steps. Runs resume only from checkpoints at "
            f"the end of a cycle; others can be loaded. Set {name}={fitting}.",
            stacklevel=3,
        )
    if args.save_strategy != "no" and args.max_steps > 0 and args.max_steps % cycle:
        warnings.warn(
            f"max_steps={args.max_steps} ends inside a generation cycle of {cycle} optimizer steps, so runs cannot resume from "
            f"the last checkpoint. Set max_steps={cycle * math.ceil(args.max_steps / cycle)}.",
            stacklevel=3,
        )
