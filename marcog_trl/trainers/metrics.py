"""Logged metrics: one function per family of names, and means over the logging window."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from marcog_trl.parsing.prompts import messages_of
from marcog_trl.problems.schema import solution_job
from marcog_trl.processes import gather_rows, sum_over_processes, this_process
from marcog_trl.report.episodes import Learned
from marcog_trl.rewards.failures import FAILURES, failure_kind
from marcog_trl.rollout.records import Episode
from marcog_trl.trainers.batch import TeamBatch


Sums = dict[str, tuple[torch.Tensor | float, torch.Tensor | float]]
"""By name: a sum of values of this process, and their number. All processes have the same names."""

# Metrics that TRL logs per micro-batch as a mean over tokens
_MICRO_BATCH_MEANS = (
    "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"
)  # fmt: skip


def means(sums: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]) -> dict[str, float]:
    """Returns means over all processes, by name, without those of no values. A collective operation."""
    device = this_process().device
    pairs = [torch.as_tensor(x, device=device).detach().double() for pair in sums.values() for x in pair]
    totals = sum_over_processes(torch.stack(pairs).view(-1, 2)).tolist() if pairs else []
    return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}


# A generation batch


def rollout_metrics(
    batch: TeamBatch,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    outside: Sequence[str] = (),
    with_tools: Sequence[str] = (),
    runs_tests: bool = False,
    masks_errors: bool = False,
    may_fail: bool = False,
) -> dict[str, float]:
    """
    Computes all metrics of the episodes of a generation batch, over all processes.

    Args:
        batch ([`TeamBatch`]): The batch.
        lengths, ends (`torch.Tensor` of shape `(B,)`): See [`reply_lengths`].
        outside, with_tools (`Sequence[str]`): Agents that speak through endpoints, and agents that have tools.
        runs_tests (`bool`): Whether solutions are tested.
        masks_errors (`bool`): Whether errors of reward functions mask episodes.
        may_fail (`bool`): Whether episodes may fail, since a program plays them.
    """
    sums = agent_metrics(batch, lengths, ends) | episode_metrics(batch, masks_errors, may_fail)
    sums |= endpoint_metrics(batch, outside) | tool_metrics(batch, with_tools) | rollout_costs(batch)
    found = means(sums | test_metrics(batch) if runs_tests else sums)
    for agent in with_tools:
        if f"agents/{agent}/tools/call_frequency" in found:  # also without calls, as in TRL
            found.setdefault(f"agents/{agent}/tools/failure_frequency", 0.0)
    return found


def agent_metrics(batch: TeamBatch, lengths: torch.Tensor, ends: torch.Tensor) -> Sums:
    """`agents/<name>/...`, also by turn: reward, return, completion length, and share of truncated replies."""
    columns = {
        "reward": (batch.of_agent(batch.rewards), batch.is_used & batch.last_act),
        "return": (batch.row_returns(), batch.is_used),
        "completion_length": (lengths, lengths > 0),
        "clipped_ratio": ((~ends).float(), lengths > 0),
    }
    groups = [(f"agents/{agent}", batch.agent == i) for i, agent in enumerate(batch.agents)]
    if batch.num_turns > 1:
        groups += [
            (f"{prefix}/turn_{k + 1}", own & (batch.turn == k))
            for prefix, own in groups
            for k in range(batch.num_turns)
        ]
    return {
        f"{prefix}/{name}": ((values * (own & chosen)).sum(), (own & chosen).sum())
        for prefix, own in groups
        for name, (values, chosen) in columns.items()
    }


def endpoint_metrics(batch: TeamBatch, outside: Sequence[str]) -> Sums:
    """
    `agents/<name>/...` of agents that speak through endpoints: the share of replies that failed, the number of requests, and, as
    means over the answered ones, seconds, tokens of the prompt and of the reply, and the share of truncated replies.
    """
    sums: Sums = {}
    for agent in outside:
        answers = [row.completion for row in batch.replies if row is not None and row.slot.agent == agent]
        sent = [answer for answer in answers if answer is not None and answer.sent and answer.error is None]
        columns: dict[str, list[float]] = {
            "seconds": [answer.seconds for answer in sent],
            "prompt_tokens": [answer.prompt_tokens for answer in sent],
            "completion_length": [answer.completion_tokens for answer in sent],
            "clipped_ratio": [answer.truncated for answer in sent],
            "failed": [answer.error is not None for answer in answers if answer is not None],
        }
        sums |= {f"agents/{agent}/{name}": (sum(column), len(column)) for name, column in columns.items()}
        sums[f"agents/{agent}/requests"] = _total(sum(answer.sent for answer in answers if answer is not None))
    return sums


def _total(value: float) -> tuple[float, float]:
    """A sum over all processes in place of a mean."""
    return value, 1 / this_process().num_processes


def tool_metrics(batch: TeamBatch, with_tools: Sequence[str]) -> Sums:
    """
    `agents/<name>/tools/call_frequency`: calls of tools per reply; `agents/<name>/tools/failure_frequency`: share of these
    calls whose tool raised an error, or whose result is not in the reply. For agents with tools.
    """
    sums: Sums = {}
    for agent in with_tools:
        calls = [row.tool_calls for row in batch.rows if row is not None and row.slot.agent == agent]
        made, failed = sum(made for made, _ in calls), sum(failed for _, failed in calls)
        sums[f"agents/{agent}/tools/call_frequency"] = made, len(calls)
        sums[f"agents/{agent}/tools/failure_frequency"] = failed, made
    return sums


def reply_lengths(batch: TeamBatch, end_tokens: set[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of tokens that the model wrote in each row, and whether it ends with one of `end_tokens`, `(B,)`."""
    replies = [[] if row is None else row.completion_ids for row in batch.rows]
    ends = [bool(ids) and ids[-1] in end_tokens for ids in replies]
    lengths = [0.0 if row is None else float(sum(row.mask)) for row in batch.rows]
    return torch.tensor(lengths, device=batch.device), torch.tensor(ends, device=batch.device)


