"""Logged metrics: one function per family of names, and means over the logging window."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from marcog_trl.parsing.prompts import messages_of
from marcog_trl.problems.schema import solution_job
from marcog_trl.rewards.failures import FAILURES, failure_kind
from marcog_trl.rollout.records import Episode
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


Total = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all processes."""

# Metrics that TRL logs per micro-batch as a mean over tokens
_MICRO_BATCH_MEANS = (
    "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"
)  # fmt: skip


def log_rollout(trainer: MultiAgentTrainer, output: dict[str, Any], rollout: Rollout) -> None:
    """Logs a generation batch after its advantages are computed."""
    found = rollout_metrics(trainer, rollout) | advantage_metrics(trainer, output, rollout)
    for name, value in found.items():
        trainer._metric(name, value)
    _warn_of_threshold(trainer, found.get("episodes/turns"))
    if trainer.log_completions and trainer.model.training:
        trainer._episodes_to_show = spread(rollout.episodes, trainer.num_episodes_to_print)
    if trainer._curriculum is not None and trainer.model.training:
        trainer._metric("curriculum/stage", trainer._curriculum.stage_of(trainer._curriculum.batches) + 1)
        by_rate = trainer.args.curriculum_pass_rate is not None  # otherwise problems need no tests
        device, total = trainer.accelerator.device, trainer._sum_over_processes
        trainer._curriculum.note(pass_rate(rollout.episodes, device, total) if by_rate else None)
    correct_completions(trainer, rollout)
    correct_table(trainer, output, rollout)


