"""How episodes lie in a generation batch: groups, rows, and which batch sizes hold whole problems."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset

from marcog_trl.agents import Slot
from marcog_trl.rollout.records import Episode, Row, Score
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


@dataclass
class Rollout:
    """
    One generation batch of this process, in row order: problem, then group (slot; in a tree: node and slot), then generation.

    Args:
        levels (`list[list[Episode]]` of length K): Episodes by the turn that they come to. Without a tree all K lists are
            one and the same: problem by problem, generation by generation. In a tree, those of a later turn begin with
            those of the turn before, which they branch off. E is the length of the last list.
        rows (`list[Row | None]` of length B): `None` where an episode did not use the slot.
        wait (`Callable`, *optional*): Waits for the verdicts on the solutions of the last turn.
        scores (`torch.Tensor` of shape `(E, K, F)`): What each reward function returned, averaged over agents; NaN where
            it returned nothing, and before scoring.
        agent (`torch.Tensor` of shape `(B,)`): Index of the row's agent.
        turn (`torch.Tensor` of shape `(B,)`): Turn of the row.
        episodes_of_row (`torch.Tensor` of shape `(B, M)`): Which episodes of its turn's list hold the row, dead rows
            included: one, or, where joint actions share replies, several.
        live (`torch.Tensor` of shape `(B,)`): Whether the row is used, and, once it is scored, not masked.
        trained (`torch.Tensor` of shape `(B,)`): Whether the row is live, and the loss may see it, unlike one that was cut
            off under `mask_truncated_completions`: such a row earned its reward, and its siblings are compared with it.
        rewards, returns (`torch.Tensor` of shape `(E, N, K)`): Reward of each agent in each turn, and return from that
            turn on; 0 where none was given, and before scoring.
        counted (`torch.Tensor` of shape `(E, K)`): Whether the turn was played and is not masked.
    """

    levels: list[list[Episode]]
    rows: list[Row | None]
    wait: Callable[[], None] | None
    scores: torch.Tensor
    agent: torch.Tensor
    turn: torch.Tensor
    episodes_of_row: torch.Tensor
    live: torch.Tensor
    trained: torch.Tensor
    rewards: torch.Tensor
    returns: torch.Tensor
    counted: torch.Tensor

    # What forward passes on the rows need beside token ids, each `(B, ...)`, and values and log-probabilities at rollout, `(B, T)`
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None
    logps: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        trainer: MultiAgentTrainer,
        levels: list[list[Episode]],
        rows: list[Row | None],
        of_slot: list[Slot],
        episodes_of_row: torch.Tensor,
        wait: Callable[[], None] | None,
    ) -> Rollout:
        """A batch before its last turn is scored; `of_slot`: the slot of every row, `(B,)`."""
        device, agents = trainer.accelerator.device, trainer.agents
        by_agent = len(levels[-1]), len(agents), trainer.workflow.num_turns
        live = torch.tensor([row is not None for row in rows], device=device)
        return cls(
            levels=levels,
            rows=rows,
            wait=wait,
            scores=torch.full((by_agent[0], by_agent[2], len(trainer.reward_funcs)), torch.nan),
            agent=torch.tensor([agents.index(slot.agent) for slot in of_slot], device=device),
            turn=torch.tensor([slot.turn for slot in of_slot], device=device),
            episodes_of_row=episodes_of_row.to(device),
            live=live,
            trained=live,
            rewards=torch.zeros(by_agent, device=device),
            returns=torch.zeros(by_agent, device=device),
            counted=torch.zeros(by_agent[0], by_agent[2], dtype=torch.bool, device=device),
        )

    def take_scores(self, agents: list[str]) -> torch.Tensor:
        """Takes over what the episodes earned; returns whether they had each turn, `(E, K)`."""
        rewards = torch.zeros(self.rewards.shape)
        played, counted = torch.zeros(2, *self.counted.shape, dtype=torch.bool)
        for k, episodes in enumerate(self.levels):
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
        """What the reward functions said of a row's turn; of several episodes that hold the row, in the first."""
        turn = row.slot.turn
        return self.levels[turn][row.episode].turns[turn].score

    @property
    def episodes(self) -> list[Episode]:
        """The episodes at their ends."""
        return self.levels[-1]

    @functools.cached_property
    def last_act(self) -> torch.Tensor:
        """Whether the row is its agent's last one of the turn, `(B,)`."""
        turn_of = [None if row is None else (row.episode, row.slot.agent, row.slot.turn) for row in self.rows]
        last_row = {turn: i for i, turn in enumerate(turn_of)}  # of an agent's acts in a turn, the last one stays
        return torch.tensor([last_row[turn] == i for i, turn in enumerate(turn_of)], device=self.live.device)

    def of_rows(self, name: str) -> torch.Tensor:
        """A tensor that rows have as a field, `(B, ...)`, zeros on unused rows."""
        found = [None if row is None else getattr(row, name) for row in self.rows]
        zero = torch.zeros_like(next(tensor for tensor in found if tensor is not None))
        return torch.stack([zero if tensor is None else tensor for tensor in found])

    def row_returns(self) -> torch.Tensor:
        """Return of the row's agent from the row's turn on, `(B,)`, 0 on dead rows."""
        return self.of_agent(self.returns) * self.live

    def mean_over_episodes(self, values: torch.Tensor) -> torch.Tensor:
        """From `(E, K, ...)` to rows, `(B, ...)`: mean over the episodes that hold the row and count, 0 without any."""
        of_row = values[self.episodes_of_row, self.turn[:, None]]
        counted = self.counted[self.episodes_of_row, self.turn[:, None]].view(
            *of_row.shape[:2], *[1] * (of_row.dim() - 2)
        )
        total = torch.where(counted, of_row, torch.zeros_like(of_row)).sum(1)
        return total / counted.sum(1).clamp(min=1)

    def of_agent(self, values: torch.Tensor) -> torch.Tensor:
        """From `(E, N, K)` to rows, `(B,)`: the mean of the row's own agent and turn."""
        by_agent = self.mean_over_episodes(values.transpose(1, 2))
        return by_agent.gather(1, self.agent[:, None]).squeeze(1)


