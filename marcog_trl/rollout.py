"""
Plays workflows in batches.

The engine advances every episode of a batch to its next request, answers all code-execution requests in one call to
the executor and all requests to speak in one call to `generate`, so that the number of generate calls is the number of
stages, whatever the number of problems, agents and branches. It knows nothing about losses, models or trl: training, evaluation
and tests hand it the functions that it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from marcog_trl.agents import Advisor, Consult, Execute, Prompt, Slot, Workflow
from marcog_trl.execution import CodeExecutor, Job, Verdict, shared_executor


Request = dict[str, Prompt] | Execute | Consult
Answer = dict[str, str] | list[Verdict] | list[str | None]


@dataclass
class Row:
    """
    One reply of one agent: the unit of the batch and of the loss.

    Args:
        episode (`int`): Index of the episode in its batch; of several that share the reply, the first.
        slot (`Slot`): Agent, turn and act of the reply.
        stage (`int`): Number of the generate call, within the episode's batch, that produced the reply.
        prompt (`str` or `list[dict]`): What the agent was asked, before tokenization.
        prompt_ids (`list[int]`): The prompt's token ids.
        completion_ids (`list[int]`): The reply's token ids, the terminal EOS included.
        logprobs (`list[float]`, *optional*): Log-probability of each completion token, where the backend gives it.
        text (`str`): The decoded reply.
        node (`int`): Id of the history at which the reply was given. In a tree the siblings of a group share it.
        parent (`int`): Id of the history one turn before, -1 in the first turn.
        sibling (`int`): Which of the replies of its agent at this node, from 0.
    """

    episode: int
    slot: Slot
    stage: int
    prompt: Prompt
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    text: str = ""
    node: int = -1
    parent: int = -1
    sibling: int = 0


@dataclass(frozen=True)
class Score:
    """
    What the reward functions said of one turn of one episode.

    Args:
        values (`tuple[float, ...]`): By reward function, in reward units, averaged over agents; NaN where it gave none.
        columns (`Mapping[str, Any]`): What they logged of this episode with `log_extra`.
        metrics (`Mapping[str, float]`): What they logged with `log_metric`, names without the turn: of this episode where the
            function told it (see [`~marcog_trl.rewards.EpisodeMean`]), else of all episodes that were scored with it.
        failed (`bool`): Whether a function failed, and the episode is masked for it.
    """

    values: tuple[float, ...]
    columns: Mapping[str, Any]
    metrics: Mapping[str, float]
    failed: bool = False


@dataclass
class Turn:
    """
    What one turn of an episode came to.

    Args:
        replies (`Mapping[str, str]`): The last reply of each agent that spoke in this turn, as `Workflow.parts` gives it.
        solution (`str`): The code (or, for a single agent, the reply) that is scored.
        verdicts (`list[tuple[Job, Verdict]]`): What the workflow executed during the turn, and, once it is scored, `tested`.
        tested (`tuple[Job, Verdict]`, *optional*): The solution with all tests of the problem, and what came of it; `None`
            before scoring, and where no reward needs it.
        score ([`Score`], *optional*): What the reward functions said; `None` before scoring.
        rewards (`dict[str, float]`, *optional*): Reward of each agent, in reward units; `None` if the episode is
            masked, and before scoring.
    """

    replies: Mapping[str, str]
    solution: str
    verdicts: list[tuple[Job, Verdict]]
    rewards: dict[str, float] | None = None
    tested: tuple[Job, Verdict] | None = None
    score: Score | None = None


@dataclass
class Episode:
    """
    One play of a workflow on one problem.

    Args:
        problem (`Mapping`): The dataset row.
        rows (`list[Row]`): Replies in the order in which they were given.
        turns (`list[Turn]`): One entry per turn played.
        answers (`list`): Every answer that the workflow received, in order: what [`replay`] needs.
        masked (`bool`): Whether the episode is left out of every loss: no reward function had a reward for a turn of it, a
            function failed, or the infrastructure did.
        advice (`list[str | None]`): What advisors answered, in order; `None` where they had no answer.
    """

    problem: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    masked: bool = False
    advice: list[str | None] = field(default_factory=list)


class Generate(Protocol):
    """Answers one stage: one completion per row, in order. Called with no rows where only other processes have some."""

    def __call__(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]: ...


class _Player:
    """An episode in flight: the workflow's generator, the request that it waits on, and its record."""

    def __init__(self, workflow: Workflow, problem: Mapping[str, Any], index: int):
        self.workflow = workflow
        self.index = index
        self.episode = Episode(problem)
        self.turn = 0
        self.node = self.parent = -1
        self.sibling = 0
        self._replies: dict[str, str] = {}
        self._verdicts: list[tuple[Job, Verdict]] = []
        self._slots = {
            agent.name: [slot for slot in workflow.slots if slot.agent == agent.name] for agent in workflow.agents
        }
        self._spoken = dict.fromkeys(self._slots, 0)
        self._play: Generator[Request, Answer, None] = workflow.play(problem)
        self.request: Request | None = self._advance(None)

    def _advance(self, answer: Answer | None) -> Request | None:
        try:
            request = next(self._play) if answer is None else self._play.send(answer)
        except StopIteration:
            return None
        if isinstance(request, Execute):
            if not request.jobs:
                raise ValueError(
                    f"{type(self.workflow).__name__}.play yielded Execute without jobs; give at least one"
                )
        elif not isinstance(request, Consult) and not (isinstance(request, dict) and request):
            raise TypeError(
                f"{type(self.workflow).__name__}.play yielded {request!r}; yield a non-empty dict of agent -> prompt, "
                "Execute([job, ...]) or Consult(advisor, [question, ...])"
            )
        return request

    def answer(self, answer: Answer) -> None:
        self.episode.answers.append(answer)
        if isinstance(self.request, Execute):
            self._verdicts += zip(self.request.jobs, answer, strict=True)  # type: ignore[arg-type]
        elif isinstance(self.request, Consult):
            self.episode.advice += answer  # type: ignore[arg-type]
        elif isinstance(self.request, dict):
            for agent in self.request:
                self._spoken[agent] += 1
            self._replies.update(answer)  # type: ignore[arg-type]
        self.request = self._advance(answer)

    def answer_rows(self, rows: list[Row]) -> None:
        """Answers the pending request to speak."""
        self.episode.rows += rows
        self.answer({row.slot.agent: row.text for row in rows})

    def goes_on(self, turn: int) -> bool:
        """Whether the episode had this turn and may have another one."""
        return len(self.episode.turns) == turn + 1 and self.request is not None

    def next_slots(self) -> list[Slot]:
        """The slots that the pending request to speak fills."""
        assert isinstance(self.request, dict)
        slots = []
        for agent in self.request:
            if agent not in self._slots:
                raise ValueError(
                    f"{type(self.workflow).__name__} asked agent {agent!r}, which is not in its agents {list(self._slots)}"
                )
            if self._spoken[agent] == len(self._slots[agent]):
                raise ValueError(
                    f"{type(self.workflow).__name__} asked agent {agent!r} for reply {self._spoken[agent] + 1}, but its "
                    f"slots hold {self._spoken[agent]}; declare one Slot per reply"
                )
            slots.append(self._slots[agent][self._spoken[agent]])
        if len({slot.turn for slot in slots}) > 1:
            raise ValueError(f"{type(self.workflow).__name__} asked for replies of different turns at once: {slots}")
        return slots

    def fork(self, index: int, sibling: int) -> _Player:
        """The same episode once more, as number `index`: what was said and scored is shared, what follows is its own."""
        copy = _Player(self.workflow, self.episode.problem, index)
        copy.node, copy.parent, copy.sibling = self.node, self.parent, sibling
        for answer in self.episode.answers:
            copy.answer(answer)
        if self.request is None:
            copy.stop()
        copy.turn, copy._verdicts = self.turn, list(self._verdicts)
        copy._replies = dict(self._replies)
        copy.episode.rows, copy.episode.turns = list(self.episode.rows), list(self.episode.turns)
        copy.episode.masked = self.episode.masked
        return copy

    def stop(self) -> None:
        """Ends the episode here."""
        self._play.close()
        self.request = None

    def speaks_now(self) -> bool:
        """Whether the episode waits for replies of the current turn."""
        return isinstance(self.request, dict) and self.next_slots()[0].turn == self.turn

    def end_turn(self) -> None:
        """Closes the current turn. Turns are consecutive: where nobody speaks, the episode is over."""
        if self._replies:
            parts = self.workflow.parts(self.episode.problem, self._replies)
            solution = self.workflow.solution(self.episode.problem, parts)
            self.episode.turns.append(Turn(parts, solution, self._verdicts))
        elif not self.turn:
            raise ValueError(f"{type(self.workflow).__name__}.play let nobody speak in the first turn")
        elif isinstance(self.request, dict) and self.next_slots()[0].turn > self.turn:
            raise ValueError(
                f"{type(self.workflow).__name__}.play let nobody speak in turn {self.turn}, but asks "
                f"{list(self.request)} for turn {self.next_slots()[0].turn}; slots of consecutive turns work"
            )
        self._replies, self._verdicts = {}, []
        self.turn += 1


