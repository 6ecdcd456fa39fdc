"""Settings of a team, and the workflow made from them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast

from transformers import GenerationConfig

from marcog_trl.agents import Workflow
from marcog_trl.checks import Count, NaturalNumber, Positive, Range, Unit, check_fields, documented
from marcog_trl.execution import CodeExecutor
from marcog_trl.execution.isolation import IsolationLevel
from marcog_trl.execution.jobs import LEAST_MEMORY_MB
from marcog_trl.team.endpoint_agents import endpoint_of, use_endpoints
from marcog_trl.workflows import Centralized, ClassTeam, FeedbackWorkflow, Program, construct, is_own, workflow_class
from marcog_trl.workflows.expert import ExpertEdits
from marcog_trl.workflows.feedback import FeedbackMode
from marcog_trl.workflows.program import OPTIONS as PROGRAM_OPTIONS


# Settings of the machine that runs a team, not of the team
MACHINE_SETTINGS = {"num_workers", "execution_timeout", "execution_memory_mb", "isolation"}
# Settings that only some workflows have, and what their constructors call them
_OPTION_OF = {"class_split": "split"} | {
    name: name for name in ("feedback", "visible_tests", "expert", *PROGRAM_OPTIONS)
}


@documented
@dataclass
class PlaySettings:
    """
    Settings of the workflow and of code execution, shared by [`TeamSettings`] and the trainers' configurations.

    Args:
        > Parameters that control the team

        workflow (`str`, *optional*, defaults to `"single"`):
            Built-in workflow: `"single"`, `"collaboration"`, `"coverage"`, `"pipeline"`, `"discussion"`, `"module"` or
            `"classeval"`; a Python file and a class in it, `"my_team.py:Debate"`; or a program: a file and a function in it, or a
            command. Ignored if a workflow is passed to the trainer.
        agents (`list[str]`, *optional*):
            Agents of a program: the names that it uses as `model`.
        max_calls (`int` or `dict[str, int]`, *optional*, defaults to `4`):
            How often an episode of a program may ask each agent. In Python and in files also a number by agent.
        program_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that a program may compute between two calls.
        stage_timeout (`float`, *optional*, defaults to `10.0`):
            Seconds that programs wait for others which compute, before they get replies.
        on_program_error (`str`, *optional*, defaults to `"mask"`):
            What happens to an episode whose program fails: `"mask"`, `"zero"` or `"raise"`.
        replayable (`bool`, *optional*, defaults to `False`):
            Whether a program asks the same, given the same problem and replies, so that episodes can branch.
        num_turns (`int`, *optional*, defaults to `1`):
            Rounds of the whole team, separated by feedback.
        num_agents (`int`, *optional*):
            Number of agents, for workflows that allow any number. Defaults to the workflow's default.
        roles (`dict[str, str]`, *optional*):
            Role texts that replace the default ones, by agent name. With `workflow="single"`, `{"solver": ""}` lets the model
            continue prompts in plain text, which is the default for datasets without our column `test_format`.
        system_prompt (`str`, *optional*):
            System message of every chat prompt that has none.
        endpoints (`dict[str, dict]`, *optional*):
            OpenAI-compatible endpoints that agents speak through, by agent name: the fields of
            [`~marcog_trl.endpoints.Endpoint`], such as `{"planner": {"model": "gpt-4o-mini"}}`. Such agents are never trained.
        class_split (`str`, *optional*):
            How `workflow="classeval"` assigns methods to agents: `"random"`, `"pick"` or `"one"` (see [`ClassTeam`]).
        centralized (`bool`, *optional*, defaults to `False`):
            Whether one agent writes the parts of all agents of the workflow in one reply (see [`Centralized`]).
        feedback (`str`, *optional*, defaults to `"level_feedback"`):
            Feedback between turns: `"level_feedback"`, `"level_passed"`, `"passed"`, `"plain"` or `"expert_edits"` (see
            [`FeedbackWorkflow`]). Pass a function to the workflow instead.
        expert (`dict`, *optional*):
            OpenAI-compatible endpoint that `feedback="expert_edits"` asks: the fields of [`~marcog_trl.endpoints.Endpoint`],
            such as `{"model": "gpt-4o-mini"}`.
        visible_tests (`int`, *optional*, defaults to `1`):
            Number of tests that feedback may show: negative numbers count from the end, 0 shows none, and `None` all. With
            `workflow="coverage"`, the number of tests that choose the solution.
        early_termination_threshold (`float`, *optional*):
            End an episode once a turn earns more than this, in reward units, averaged over agents; in a tree, a joint action
            that earns it has no children. By default, episodes do not end early.

        > Parameters that control code execution

        num_workers (`int`, *optional*):
            Worker processes that execute code. Defaults to this process's share of the cores.
        execution_timeout (`float`, *optional*, defaults to `10.0`):
            Limit of the CPU time of one program and its tests, in seconds.
        execution_memory_mb (`int`, *optional*, defaults to `512`):
            Memory limit of one program, in MiB.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` refuses to start if the kernel cannot isolate programs, `"best_effort"` uses the isolation that is
            available, `"none"` is for trusted code.
        packages (`list[str]`, *optional*):
            Installed packages that programs and tests may import besides the standard library and numpy, such as
            `["pandas", "pytest"]`.
    """

    # Parameters that control the team
    workflow: str = "single"
    agents: list[str] | None = None
    max_calls: int | str | dict[str, int] = 4  # flags can only be a number; a `Program` checks it
    program_timeout: Positive = 300.0
    stage_timeout: Positive = 10.0
    on_program_error: str = "mask"
    replayable: bool = False
    num_turns: Count = 1
    num_agents: Count | None = None
    roles: dict[str, str] | str | None = None
    system_prompt: str | None = None
    endpoints: dict[str, Any] | str | None = None
    class_split: Literal["random", "pick", "one"] | None = None
    centralized: bool = False
    feedback: FeedbackMode = "level_feedback"
    expert: dict[str, Any] | str | None = None
    visible_tests: int | None = 1
    early_termination_threshold: float | None = None

    # Parameters that control code execution
    num_workers: Count | None = None
    execution_timeout: Positive = 10.0
    execution_memory_mb: Annotated[int, Range(LEAST_MEMORY_MB)] = 512
    isolation: IsolationLevel = "strict"
    packages: list[str] | None = None

    def check_play(self) -> None:
        """
        Checks the fields above together.

        Raises:
            ValueError: If the system prompt is blank.
        """
        if self.system_prompt is not None and not str(self.system_prompt).strip():
            raise ValueError(f"system_prompt={self.system_prompt!r} is blank. Set system_prompt=None, or a text.")

    def make_executor(self) -> CodeExecutor:
        """Makes the executor of these settings."""
        return CodeExecutor(
            num_workers=self.num_workers,
            timeout=self.execution_timeout,
            memory_mb=self.execution_memory_mb,
            isolation=self.isolation,
            packages=self.packages or (),
        )

    def make_workflow(self, workflow: Workflow | str | None = None) -> Workflow:
        """
        Makes the team's workflow, and updates the settings to describe it.

        Args:
            workflow ([`Workflow`] or `str`, *optional*): An instance, or a name that replaces the field `workflow`. A file
                that it names is run.

        Returns:
            [`Workflow`]: The validated workflow.

        Raises:
            TypeError: If `workflow` is neither an instance nor a name.
            ValueError: If the settings do not fit the workflow, or an endpoint cannot be used.
        """
        if workflow is not None and not isinstance(workflow, str | Workflow):
            raise TypeError(f"workflow={workflow!r} is not a workflow. Pass an instance of Workflow, or a name.")
        if isinstance(workflow, Workflow):
            workflow.validate()
            self._agree_with(workflow)
        else:
            self.workflow = workflow or self.workflow
            made_of = workflow_class(self.workflow)
            options = self._workflow_options(made_of)
            workflow = construct(made_of, self.workflow, options)
            if is_own(self.workflow):
                self._agree_with(workflow, options)
        if self.centralized:
            workflow = Centralized(workflow)
        workflow.validate()
        self.endpoints = use_endpoints(workflow, cast(dict | None, self.endpoints))
        return workflow

    def _workflow_options(self, made_of: Callable[..., Workflow]) -> dict[str, Any]:
        """Arguments of a workflow's class. One from a file takes what it likes."""
        from_file = is_own(self.workflow)
        options: dict[str, Any] = {"num_turns": self.num_turns} if from_file or self.num_turns > 1 else {}
        if self.workflow == "coverage":
            options["visible_tests"] = self.visible_tests
        elif self.num_turns > 1 or self.workflow == "pipeline" or from_file:
            options |= {"feedback": self.feedback, "visible_tests": self.visible_tests}
        if self.num_turns > 1 and self.feedback == "expert_edits":
            options["expert"] = expert = ExpertEdits(endpoint_of("expert", self.expert))
            expert.endpoint.check()
        if from_file:
            takes = inspect.signature(made_of).parameters
            options = {name: value for name, value in options.items() if name in takes}
        given = {"num_agents": self.num_agents, "roles": self.roles, "split": self.class_split}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        given |= {name: getattr(self, name) for name in PROGRAM_OPTIONS if getattr(self, name) != defaults[name]}
        return options | {name: value for name, value in given.items() if value is not None}

    def _agree_with(self, workflow: Workflow, options: Collection[str] | None = None) -> None:
        """
        Copies the settings of a workflow, and refuses settings that contradict it. `options`: the arguments that it was made
        with, if it was made from these settings.
        """
        brought: dict[str, Any] = {"num_turns": workflow.num_turns, "num_agents": len(workflow.agents)}
        brought["roles"] = {agent.name: agent.role for agent in workflow.agents}
        brought |= {setting: None for setting, option in _OPTION_OF.items() if option not in (options or ())}
        if isinstance(workflow, FeedbackWorkflow):
            brought |= {"feedback": workflow.feedback, "visible_tests": workflow.visible_tests}
            if isinstance(workflow.expert, ExpertEdits):
                brought["expert"] = dataclasses.asdict(workflow.expert.endpoint)
        if isinstance(workflow, ClassTeam):
            brought["class_split"] = workflow.split
        if isinstance(workflow, Program):
            brought |= {name: getattr(workflow, name) for name in PROGRAM_OPTIONS} | {"agents": [*brought["roles"]]}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, value in brought.items():
            asked = getattr(self, name)
            is_part = isinstance(asked, dict) and isinstance(value, dict | None)
            agrees = asked.items() <= (value or {}).items() if is_part else asked == value
            if asked != defaults[name] and not agrees:
                title = type(workflow).__name__
                if options is None:
                    instead = f"Pass {name} to the workflow, or pass the workflow's name."
                else:
                    instead = f"Leave {name} out, or let {title} take it as an argument."
                raise ValueError(f"{name}={asked!r} contradicts the given workflow {title}. {instead}")
        self.num_turns = workflow.num_turns
        if isinstance(workflow, FeedbackWorkflow):
            self.visible_tests = brought["visible_tests"]
            # team.json cannot hold functions or other kinds of experts
            if isinstance(workflow.feedback, str) and (workflow.expert is None or brought["expert"] is not None):
                self.feedback = cast(FeedbackMode, workflow.feedback)
                self.expert = brought["expert"]
        if isinstance(workflow, ClassTeam):
            self.class_split = cast(Any, workflow.split)
        if isinstance(workflow, Program):
            for name in PROGRAM_OPTIONS:
                setattr(self, name, brought[name])


@dataclass
class TeamSettings(PlaySettings):
    """
    Settings of a team outside of training.

    Args:
        max_completion_length (`int`, *optional*, defaults to `256`): Maximum number of tokens of one reply.
        max_tool_calling_iterations (`int`, *optional*): How often an agent may call tools in one reply. No limit by default.
        temperature, top_p, top_k, min_p, repetition_penalty: Sampling settings, as in [`~trl.GRPOConfig`].
        generation_kwargs (`dict`, *optional*):
            Further arguments of [`~transformers.GenerationConfig`]. Of the model's own `generation_config`, only the ids of tokens
            count.
        chat_template_kwargs (`dict`, *optional*): Arguments of the chat template.
        parameter_sharing (`str`, *optional*, defaults to `"shared"`): `"latent"`, `"shared"` or `"separate"`; see [`SHPPOConfig`].
        latent_scope, latent_size: As in [`SHPPOConfig`].

    See [`PlaySettings`] for the other fields.

    Raises:
        ValueError: If a value is out of range.
    """

    max_completion_length: Count = 256
    max_tool_calling_iterations: NaturalNumber | None = None
    temperature: Positive = 1.0
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    top_k: NaturalNumber = 0
    min_p: Unit | None = None
    repetition_penalty: Positive = 1.0
    generation_kwargs: dict | None = None
    chat_template_kwargs: dict | None = None
    parameter_sharing: Literal["latent", "shared", "separate"] = "shared"
    latent_scope: Literal["observation", "agent"] = "observation"
    latent_size: Count = 8

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_play()

    @classmethod
    def of(cls, args: Any) -> TeamSettings:
        """Takes the settings of a team from its trainer's configuration `args`."""
        names = {f.name for f in fields(args)} & {f.name for f in fields(cls)}
        return cls(**{name: getattr(args, name) for name in names})

    @property
    def has_latents(self) -> bool:
        """Whether the agents have latents."""
        return self.parameter_sharing == "latent"

    def generation_config(
        self, pad_token_id: int, bos_token_id: int | None, eos_token_ids: Iterable[int]
    ) -> GenerationConfig:
        """Makes the generation config that [`~trl.GRPOTrainer`] would use with the same settings."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_completion_length,
            "do_sample": True,
            "pad_token_id": pad_token_id,
            "bos_token_id": bos_token_id,
            "eos_token_id": list(eos_token_ids),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return GenerationConfig(**arguments | (self.generation_kwargs or {}), disable_compile=True)
