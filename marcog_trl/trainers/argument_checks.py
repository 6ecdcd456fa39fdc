"""Checks of arguments that would train wrongly without a word. TRL and transformers check the rest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations import get_reporting_integration_callbacks

from marcog_trl.agents import Workflow
from marcog_trl.problems.schema import list_faults
from marcog_trl.processes import on_main
from marcog_trl.rollout.chats import with_system_prompt
from marcog_trl.rollout.engine import encode_prompts, replay
from marcog_trl.team.base_models import fingerprint, same_weights
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.shared_prompts import computes_the_same_in_line
from marcog_trl.team.tools import check_tools
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.workflows import Single
from marcog_trl.workflows.rounds import SOLVER


def check_arguments(
    trainer_class: Any, model: Any, args: Any, peft_config: Any, quantization_config: Any, **unsupported: Any
) -> Any:
    """Returns the configuration: `args`, or the default one. Refuses arguments that would have no effect."""
    if args is None:
        name = model if isinstance(model, str) else str(model.config.name_or_path)
        args = trainer_class._config_class(
            f"{name.rstrip('/').split('/')[-1]}-{trainer_class._config_class.__name__.removesuffix('Config')}"
        )
    if not isinstance(args, trainer_class._config_class):
        given = f"the class {args.__name__}" if isinstance(args, type) else f"a {type(args).__name__}"
        needed = trainer_class._config_class.__name__
        raise TypeError(
            f"args is {given}, but {trainer_class.__name__} needs a {needed}. Pass {needed}('outputs/team'), for example."
        )
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{trainer_class.__name__} does not support {name}. Write a Workflow instead.")
    if isinstance(model, str) and (Path(model) / "team.json").is_file():
        raise ValueError(
            f"model={model!r} is a saved team. To go on with its run, pass the model of that run, and its checkpoint to "
            "trainer.train(resume_from_checkpoint=...). To begin a new one, pass the base model."
        )
    check_report_to(args)
    if args.full_finetuning:
        check_full_finetuning(model, args, peft_config, quantization_config)
    return args


def check_is_saved(model: PreTrainedModel, description: TeamDescription, args: Any) -> None:
    """
    Refuses a model whose weights are not those of the folder that its configuration names: the team, and the reference of `beta` if
    all weights are trained, would be loaded with others. Warns of one that names no folder, if the run saves no checkpoints. A
    collective operation.

    Args:
        model ([`~transformers.PreTrainedModel`]): The base model that a user passed. One that is quantised is not compared.
        description ([`TeamDescription`]): The team on this model.
        args ([`MultiAgentConfig`]): The trainer's configuration.

    Raises:
        ValueError: If there are no such files, or other weights in them.
    """
    if getattr(model, "is_quantized", False):
        return
    name, ours = model.config.name_or_path, description.base_fingerprint or fingerprint(model)
    if not name and args.save_strategy == "no" and not args.full_finetuning:
        warnings.warn(
            "model was made in memory. A team that is saved on it can be loaded only with base_model='...', a folder with these weights: "
            "save the base model, too, with save_pretrained.",
            stacklevel=2,
        )
        return
    # Bits are compared in bfloat16, see `fingerprint`
    dtype = torch.float16 if model.dtype == torch.float16 else torch.bfloat16
    revision = description.revision or "main"

    def difference() -> str | None:
        with outside_zero3(args.deepspeed_plugin), torch.random.fork_rng(devices=[]):
            try:
                theirs = fingerprint(type(model).from_pretrained(name, revision=revision, dtype=dtype))
            except (OSError, ValueError):
                return f"there are none in {name!r}" if name else "it was made in memory"
        if theirs["vocab_size"] != ours["vocab_size"]:
            return f"{name!r} has a vocabulary of {theirs['vocab_size']} tokens, and model one of {ours['vocab_size']}"
        return None if same_weights(theirs, ours) else f"those in {name!r} are others"

    found = on_main(difference)
    if found is not None:
        raise ValueError(
            f"model has weights that are in no folder, from which its team or its reference could be loaded: {found}. Save the base model and "
            "its tokenizer with save_pretrained('my_base'), and pass model='my_base' (or load it from there, and add the adapter). If it is "
            "another revision, name it in model_init_kwargs={'revision': ...}."
        )


def check_report_to(args: Any) -> None:
    """Refuses trackers that are unknown or not installed. The Trainer finds out once the model is loaded."""
    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except (ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"report_to={args.report_to!r} cannot be used: {error}") from error


def check_full_finetuning(model: Any, args: Any, peft_config: Any, quantization_config: Any) -> None:
    """Refuses what cannot be trained as a whole, and warns of weights whose updates would be lost."""
    adapter = "peft_config" if peft_config is not None else "a model that has an adapter"
    if peft_config is not None or isinstance(model, PeftModel):
        raise ValueError(
            f"full_finetuning=True does not support {adapter}: it trains the model's own weights. Leave the adapter out, or "
            "set full_finetuning=False."
        )
    quantized = quantization_config or (args.model_init_kwargs or {}).get("quantization_config")
    if quantized is not None or (
        isinstance(model, PreTrainedModel) and model.config.to_dict().get("quantization_config")
    ):
        raise ValueError(
            "full_finetuning=True does not support a quantised model, whose weights cannot be trained. Load it without "
            "quantization_config, or set full_finetuning=False to train an adapter on it."
        )
    dtype = model.dtype if isinstance(model, PreTrainedModel) else (args.model_init_kwargs or {}).get("dtype")
    if str(dtype).removeprefix("torch.") in ("bfloat16", "float16") and args.deepspeed_plugin is None:
        warnings.warn(
            f"full_finetuning=True with weights in {dtype} loses updates below about 1/256 of a weight, which is most of them. Leave "
            "dtype at float32, and set bf16=True to compute in bfloat16; or use DeepSpeed, which keeps float32 copies.",
            stacklevel=4,
        )


def warn_of_slow_type(model: PreTrainedModel, args: Any) -> None:
    """Warns of bfloat16 on a processor that has no instructions for it."""
    slow = model.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if slow and (args.bf16 or model.dtype == torch.bfloat16):
        warnings.warn(
            "This processor computes in bfloat16 several times slower than in float32, because it has neither AVX-512 nor AMX. Set "
            "dtype='float32' and bf16=False (--dtype float32 --bf16 false).",
            stacklevel=4,
        )


def check_shared_prompts(model: PreTrainedModel, aux_loss: bool) -> None:
    """
    Refuses `share_prompts` for models whose tokens would not see their prompt and reply alone, at the same distances: what the
    configuration does not tell, a pass over a few tokens does.
    """
    config = model.config.get_text_config()
    attention = config._attn_implementation
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    windows = [
        n for n, value in config.to_dict().items() if n.endswith(("window", "window_size", "index_topk")) and value
    ]
    if attention != "sdpa":
        found = f"attn_implementation={attention!r}. Set it to 'sdpa'"
    elif kinds or windows:
        found = f"layers of other kinds ({', '.join(sorted(kinds) or windows)}). Set share_prompts=False"
    elif not getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        found = "none. Set share_prompts=False"
    elif aux_loss:
        found = "an auxiliary loss of its experts. Set share_prompts=False"
    elif not computes_the_same_in_line(model.get_decoder()):
        found = "layers that compute something else. Set share_prompts=False"
    else:
        return
    raise ValueError(
        f"share_prompts=True needs full attention and rotary positions in every layer, but this {config.model_type} has {found}."
    )


TOOLS_WITHOUT_VLLM = "use_vllm=True does not support tools and environments. Set use_vllm=False."


def check_workflow(workflow: Workflow, args: Any) -> list[str]:
    """
    Refuses settings that do not fit the workflow, and tools that cannot be described. Returns the names of the agents to train.
    """
    check_tools(workflow)
    if args.use_vllm and any(agent.tools for agent in workflow.agents):
        raise ValueError(TOOLS_WITHOUT_VLLM)
    trained = _trained_agents(workflow, args.trained_agents)
    if args.agent_loss_weighting == "agent" and len(trained) > 1 and args.loss_type not in ("dapo", "grpo"):
        raise ValueError(
            f"loss_type={args.loss_type!r} does not support agent_loss_weighting='agent'. Use loss_type='dapo' or "
            "'grpo', or set agent_loss_weighting='token'."
        )
    if args.turn_weights is not None and len(args.turn_weights) != workflow.num_turns:
        raise ValueError(
            f"turn_weights={args.turn_weights} has {len(args.turn_weights)} weights for num_turns={workflow.num_turns}. "
            f"Set turn_weights={[1.0] * workflow.num_turns}, for example."
        )
    return trained


def _trained_agents(workflow: Workflow, given: Any) -> list[str]:
    speaking = {slot.agent for slot in workflow.slots}
    outside = [agent.name for agent in workflow.agents if agent.endpoint is not None]
    agents = [agent.name for agent in workflow.agents if agent.name in speaking and agent.name not in outside]
    if not agents:
        raise ValueError(
            f"All agents {outside} speak through endpoints, so there is nothing to train. Leave one of them to the model, or "
            "measure the team with evaluate_team (marcog-trl evaluate)."
        )
    if given is None:
        return agents
    names = given if isinstance(given, list | tuple) else [given]
    for name in names:
        if name in outside:
            raise ValueError(
                f"trained_agents={given!r} has {name!r}, which speaks through an endpoint. Use some of {agents}."
            )
        if name not in agents:
            raise ValueError(
                f"trained_agents={given!r} has {name!r}, which is not one of the team's agents. Use some of {agents}."
            )
    if not names:
        raise ValueError(f"trained_agents={given!r} trains no agent. Use some of {agents}.")
    return [agent for agent in agents if agent in names]


def checkpoint_without_reentry(args: Any) -> None:
    """Replaces the reentrant gradient checkpointing that TRL sets for ZeRO-3."""
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3 and args.gradient_checkpointing:
        # With PEFT and ZeRO-3, TRL selects reentrant checkpointing, which drops the gradients of tensors that a hook
        # passes to a layer. Non-reentrant checkpointing keeps them, and needs deepspeed >= 0.19
        args.gradient_checkpointing_kwargs = {"use_reentrant": False}


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: Any) -> None:
    """Refuses an optimizer that was made before the model had its adapter, because it would train nothing."""
    held = held_by(optimizer)
    if held is not None and not any(p.requires_grad and id(p) in held for p in model.parameters()):
        raise ValueError(
            "optimizers has an optimizer that holds no trainable parameter of the adapter. Add the adapter with "
            "get_peft_model before you make the optimizer, or leave optimizers out and set optim and learning_rate."
        )


def held_by(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """Returns the `id`s of an optimizer's parameters, or `None` without an optimizer."""
    if optimizer is None:
        return None
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def check_curriculum(args: Any, runs_tests: bool) -> None:
    """Refuses settings that do not fit a curriculum."""
    if args.curriculum is not None and args.restore_callback_states_from_checkpoint:
        raise ValueError(
            "restore_callback_states_from_checkpoint=True does not support a curriculum, which holds its dataset. Set it to "
            "False: a curriculum continues where it was in any case."
        )
    if args.curriculum is not None and "pass_rate" in args.curriculum and not runs_tests:
        raise ValueError(f"curriculum={args.curriculum} needs a reward that runs tests, such as 'execution_reward'.")


