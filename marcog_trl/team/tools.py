"""
Calls the tools of agents inside their replies, with TRL's own loop.

TRL parses a reply, runs the calls in it, appends their results, and lets the model go on until it calls no tool. [`ToolLoop`]
has what this loop reads of a trainer, for the rows of one stage.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.trainer.utils import start_event_loop_in_daemon

from marcog_trl.agents import Tools, Workflow
from marcog_trl.execution import python_tool, shared_executor
from marcog_trl.parsing.prompts import ChatRequest
from marcog_trl.rollout.chats import with_system_prompt
from marcog_trl.rollout.engine import Generate, encode_prompts
from marcog_trl.rollout.records import Row
from marcog_trl.team.agent_contexts import AgentContexts
from marcog_trl.team.data_checks import NEEDS_MESSAGES


class ToolLoop(GRPOTrainer):
    """
    TRL's loop of calls of tools, for a team. It trains nothing, and TRL's constructor does not run.

    Its attributes have the names that TRL's loop reads. TRL finds the tools of a completion by the environment of its
    problem. Here the number of the row stands for the environment, because every row may have other tools.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The team's model, whose context limits replies.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer. Gets a response template if it has none.
        workflow ([`Workflow`]): The team's workflow.
        settings ([`TeamSettings`]): The team's settings.
        sum_over_processes (`Callable`): Sums an `int` over all processes.

    Raises:
        ValueError: If the chat template does not support tools, or cannot describe one of them.
    """

    environment_factories: Any = ()
    processing_class: Any
    chat_template_kwargs: dict[str, Any]
    _env_tools: Any
    _batch_environments: Any
    use_vllm = False
    vllm_mode = "colocate"
    vllm_generation: Any = None
    _is_vlm = False

    def __init__(
        self, model: Any, tokenizer: Any, workflow: Workflow, settings: Any, sum_over_processes: Callable[[int], int]
    ):
        check_tools(workflow)
        if not supports_tool_calling(tokenizer):
            raise ValueError(
                "The chat template of the tokenizer does not support tools: it does not show calls of tools and their results. "
                "Use a model that was trained to call tools, such as Qwen/Qwen3-0.6B."
            )
        if any(python_tool in agent.tools for agent in workflow.agents):
            shared_executor(
                isolation=settings.isolation, packages=settings.packages
            )  # it may not support this machine
        self.model = model
        self._tokenizer = tokenizer
        self.processing_class = _Template(tokenizer)
        # As in TRL's constructor
        if tokenizer.response_template is None:
            add_response_schema(tokenizer)
        kept = is_chat_template_prefix_preserving(tokenizer)
        self.chat_template = None if kept else get_training_chat_template(tokenizer)
        self.chat_template_kwargs = settings.chat_template_kwargs or {}
        self._system_prompt = settings.system_prompt
        self.max_completion_length = settings.max_completion_length
        limit = settings.max_tool_calling_iterations
        self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        self._of_agent = {agent.name: agent.tools for agent in workflow.agents}
        self._sum = sum_over_processes
        if any(inspect.iscoroutinefunction(tool) for tools in self._of_agent.values() for tool in tools):
            _, self.async_loop, ready = start_event_loop_in_daemon(name="marcog_trl-tools")
            ready.wait()
        self._speak: Generate | None = None  # generates the rest of replies; TRL's loop cannot pass it on

    def tools_of(self, row: Row) -> Tools:
        """Returns the tools of the row's agent."""
        return self._of_agent[row.slot.agent]

    def around(
        self,
        begin: Generate,
        speak: Generate,
        contexts: AgentContexts | None,
        tools_of: Callable[[Row], Tools] | None,
    ) -> Generate:
        """
        Extends a function that generates replies by calls of tools.

        Args:
            begin (`Callable`): Generates the beginning of replies, as [`~marcog_trl.rollout.engine.Generate`].
            speak (`Callable`): Generates what follows the prompts of rows.
            contexts ([`AgentContexts`], *optional*): Makes the model act as the agents of rows.
            tools_of (`Callable`, *optional*): Returns the tools of a row, in place of those of its agent.
        """
        found = tools_of or self.tools_of

        def go_on(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
            with nullcontext() if contexts is None else contexts.as_before(rows):
                return speak(rows)

        def generate(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
            self.encode(rows, found)
            return self.run(rows, *begin(rows), go_on, found)

        return generate

    def encode(self, rows: list[Row], tools_of: Callable[[Row], Tools]) -> None:
        """Tokenizes the prompts of rows with tools again, with a description of the tools."""
        known: dict[Any, list[int]] = {}
        for row in rows:
            tools = tools_of(row)
            if not tools:
                continue
            if isinstance(row.prompt, str):
                raise ValueError(NEEDS_MESSAGES.format(agent=row.slot.agent))
            key = repr(row.prompt), *(tool.__name__ for tool in tools)
            if key not in known:
                [known[key]] = encode_prompts(
                    self._tokenizer,
                    [with_system_prompt(row.prompt, self._system_prompt)],
                    tools=list(tools),
                    chat_template=self.chat_template,
                    **self.chat_template_kwargs,
                )
            row.prompt_ids = list(known[key])

    def run(
        self,
        rows: list[Row],
        completion_ids: list[list[int]],
        logprobs: list[list[float]] | None,
        speak: Generate,
        tools_of: Callable[[Row], Tools],
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """
        Runs the calls in the replies of a stage, and sets `messages` and `tool_mask` of the rows that have tools.

        A collective operation: all processes must call it, also without rows.

        Args:
            rows (`list[Row]` of length R): The rows.
            completion_ids (`list[list[int]]` of length R): What their agents wrote so far.
            logprobs (`list[list[float]]` of length R, *optional*): Log-probabilities of these tokens.
            speak (`Callable`): Generates what follows the prompts of rows, as [`~marcog_trl.rollout.engine.Generate`].
            tools_of (`Callable`): Returns the tools of a row.

        Returns:
            `tuple`: The whole replies, including results of tools, and log-probabilities, which are 0 for these results.
        """
        using = [i for i, row in enumerate(rows) if tools_of(row)]
        if using:
            own = [{tool.__name__: tool for tool in tools_of(rows[i])} for i in using]
            self._env_tools, self._batch_environments = [list(tools.values()) for tools in own], range(len(own))
            self._async_tool_dicts = [_select(tools, is_async=True) for tools in own]
            self._sync_tool_dicts = [_select(tools, is_async=False) for tools in own]
            self._speak = speak
            masks, messages, replies, scores, *_ = self._tool_call_loop(
                [list(rows[i].prompt) for i in using],
                [_PromptIds(rows[i].prompt_ids, rows[i]) for i in using],
                [completion_ids[i] for i in using],
                [
                    [parse_response(self._tokenizer, completion_ids[i], rows[i].prompt_ids, list(tools.values()))]
                    for i, tools in zip(using, own, strict=True)
                ],
                None if logprobs is None else [logprobs[i] for i in using],
                None,
                {},
            )
            for k, i in enumerate(using):
                if len(replies[k]) > len(completion_ids[i]):
                    rows[i].token_states = None  # generation gave only those before the first result
                rows[i].messages, rows[i].tool_mask, completion_ids[i] = messages[k], masks[k], replies[k]
                if logprobs is not None:
                    logprobs[i] = scores[k]
        while self._sum(0):  # tools were called on another process
            speak([])
        return completion_ids, logprobs

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """
        Generates with the team. It does not call `super()`, which would need a trainer: this class would go if TRL's loop were a
        function that takes what generates.
        """
        self._sum(len(prompt_ids))
        assert self._speak is not None
        return self._speak([ids.continued() for ids in prompt_ids])


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template describes tools, and TRL can read the calls in replies."""
    if not supports_tool_calling(tokenizer):
        return False
    if tokenizer.response_template is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:  # TRL does not know the template
            return False
    return True


def read_calls(generate: Generate, tokenizer: Any) -> Generate:
    """
    Extends a function that generates replies: those to a program that described tools are read as a message with calls of
    tools, which the program runs.
    """

    def read(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        completion_ids, logprobs = generate(rows)
        for row, ids in zip(rows, completion_ids, strict=False):  # a process without rows generates a dummy row
            if isinstance(row.prompt, ChatRequest) and row.prompt.tools:
                row.messages = [parse_response(tokenizer, ids, row.prompt_ids, [*row.prompt.tools])]
        return completion_ids, logprobs

    return read


class _PromptIds(list):
    """Token ids of the prompt of a row. TRL's loop adds those of the reply so far and of the results of tools."""

    def __init__(self, ids: Sequence[int], row: Row):
        super().__init__(ids)
        self.row = row

    def __add__(self, other: Any) -> _PromptIds:
        return _PromptIds([*self, *other], self.row)

    def continued(self) -> Row:
        """Returns a copy of the row whose prompt has all of these tokens."""
        return replace(self.row, prompt_ids=list(self), completion_ids=self[len(self.row.prompt_ids) :])


class _Template:
    """The chat template of a tokenizer, for TRL's loop. Results of tools cannot inject special tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, return_dict: bool, **options: Any
    ) -> list[int]:
        """Returns the token ids of a chat."""
        [ids] = encode_prompts(self._tokenizer, [messages], **options)
        return ids


def _select(tools: Mapping[str, Callable], is_async: bool) -> dict[str, Callable]:
    return {name: tool for name, tool in tools.items() if inspect.iscoroutinefunction(tool) is is_async}


def check_tools(workflow: Workflow) -> None:
    """
    Checks that chat templates can describe the tools of a workflow's agents.

    Raises:
        ValueError: If a tool lacks type hints or a docstring, or two tools of an agent share a name.
    """
    for agent in workflow.agents:
        for tool in agent.tools:
            try:
                get_json_schema(tool)
            except Exception as error:
                why = " ".join(str(error).split()).rstrip(".!")
                raise ValueError(
                    f"Tool {tool.__name__!r} of agent {agent.name!r} cannot be described to the model: {why}. Give it type "
                    "hints and a docstring that describes each argument."
                ) from error
        names = [tool.__name__ for tool in agent.tools]
        if len({*names}) < len(names):
            raise ValueError(f"Agent {agent.name!r} has tools with the same name: {names}. Rename one of them.")