# Which batch sizes fit


def fit_batches(trainer: MultiAgentTrainer, args: MultiAgentConfig, train_dataset: Any) -> None:
    """Completes the batch sizes that `args` leaves open, and refuses those that cannot hold whole problems."""
    num_groups, num_processes = trainer._num_groups(training=True), args.world_size
    whole = args.num_generations * num_groups
    accumulation = args.gradient_accumulation_steps
    # Whole problems lie within so many processes
    spread = num_processes if trainer._splits_groups(training=True) else 1
    if args.auto_generation_batch:
        # The smallest number of micro-batches that holds whole problems and whole accumulation windows
        micro_batches = whole // math.gcd(whole, args.per_device_train_batch_size * spread)
        args.steps_per_generation = math.lcm(micro_batches, accumulation)
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * num_processes
    # The configuration has completed these
    assert args.steps_per_generation is not None and args.generation_batch_size is not None
    assert args.num_generations_eval is not None and args.per_device_eval_batch_size is not None
    assert args.save_steps is not None
    rows = args.per_device_train_batch_size * args.steps_per_generation * spread
    kind = "slots" if num_groups == len(trainer.workflow.slots) else "groups of a tree"
    layout = f"{whole} rows (num_generations={args.num_generations} x {num_groups} {kind})"
    if rows % whole:
        works = math.lcm(whole, args.per_device_train_batch_size * spread) * (num_processes // spread)
        where = f" on each of {num_processes} processes" if spread < num_processes else ""
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} cannot hold whole problems of {layout}{where}. Set "
            f"generation_batch_size={works}."
        )
    if isinstance(train_dataset, Dataset) and len(train_dataset) < args.generation_batch_size // whole:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} problems, fewer than a generation batch of "
            f"generation_batch_size={args.generation_batch_size} rows holds; {args.generation_batch_size // whole} work"
        )
    num_slots = trainer._num_groups(training=False)
    whole = args.num_generations_eval * num_slots
    spread = num_processes if trainer._splits_groups(training=False) else 1
    if args.auto_eval_batch:
        args.per_device_eval_batch_size = whole * max(1, math.ceil(8 / whole))
    elif args.per_device_eval_batch_size * spread % whole:
        unit = whole // math.gcd(whole, spread)
        raise ValueError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} cannot hold whole problems of {whole} rows "
            f"(num_generations_eval={args.num_generations_eval} x {num_slots} slots). Set "
            f"per_device_eval_batch_size={unit * math.ceil(args.per_device_eval_batch_size / unit)}."
        )
    # A checkpoint inside a generation cycle would resume with other rollouts than the uninterrupted run
    cycle = generation_cycle(args)
    evaluates_by_steps = args.eval_strategy == "steps" and args.eval_steps is not None and args.eval_steps >= 1
    if args.save_strategy == "best" and evaluates_by_steps and cast(float, args.eval_steps) % cycle:
        raise ValueError(
            f"save_strategy='best' saves where eval_steps={args.eval_steps} says, inside a generation cycle of {cycle} "
            f"optimizer steps, from which a run cannot resume exactly; "
            f"eval_steps={cycle * math.ceil(cast(float, args.eval_steps) / cycle)} works"
        )
    if args.auto_save_steps:
        # The best model is among those that were saved and evaluated at the same step
        best = evaluates_by_steps and args.load_best_model_at_end
        unit = math.lcm(cycle, int(cast(float, args.eval_steps))) if best else cycle
        args.save_steps = unit * math.ceil(args.save_steps / unit)
    elif args.save_strategy == "steps" and cycle > 1 and args.save_steps % cycle:
        # A share of the run, below 1, may fall anywhere
        works = cycle * math.ceil((args.save_steps if args.save_steps >= 1 else 500) / cycle)
        raise ValueError(
            f"save_steps={args.save_steps} falls inside a generation cycle of {cycle} optimizer steps, from which a "
            f"run cannot resume exactly; {works} works"
        )