def spread(episodes: list[Episode], number: int) -> list[Episode]:
    """This number of episodes, if there are as many, with equal distances: siblings are neighbours."""
    number = min(number, len(episodes))
    return [episodes[i * len(episodes) // number] for i in range(number)]


def _warn_of_threshold(trainer: MultiAgentTrainer, turns: float | None) -> None:
    """Warns if the threshold ended all episodes of the first batch after one turn, or none."""
    threshold = trainer.args.early_termination_threshold
    if threshold is None or turns is None or "threshold" in trainer._warned:
        return
    trainer._warned.add("threshold")
    if turns in (1, trainer.workflow.num_turns):
        found = "every episode earned more in its first turn" if turns == 1 else "no episode earned more"
        warnings.warn(f"early_termination_threshold={threshold}: in the first batch {found}", stacklevel=2)


def rollout_metrics(trainer: MultiAgentTrainer, rollout: Rollout) -> dict[str, float]:
    """Computes all metrics of the episodes of a generation batch, over all processes."""
    total = trainer._sum_over_processes
    metrics = agent_metrics(trainer, rollout, total) | episode_metrics(trainer, rollout, total)
    metrics |= endpoint_metrics(trainer, rollout, total)
    metrics |= tool_metrics(trainer, rollout, total) | ledger(rollout, total)
    return metrics | test_metrics(rollout, total) if trainer.scorer.runs_tests else metrics


def agent_metrics(trainer: MultiAgentTrainer, rollout: Rollout, total: Total) -> dict[str, float]:
    """`agents/<name>/...`, also by turn: reward, return, completion length, and share of truncated replies."""
    lengths, ends = reply_lengths(trainer, rollout)
    columns = {
        "reward": rollout.of_agent(rollout.rewards),
        "return": rollout.row_returns(),
        "completion_length": lengths,
        "clipped_ratio": (~ends).float(),
    }
    scored = {"reward": rollout.live & rollout.last_act, "return": rollout.live}
    groups = [(f"agents/{agent}", rollout.agent == i) for i, agent in enumerate(trainer.agents)]
    num_turns = trainer.workflow.num_turns
    if num_turns > 1:
        groups += [
            (f"{prefix}/turn_{k + 1}", own & (rollout.turn == k)) for prefix, own in groups for k in range(num_turns)
        ]
    chosen = torch.stack([own & scored.get(name, lengths > 0) for _, own in groups for name in columns])
    values = torch.stack([column for _ in groups for column in columns.values()])
    sums = total(torch.stack([(values * chosen).sum(1), chosen.sum(1).float()])).tolist()
    names = [f"{prefix}/{name}" for prefix, _ in groups for name in columns]
    return {name: value / count for name, value, count in zip(names, *sums, strict=True) if count}


def endpoint_metrics(trainer: MultiAgentTrainer, rollout: Rollout, total: Total) -> dict[str, float]:
    """
    `agents/<name>/...` of agents that speak through endpoints: the share of replies that failed, the number of requests, and, as
    means over the answered ones, seconds, tokens of the prompt and of the reply, and the share of truncated replies.
    """
    metrics: dict[str, float] = {}
    for agent in trainer.team.outside:
        answers = [row.outside for row in rollout.replies if row is not None and row.slot.agent == agent]
        sent = [answer for answer in answers if answer is not None and answer.sent and answer.error is None]
        columns: dict[str, list[float]] = {
            "seconds": [answer.seconds for answer in sent],
            "prompt_tokens": [answer.prompt_tokens for answer in sent],
            "completion_length": [answer.completion_tokens for answer in sent],
            "clipped_ratio": [answer.truncated for answer in sent],
            "failed": [answer.error is not None for answer in answers if answer is not None],
            "requests": [answer.sent for answer in answers if answer is not None],
        }
        sums = [[float(sum(column)), float(len(column))] for column in columns.values()]
        totals = total(torch.tensor(sums, device=rollout.live.device)).tolist()
        means = {name: found / count for name, (found, count) in zip(columns, totals, strict=True) if count}
        metrics |= {f"agents/{agent}/{name}": value for name, value in (means | {"requests": totals[-1][0]}).items()}
    return metrics


def tool_metrics(trainer: MultiAgentTrainer, rollout: Rollout, total: Total) -> dict[str, float]:
    """
    `agents/<name>/tools/call_frequency`: calls of tools per reply; `agents/<name>/tools/failure_frequency`: share of these
    calls whose tool raised an error, or whose result is not in the reply. For agents with tools.
    """
    counts = {agent.name: [0, 0, 0] for agent in trainer.workflow.agents if agent.tools}
    if not counts:
        return {}
    for row in filter(None, rollout.rows):
        if row.slot.agent in counts:
            counts[row.slot.agent] = [a + b for a, b in zip(counts[row.slot.agent], (1, *row.tool_calls), strict=True)]
    sums = total(torch.tensor(list(counts.values()), dtype=torch.float, device=rollout.live.device)).tolist()
    metrics = {}
    for agent, (replies, calls, failed) in zip(counts, sums, strict=True):
        if replies:
            metrics[f"agents/{agent}/tools/call_frequency"] = calls / replies
            metrics[f"agents/{agent}/tools/failure_frequency"] = failed / calls if calls else 0.0
    return metrics


def reply_lengths(trainer: MultiAgentTrainer, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of tokens that the model wrote in each row, and whether the row ends with EOS, each `(B,)`."""
    device = rollout.live.device
    replies = [[] if row is None else row.completion_ids for row in rollout.rows]
    eos_and_pad = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    ends = [bool(ids) and ids[-1] in eos_and_pad for ids in replies]
    lengths = [0.0 if row is None else float(sum(row.mask)) for row in rollout.rows]
    return torch.tensor(lengths, device=device), torch.tensor(ends, device=device)


def episode_metrics(trainer: MultiAgentTrainer, rollout: Rollout, total: Total) -> dict[str, float]:
    """
    Shares of masked episodes, of turns with a failed reward function, and of requests that the expert did not answer; the
    mean number of turns, and the share of episodes with fewer than all turns.
    """
    episodes, num_turns = rollout.episodes, trainer.workflow.num_turns
    values: dict[str, list[float]] = {
        "episodes/masked": [episode.masked for episode in episodes],
        "feedback/failed": [text is None for episode in episodes for text in episode.advice],
    }
    if trainer.args.on_reward_error == "mask":
        turns = [e.turns[k] for k, level in enumerate(rollout.turns) for e in level if len(e.turns) > k]
        values["rewards/failed"] = [turn.score is not None and turn.score.failed for turn in turns]
    if num_turns > 1:
        values["episodes/turns"] = [len(episode.turns) for episode in episodes]
        values["episodes/ended_early"] = [len(episode.turns) < num_turns for episode in episodes]
    sums = [[sum(column), len(column)] for column in values.values()]
    totals = total(torch.tensor(sums, dtype=torch.float, device=rollout.live.device)).tolist()
    return {name: found / count for name, (found, count) in zip(values, totals, strict=True) if count}


def ledger(rollout: Rollout, total: Total) -> dict[str, float]:
    """`ledger/...`: what a rollout cost over all processes: generated tokens, scored turns, and seconds of executing code."""
    # Episodes that branched later share turns
    turns = {id(turn): turn for episode in rollout.episodes for turn in episode.turns}
    verdicts = {id(verdict): verdict for turn in turns.values() for _, verdict in turn.verdicts}
    costs = {
        # Without results of tools
        "ledger/generated_tokens": sum(sum(row.mask) for row in rollout.rows if row is not None),
        "ledger/evaluations": len(turns),
        "ledger/sandbox_seconds": sum(verdict.seconds for verdict in verdicts.values()),
    }
    totals = total(torch.tensor([*costs.values()], dtype=torch.double, device=rollout.live.device)).tolist()
    return dict(zip(costs, totals, strict=True))


def test_metrics(rollout: Rollout, total: Total) -> dict[str, float]:
    """
    `episodes/solved`: share of episodes whose last solution passes all tests. `failures/<kind>`: share whose last solution
    fails this check first. Episodes that the infrastructure or an endpoint failed on do not count.
    """
    counts: dict[str | None, float] = dict.fromkeys([None, *FAILURES], 0.0)  # None: solved
    for episode in rollout.episodes:
        turn = episode.turns[-1]
        if turn.tested is not None and turn.tested[1].status != "infrastructure" and not episode.unanswered:
            counts[failure_kind(episode.problem, turn.solution, *turn.tested)] += 1
    solved, *failed = total(torch.tensor(list(counts.values()), device=rollout.live.device)).tolist()
    tested = solved + sum(failed)
    if not tested:
        return {}
    shares = {f"failures/{kind}": count / tested for kind, count in zip(FAILURES, failed, strict=True)}
    return {"episodes/solved": solved / tested, **shares}


def advantage_metrics(trainer: MultiAgentTrainer, output: dict[str, Any], rollout: Rollout) -> dict[str, float]:
    """
    `advantages/zero`: share of trained rows without an advantage (below 1e-4), from which the policy learns nothing.
    `agents/<name>/advantage_variance`: variance of an agent's advantages before they are normalised, small for an agent whose
    replies do not matter.
    """
    advantages = output["advantages"].abs()
    if advantages.dim() == 2:
        advantages = (advantages * output["completion_mask"] * output["tool_mask"]).amax(1)
    zero, count = trainer._sum_over_processes(
        torch.stack([((advantages < 1e-4) & rollout.trained).sum(), rollout.trained.sum()])
    ).tolist()
    found = {"advantages/zero": zero / count} if count else {}
    if len(trainer.agents) > 1:
        credit, trained = cast(torch.Tensor, rollout.advantages).double(), rollout.trained.double()
        sums = credit.new_zeros(len(trainer.agents), 3)
        sums.index_add_(
            0, rollout.agent, torch.stack([credit.square(), credit, torch.ones_like(credit)], 1) * trained[:, None]
        )
        for agent, (square, total, count) in zip(
            trainer.agents, trainer._sum_over_processes(sums).tolist(), strict=True
        ):
            if count:
                found[f"agents/{agent}/advantage_variance"] = square / count - (total / count) ** 2
    return found


def pass_rate(episodes: list[Episode], device: torch.device, total: Total) -> float | None:
    """Share of tests that the last solutions of all episodes pass, over all processes. `None` if nothing was tested."""
    rates = []
    for episode in episodes:
        known = dict(episode.turns[-1].verdicts)
        verdict = known.get(solution_job(episode.problem, episode.turns[-1].solution))
        if verdict is not None and verdict.status != "infrastructure" and not episode.unanswered:
            rates.append(verdict.passed / verdict.total)
    passed, count = total(torch.tensor([sum(rates), len(rates)], dtype=torch.float, device=device)).tolist()
    return passed / count if count else None


def correct_completions(trainer: MultiAgentTrainer, rollout: Rollout) -> None:
    """Recomputes TRL's `completions/...` metrics of the batch without unused rows."""
    lengths, ends = reply_lengths(trainer, rollout)
    lengths, ends = trainer.accelerator.gather(torch.stack([lengths, ends.float()], dim=1)).T
    lengths, ends = lengths[lengths > 0], ends[lengths > 0] > 0
    if not len(lengths):  # all replies are of endpoints
        return
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for kind, of_kind in (("", lengths), ("terminated_", lengths[ends] if ends.any() else lengths.new_zeros(1))):
        for name, value in (("mean", of_kind.mean()), ("min", of_kind.min()), ("max", of_kind.max())):
            metrics[f"completions/{name}_{kind}length"][-1] = value.item()
    metrics["completions/clipped_ratio"][-1] = 1 - ends.float().mean().item()


def complete_log(trainer: MultiAgentTrainer) -> None:
    """Adds what was pooled over the logging window to the metrics of the log that is about to be written."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    if trainer.model.training:
        seconds = sum(metrics.get("step_time", ()))
        if seconds:
            per_process = torch.tensor(seconds / trainer.accelerator.num_processes, device=trainer.accelerator.device)
            trainer._pool("tokens_per_second", torch.zeros_like(per_process), per_process)
        if len(trainer.agents) > 1:
            for name, share in trainer._gradient_shares.take().items():
                trainer._metric(name, share)
    for name, mean in trainer._pooled_means().items():
        trainer._metric(name, mean)
    if trainer.num_generations_eval == 1:  # TRL's metrics of the spread among siblings
        for name in ("reward_std", "frac_reward_zero_std"):
            trainer._metrics["eval"].pop(name, None)


def correct_table(trainer: MultiAgentTrainer, output: dict[str, Any], rollout: Rollout) -> None:
    """
    Replaces columns of TRL's table of completions: advantages by the actual ones, averaged over the tokens of a row, prompts
    of the dataset by those that the agents were sent, and completions by the replies, those of endpoints included.
    """
    advantages = output["advantages"]
    if advantages.dim() == 2:
        mask = output["completion_mask"] * output["tool_mask"]
        advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    prompts = gather_object([None if row is None else row.prompt for row in rollout.replies])
    if any(isinstance(prompt, list) for prompt in prompts):  # a column has one type
        prompts = [[] if prompt is None else messages_of(prompt) for prompt in prompts]
    else:
        prompts = ["" if prompt is None else str(prompt) for prompt in prompts]
    columns = {"advantages": gather_object(advantages.tolist()), "prompt": prompts}
    if trainer.team.outside:
        columns["completion"] = gather_object(["" if row is None else row.text for row in rollout.replies])
    for column, values in columns.items():
        shown = cast(deque, trainer._logs[column])
        for _ in range(min(len(values), len(shown))):
            shown.pop()
        shown.extend(values)


class WindowMeans:
    """
    Means over the logging window and all processes. All processes must add to the same names.

    Args:
        total (`Callable`): Sums a tensor over all processes.
    """

    def __init__(self, total: Total):
        self._total = total
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
        logged: dict[str, int],
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
            logged (`dict[str, int]`): Number of values of each metric before the micro-batch.
            mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens of the rows in the forward pass.
            of_all_rows (`torch.Tensor` of shape `(B, T)`): The same with rows that were skipped, which are never clipped.
            by_sequence (`bool`): Whether TRL clips whole sequences.
        """
        for name in _MICRO_BATCH_MEANS:
            if len(metrics.get(name, ())) > logged.get(name, 0):
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

    @staticmethod
    def logged(metrics: dict[str, list[float]]) -> dict[str, int]:
        """Returns the number of values of each metric that [`add_micro_batch`] takes."""
        return {name: len(metrics[name]) for name in _MICRO_BATCH_MEANS if name in metrics}

    def take(self, mode: str) -> dict[str, float]:
        """Returns the means since the last call, by name, without empty ones."""
        sums = self._sums[mode]
        if not sums:
            return {}
        names = sorted(sums)
        totals = self._total(torch.stack([sums[name] for name in names])).tolist()
        sums.clear()
        return {name: total / count for name, (total, count) in zip(names, totals, strict=True) if count}


class GradientShares:
    """
    Each agent's share of the policy gradient.

    Takes the norm of the loss's gradient at the last hidden state of each token, and sums it over tokens, micro-batches and
    processes. The sum does not depend on how rows are split into micro-batches.

    Args:
        agents (`list[str]`): Names of the agents.
        device (`torch.device`): Device of the gradients.
        total (`Callable`): Sums a tensor over all processes.
    """

    def __init__(self, agents: list[str], device: torch.device, total: Total):
        self._agents = agents
        self._total = total
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
        mass = self._total(self._mass.clone())
        self._mass.zero_()
        if mass.sum() <= 0:
            return {}
        shares = (mass / mass.sum()).tolist()
        return {f"agents/{agent}/gradient_share": share for agent, share in zip(self._agents, shares, strict=True)}


def log_columns(trainer: MultiAgentTrainer, rollout: Rollout) -> None:
    """Adds logged values of reward functions, agents and turns to TRL's table of completions."""
    of_row = [None if row is None else rollout.score_of(row) for row in rollout.replies]
    logged = {column for score in of_row if score is not None for column in score.columns}
    # Once a column is logged, every later batch needs a value, even if the function failed
    extra = cast(dict[str, deque], trainer._logs["extra"])
    columns = sorted(extra.keys() | set(gather_object(list(logged))))
    for column in columns:
        if column not in extra:
            extra[column].extend([None] * len(trainer._logs["prompt"]))
    for column in columns:
        if column not in ("agent", "turn"):
            values = [None if score is None else score.columns.get(column) for score in of_row]
            trainer._log_completion_extra(column, values)
    trainer._log_completion_extra("agent", [trainer.agents[i] for i in rollout.agent.tolist()])
    trainer._log_completion_extra("turn", (rollout.turn + 1).tolist())
