"""Plays workflows with replies that nobody wrote, and without running code: what prompts will be like, before there is a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marcog_trl.agents import Consult, Execute, Prompt, Slot, Workflow
from marcog_trl.execution.jobs import unusable
from marcog_trl.rollout.chats import with_system_prompt
from marcog_trl.rollout.engine import encode_prompts
from marcog_trl.rollout.player import EpisodePlayer


def measure_prompts(
    workflow: Workflow,
    problems: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    reply_tokens: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> tuple[int, int, bool]:
    """
    Plays a workflow with long replies. All tests fail.

    Args:
        workflow ([`Workflow`]): The workflow.
        problems (`Iterable[Mapping]`): Dataset rows.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer.
        reply_tokens (`int`): Length of a reply.
        chat_template_kwargs (`Mapping`, *optional*): Arguments of the chat template.
        system_prompt (`str`, *optional*): System message of prompts that have none.

    Returns:
        `tuple[int, int, bool]`: Tokens of the longest prompt, the most agents that speak at the same moment, and whether some
        of them read the same prompt.
    """
    line = "    total = total + value\n"
    lines = reply_tokens // max(1, len(tokenizer(line)["input_ids"]))
    reply = f"```python\ndef f(value):\n{line * lines}    return total\n```"
    stages = [stage for problem in problems for stage in _stages(workflow, problem, reply)]
    prompts = list({repr(prompt): prompt for stage in stages for prompt in stage.values()}.values())
    chats = [with_system_prompt(prompt, system_prompt) for prompt in prompts]
    ids = encode_prompts(tokenizer, chats, **(chat_template_kwargs or {}))
    alike = any(len(set(map(repr, stage.values()))) < len(stage) for stage in stages)
    return max(map(len, ids)), max(map(len, stages)), alike


def _stages(workflow: Workflow, problem: Mapping[str, Any], reply: str) -> list[dict[Slot, Prompt]]:
    """The slots and prompts of each stage of an episode in which all agents give this reply."""
    player, stages = EpisodePlayer(workflow, problem, 0), []
    while player.request is not None:
        request = player.request
        if isinstance(request, Execute):
            player.respond([unusable(job, "not run") for job in request.jobs])
        elif isinstance(request, Consult):
            answers: list[str | None] = [None] * len(request.questions)
            player.respond(answers)
        else:
            slots = player.next_slots()
            stages.append({slot: player.prompt_for(slot) for slot in slots})
            player.respond({slot.agent: reply for slot in slots})
    return stages


def stages_of(workflow: Workflow, problems: Iterable[Mapping[str, Any]]) -> list[tuple[Slot, ...]]:
    """
    Finds out who speaks when. Plays the problems once with empty replies, and once with code; all tests fail.

    Args:
        workflow ([`Workflow`]): The workflow.
        problems (`Iterable[Mapping]`): Dataset rows.

    Returns:
        `list[tuple[Slot, ...]]`: The slots of each stage, in the order of the workflow's slots. A slot that no problem uses is
        a stage of its own.

    Raises:
        ValueError: If agents speak in another order than that of the slots.
    """
    code = "```python\ndef f(value):\n    return value\n```"
    episodes = [list(map(set, _stages(workflow, problem, reply))) for problem in problems for reply in ("", code)]
    stages: list[list[Slot]] = []
    for slot in workflow.slots:
        if stages and any({slot, stages[-1][-1]} <= asked for episode in episodes for asked in episode):
            stages[-1].append(slot)
        else:
            stages.append([slot])
    for episode in episodes:
        order = [i for asked in episode for i, stage in enumerate(stages) if asked & set(stage)]
        if len(order) != len(episode) or sorted(set(order)) != order:
            asked_in_order = [[f"{slot.agent} (turn {slot.turn})" for slot in asked] for asked in episode]
            raise ValueError(
                f"credit='counterfactual' needs slots in the order in which agents speak, but {type(workflow).__name__}.play "
                f"asks {asked_in_order}, and its slots are {workflow.slots}. Reorder the slots, or set credit='group'."
            )
    return [tuple(stage) for stage in stages]


def widest_stage(workflow: Workflow) -> int:
    """The most agents that can speak at the same moment, from the workflow's slots alone."""
    moments = [(slot.turn, slot.act) for slot in workflow.slots]
    return max(moments.count(moment) for moment in moments)