def episode_metrics(batch: TeamBatch, masks_errors: bool, may_fail: bool) -> Sums:
    """
    Shares of masked episodes, of failed programs, of turns with a failed reward function, and of requests that the expert did
    not answer; the mean number of turns, and the share of episodes with fewer than all turns.
    """
    episodes, num_turns = batch.episodes, batch.num_turns
    values: dict[str, list[float]] = {
        "episodes/masked": [episode.masked for episode in episodes],
        "feedback/failed": [text is None for episode in episodes for text in episode.advice if not may_fail],
    }
    if may_fail:
        values["program/failed"] = [episode.failure is not None for episode in episodes]
    if masks_errors:
        turns = [e.turns[k] for k, level in enumerate(batch.turns) for e in level if len(e.turns) > k]
        values["rewards/failed"] = [turn.score is not None and turn.score.failed for turn in turns]
    if num_turns > 1:
        values["episodes/turns"] = [len(episode.turns) for episode in episodes]
        values["episodes/ended_early"] = [len(episode.turns) < num_turns for episode in episodes]
    return {name: (sum(column), len(column)) for name, column in values.items()}


def rollout_costs(batch: TeamBatch) -> Sums:
    """`ledger/...`: what a rollout cost over all processes: generated tokens, scored turns, and seconds of executing code."""
    # Episodes that branched later share turns
    turns = {id(turn): turn for episode in batch.episodes for turn in episode.turns}
    verdicts = {id(verdict): verdict for turn in turns.values() for _, verdict in turn.verdicts}
    return {
        # Without results of tools
        "ledger/generated_tokens": _total(sum(sum(row.mask) for row in batch.rows if row is not None)),
        "ledger/evaluations": _total(len(turns)),
        "ledger/sandbox_seconds": _total(sum(verdict.seconds for verdict in verdicts.values())),
    }


def test_metrics(batch: TeamBatch) -> Sums:
    """
    `episodes/solved`: share of episodes whose last solution passes all tests. `failures/<kind>`: share whose last solution
    fails this check first. Episodes that the infrastructure or an endpoint failed on do not count.
    """
    counts: dict[str | None, float] = dict.fromkeys([None, *FAILURES], 0.0)  # None: solved
    for episode in batch.episodes:
        turn = episode.turns[-1]
        if turn.tested is not None and turn.tested[1].status != "infrastructure" and not episode.unanswered:
            counts[failure_kind(episode.problem, turn.solution, *turn.tested)] += 1
    tested = sum(counts.values())
    return {
        "episodes/solved" if kind is None else f"failures/{kind}": (count, tested) for kind, count in counts.items()
    }


