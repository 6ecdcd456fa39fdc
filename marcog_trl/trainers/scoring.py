"""
Scores turns of episodes: executes the solutions, calls every reward function once, and stores the results in the turn.

Used by training and evaluation. It knows nothing about rows, advantages or losses.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather, gather_object, reduce
from trl.trainer.utils import get_callable_name

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import solution_job
from marcog_trl.processes import this_process
from marcog_trl.rewards.requirements import needs, unwrap
from marcog_trl.rollout.records import Episode, Score, Turn
from marcog_trl.team.team import Team
from marcog_trl.trainers.reward_functions import CALL_COLUMN, ScoringCall, is_reward_model, wrap_rewards


_EXECUTION = "code execution"
_SILENT_CALLS = 10  # calls that return only None before a warning


@dataclass
class ScoringSettings:
    """The fields of [`MultiAgentConfig`] that a [`Scorer`] reads, with their defaults."""

    on_reward_error: str = "raise"
    reward_timeout: float | None = None
    reward_scale: float = 1.0
    reward_shift: float = 0.0


class Scorer:
    """
    The reward functions of a team.

    Every function is called once per turn, with the episodes that have the turn. TRL's `_calculate_rewards` passes the
    record of the call to the functions as a column of its inputs.

    Args:
        reward_funcs (`list`): Functions, coroutine functions and reward models, as TRL accepts them.
        agents (`list[str]`): Names of the agents.
        settings ([`ScoringSettings`] or [`MultiAgentConfig`]): Limits, and how to handle failures.
        executor (`Callable`): Returns the executor. Called when it is first needed.
        calculate (`Callable`, *optional*): TRL's `_calculate_rewards`, which calls `wrapped`. By default, the scorer calls
            them, and reward models are not supported.
        weights (`Callable`, *optional*): Returns the weight of each function, `(F,)`. Defaults to 1 for all.

    Attributes:
        reward_funcs (`list`): The functions as given.
        runs_tests (`bool`): Whether a function needs the verdict on the solution.
        wrapped (`list`): The functions for TRL to call.
    """

    def __init__(
        self,
        reward_funcs: list,
        agents: list[str],
        settings: Any,
        executor: Callable[[], CodeExecutor],
        calculate: Callable[..., torch.Tensor] | None = None,
        weights: Callable[[], torch.Tensor] | None = None,
    ):
        self.reward_funcs = reward_funcs
        self._calculate = calculate or self._call_functions
        self._weights = weights or (lambda: torch.ones(len(reward_funcs)))
        self.runs_tests = any(needs(func, "tests") for func in reward_funcs)
        self._agents = agents
        self._settings = settings
        self._executor = executor
        self.wrapped = wrap_rewards(reward_funcs, agents, executor, settings.reward_timeout)
        self._warned: set[str] = set()
        # Number of calls of the functions that have returned only None so far, by index
        self._silent = {index: 0 for index, func in enumerate(reward_funcs) if not is_reward_model(func)}

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuses reward functions that read token ids of another tokenizer."""
        for func in self.reward_funcs:
            if needs(func, "tokenizer"):
                unwrap(func).check_tokenizer(tokenizer)  # type: ignore[attr-defined]

    def execute(self, turns: Sequence[tuple[Episode, Turn]]) -> Callable[[], None]:
        """
        Starts to execute the solutions of turns with all tests of their problems.

        Does not repeat what the workflow has executed, unless the executor failed.

        Args:
            turns (`Sequence[tuple[Episode, Turn]]`): Episodes and their turns.

        Returns:
            `Callable[[], None]`: Waits for the verdicts, and sets `tested` on every turn.
        """
        jobs = [solution_job(episode.problem, turn.solution) for episode, turn in turns]
        known = {
            job: verdict for _, turn in turns for job, verdict in turn.verdicts if verdict.status != "infrastructure"
        }
        missing = list(dict.fromkeys(job for job in jobs if job not in known))
        future = self._executor().submit(missing)

        def finish() -> None:
            verdicts = known | dict(zip(missing, future.result(), strict=True))
            for (_, turn), job in zip(turns, jobs, strict=True):
                turn.tested = job, verdicts[job]
                turn.verdicts = [pair for pair in turn.verdicts if pair[0] != job] + [turn.tested]

        return finish

    def score(
        self,
        episodes: list[Episode],
        turn: int,
        wait: Callable[[], None] | None,
    ) -> list[tuple[str, float]]:
        """
        Scores one turn of the episodes of this process: sets `rewards` and `score` on the turn, and `masked` on episodes.

        A collective operation: all processes must pass the same number of episodes.

        Args:
            episodes (`list[Episode]` of length E): The episodes. Those that ended before the turn are skipped.
            turn (`int`): The turn, counted from 0.
            wait (`Callable`, *optional*): Waits for the verdicts (see [`Scorer.execute`]).

        Returns:
            `list[tuple[str, float]]`: Names and values that functions passed to `log_metric`.

        Raises:
            Exception: On all processes, the error of the executor, or of a reward function with `on_reward_error="raise"`.
        """
        playing = [e for e, episode in enumerate(episodes) if len(episode.turns) > turn]
        call = ScoringCall(turn, playing)
        try:
            if wait is not None:
                wait()
        except Exception as error:  # raised below on all processes, so that none waits for this one
            call.errors[_EXECUTION] = error
        inputs, prompts, completions, completion_ids = [], [], [], []
        for episode in episodes:
            # TRL gathers rewards, so every process passes all of its episodes. Those that ended are skipped below
            last = min(turn, len(episode.turns) - 1)
            columns, completion = reward_inputs(episode, last)
            inputs.append({**columns, CALL_COLUMN: call})
            prompts.append(columns["prompt"])
            completions.append(completion)
            completion_ids.append(
                [token for row in episode.rows if row.slot.turn == last for token in row.completion_ids]
            )
        gathered = self._calculate(inputs, prompts, completions, completion_ids)
        failed = self._settle(call, gathered.device)
        state = this_process()
        start = state.process_index * len(episodes)
        values = gathered[start : start + len(episodes)].cpu()[playing]
        for i, f in call.missing:
            values[i, f] = torch.nan
        if failed:
            values.fill_(torch.nan)
        for i, e in enumerate(playing):
            self._note(episodes[e], i, call, values[i], self._weights().cpu(), failed)
        if state.is_main_process:
            self._warn(call, values, failed)
        return call.metrics

    def begin(
        self,
        team: Team,
        problems: Sequence[Mapping[str, Any]],
        groups: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Callable[[], list[Episode]]:
        """
        Plays one episode per problem outside of training. Returns before the solutions are executed, so that the caller can
        play more episodes in the meantime.

        A collective operation: all processes must pass the same number of problems.

        Args:
            team ([`Team`]): The team that plays.
            problems (`Sequence[Mapping]` of length E): Dataset rows with tests.
            groups (`Sequence[Sequence[int]]`, *optional*): Indices of the episodes to pass to reward functions together. All
                processes need the same number and sizes of groups. Defaults to one group of all episodes.
            **options: Arguments of [`Team.playing`].

        Returns:
            `Callable[[], list[Episode]]`: Waits for the verdicts, scores the episodes, and returns them, with rewards and the
            verdict on the solution of every turn. Call it once, in the same order on all processes.
        """
        groups = [range(len(problems))] if groups is None else groups
        last, threshold = team.workflow.num_turns - 1, team.settings.early_termination_threshold
        # Turns are scored as they are played only if rewards can end episodes
        scored_first = last if threshold is not None else 0

        def execute(episodes: list[Episode], turns: Iterable[int]) -> Callable[[], None]:
            return self.execute([(e, e.turns[k]) for k in turns for e in episodes if len(e.turns) > k])

        def score(episodes: list[Episode], turns: Sequence[int], wait: Callable[[], None] | None) -> None:
            for turn, group in itertools.product(turns, groups):
                self.score([episodes[e] for e in group], turn, wait)
                wait = None

        def end_turn(episodes: list[Episode], turn: int) -> None:
            if turn < scored_first:
                score(episodes, [turn], execute(episodes, [turn]))

        ends = None if threshold is None else lambda episode: is_over(episode, threshold)
        episodes = team.play(problems, end_turn, ends, **options)
        turns = range(scored_first, last + 1)
        wait = execute(episodes, turns)

        def finish() -> list[Episode]:
            score(episodes, turns, wait)
            return episodes

        return finish

    def _call_functions(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids: list
    ) -> torch.Tensor:
        """Returns the rewards of the episodes of all processes, like TRL's `_calculate_rewards`."""
        keywords: dict[str, Any] = {key: [row[key] for row in inputs] for key in inputs[0] if key != "prompt"}
        keywords |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        outputs = [func(**keywords) for func in self.wrapped]

        async def all_of(awaitables: list) -> list:
            return await asyncio.gather(*awaitables)

        awaited = iter(asyncio.run(all_of([out for out in outputs if inspect.isawaitable(out)])))
        outputs = [next(awaited) if inspect.isawaitable(out) else out for out in outputs]
        device = this_process().device
        return gather(torch.tensor(outputs, dtype=torch.float32, device=device).T.contiguous())

    def _note(
        self, episode: Episode, i: int, call: ScoringCall, values: torch.Tensor, weights: torch.Tensor, failed: bool
    ) -> None:
        """Stores the rewards of the i-th episode of the call in the episode."""
        turn = episode.turns[call.turn]
        own_values = [(call.by_agent.get((f, i), {}), value) for f, value in enumerate(values.tolist())]
        turn.score = Score(
            values=tuple(values.tolist()),
            columns={column: logged[i] for column, logged in call.columns.items()},
            metrics=call.metrics_of(i),
            failed=failed,
            by_agent={agent: tuple(own.get(agent, value) for own, value in own_values) for agent in self._agents},
        )
        if self.runs_tests and turn.tested is not None and turn.tested[1].status == "infrastructure":
            call.lost.setdefault(i, turn.tested[1].message)
        if i in call.lost or values.isnan().all():
            episode.masked = True
            return
        shared = 0.0
        own = dict.fromkeys(self._agents, 0.0)
        for f, value in enumerate(turn.score.values):
            by_agent = call.by_agent.get((f, i))
            if by_agent is not None:
                for agent in self._agents:
                    own[agent] += float(weights[f]) * by_agent[agent]
            elif not math.isnan(value):
                shared += float(weights[f] * values[f])
        scale, shift = self._settings.reward_scale, self._settings.reward_shift
        turn.rewards = {agent: scale * (shared + own[agent]) + shift for agent in self._agents}

    def _settle(self, call: ScoringCall, device: torch.device) -> bool:
        """Returns whether a reward function failed on this process, or raises the error on all processes."""
        masks = self._settings.on_reward_error == "mask"
        fatal = {what: error for what, error in call.errors.items() if not masks or what == _EXECUTION}
        if reduce(torch.tensor(len(fatal), device=device), reduction="sum").item():
            index = this_process().process_index
            messages = gather_object([f"{what} failed on process {index}: {error!r}" for what, error in fatal.items()])
            raise next(iter(fatal.values()), RuntimeError("; ".join(messages)))
        for what, error in call.errors.items():
            self._warn_once(
                what,
                f"{what} failed, and on_reward_error='mask' excludes the episodes of this call from training. Later failures "
                f"are counted as rewards/failed in the log: {error!r}",
            )
        return bool(call.errors)

    def _warn(self, call: ScoringCall, values: torch.Tensor, failed: bool) -> None:
        """Warns once of failed infrastructure, and of functions that return only `None`."""
        if call.lost:
            reason = next(filter(None, call.lost.values()), "no reason given")
            self._warn_once(
                _EXECUTION,
                f"{len(call.lost)} of {len(call.playing)} episodes could not be scored because the infrastructure failed: "
                f"{reason}. Such episodes are excluded from training, and counted as episodes/masked in the log.",
            )
        if failed or call.lost or not call.playing:
            return
        answered = ~values.isnan().all(0)
        for f in list(self._silent):
            if answered[f]:
                del self._silent[f]
                continue
            self._silent[f] += 1
            if not answered.any() or self._silent[f] == _SILENT_CALLS:
                name = get_callable_name(self.reward_funcs[f])
                left_out = (
                    "" if answered.any() else " No other reward scored these episodes, so they are not trained on."
                )
                self._warn_once(
                    f"silence of {name!r}",
                    f"reward function {name!r} has returned only None so far, which means that it applies to no "
                    f"episode.{left_out}",
                )

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, stacklevel=2)