def play(
    workflow: Workflow,
    problems: Sequence[Mapping[str, Any]],
    generate: Generate,
    encode: Callable[[list[Prompt]], list[list[int]]],
    decode: Callable[[list[list[int]]], list[str]],
    executor: CodeExecutor | None = None,
    score: Callable[[list[Episode], int], None] | None = None,
    total: Callable[[int], int] = int,
    ends: Callable[[Episode], bool] | None = None,
) -> list[Episode]:
    """
    Plays one episode of a workflow per problem.

    Args:
        workflow (`Workflow`): Who speaks when, and who sees what.
        problems (`Sequence[Mapping]` of length E): Dataset rows; repeat a row to play it several times.
        generate (`Callable`): `generate(rows) -> (completion_ids, logprobs or None)`, called once per stage.
        encode (`Callable`): `encode(prompts) -> prompt_ids`.
        decode (`Callable`): `decode(completion_ids) -> texts`.
        executor (`CodeExecutor`, *optional*): Runs what workflows ask to execute. Defaults to the shared one.
        score (`Callable`, *optional*): `score(episodes, turn)`, called once at the end of every turn; it sets the
            `rewards` of that turn of the episodes that have it.
        total (`Callable`, *optional*): Sums an `int` over all processes, so that every process makes the same number
            of generate calls; with several processes it is a collective operation.
        ends (`Callable`, *optional*): `ends(episode)`, asked after the scoring of each turn but the last: whether the
            episode is over, whatever its workflow would still ask.

    Returns:
        `list[Episode]`: E episodes, in the order of `problems`.

    Raises:
        ValueError: If a workflow asks an agent that it does not have, or for more replies than its slots.
    """
    engine = _Engine(generate, encode, decode, executor, total)
    players = [_Player(workflow, problem, index) for index, problem in enumerate(problems)]
    for turn in range(workflow.num_turns):
        for player in players:
            # Every episode has a history of its own
            player.node, player.parent = player.index * workflow.num_turns + turn, player.node
        engine.play_turn(players, turn)
        if score is not None:
            score([player.episode for player in players], turn)
        for player in players:
            if ends is not None and turn < workflow.num_turns - 1 and player.request is not None:
                if ends(player.episode):
                    player.stop()
    _check_ended(players)
    return [player.episode for player in players]


