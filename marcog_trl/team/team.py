"""A team of agents on one language model. It plays workflows and solves problems, and trainers train it."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from accelerate.utils import reduce
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from transformers import GenerationConfig, PreTrainedModel

from marcog_trl.agents import Tools, Workflow
from marcog_trl.execution import CodeExecutor, Verdict
from marcog_trl.parsing.prompts import ChatRequest, Prompt
from marcog_trl.parsing.replies import code_in
from marcog_trl.problems.schema import list_faults, solution_job
from marcog_trl.problems.tests import as_problem, complete
from marcog_trl.rollout.chats import end_of_turn, with_system_prompt
from marcog_trl.rollout.engine import Generate, encode_prompts, play, play_tree, prompt_text
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.agent_contexts import AgentContexts, keep_token_states
from marcog_trl.team.base_models import check_vocabulary
from marcog_trl.team.data_checks import fault_in, fault_of_task, needed_columns
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.endpoint_agents import EndpointAgents
from marcog_trl.team.lending import lent
from marcog_trl.team.modules import ATTRIBUTE, TeamModule
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.shared_prompts import contiguous_states, shared_prompts
from marcog_trl.team.token_sampling import KeyedSampler, fast_draws
from marcog_trl.workflows import Program


if TYPE_CHECKING:
    from marcog_trl.team.tools import ToolLoop


class Team:
    """
    A team of LLM agents that share one model.

    Example:

    ```python
    >>> from marcog_trl import Team, load_problems

    >>> team = Team.from_pretrained("outputs/quickstart")
    >>> problem = load_problems("builtin", "test")[58]  # first sort the list, then put 8 at the end
    >>> print(team.solve(problem).code)
    ```

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model that all agents share.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        workflow ([`Workflow`]): Which agents speak when, and what they see.
        settings ([`TeamSettings`]): How replies are generated, and what agents share.
        description ([`TeamDescription`]): Content of `team.json`.
        modules ([`TeamModule`], *optional*): The team's networks, attached to the model.
        executor ([`CodeExecutor`], *optional*): Runs code. By default, one is started from the settings when first needed.
    """

    on_workflow_error: Callable[[WorkflowError], None] | None = None  # see `play`
    # Told what the team does, as a stage may take minutes
    on_activity: Callable[[str], None] = staticmethod(lambda activity: None)
    masks_failures = False  # whether an episode is masked if an agent's endpoint fails; otherwise this is an error

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        workflow: Workflow,
        settings: TeamSettings,
        description: TeamDescription,
        modules: TeamModule | None = None,
        executor: CodeExecutor | None = None,
    ):
        check_vocabulary(model.config, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.workflow = workflow
        self.settings = settings
        self.description = description
        self.modules = modules
        self.agents = [agent.name for agent in workflow.agents]
        declared = model.generation_config.eos_token_id
        declared = [declared] if isinstance(declared, int) else declared or []
        own = tokenizer.eos_token_id
        self.eos_token_ids = declared if own in declared else [own, *declared]
        end = end_of_turn(tokenizer, settings.chat_template_kwargs or {})
        if end is not None and end not in self.eos_token_ids:
            self.eos_token_ids = [*self.eos_token_ids, end]
        self.generation_config = settings.generation_config(
            tokenizer.pad_token_id, tokenizer.bos_token_id, self.eos_token_ids
        )
        self._executor = executor
        self._warned_of_context = False
        self._outside = EndpointAgents(workflow, settings.system_prompt, self.sum_over_processes)
        self._contexts = None
        if modules is not None:
            self._contexts = AgentContexts(model, tokenizer, workflow, settings, modules, self.autocast)
        self.tools: ToolLoop | None = None
        if any(agent.tools for agent in workflow.agents):
            from marcog_trl.team.tools import ToolLoop  # slow, and few teams need it

            self.tools = ToolLoop(model, tokenizer, workflow, settings, self.sum_over_processes)
        if isinstance(workflow, Program):
            from marcog_trl.team.tools import knows_tools

            workflow.knows_tools = knows_tools(tokenizer)
            held = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            workflow.holds = {name: getattr(settings, name) for name in held}
            workflow.holds["chat_template_kwargs"] = settings.chat_template_kwargs or {}
            workflow.check_prompt = self._rendered

    def __repr__(self) -> str:
        title = type(self.workflow).__name__
        return f"{type(self).__name__}({', '.join(self.agents)}; workflow {title}, base model {self.description.base_model!r})"

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        num_agents: int | None = None,
        roles: Mapping[str, str] | None = None,
        workflow: Workflow | str | None = None,
        base_model: str | None = None,
        quantization_config: Any = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        tools: Tools | None = None,
        **settings: Any,
    ) -> Team:
        """
        Load a team.

        Args:
            path (`str`): Folder that a trainer's `save_model` wrote, a checkpoint, or a repository on the Hub.
            num_agents (`int`, *optional*): Size of the team. Defaults to the size in training.
            roles (`Mapping[str, str]`, *optional*): Role texts that replace those of the training, by agent name.
            workflow (`Workflow` or `str`, *optional*): The team's workflow, if it is neither a built-in one nor saved with
                the team: an instance, or a name such as `"my_team.py:Debate"`.
            base_model (`str`, *optional*): Name or path of the base model. Defaults to the one that the team was saved with.
            quantization_config (`BitsAndBytesConfig`, *optional*): How to quantise the base model.
            model_init_kwargs (`Mapping`, *optional*): Arguments of the base model's `from_pretrained`, such as `dtype`, which
                defaults to that of the training.
            device (`str` or `torch.device`, *optional*): Device of the model. Defaults to this process's accelerator, or the
                CPU.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run the team's own file, if it has its
                workflow in one. Read the file first. The code of a base model is `model_init_kwargs={"trust_remote_code": True}`.
            tools (`list[Callable]`, *optional*): Tools of the only agent, as in training. Agents of a workflow of your own bring
                theirs.
            **settings: Other fields of [`TeamSettings`], such as `max_completion_length`, `num_turns` or `isolation`.

        Returns:
            [`Team`].

        Raises:
            ValueError: If the folder is not a saved team, a file cannot be read, the team does not fit the base model, it does
                not support the size, roles or settings, its workflow is in a file that is not trusted, or its tools are missing.
        """
        from marcog_trl.team.loading import load_team

        settings |= {
            name: value for name, value in (("num_agents", num_agents), ("roles", roles)) if value is not None
        }
        return load_team(
            cls, Path(path) if isinstance(path, Path) else path, workflow, base_model, quantization_config,
            model_init_kwargs, device, trust_remote_code, tools, settings,
        )  # fmt: skip

    @property
    def _causal_lm(self) -> PreTrainedModel:
        return cast(Any, self.model).get_base_model() if isinstance(self.model, PeftModel) else self.model

    # Solving problems

    @overload
    def solve(self, problems: Mapping[str, Any] | str, greedy: bool = ..., batch_size: int = ...) -> Answer: ...

    @overload
    def solve(
        self, problems: list[Mapping[str, Any] | str] | Dataset, greedy: bool = ..., batch_size: int = ...
    ) -> list[Answer]: ...

    def solve(self, problems, greedy=True, batch_size=128):
        """
        Solve a problem, or several at once.

        Args:
            problems (`Mapping`, `str`, or a list of them, or a `Dataset`): Problems with `prompt`, `entry_point` if the
                workflow asks for a function by name, and `test` if there are tests. What prompt and tests tell need not be there.
                A `str` is a prompt: Python, of which the last function is the one to write, or other text.
            greedy (`bool`, *optional*, defaults to `True`): Whether to decode greedily instead of sampling.
            batch_size (`int`, *optional*, defaults to `128`): Number of problems to play at once.

        Returns:
            [`Answer`], or a list of them in the order of `problems`.

        Raises:
            ValueError: If problems lack what the workflow needs, or have invalid tests. The error lists all of them.
        """
        if isinstance(problems, Mapping | str):
            return self.solve([problems], greedy, batch_size)[0]
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be positive. Set batch_size=128.")
        rows = [as_problem(problem) if isinstance(problem, str) else complete(problem) for problem in problems]
        needed = needed_columns(self.workflow, ())
        tested = dict.fromkeys(("test", "test_format"), "a problem with tests")
        faults = [
            fault_in(row, self.workflow, tested | needed if row.get("test") else needed, self.settings.packages)
            or fault_of_task(row, self.workflow)
            for row in rows
        ]
        list_faults(
            "problems",
            [(row.get("task_id"), i, fault) for i, (row, fault) in enumerate(zip(rows, faults, strict=True))],
        )
        answers: list[Answer] = []
        for start in range(0, len(rows), batch_size):
            answers += self._solve(rows[start : start + batch_size], greedy)
        return answers

    def _solve(self, rows: list[dict[str, Any]], greedy: bool) -> list[Answer]:
        with self.evaluating(), self.greedy() if greedy else nullcontext():
            episodes = self.play(rows)
        jobs = {
            e: solution_job(episode.problem, episode.turns[-1].solution)
            for e, episode in enumerate(episodes)
            if episode.problem.get("test")
        }
        verdicts = dict(zip(jobs, self.executor.run(list(jobs.values())), strict=True)) if jobs else {}
        answers = []
        for e, episode in enumerate(episodes):
            solution = episode.turns[-1].solution
            found = code_in(episode.problem, solution)
            messages = [
                {"agent": row.slot.agent, "turn": row.slot.turn + 1, "prompt": row.prompt, "reply": row.text}
                | ({} if row.messages is None else {"messages": row.messages})
                for row in episode.rows
            ]
            answers.append(Answer(found, messages, verdicts.get(e)))
        return answers

    # Playing

    @property
    def executor(self) -> CodeExecutor:
        """Runs the agents' code in worker processes, which start when they are first needed."""
        if self._executor is None:
            self._executor = self.settings.make_executor()
        return self._executor

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        if self._executor is not None:
            self._executor.close()

    def play(
        self,
        problems: Sequence[Mapping[str, Any]],
        score: Callable[[list[Episode], int], object] | None = None,
        is_over: Callable[[Episode], bool] | None = None,
        **options: Any,
    ) -> list[Episode]:
        """
        Play one episode per problem.

        A collective operation: all processes must pass the same number of problems.

        Args:
            problems (`Sequence[Mapping]` of length E): Dataset rows.
            score, is_over (`Callable`, *optional*): See [`~marcog_trl.rollout.engine.play`].
            **options: Arguments of [`Team.engine_functions`].

        Returns:
            `list[Episode]`: E episodes, in the order of `problems`.
        """
        with torch.no_grad(), self.gathered():
            return play(self.workflow, problems, score=score, is_over=is_over, **self.engine_functions(**options))

    def play_tree(
        self,
        problems: Sequence[Mapping[str, Any]],
        tree: Tree,
        score: Callable[[list[Episode], int], object] | None = None,
        is_over: Callable[[Episode], bool] | None = None,
        **options: Any,
    ) -> list[list[Episode]]:
        """Play a tree of episodes per problem: see [`Team.play`] and [`~marcog_trl.rollout.engine.play_tree`]."""
        with torch.no_grad(), self.gathered():
            return play_tree(
                self.workflow, problems, tree=tree, score=score, is_over=is_over, **self.engine_functions(**options)
            )

    def engine_functions(
        self,
        noise: Callable[[list[Row]], torch.Tensor] | None = None,
        prompt_states: bool = False,
        token_states: bool = False,
        sampler: KeyedSampler | None = None,
        tools_of: Callable[[Row], Tools] | None = None,
    ) -> dict[str, Any]:
        """
        Returns this team's arguments of [`~marcog_trl.rollout.engine.play`] and `play_tree`.

        Args:
            noise (`Callable`, *optional*): Maps rows to the noise of their latents, `(R, d)`. By default, a latent is its mean.
            prompt_states (`bool`, *optional*, defaults to `False`): Whether rows keep their `prompt_state`.
            token_states (`bool`, *optional*, defaults to `False`): Whether rows keep their `token_states`, if the model
                generates with one forward pass per token.
            sampler ([`KeyedSampler`], *optional*): Samples the tokens instead of the random state of the process.
            tools_of (`Callable`, *optional*): Returns the tools of a row, in place of those of its agent.

        Returns:
            `dict[str, Any]`: `generate`, `encode`, `decode`, `executor`, `sum_over_processes`, `on_error` and `end_tokens`.
        """
        speak = cut_off(self.generate if sampler is None else lambda rows: (self._generate(rows, sampler), None))

        def begin(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
            if self._contexts is None:
                return speak(rows)
            with self._contexts.as_rows(rows, noise, prompt_states) as context:
                if not token_states:
                    return speak(rows)
                context.states = []
                completion_ids, logprobs = speak(rows)
                keep_token_states(rows, completion_ids, context.states)
                return completion_ids, logprobs

        speaks = begin
        if self.tools is not None:
            speaks = self.tools.around(begin, speak, self._contexts, tools_of)
        if isinstance(self.workflow, Program) and self.workflow.knows_tools:
            from marcog_trl.team.tools import read_calls

            speaks = read_calls(begin, self.tokenizer)
        options = self.settings.chat_template_kwargs or {}
        return {
            "generate": self._outside.beside(speaks, self.masks_failures),
            "encode": lambda prompts: encode_prompts(
                self.tokenizer, [with_system_prompt(p, self.settings.system_prompt) for p in prompts], **options
            ),
            "decode": functools.partial(self.tokenizer.batch_decode, skip_special_tokens=True),
            "executor": lambda: self.executor,
            "sum_over_processes": self.sum_over_processes,
            "on_error": self.on_workflow_error,
            "end_tokens": self.eos_token_ids,
        }

    def _rendered(self, prompt: Prompt) -> str:
        """The text of a prompt. Raises a `ValueError` if the chat template refuses it."""
        prompt = with_system_prompt(prompt, self.settings.system_prompt)
        return prompt_text(self.tokenizer, prompt, self.settings.chat_template_kwargs or {})

    def generate(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Generates one stage in one call. Without rows, takes part in the call of the other processes."""
        return self._generate(rows), None

    def _check_context(self, rows: list[Row]) -> None:
        """Warns once if replies may exceed the model's context."""
        config = self.model.config.get_text_config()
        context = config.to_dict().get(config.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
        rows = [row for row in rows if not row.completion_ids]  # not those that go on after a call of a tool
        longest = max(rows, key=lambda row: len(row.prompt_ids), default=None)
        if longest is None or context is None or self._warned_of_context:
            return
        if len(longest.prompt_ids) + self.settings.max_completion_length > context:
            self._warned_of_context = True
            warnings.warn(
                f"A prompt of agent {longest.slot.agent!r} has {len(longest.prompt_ids)} tokens, which with "
                f"max_completion_length={self.settings.max_completion_length} exceeds the model's context of {context} tokens. Shorten "
                "the prompts, or lower max_completion_length.",
                stacklevel=2,
            )

    def _generate(self, rows: list[Row], sampler: KeyedSampler | None = None) -> list[list[int]]:
        self._check_context(rows)
        prompt_ids = [row.prompt_ids for row in rows] or [[self.tokenizer.eos_token_id]]
        inputs = self.tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        with torch.no_grad(), self.generating(rows, sampler), self._unwrapped() as model:
            ids = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                generation_config=self.generation_config,
            )
        return [self._until_eos(reply) for reply in ids[:, inputs["input_ids"].size(1) :].tolist()]

    def _until_eos(self, ids: list[int]) -> list[int]:
        """Removes the padding after the end-of-sequence token."""
        end = next((t for t, token in enumerate(ids) if token in self.eos_token_ids), len(ids))
        return ids[: end + 1]

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Decodes greedily instead of sampling."""
        with lent(self, generation_config=copy.deepcopy(self.generation_config)):
            self.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
            yield

    @contextmanager
    def generating(self, rows: list[Row], sampler: KeyedSampler | None = None) -> Iterator[None]:
        """
        Makes `generate` faster: rows share prompts, and a sampler or fewer random numbers replace `torch.multinomial`. Also says how far
        it is.
        """
        draws = None
        if sampler is not None:
            draws = sampler.draws(rows)
        elif self.other_generation is None:
            draws = fast_draws(self.model, self.generation_config, len(rows))
        share_weights = self.settings.parameter_sharing == "shared"
        model = self._causal_lm
        own = model.generation_config
        ends = GenerationConfig(
            bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
        )
        with (
            lent(model, generation_config=ends),  # its other options would fill those that ours leaves out
            shared_prompts(self.model) if share_weights else nullcontext(),
            contiguous_states(self.model),
            nullcontext() if draws is None else self.greedy(),
            self._telling(rows),
        ):
            if draws is not None:
                self.generation_config.watermarking_config = draws
            yield

    @contextmanager
    def _telling(self, rows: list[Row]) -> Iterator[None]:
        """Says which agents write, and how far they are; with vLLM, only which."""
        agents = " and ".join(dict.fromkeys(row.slot.agent for row in rows))
        said, most = f"{agents}: writing {len(rows)} replies", self.settings.max_completion_length
        forward_passes = itertools.count(1)

        def tell(*_: Any) -> None:
            self.on_activity(f"{said}, token {min(next(forward_passes), most)} of at most {most}")

        self.on_activity(said)
        handle = self._causal_lm.register_forward_hook(tell)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def evaluating(self, on_activity: Callable[[str], None] | None = None) -> Iterator[None]:
        """Sets evaluation mode: no dropout, and latents are their means. `on_activity` is told what the team does."""
        was_training, told = self.model.training, self.on_activity
        self.on_activity = on_activity or told
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)
            self.on_activity = told

    def sum_over_processes(self, count: int) -> int:
        """Sum over all processes."""
        return int(reduce(torch.tensor(count, device=self.model.device), reduction="sum").item())

    # A trainer's team overrides these

    def _unwrapped(self) -> AbstractContextManager[Any]:
        """Unwraps the model for generation."""
        return nullcontext(self.model)

    def gathered(self) -> AbstractContextManager[None]:
        """Gathers the parameters for forward passes outside of training."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Sets the precision of forward passes on prompts."""
        return nullcontext()

    @property
    def other_generation(self) -> str | None:
        """Name of the setting that replaces `model.generate` by a backend with its own random numbers."""
        return None

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights of the adapter, or of the whole model if it was trained, and of the team's modules, by name."""
        if self.description.full_finetuning:
            return dict(self.model.state_dict())
        weights = dict(get_peft_model_state_dict(self.model)) if isinstance(self.model, PeftModel) else {}
        if self.modules is not None:
            weights |= {f"{ATTRIBUTE}.{name}": tensor for name, tensor in self.modules.state_dict().items()}
        return weights

    # Agents

    @property
    def outside(self) -> list[str]:
        """Names of the agents that speak through endpoints."""
        return [agent.name for agent in self.workflow.agents if agent.endpoint is not None]

    @property
    def own_agents(self) -> list[str]:
        """Names of the agents that the team's model speaks for."""
        return [name for name in self.agents if name not in self.outside]

    @contextmanager
    def use_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """
        Makes `team.model` act as an agent, as in evaluation: in evaluation mode, and with the mean of the agent's latent.

        Example:

        ```python
        >>> inputs = team.tokenizer(["def add(a, b):"], return_tensors="pt").to(team.model.device)
        >>> with team.use_agent("main", inputs):
        ...     output = team.model.generate(**inputs)
        ```

        Args:
            agent (`str`): Name of the agent.
            inputs (`Mapping[str, torch.Tensor]`, *optional*): The model's inputs, `input_ids` and `attention_mask` of shape
                `(B, P)`. Needed only with `latent_scope="observation"`.

        Raises:
            ValueError: If there is no such agent, it speaks through an endpoint, or `inputs` are missing.
        """
        if agent not in self.own_agents:
            why = "speaks through an endpoint" if agent in self.outside else "is unknown"
            raise ValueError(f"agent={agent!r} {why}. Use one of {self.own_agents}.")
        context = nullcontext() if self._contexts is None else self._contexts.as_agent(agent, inputs)
        with self.evaluating(), context:
            yield

    @property
    def role_observations(self) -> torch.Tensor:
        """Observation of each agent's role text alone, `(N, 2H)`."""
        assert self._contexts is not None
        return self._contexts.role_observations


def cut_off(generate: Generate) -> Generate:
    """
    Extends a function that generates replies: those to a program that limits them are cut off at its `max_tokens`. Since a token
    depends only on those before it, this is what a generation with that limit samples.
    """

    def limited(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        completion_ids, logprobs = generate(rows)  # of a dummy row, too, in a process without rows
        limits = [row.prompt.max_tokens if isinstance(row.prompt, ChatRequest) else None for row in rows]
        completion_ids = [ids[:limit] for ids, limit in zip(completion_ids, limits, strict=False)]
        if logprobs is not None:
            logprobs = [own[:limit] for own, limit in zip(logprobs, limits, strict=False)]
        return completion_ids, logprobs

    return limited


@dataclass(frozen=True)
class Answer:
    """
    A team's solution of a problem.

    Args:
        code (`str`): The solution's code. Empty if the reply has none.
        messages (`list[dict]`): Every reply in order: `agent`, `turn` (from 1), `prompt` (text or chat messages), `reply`, and for
            agents with tools `messages`, which include calls and results.
        verdict (`Verdict`, *optional*): Result of the problem's tests, if it has any.
    """

    code: str
    messages: list[dict[str, Any]] = field(repr=False)
    verdict: Verdict | None = None