# How the prompts of a user's datasets reach the model


def as_in_trl(workflow: Workflow, args: Any, dataset: Dataset | IterableDataset | None) -> Workflow:
    """
    Lets [`Single`] continue plain text, as TRL does, in datasets that are none of our problem sets.

    Args:
        workflow ([`Workflow`]): The workflow of a trainer.
        args ([`MultiAgentConfig`]): Its configuration. `roles` is set, so that the saved team has it.
        dataset (`Dataset` or `IterableDataset`, *optional*): Its training data.

    Returns:
        [`Workflow`]: The workflow, or a copy without a role text if `roles` has none, the first row's prompt is plain text, and it
        has no `test_format`, which [`load_problems`] adds to all problems.
    """
    if not isinstance(workflow, Single) or args.roles is not None or workflow.agents[0].role != SOLVER:
        return workflow
    first: Mapping[str, Any] = next(iter(dataset), {}) if isinstance(dataset, Dataset | IterableDataset) else {}
    if not isinstance(first.get("prompt"), str) or "test_format" in first:
        return workflow
    workflow = copy.copy(workflow)
    workflow.agents = tuple(replace(agent, role="") for agent in workflow.agents)
    args.roles = {agent.name: "" for agent in workflow.agents}
    return workflow


def check_prompts(datasets: Mapping[str, Any], workflow: Workflow, args: Any, tokenizer: Any, warn: bool) -> None:
    """
    Checks that the chat template accepts the prompts, one of each order of roles in a dataset.

    Args:
        datasets (`Mapping[str, Dataset]`): Datasets by their names in errors. Others than a `Dataset` are not read.
        workflow ([`Workflow`]): The workflow, which is asked for its first prompts.
        args ([`MultiAgentConfig`]): Settings of prompts.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        warn (`bool`): Whether to warn that plain text is continued.

    Raises:
        ValueError: If the chat template refuses a prompt, or `system_prompt` is set and the model continues plain text.
    """
    continues = isinstance(workflow, Single) and not workflow.agents[0].role
    instead = f"Set roles={{'solver': {SOLVER!r}}}, for example, to send it as a chat message that ends with this text"
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset):
            continue
        first_of: dict[Any, int] = {}
        for i, prompt in enumerate(dataset["prompt"]):
            roles = None if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
            first_of.setdefault(roles, i)
        rows = [(i, dataset[i]) for i in first_of.values()]
        list_faults(name, [(row.get("task_id"), i, _fault_in(row, workflow, args, tokenizer)) for i, row in rows])
        if None in first_of and continues and args.system_prompt is not None:
            raise ValueError(
                f"system_prompt={args.system_prompt!r} needs chat messages, but {name} has plain text, which the model continues. "
                f"{instead}."
            )
        if None in first_of and continues and warn and tokenizer.chat_template:
            warn = False
            warnings.warn(
                f"{name} has prompts in plain text, which the model continues without its chat template, as in TRL. {instead}, or "
                "roles={'solver': ''} to leave it as it is.",
                stacklevel=3,
            )


def _fault_in(row: Mapping[str, Any], workflow: Workflow, args: Any, tokenizer: Any) -> str | None:
    """Says why the first prompts of a problem cannot be tokenized, or returns `None`."""
    [request] = replay(workflow, row, ())
    asked = request.values() if isinstance(request, dict) else ()
    prompts = [with_system_prompt(prompt, args.system_prompt) for prompt in asked]
    try:
        encode_prompts(tokenizer, prompts, **(args.chat_template_kwargs or {}))
    except ValueError as error:
        return str(error)
    return None