def play_tree(
    workflow: Workflow,
    problems: Sequence[Mapping[str, Any]],
    generate: Generate,
    encode: Callable[[list[Prompt]], list[list[int]]],
    decode: Callable[[list[list[int]]], list[str]],
    num_generations: int,
    joint_mode: str = "align",
    executor: CodeExecutor | None = None,
    score: Callable[[list[Episode], int], None] | None = None,
    total: Callable[[int], int] = int,
    ends: Callable[[list[Episode]], bool] | None = None,
) -> list[list[Episode]]:
    """
    Plays a tree of episodes per problem: at every node, which is what one turn of an episode came to, agents answer
    `num_generations` times, and every joint action of theirs becomes a child. All nodes of one depth are played together.

    Args:
        workflow, generate, encode, decode, executor, score, total: See [`play`]. `score` is given all episodes of a depth;
            one that ended before stands there with fewer turns, as many times as it would have descendants. What it masks has no
            children.
        problems (`Sequence[Mapping]` of length P): Dataset rows, each of them once.
        num_generations (`int`): G, the replies of each agent at a node.
        joint_mode (`str`, *optional*, defaults to `"align"`): `"align"`: the g-th replies of all agents are joint action g,
            J = G of them. `"cross"`: every combination of their replies is one, J = G^N with N the agents, which must speak at
            the same moment.
        ends (`Callable`, *optional*): `ends(siblings)`, asked of the J children of every node but at the last turn: whether
            none of them has children.

    Returns:
        `list[list[Episode]]` of length K: For turn k, the P · J^(k+1) episodes up to it, siblings beside each other. They
        share the rows and turns of their ancestors.

    Raises:
        ValueError: As [`play`], and if agents do not speak at the same moment in cross mode.
    """
    engine = _Engine(generate, encode, decode, executor, total)
    players = [_Player(workflow, problem, index) for index, problem in enumerate(problems)]
    levels: list[list[Episode]] = []
    next_node = 0
    for turn in range(workflow.num_turns):
        engine.settle(players)
        for player in players:
            player.node, player.parent = next_node + player.index, player.node
        next_node += len(players)
        if joint_mode == "cross":
            joint_actions = num_generations ** sum(slot.turn == turn for slot in workflow.slots)
            players = engine.play_cross_turn(players, turn, num_generations)
        else:
            joint_actions = num_generations
            players = _forks(players, joint_actions)
            engine.play_turn(players, turn)
        levels.append([player.episode for player in players])
        if score is not None:
            score(levels[-1], turn)
        for start in range(0, len(players), joint_actions):
            siblings = players[start : start + joint_actions]
            if turn < workflow.num_turns - 1 and any(player.goes_on(turn) for player in siblings):
                over = ends is not None and ends([player.episode for player in siblings])
                for player in siblings:
                    if over or player.episode.masked:
                        player.stop()
    _check_ended(players)
    return levels