def advantage_metrics(batch: TeamBatch, advantages: torch.Tensor) -> dict[str, float]:
    """
    `advantages/zero`: share of rows in the loss without an advantage (below 1e-4), from which the policy learns nothing.
    `agents/<name>/advantage_variance`: variance of an agent's advantages before they are normalised, small for an agent whose
    replies do not matter.

    Args:
        batch ([`TeamBatch`]): The batch.
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`): What the loss uses.
    """
    largest = (advantages * batch.mask).abs().amax(1) if advantages.dim() == 2 else advantages.abs()
    sums: Sums = {"advantages/zero": (((largest < 1e-4) & batch.in_loss).sum(), batch.in_loss.sum())}
    agents = batch.agents if len(batch.agents) > 1 else []
    assert batch.advantages is not None
    credit = batch.advantages.double()
    for i, agent in enumerate(agents):
        own = credit[batch.in_loss & (batch.agent == i)]
        sums |= {f"{agent}/square": (own.square().sum(), len(own)), f"{agent}/mean": (own.sum(), len(own))}
    found = means(sums)
    for agent in agents:
        if f"{agent}/mean" in found:
            square, mean = found.pop(f"{agent}/square"), found.pop(f"{agent}/mean")
            found[f"agents/{agent}/advantage_variance"] = square - mean**2
    return found


def pass_rate(episodes: list[Episode]) -> float | None:
    """Share of tests that the last solutions of all episodes pass, over all processes. `None` if nothing was tested."""
    rates = []
    for episode in episodes:
        known = dict(episode.turns[-1].verdicts)
        verdict = known.get(solution_job(episode.problem, episode.turns[-1].solution))
        if verdict is not None and verdict.status != "infrastructure" and not episode.unanswered:
            rates.append(verdict.passed / verdict.total)
    return means({"pass_rate": (sum(rates), len(rates))}).get("pass_rate")


def completion_metrics(lengths: torch.Tensor, ends: torch.Tensor) -> dict[str, float]:
    """TRL's `completions/...` metrics over all processes without unused rows. Empty if all replies are of endpoints."""
    _, (lengths, ends) = gather_rows(lengths, ends)
    lengths, ends = lengths[lengths > 0], ends[lengths > 0]
    if not len(lengths):
        return {}
    found = {"completions/clipped_ratio": 1 - ends.float().mean().item()}
    for kind, of_kind in (("", lengths), ("terminated_", lengths[ends] if ends.any() else lengths.new_zeros(1))):
        for name, value in (("mean", of_kind.mean()), ("min", of_kind.min()), ("max", of_kind.max())):
            found[f"completions/{name}_{kind}length"] = value.item()
    return found


# The table of completions


def table_columns(batch: TeamBatch, advantages: torch.Tensor, with_replies: bool) -> dict[str, list]:
    """
    Returns columns that replace TRL's, of all processes: the actual advantages, averaged over the tokens of a row, the prompts that
    the agents were sent, and with `with_replies`, the replies, those of endpoints included.
    """
    prompts = gather_object([None if row is None else row.prompt for row in batch.replies])
    if any(isinstance(prompt, list) for prompt in prompts):  # a column has one type
        prompts = [[] if prompt is None else messages_of(prompt) for prompt in prompts]
    else:
        prompts = ["" if prompt is None else str(prompt) for prompt in prompts]
    columns = {"advantages": gather_object(batch.mean_over_tokens(advantages).tolist()), "prompt": prompts}
    if with_replies:
        columns["completion"] = gather_object(["" if row is None else row.text for row in batch.replies])
    return columns


def extra_columns(batch: TeamBatch, known: Sequence[str]) -> dict[str, list]:
    """
    Returns further columns, with values of the rows of this process: what reward functions logged, agents and turns.

    Args:
        batch ([`TeamBatch`]): The batch.
        known (`Sequence[str]`): Columns of earlier batches: every later batch needs values, even if the function failed.
    """
    # If several episodes contain a row, the first
    episodes = [None if row is None else batch.turns[row.slot.turn][row.episode] for row in batch.replies]
    turns = [e.turns[row.slot.turn] if e and row else None for e, row in zip(episodes, batch.replies, strict=True)]
    of_row = [None if turn is None else turn.score for turn in turns]
    logged = {column for score in of_row if score is not None for column in score.columns}
    columns = {
        column: [None if score is None else score.columns.get(column) for score in of_row]
        for column in sorted({*known, *gather_object(list(logged))})
    }
    first = this_process().process_index * len(batch.episodes)
    columns["episode"] = [None if row is None else first + row.episode for row in batch.replies]
    columns["problem"] = [None if e is None else str(e.problem.get("task_id", "")) for e in episodes]
    columns["verdict"] = [None if turn is None or turn.tested is None else turn.tested[1].status for turn in turns]
    columns["agent"] = [batch.agents[i] for i in batch.agent.tolist()]
    columns["turn"] = (batch.turn + 1).tolist()
    return columns


