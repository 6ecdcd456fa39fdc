"""
Plays workflows in batches.

The engine advances every episode of a batch to its next request, answers all code-execution requests in one call to
the executor and all requests to speak in one call to `generate`, so that the number of generate calls is the number of
stages, whatever the number of problems, agents and branches. It knows nothing about losses, models or trl: training, evaluation
and tests hand it the functions that it needs.
"""

from __future__ import annotations

import copy
import itertools
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, cast

from marcog_trl.agents import Advisor, Consult, Execute, Prompt, Slot, Workflow
from marcog_trl.execution import CodeExecutor, Job, Verdict, shared_executor
from marcog_trl.problems.schema import fault_of_prompt


Request = dict[str | Slot, Prompt] | Execute | Consult
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
        problem (`Mapping`): The dataset row: a read-only copy of this episode's own.
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
        self.title = type(workflow).__name__
        self.index = index
        self.problem = problem
        # Lists and dicts inside are this episode's own, so that nothing leaks from one episode to the next
        self.episode = Episode(MappingProxyType(copy.deepcopy(dict(problem))))
        self.turn = 0
        self.node = self.parent = -1
        self.sibling = 0
        self._replies: dict[str, str] = {}
        self._verdicts: list[tuple[Job, Verdict]] = []
        self._slots = {
            agent.name: [slot for slot in workflow.slots if slot.agent == agent.name] for agent in workflow.agents
        }
        self._used = dict.fromkeys(self._slots, 0)  # of each agent's slots, those that are filled or passed over
        self._turn_begun = 0  # turn of the last reply
        self._asked: dict[Slot, Prompt] = {}
        play = workflow.play(self.episode.problem)
        if not isinstance(play, Generator):
            raise TypeError(
                f"{self.title}.play returned {play!r}, since it has no `yield`. Let it yield {{agent name: prompt}}."
            )
        self._play = cast(Generator[Request, Answer, None], play)
        self.request: Request | None = self._advance(None)
        if self.request is None:
            raise ValueError(f"{self.title}.play asked nobody. Let it yield {{agent name: prompt}}.")

    def _advance(self, answer: Answer | None) -> Request | None:
        try:
            request = next(self._play) if answer is None else self._play.send(answer)
        except StopIteration:
            return None
        if isinstance(request, Execute):
            if not request.jobs:
                raise ValueError(f"{self.title}.play yielded Execute without jobs. Give it at least one.")
        elif isinstance(request, dict) and request:
            self._asked = self._slots_of(request)
        elif not isinstance(request, Consult):
            raise TypeError(
                f"{self.title}.play yielded {request!r}. Yield a non-empty dict of agent name -> prompt, "
                "Execute([job, ...]) or Consult(advisor, [question, ...])."
            )
        return request

    def _slots_of(self, request: dict[str | Slot, Prompt]) -> dict[Slot, Prompt]:
        """Which slots a request to speak fills: those that it names, else the next one of an agent."""
        asked: dict[Slot, Prompt] = {}
        for key, prompt in request.items():
            agent = key.agent if isinstance(key, Slot) else key
            if agent not in self._slots:
                raise ValueError(
                    f"{self.title}.play asked agent {agent!r}, which is not in its agents {list(self._slots)}."
                )
            slots, used = self._slots[agent], self._used[agent]
            if not isinstance(key, Slot):
                # Slots of a turn that is over stay empty
                found = next((slot for slot in slots[used:] if slot.turn >= self._turn_begun), None)
                if found is None:
                    raise ValueError(
                        f"{self.title}.play asked agent {agent!r} for one more reply than its slots {slots} hold. Declare "
                        "one Slot per reply."
                    )
            elif key in slots[used:] and key.turn >= self._turn_begun:
                found = key
            else:
                why = "was filled or passed over before" if key in slots else f"is not in its slots {slots}"
                raise ValueError(f"{self.title}.play asked for {key}, which {why}.")
            fault = fault_of_prompt(prompt)
            if fault is not None:
                raise ValueError(f"{self.title}.play asked agent {agent!r} something that cannot be asked: {fault}.")
            if any(slot.agent == agent for slot in asked):
                raise ValueError(f"{self.title}.play asked agent {agent!r} twice at the same moment.")
            asked[found] = prompt
        if len({slot.turn for slot in asked}) > 1:
            raise ValueError(
                f"{self.title}.play asked for replies of different turns at once: {list(asked)}. Where a turn leaves a slot "
                "empty, name the slot in the request that follows: {Slot('main', turn=1): prompt}."
            )
        return asked

    def answer(self, answer: Answer) -> None:
        self.episode.answers.append(answer)
        if isinstance(self.request, Execute):
            self._verdicts += zip(self.request.jobs, answer, strict=True)  # type: ignore[arg-type]
        elif isinstance(self.request, Consult):
            self.episode.advice += answer  # type: ignore[arg-type]
        elif isinstance(self.request, dict):
            for slot in self._asked:
                self._used[slot.agent] = self._slots[slot.agent].index(slot) + 1
                self._turn_begun = slot.turn
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
        return list(self._asked)

    def prompt_for(self, slot: Slot) -> Prompt:
        """What the pending request asks; the dataset's own prompt, word for word, is [`AsGiven`]."""
        prompt = self._asked[slot]
        return AsGiven(prompt) if isinstance(prompt, str) and prompt == self.problem.get("prompt") else prompt

    def fork(self, index: int, sibling: int) -> _Player:
        """The same episode once more, as number `index`: what was said and scored is shared, what follows is its own."""
        copy = _Player(self.workflow, self.problem, index)
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
            if not isinstance(parts, Mapping):
                raise TypeError(f"{self.title}.parts returned {parts!r:.80}. Return a dict of name -> text.")
            solution = self.workflow.solution(self.episode.problem, parts)
            if not isinstance(solution, str):
                raise TypeError(f"{self.title}.solution returned {solution!r:.80}. Return the solution as text.")
            self.episode.turns.append(Turn(parts, solution, self._verdicts))
        elif not self.turn:
            raise ValueError(
                f"{self.title}.play let nobody speak in the first turn. Let it yield {{agent name: prompt}}."
            )
        elif isinstance(self.request, dict) and self.next_slots()[0].turn > self.turn:
            raise ValueError(
                f"{self.title}.play let nobody speak in turn {self.turn}, but asks for {self.next_slots()} next. Turns must "
                "be consecutive."
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
        TypeError: If `play`, `parts` or `solution` of a workflow yields or returns something else than it must.
        ValueError: If a workflow asks an agent that it does not have, for more replies than its slots, or with an empty
            prompt.
    """
    workflow.validate()
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
        TypeError, ValueError: As [`play`]; `ValueError` also if agents do not speak at the same moment in cross mode.
    """
    workflow.validate()
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
                f"{player.title}.play asks for {player.next_slots()} after its last turn. Increase num_turns="
                f"{player.workflow.num_turns}, or ask in the order of the slots."
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
                prompt = player.prompt_for(slot)
                for sample in range(samples):
                    # Which episode shares a reply of several is known when they are combined
                    episode, sibling = (player.index, player.sibling) if samples == 1 else (-1, sample)
                    row = Row(episode, slot, self.stage, prompt, [], node=player.node, parent=player.parent)
                    row.sibling = sibling
                    rows.append(row)
        if rows:
            # The siblings of a group ask the same thing: tokenize each prompt once
            unique = {(type(row.prompt), repr(row.prompt)): row.prompt for row in rows}
            ids = dict(zip(unique, self.encode(list(unique.values())), strict=True))
            for row in rows:
                row.prompt_ids = list(ids[type(row.prompt), repr(row.prompt)])
        completion_ids, logprobs = self.generate(rows)
        texts = self.decode(completion_ids) if rows else []
        for i, row in enumerate(rows):
            row.completion_ids, row.text = completion_ids[i], texts[i]
            row.logprobs = None if logprobs is None else logprobs[i]
        self.stage += 1
        return rows


def _check_simultaneous(player: _Player, num_slots: int) -> None:
    asked = player.next_slots()
    if len(asked) != num_slots:
        raise ValueError(
            f"joint_mode='cross' combines replies that are given at the same moment, but {player.title} asks "
            f"{[slot.agent for slot in asked]} alone. Set joint_mode='align'."
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


class AsGiven(str):
    """
    A text prompt that is the dataset's own, word for word. TRL's users may have put it through a chat template themselves,
    so that the special tokens in it are meant.
    """


_CUT = f"\ue000{uuid.uuid4().hex}\ue001"
"""Stands where a text is cut into pieces that are tokenized apart. No text can hold it but by our doing."""


def encode_prompts(processing_class: Any, prompts: list[Prompt], **chat_template_kwargs: Any) -> list[list[int]]:
    """
    Tokenizes prompts for generation.

    Chat messages go through the tokenizer's chat template; where it has none (base models), their contents are joined
    by blank lines. Plain text is tokenized as text.

    What problems, replies and feedback spell out stays text: `<|im_end|>` in it is not the token that ends a message, so
    that no reply can speak in another's name. Special tokens come from the chat template and the tokenizer alone, and from
    a text prompt of the dataset that is asked word for word ([`AsGiven`]), as in TRL. Other prompts have the token ids of
    `apply_chat_template`.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        prompts (`list[str | list[dict]]`): B prompts.
        chat_template_kwargs: Passed to the chat template.

    Returns:
        `list[list[int]]`: B lists of token ids, of their own lengths, without padding.
    """
    cut = _Cutter(processing_class, repr(prompts), chat_template_kwargs)
    ids: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            text = prompt if isinstance(prompt, AsGiven) else cut(prompt)
        elif processing_class.chat_template:
            text = processing_class.apply_chat_template(
                cut(prompt), add_generation_prompt=True, tokenize=False, **chat_template_kwargs
            )
        else:
            text = "\n\n".join(cut(message["content"]) for message in prompt) + "\n"
        in_template = not isinstance(prompt, str) and bool(processing_class.chat_template)
        ids.append(_encode_pieces(processing_class, text.split(_CUT), add_special_tokens=not in_template))
    return ids


def _encode_pieces(processing_class: Any, pieces: list[str], add_special_tokens: bool) -> list[int]:
    """The token ids of the pieces of a text, in what the tokenizer puts around a whole text."""
    ids = list(processing_class(text=pieces[0], add_special_tokens=add_special_tokens)["input_ids"])
    if len(pieces) == 1:
        return ids
    plain = [list(processing_class(text=piece, add_special_tokens=False)["input_ids"]) for piece in pieces]
    size = len(plain[0])
    start = next(i for i in range(len(ids) - size + 1) if ids[i : i + size] == plain[0])
    return [*ids[:start], *itertools.chain.from_iterable(plain), *ids[start + size :]]


class _Cutter:
    """
    Cuts texts inside of all that would be read as a special token, after its first character.

    Those are the tokenizer's special tokens, and the added ones that the chat template puts around the messages of an
    ordinary exchange. Tokens that the template itself looks for in a reply, such as `</think>`, are left to it.
    """

    def __init__(self, processing_class: Any, said: str, chat_template_kwargs: Mapping[str, Any]):
        added = processing_class.added_tokens_decoder.values()
        tokens = [token.content for token in added if token.special]
        others = [token.content for token in added if not token.special and token.content in said]
        if others and processing_class.chat_template:

            def exchange(reply: str) -> str:
                turns = zip(("user", "assistant", "user"), ("a", reply, "c"), strict=True)
                messages = [{"role": role, "content": content} for role, content in turns]
                return processing_class.apply_chat_template(messages, tokenize=False, **chat_template_kwargs)

            around = exchange("b")
            tokens += [token for token in others if token in around and f"b{token}d" in exchange(f"b{token}d")]
        self._start = re.compile(f"(?=(?:{'|'.join(map(re.escape, tokens))})).", re.DOTALL) if tokens else None

    def __call__(self, prompt: Any) -> Any:
        """The text, or the messages, with cuts; roles are the workflow's own."""
        if isinstance(prompt, str):
            return prompt if self._start is None else self._start.sub(lambda found: found[0] + _CUT, prompt)
        if isinstance(prompt, Mapping):
            return {key: value if key == "role" else self(value) for key, value in prompt.items()}
        return [self(part) for part in prompt] if isinstance(prompt, list) else prompt