def _forks(players: list[_Player], count: int) -> list[_Player]:
    return [player.fork(player.index * count + i, i) for player in players for i in range(count)]


def _check_ended(players: list[_Player]) -> None:
    for player in players:
        if isinstance(player.request, dict):
            raise ValueError(
                f"{type(player.workflow).__name__}.play asks {list(player.request)} for turn {player.next_slots()[0].turn} "
                f"after its last turn; num_turns={player.workflow.num_turns} is too small, or replies come in another order "
                "than slots"
            )


@dataclass
class _Engine:
    """Answers the requests of many episodes, one call per kind and stage."""

    generate: Generate
    encode: Callable[[list[Prompt]], list[list[int]]]
    decode: Callable[[list[list[int]]], list[str]]
    executor: CodeExecutor | None
    total: Callable[[int], int]
    stage: int = 0

    def settle(self, players: list[_Player]) -> None:
        """Executes and asks advisors, until every episode waits for replies or is over."""
        while True:
            executing = [player for player in players if isinstance(player.request, Execute)]
            consulting = [player for player in players if isinstance(player.request, Consult)]
            if executing:
                jobs = [job for player in executing for job in player.request.jobs]  # type: ignore[union-attr]
                verdicts = iter((self.executor or shared_executor()).run(jobs))
                for player in executing:
                    player.answer([next(verdicts) for _ in player.request.jobs])  # type: ignore[union-attr]
            elif consulting:
                asked: dict[Advisor, list[_Player]] = {}
                for player in consulting:
                    asked.setdefault(player.request.advisor, []).append(player)  # type: ignore[union-attr]
                for advisor, waiting in asked.items():
                    self._consult(advisor, waiting)
            else:
                return

    @staticmethod
    def _consult(advisor: Advisor, players: list[_Player]) -> None:
        asked = [cast(Consult, player.request).questions for player in players]
        answers = advisor([question for questions in asked for question in questions])
        expected = sum(map(len, asked))
        if len(answers) != expected:
            raise ValueError(f"the advisor {advisor} gave {len(answers)} answers to {expected} questions")
        remaining = iter(answers)
        for player, questions in zip(players, asked, strict=True):
            player.answer(list(itertools.islice(remaining, len(questions))))

    def play_turn(self, players: list[_Player], turn: int) -> None:
        """All stages of a turn, one reply for each request."""
        while True:
            self.settle(players)
            speaking = [player for player in players if player.speaks_now()]
            if self.total(len(speaking)) == 0:
                break
            rows = iter(self._speak(speaking, turn))
            for player in speaking:
                player.answer_rows([next(rows) for _ in player.request])  # type: ignore[union-attr]
        for player in players:
            player.end_turn()

    def play_cross_turn(self, players: list[_Player], turn: int, samples: int) -> list[_Player]:
        """A turn of one stage, `samples` replies for each request; the episodes of all combinations of them."""
        num_slots = sum(slot.turn == turn for slot in players[0].workflow.slots) if players else 0
        speaking = [player for player in players if player.speaks_now()]
        rows = iter(self._speak(speaking, turn, samples) if self.total(len(speaking)) else [])
        combinations = samples**num_slots
        forks: list[_Player] = []
        for player in players:
            copies = _forks([player], combinations)
            forks += copies
            if player.speaks_now():
                _check_simultaneous(player, num_slots)
                replies = [[next(rows) for _ in range(samples)] for _ in range(num_slots)]
                for copy, joint_action in zip(copies, itertools.product(*replies), strict=True):
                    for row in joint_action:
                        row.episode = copy.index if row.episode < 0 else row.episode
                    copy.answer_rows(list(joint_action))
        self.settle(forks)
        for player in forks:
            if player.speaks_now():
                _check_simultaneous(player, num_slots)
            player.end_turn()
        return forks

    def _speak(self, speaking: list[_Player], turn: int, samples: int = 1) -> list[Row]:
        """`samples` replies for each pending request of each player, in one call."""
        rows = []
        for player in speaking:
            for slot in player.next_slots():
                prompt = player.request[slot.agent]  # type: ignore[index]
                for sample in range(samples):
                    # Which episode shares a reply of several is known when they are combined
                    episode, sibling = (player.index, player.sibling) if samples == 1 else (-1, sample)
                    row = Row(episode, slot, self.stage, prompt, [], node=player.node, parent=player.parent)
                    row.sibling = sibling
                    rows.append(row)
        if rows:
            # The siblings of a group ask the same thing: tokenize each prompt once
            unique = {repr(row.prompt): row.prompt for row in rows}
            ids = dict(zip(unique, self.encode(list(unique.values())), strict=True))
            for row in rows:
                row.prompt_ids = list(ids[repr(row.prompt)])
        completion_ids, logprobs = self.generate(rows)
        texts = self.decode(completion_ids) if rows else []
        for i, row in enumerate(rows):
            row.completion_ids, row.text = completion_ids[i], texts[i]
            row.logprobs = None if logprobs is None else logprobs[i]
        self.stage += 1
        return rows