def is_over(episode: Episode, threshold: float) -> bool:
    """Whether the last turn's reward, averaged over agents, exceeds the threshold, or the episode is masked."""
    rewards = episode.turns[-1].rewards
    return sum(rewards.values()) / len(rewards) > threshold if rewards else episode.masked


def reward_inputs(episode: Episode, turn: int) -> tuple[dict[str, Any], Any]:
    """
    Returns the inputs of reward functions for a turn, in TRL's format.

    Args:
        episode ([`Episode`]): The episode.
        turn (`int`): One of its turns, counted from 0.

    Returns:
        `tuple`: The row, with the problem's columns and those of the turn, and the completion: text, or chat messages if the
        prompt is a list of messages. If the solution is the reply of an agent with tools, these include calls and results.
    """
    this, before = episode.turns[turn], episode.turns[turn - 1] if turn else None
    columns = {
        "replies": this.replies,
        "turn": turn,
        "verdicts": this.verdicts,
        "rows": [row for row in episode.rows if row.slot.turn <= turn],
        "previous_solution": None if before is None else before.solution,
        "previous_verdicts": [] if before is None else before.verdicts,
        **episode.problem,  # has such columns only where they are meant (see `check_dataset`)
    }
    if isinstance(episode.problem["prompt"], str):
        return columns, this.solution
    used = [
        row.messages for row in episode.rows if row.slot.turn == turn and row.text == this.solution and row.messages
    ]
    return columns, used[-1] if used else [{"role": "assistant", "content": this.solution}]
