"""
Scores turns of episodes: executes solutions, calls every reward function once, and keeps what came back with the turn.

Training and evaluation both score here. It knows nothing about rows, advantages or losses.
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
_SILENT_CALLS = 10  # of a function that has returned nothing but None, before it is warned of


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

    Every function is called once per turn, with the episodes that had the turn. What it needs to know of the call goes
    through TRL's `_calculate_rewards` as a column of its inputs, so that nothing is kept between calls.

    Args:
        reward_funcs (`list`): Functions, coroutine functions, and what TRL makes reward models of.
        agents (`list[str]`): Names of the agents.
        settings ([`ScoringSettings`] or [`MultiAgentConfig`]): Limits, and what becomes of failures.
        executor (`Callable`): Returns the executor; called when it is first needed.
        calculate (`Callable`, *optional*): TRL's `_calculate_rewards`, which calls `wrapped`. By default they are called here,
            which rules reward models out.
        weights (`Callable`, *optional*): Returns the weight of each function, `(F,)`. All are 1 by default.

    Attributes:
        reward_funcs (`list`): The functions as they were given.
        runs_tests (`bool`): Whether a function needs the verdict on the solution.
        wrapped (`list`): What TRL is to call in their place.
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
        # By index: calls of a function that returned nothing but None, as long as it has returned nothing else
        self._silent = {index: 0 for index, func in enumerate(reward_funcs) if not is_reward_model(func)}

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuses reward functions that read token ids of another tokenizer."""
        for func in self.reward_funcs:
            if needs(func, "tokenizer"):
                unwrap(func).check_tokenizer(tokenizer)  # type: ignore[attr-defined]

    def execute(self, turns: Sequence[tuple[Episode, Turn]]) -> Callable[[], None]:
        """
        Begins to execute the solutions of turns with all tests of their problems.

        What the workflow has executed is not executed again, unless the executor failed.

        Args:
            turns (`Sequence[tuple[Episode, Turn]]`): Episodes and their turns.

        Returns:
            `Callable[[], None]`: Waits for the verdicts, and sets `tested` of every turn.
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
        Scores one turn of the episodes of this process: sets `rewards` and `score` of the turn, and `masked` of episodes.

        With several processes it is a collective operation, and all of them bring the same number of episodes.

        Args:
            episodes (`list[Episode]` of length E): Those that ended before the turn are left out.
            turn (`int`): The turn, counted from 0.
            wait (`Callable`, *optional*): Waits for the verdicts, see [`Scorer.execute`].

        Returns:
            `list[tuple[str, float]]`: What the functions gave to `log_metric`.

        Raises:
            Exception: On all processes, what a reward function raised under `on_reward_error="raise"`, and what the executor
                raised.
        """
        playing = [e for e, episode in enumerate(episodes) if len(episode.turns) > turn]
        call = ScoringCall(turn, playing)
        try:
            if wait is not None:
                wait()
        except Exception as error:  # of this process, which the others would wait for
            call.errors[_EXECUTION] = error
        inputs, prompts, completions, completion_ids = [], [], [], []
        for episode in episodes:
            # Every process scores all of its episodes, since TRL gathers rewards; those that ended are left out below
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
        Plays one episode per problem, outside of training, and returns while solutions are still being executed, so that
        more can be played meanwhile.

        With several processes it is a collective operation, and every process must bring the same number of problems.

        Args:
            team ([`Team`]): The team that plays.
            problems (`Sequence[Mapping]` of length E): Dataset rows with tests.
            groups (`Sequence[Sequence[int]]`, *optional*): Episodes that reward functions are called with together, by index;
                as many groups, of the same sizes, on all processes. By default all of them.
            **options: Arguments of [`Team.playing`].

        Returns:
            `Callable[[], list[Episode]]`: To be called once, by all processes in the same order: waits for the verdicts,
            scores the episodes, and returns them, with rewards and, of every turn, the verdict on its solution.
        """
        groups = [range(len(problems))] if groups is None else groups
        last, threshold = team.workflow.num_turns - 1, team.settings.early_termination_threshold
        # Only where rewards end episodes are turns scored as they are played
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

        ends = None if threshold is None else lambda episode: is_over([episode], threshold)
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
        """Rewards of all processes' episodes, as TRL's `_calculate_rewards` returns them."""
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
        """Puts what the functions said of the i-th episode that they were given into the episode."""
        turn = episode.turns[call.turn]
        turn.score = Score(
            values=tuple(values.tolist()),
            columns={column: logged[i] for column, logged in call.columns.items()},
            metrics=call.metrics_of(i),
            failed=failed,
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
        """Whether a reward function failed here, and is left out; or the error, which all processes raise together."""
        masks = self._settings.on_reward_error == "mask"
        fatal = {what: error for what, error in call.errors.items() if not masks or what == _EXECUTION}
        if reduce(torch.tensor(len(fatal), device=device), reduction="sum").item():
            index = this_process().process_index
            messages = gather_object([f"{what} failed on process {index}: {error!r}" for what, error in fatal.items()])
            raise next(iter(fatal.values()), RuntimeError("; ".join(messages)))
        for what, error in call.errors.items():
            self._warn_once(
                what,
                f"{what} failed, and on_reward_error='mask' leaves out the episodes it was called with, now and from now "
                f"on (their share is rewards/failed in the log): {error!r}",
            )
        return bool(call.errors)

    def _warn(self, call: ScoringCall, values: torch.Tensor, failed: bool) -> None:
        """Warns once of infrastructure that fails, and of functions that say nothing."""
        if call.lost:
            reason = next(filter(None, call.lost.values()), "no reason given")
            self._warn_once(
                _EXECUTION,
                f"{len(call.lost)} of {len(call.playing)} episodes could not be scored because the infrastructure failed, not "
                f"the solution: {reason}. Such episodes are left out, now and from now on (episodes/masked in the log).",
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
                    "" if answered.any() else " No other reward scored these episodes: they are left out of training."
                )
                self._warn_once(
                    f"silence of {name!r}",
                    f"reward function {name!r} has returned only None so far. None means that a reward does not apply to "
                    f"an episode.{left_out}",
                )

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, stacklevel=2)


def is_over(episodes: list[Episode], threshold: float) -> bool:
    """Whether the last turn of these siblings earned more than the threshold, or nothing that comes could count."""
    rewards = [list(episode.turns[-1].rewards.values()) for episode in episodes if episode.turns[-1].rewards]
    if not rewards:
        return all(episode.masked for episode in episodes)
    return sum(sum(by_agent) / len(by_agent) for by_agent in rewards) / len(rewards) > threshold


def reward_inputs(episode: Episode, turn: int) -> tuple[dict[str, Any], Any]:
    """
    What reward functions are told of a turn, as TRL takes it.

    Args:
        episode ([`Episode`]): The episode.
        turn (`int`): Turn that it had, counted from 0.

    Returns:
        `tuple`: The row: `prompt`, the problem's other columns, and what the turn adds; and the completion, which is text, or
        chat messages where the prompt is.
    """
    this, before = episode.turns[turn], episode.turns[turn - 1] if turn else None
    columns = {
        **episode.problem,
        "replies": this.replies,
        "turn": turn,
        "verdicts": this.verdicts,
        "rows": [row for row in episode.rows if row.slot.turn <= turn],
        "previous_solution": None if before is None else before.solution,
        "previous_verdicts": [] if before is None else before.verdicts,
    }
    conversational = not isinstance(episode.problem["prompt"], str)
    return columns, [{"role": "assistant", "content": this.solution}] if conversational else this.solution