def _check_simultaneous(player: _Player, num_slots: int) -> None:
    asked = list(player.request)  # type: ignore[arg-type]
    if len(asked) != num_slots:
        raise ValueError(
            f"joint_mode='cross' combines replies that are given at the same moment, but {type(player.workflow).__name__} asks "
            f"{asked} alone; joint_mode='align' works"
        )


def replay(workflow: Workflow, problem: Mapping[str, Any], answers: Sequence[Answer]) -> list[Request]:
    """
    Feeds recorded answers to a fresh play of a workflow.

    A workflow is deterministic given the answers, so a prefix of an episode's record brings a fresh generator to the
    same point: this is how an episode is forked or looked at again.

    Args:
        workflow (`Workflow`): The workflow that was played.
        problem (`Mapping`): The problem that was played.
        answers (`Sequence`): [`Episode.answers`], or a prefix of it.

    Returns:
        `list`: The requests that the workflow made, the one that it waits on included if it has not ended.

    Raises:
        ValueError: If the workflow ends before all answers are used.
    """
    player = _Player(workflow, problem, 0)
    requests = [player.request]
    for answer in answers:
        if player.request is None:
            raise ValueError(
                f"the record has {len(answers)} answers, but the workflow ended after {len(requests) - 1}"
            )
        player.answer(answer)
        requests.append(player.request)
    return [request for request in requests if request is not None]


def encode_prompts(processing_class: Any, prompts: list[Prompt], **chat_template_kwargs: Any) -> list[list[int]]:
    """
    Tokenizes prompts for generation.

    Chat messages go through the tokenizer's chat template; where it has none (base models), their contents are joined
    by blank lines. Plain text is tokenized as it is.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        prompts (`list[str | list[dict]]`): B prompts.
        chat_template_kwargs: Passed to the chat template.

    Returns:
        `list[list[int]]`: B lists of token ids, of their own lengths, without padding.
    """
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append((prompt, True))
        elif processing_class.chat_template:
            text = processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **chat_template_kwargs
            )
            texts.append((text, False))
        else:
            texts.append(("\n\n".join(message["content"] for message in prompt) + "\n", True))
    ids: list[list[int]] = []
    for text, add_special_tokens in texts:
        ids.append(processing_class(text=text, add_special_tokens=add_special_tokens)["input_ids"])
    return ids