def learned(batch: TeamBatch, advantages: torch.Tensor) -> dict[int, Learned]:
    """The [`Learned`] of the rows of this process, by `id` of the row."""
    advantages = batch.mean_over_tokens(advantages)
    logps: list[float | None] = [None] * len(batch.replies)
    if batch.logps is not None:
        logps = batch.mean_over_tokens(batch.logps).tolist()
    trained, used, in_loss = (x.tolist() for x in (batch.agent_is_trained, batch.is_used, batch.in_loss))
    found = {}
    for i, row in enumerate(batch.replies):
        if row is None:
            continue
        why = ""
        if batch.training and not in_loss[i]:
            why = (
                "the agent speaks through an endpoint" if row.completion is not None
                else "the episode is not scored" if not used[i]
                else "the agent is not trained" if not trained[i]
                else "the reply is cut off"
            )  # fmt: skip
        found[id(row)] = Learned(
            None if why else logps[i], None if why or not batch.training else float(advantages[i]), why
        )
    return found


# A logging window


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if known else math.nan


class WindowMeans:
    """Means over the logging window and all processes. All processes must add to the same names."""

    def __init__(self) -> None:
        # By mode and name: the sum and the number of values
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}

    def add(self, mode: str, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Adds a sum over `count` values."""
        sums, pair = self._sums[mode], torch.stack([total.detach().double(), count.detach().double()])
        sums[name] = sums[name] + pair if name in sums else pair

    def add_micro_batch(
        self,
        mode: str,
        metrics: dict[str, list[float]],
        mask: torch.Tensor,
        of_all_rows: torch.Tensor,
        by_sequence: bool,
    ) -> None:
        """
        Takes TRL's means over the tokens of a micro-batch out of `metrics`, and adds them, weighted by the number of tokens.

        TRL logs a mean of 0 for a micro-batch without live tokens, which must not count.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            metrics (`dict[str, list[float]]`): TRL's metrics of the mode.
            mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens of the rows in the forward pass.
            of_all_rows (`torch.Tensor` of shape `(B, T)`): The same with rows that were skipped, which are never clipped.
            by_sequence (`bool`): Whether TRL clips whole sequences.
        """
        for name in _MICRO_BATCH_MEANS:
            if metrics.get(name):
                mean = metrics[name].pop()
                if not metrics[name]:
                    del metrics[name]
                # With sequence-level clipping, TRL averages over all rows. Unused rows are never clipped
                of_clipping = "clip_ratio" in name
                counted = of_all_rows if of_clipping else mask
                size, count = mask.sum(), counted.sum()
                if by_sequence and of_clipping:
                    size, count = mask.new_tensor(len(mask)), counted.any(1).sum()
                self.add(mode, name, mean * size.double(), count)

    def take(self, mode: str) -> dict[str, float]:
        """Returns the means since the last call, by name, without empty ones, and the critic's explained variance."""
        sums, self._sums[mode] = self._sums[mode], {}
        found = means({name: tuple(sums[name]) for name in sorted(sums)})  # type: ignore[misc]
        if "critic/return_square" in found:
            variance, unexplained = (
                found.pop(f"critic/{name}_square") - found[f"critic/{name}_mean"] ** 2
                for name in ("return", "residual")
            )
            if variance > 1e-12:
                found["critic/explained_variance"] = 1 - unexplained / variance
        return found


class GradientShares:
    """
    Each agent's share of the policy gradient.

    Takes the norm of the loss's gradient at the last hidden state of each token, and sums it over tokens, micro-batches and
    processes. The sum does not depend on how rows are split into micro-batches.

    Args:
        agents (`list[str]`): Names of the agents.
        device (`torch.device`): Device of the gradients.
    """

    def __init__(self, agents: list[str], device: torch.device):
        self._agents = agents
        self._mass = torch.zeros(len(agents), device=device)

    @contextmanager
    def watching(self, causal_lm: PreTrainedModel, agent: torch.Tensor) -> Iterator[None]:
        """Wraps the loss of a micro-batch. `agent` has the agent index of each row, `(B,)`. Rows after them do not count."""

        def add(gradient: torch.Tensor) -> None:
            self._mass.index_add_(0, agent, gradient[: len(agent)].detach().float().norm(dim=-1).sum(1))

        def watch(decoder: torch.nn.Module, args: Any, output: Any) -> None:
            if output[0].requires_grad:
                output[0].register_hook(add)

        handle = causal_lm.get_decoder().register_forward_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> dict[str, float]:
        """`agents/<name>/gradient_share` since the last call."""
        mass = sum_over_processes(self._mass.clone())
        self._mass.zero_()
        if mass.sum() <= 0:
            return {}
        shares = (mass / mass.sum()).tolist()
        return {f"agents/{agent}/gradient_share": share for agent, share in zip(self._agents, shares, strict=True)}