def generation_cycle(args: MultiAgentConfig) -> int:
    """Optimizer steps after which a step begins with a new rollout again."""
    micro_batches = cast(int, args.steps_per_generation) * args.num_iterations
    return math.lcm(micro_batches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps


def warn_of_schedule(trainer: Any) -> None:
    """Says what a user of TRL may not expect of the rollouts and the last checkpoint; an evaluation has neither."""
    args = trainer.args
    steps_per_generation, accumulation = cast(int, args.steps_per_generation), args.gradient_accumulation_steps
    if args.auto_generation_batch and steps_per_generation > accumulation:
        num_groups = trainer._num_groups(training=True)
        warnings.warn(
            f"Each rollout is used for {steps_per_generation // accumulation} optimizer steps: it has "
            f"{args.generation_batch_size} rows, since it holds whole problems of {args.num_generations * num_groups} rows "
            f"(num_generations={args.num_generations} x {num_groups} replies), and a step has "
            f"{cast(int, args.generation_batch_size) * accumulation // steps_per_generation}. Set "
            f"gradient_accumulation_steps={steps_per_generation} for one step per rollout.",
            stacklevel=3,
        )
    cycle = generation_cycle(args)
    if args.save_strategy != "no" and args.max_steps > 0 and args.max_steps % cycle:
        warnings.warn(
            f"max_steps={args.max_steps} ends inside a generation cycle of {cycle} optimizer steps, so the last checkpoint "
            f"cannot be continued. Set max_steps={cycle * math.ceil(args.max_steps / cycle)}.",
            stacklevel=3,
        )
