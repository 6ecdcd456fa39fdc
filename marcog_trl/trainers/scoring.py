"""
Scores turns of episodes: executes solutions, calls every reward function once, and keeps what came back with the turn.

Training and evaluation both score here. It knows nothing about rows, advantages or losses.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, gather_object, reduce
from trl.trainer.utils import get_callable_name, is_async_callable

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import solution_job
from marcog_trl.processes import this_process
from marcog_trl.rewards import make_reward
from marcog_trl.rewards.requirements import needs, wants_executor
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure
from marcog_trl.rollout.records import Episode, Score, Turn
from marcog_trl.team.team import Team


_EXECUTION = "code execution"
_CALL = "marcog_call"  # the column in which a call travels through TRL to the reward functions
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
        self.wrapped = [self._wrap(index, func) for index, func in enumerate(reward_funcs)]
        self._warned: set[str] = set()
        # By index: calls of a function that returned nothing but None, as long as it has returned nothing else
        self._silent = {index: 0 for index, func in enumerate(reward_funcs) if not _is_model(func)}

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
        call = _Call(turn, playing)
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
            inputs.append({**columns, _CALL: call})
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
        self, episode: Episode, i: int, call: _Call, values: torch.Tensor, weights: torch.Tensor, failed: bool
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

    def _settle(self, call: _Call, device: torch.device) -> bool:
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

    def _warn(self, call: _Call, values: torch.Tensor, failed: bool) -> None:
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

    def _wrap(self, index: int, func: Any) -> Any:
        """A reward function as TRL calls it: with all episodes, of which it is told those that had the turn."""
        if _is_model(func):
            return func
        name = get_callable_name(func)
        timed = TimedCall(name, func, self._settings.reward_timeout)
        accepted = _parameters(func)

        def select(kwargs: dict, call: _Call, log: _Log) -> dict:
            size = len(kwargs["prompts"])
            chosen = {
                key: [value[e] for e in call.playing] if isinstance(value, list) and len(value) == size else value
                for key, value in kwargs.items()
            }
            chosen |= {"log_extra": log.extra, "log_metric": log.metric}
            if wants_executor(func):
                chosen["executor"] = self._executor()
            return chosen if accepted is None else {key: chosen[key] for key in accepted & chosen.keys()}

        def expand(output: Any, size: int, call: _Call, log: _Log) -> list[float]:
            rewards = check_rewards(name, output, len(call.playing), self._agents)
            # Without a reward there is a number that nothing reads: None would make TRL print the episode, batch by batch
            expanded = [0.0] * size
            for i, (e, reward) in enumerate(zip(call.playing, rewards, strict=True)):
                if reward is None or isinstance(reward, InfrastructureFailure):
                    call.missing.append((i, index))
                    if reward is not None:
                        call.lost[i] = reward.reason
                elif isinstance(reward, dict):
                    call.by_agent[index, i] = reward
                    expanded[e] = sum(reward.values()) / len(reward)
                else:
                    expanded[e] = reward
            # Only now: what a call logged that failed, or was given up, is dropped
            call.columns |= log.columns
            call.metrics += log.metrics
            return expanded

        def fail(error: Exception | SystemExit, size: int, call: _Call) -> list[float]:
            if isinstance(error, SystemExit):  # of one process, which the others would wait for
                error = RuntimeError(f"reward function {name!r} called exit: {error!r}").with_traceback(
                    error.__traceback__
                )
            call.errors[f"reward function {name!r}"] = error
            return [0.0] * size  # which nothing reads

        def by_episode(**kwargs):
            size, (call, *_) = len(kwargs["prompts"]), kwargs.pop(_CALL)
            log = _Log(len(call.playing))
            try:
                return expand(timed(**select(kwargs, call, log)) if call.playing else [], size, call, log)
            except (Exception, SystemExit) as error:
                return fail(error, size, call)

        async def by_episode_async(**kwargs):
            size, (call, *_) = len(kwargs["prompts"]), kwargs.pop(_CALL)
            log = _Log(len(call.playing))
            try:
                output = await timed.call_async(**select(kwargs, call, log)) if call.playing else []
                return expand(output, size, call, log)
            except (Exception, SystemExit) as error:
                return fail(error, size, call)

        wrapped = by_episode_async if is_async_callable(func) else by_episode
        wrapped.__name__ = name
        return wrapped


@dataclass(repr=False)
class _Call:
    """
    One call of all reward functions.

    Args:
        turn (`int`): The turn that is scored.
        playing (`list[int]`): Which of the episodes had it: those that functions are given, in this order.
        by_agent (`dict[tuple[int, int], dict[str, float]]`): Rewards by agent, by function and place in `playing`.
        missing (`list[tuple[int, int]]`): Place in `playing`, and function that gave no reward.
        lost (`dict[int, str]`): By place in `playing`, why an episode could not be scored.
        columns (`dict[str, list]`): What functions gave to `log_extra`.
        metrics (`list[tuple[str, float]]`): What functions gave to `log_metric`.
        errors (`dict[str, Exception]`): Of this process, by what failed.
    """

    turn: int
    playing: list[int]
    by_agent: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    missing: list[tuple[int, int]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    columns: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)

    def metrics_of(self, i: int) -> dict[str, float]:
        """The metrics of the i-th episode, its own where the function told them; names without the turn."""
        found = defaultdict(list)
        for name, value in self.metrics:
            of_episode = value.values[i] if isinstance(value, EpisodeMean) else value
            if of_episode is not None:
                found[name.replace(f"/turn_{self.turn + 1}/", "/", 1)].append(of_episode)
        return {name: sum(values) / len(values) for name, values in found.items()}


class _Log:
    """What one reward function logs in one call, with `count` episodes."""

    def __init__(self, count: int):
        self.count = count
        self.columns: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []

    def extra(self, column: str, values: list) -> None:
        if len(values) != self.count:
            raise ValueError(
                f"a reward function logged {len(values)} values as {column!r} for {self.count} episodes. Log one value for "
                "each of its completions."
            )
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        of_episodes = isinstance(value, EpisodeMean) and len(value.values) == self.count
        self.metrics.append((name, value if of_episodes else float(value)))


class TimedCall:
    """
    A reward function with a limit on the time that a call may take.

    A function runs in a thread of its own. Python cannot end a thread: a call that is given up runs on, and until it
    returns further calls fail at once, so that a function that hangs holds one thread and no more. A call that does not
    release Python's lock, such as a runaway regular expression, is waited for; `signal.alarm` does not work outside of the
    main thread. An async function is cancelled at its next `await`.

    Args:
        name (`str`): What errors call the function.
        func (`Callable`): The function, or a coroutine function.
        timeout (`float`, *optional*): Seconds. `None` calls the function as it is.

    Raises:
        TimeoutError: By a call that takes longer.
    """

    def __init__(self, name: str, func: Callable, timeout: float | None):
        self.name, self.func, self.timeout = name, func, timeout
        self.given_up: Future | None = None

    def __call__(self, **kwargs: Any) -> Any:
        if self.timeout is None:
            return self.func(**kwargs)
        if self.given_up is not None and not self.given_up.done():
            raise TimeoutError(
                f"reward function {self.name!r} has not returned from a call that took longer than "
                f"reward_timeout={self.timeout} seconds. It is not called again before that call returns."
            )
        future: Future = Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                future.set_result(context.run(self.func, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        # Not of a thread pool, which the interpreter would wait for when it ends
        threading.Thread(target=run, name=f"reward-{self.name}", daemon=True).start()
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done():
                raise  # the function's own
            self.given_up = future
            raise self._late() from None

    async def call_async(self, **kwargs: Any) -> Any:
        """As a call, for coroutine functions."""
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await self.func(**kwargs)
        except TimeoutError:
            if limit.expired():
                raise self._late() from None
            raise

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"reward function {self.name!r} took longer than reward_timeout={self.timeout} seconds. Set a longer "
            "reward_timeout, or set on_reward_error='mask' to leave such episodes out."
        )


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
        "previous_solution": None if before is None else before.solution,
        "previous_verdicts": [] if before is None else before.verdicts,
    }
    conversational = not isinstance(episode.problem["prompt"], str)
    return columns, [{"role": "assistant", "content": this.solution}] if conversational else this.solution


def named_reward(reward_func):
    """The reward function of a name of this package; everything else, Hub ids and paths included, is left to TRL."""
    if isinstance(reward_func, str) and "/" not in reward_func and not Path(reward_func).exists():
        return make_reward(reward_func)
    if isinstance(reward_func, type) or not (callable(reward_func) or isinstance(reward_func, str)):
        raise TypeError(
            f"reward_funcs has {reward_func!r}, which is not a reward. Pass a function of completions, a reward model, or a name "
            "such as 'execution_reward'."
        )
    return reward_func


def _is_model(reward_func: Any) -> bool:
    """Whether TRL makes a reward model of it, or it is one."""
    return isinstance(reward_func, torch.nn.Module | str)


def _parameters(reward_func: Callable) -> set[str] | None:
    """The names of the arguments that a reward function takes; `None` if it takes all."""
    parameters = inspect.signature(reward_func).parameters.values()
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def check_rewards(name: str, output: Any, expected: int, agents: list[str]) -> list[float | dict[str, float] | None]:
    """
    One reward per episode: a float, a dict agent -> float, an [`InfrastructureFailure`], or `None`.

    Raises:
        ValueError: If the reward function returned something else, another number of rewards, NaN or infinity.
    """
    if not isinstance(output, Iterable):
        raise ValueError(f"reward function {name!r} returned {output!r}. It must return a list of {expected} rewards.")
    rewards = list(output)
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} returned {len(rewards)} rewards for {expected} episodes. It must return one per "
            "episode."
        )
    checked: list[float | dict[str, float] | None] = []
    for i, reward in enumerate(rewards):
        if reward is None or isinstance(reward, InfrastructureFailure):
            checked.append(reward)
            continue
        try:
            if isinstance(reward, str):
                raise TypeError
            numbers = {agent: float(reward[agent]) for agent in agents} if isinstance(reward, dict) else float(reward)
        except (KeyError, TypeError, ValueError):
            numbers = None
        if numbers is None or (isinstance(reward, dict) and len(reward) != len(agents)):
            raise ValueError(
                f"reward function {name!r} returned {reward!r} for episode {i}. Return a float, None, or a dict with a float "
                f"for each of {agents}."
            )
        for number in numbers.values() if isinstance(numbers, dict) else [numbers]:
            if not math.isfinite(number):
                shown = "NaN" if math.isnan(number) else number
                raise ValueError(
                    f"reward function {name!r} returned {shown} for episode {i}. Return None where the reward does not apply."
                )
        checked.append(numbers)
    return checked
