"""
What the package relies on in TRL, transformers, PEFT and vLLM beyond their documented interfaces: signatures, private names, keys
and lengths of what is returned.

When an upgrade breaks training, it should fail here first, and say where.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re

import deepspeed.ops
import evaluate
import pytest
import tool_model as tool_functions
import torch
import trl.trainer.utils
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, Trainer
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, RewardTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import base_trainer
from trl.trainer.utils import RepeatSampler

import marcog_trl
from marcog_trl import Single
from marcog_trl.agents import with_tools
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.tools import ToolLoop
from marcog_trl.trainers import MultiAgentTrainer
from marcog_trl.trainers.plan import LIVE_PARAMETERS, REDUCE_BUCKET


# Methods that are overridden or called, with their parameters
SIGNATURES = {
    GRPOTrainer: {
        "__init__": "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
        "optimizers quantization_config peft_config tools rollout_func environment_factory",
        "get_train_dataloader": "",
        "get_eval_dataloader": "eval_dataset",
        "_get_train_sampler": "dataset",
        "_prepare_inputs": "generation_batch",
        "_generate": "prompts",
        "_generate_single_turn": "prompt_ids images multimodal_fields num_generations has_tool_images",
        "_generate_and_score_completions": "inputs",
        "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs images multimodal_fields",
        "_get_tool_suffix_ids": "tool_messages",
        "_calculate_rewards": "inputs prompts completions completion_ids_list",
        "_log_completion_extra": "column values",
        "_log_metric": "name value",
        "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size compute_entropy "
        "compute_aux_loss pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles "
        "image_sizes token_type_ids mm_token_type_ids image_position_ids",
        "_compute_loss": "model inputs",
        "log": "logs start_time",
        "_save_checkpoint": "model trial",
    },
    Trainer: {
        "train": "resume_from_checkpoint trial ignore_keys_for_eval",
        "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
        "save_model": "output_dir _internal_call",
        "create_optimizer": "model",
        "_clip_grad_norm": "model",
        "_save": "output_dir state_dict",
        "_load_from_checkpoint": "resume_from_checkpoint model",
        "_load_best_model": "",
        "_issue_warnings_after_load": "load_result",
        "_push_from_checkpoint": "checkpoint_folder",
        "_finish_current_push": "",
    },
    VLLMGeneration: {
        "_init_vllm": "", "_iter_named_params": "", "sync_weights": "", "generate": "prompts images num_generations profiler"
    },
    DPOTrainer: {
        "__init__": "model ref_model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks "
        "optimizers quantization_config peft_config",
        "_prepare_dataset": "dataset processing_class args dataset_name",
        "_set_signature_columns_if_needed": "",
        "_precompute_ref_logps": "dataset name batch_size",
        "compute_ref_log_probs": "model inputs",
        "_compute_loss": "model inputs return_outputs",
        "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    },
    RewardTrainer: {
        "__init__": "model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks optimizers "
        "optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config",
        "_prepare_dataset": "dataset processing_class args dataset_name",
        "save_model": "output_dir _internal_call",
    },
    RepeatSampler: {"__init__": "data_source mini_repeat_count batch_size repeat_count shuffle seed"},
    Accelerator: {"reduce": "tensor reduction scale", "gather": "tensor", "unwrap_model": "model keep_fp32_wrapper "
                  "keep_torch_compile"},
}  # fmt: skip
# Attributes that are read or set, and where they are set
ATTRIBUTES = {
    GRPOTrainer: "_async_tool_dicts _batch_environments _entropy_bonus_enabled _env_tools _is_vlm _last_loaded_step _logs _metrics "
    "_name _paper _step _sync_tool_dicts _tag_names _tokenizer",
    DPOTrainer: "_metrics _name _paper _signature_columns _tag_names _tokenizer",
    RewardTrainer: "_name _tag_names",
    Trainer: "_get_output_dir _load_callback_state _signature_columns",
    GRPOConfig: "_VALID_DICT_FIELDS",
    PreTrainedModel: "_keys_to_ignore_on_save",
    PreTrainedConfig: "_attn_implementation",
    torch: "_subclasses",
    torch.nn.Module: "_apply _buffers _load_from_state_dict _parameters",
    torch.utils: "_pytree _python_dispatch",
    trl.trainer.utils: "_CHUNKED_LOGPROB_CHUNK_SIZE",
    evaluate.Metric: "_info _compute",
    deepspeed.ops: "__compatible_ops__",
    base_trainer: "_BaseTrainer",
    argparse: "_SubParsersAction",
    argparse.ArgumentDefaultsHelpFormatter: "_get_help_string",
    argparse.ArgumentParser: "_actions _option_string_actions",
}
LISTED = {name for names in SIGNATURES.values() for name in names} | set(" ".join(ATTRIBUTES.values()).split())
LISTED |= {"_cdata", "_backward_cls"}  # of torch's storages, and of each autograd.Function
DOCUMENTED = {"_replace", "_fields"}  # of named tuples and syntax trees
OWN = ("marcog_trl", "typing")
PRIVATE = r"_[A-Za-z]\w*|__compatible_ops__"
OBJECTS = [
    GRPOTrainer,
    DPOTrainer,
    RewardTrainer,
    VLLMGeneration,
    Accelerator,
    PeftModel,
    LoraModel,
    LoraLayer,
    PreTrainedModel,
]


@pytest.mark.parametrize("owner", SIGNATURES, ids=lambda owner: owner.__name__)
def test_signatures(owner):
    for name, parameters in SIGNATURES[owner].items():
        assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters.split()], name


def test_the_constructor_passes_on_everything_that_trl_takes():
    ours = list(inspect.signature(MultiAgentTrainer.__init__).parameters)
    assert ours == [*inspect.signature(GRPOTrainer.__init__).parameters, "workflow", "algorithm"]


def private_names(owner):
    """Private names that a class with its bases, or a module, defines or sets."""
    names = set()
    for part in owner.__mro__[:-1] if inspect.isclass(owner) else [owner]:
        names |= {name for name in vars(part) if re.fullmatch(PRIVATE, name)}
        prefix = r"self\." if inspect.isclass(owner) else r"\b"
        names |= set(re.findall(rf"{prefix}({PRIVATE})\b", inspect.getsource(part)))
    return names


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_attributes(owner):
    assert set(ATTRIBUTES[owner].split()) <= private_names(owner)


def test_every_private_name_that_is_touched_is_listed():
    """An override or an access that is new belongs into one of the two tables above."""
    used, ours, overridden = set(), set(), set()
    for found in pkgutil.walk_packages(marcog_trl.__path__, "marcog_trl."):
        if ".execution" in found.name or found.name.endswith("__main__"):
            continue  # what runs untrusted code touches Python's own private names
        module = importlib.import_module(found.name)
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                of_self = ast.unparse(node.value) in ("self", "cls")
                (ours if of_self and isinstance(node.ctx, ast.Store) else used).add((node.attr, of_self))
            elif isinstance(node, ast.ImportFrom):
                names = [*(alias.name for alias in node.names), *str(node.module).split(".")]
                used |= {(name, False) for name in names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add((node.name, True))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add((node.id, True))
        classes = [
            owner for owner in vars(module).values() if inspect.isclass(owner) and owner.__module__ == found.name
        ]
        for owner in classes:
            foreign = [base for base in owner.__mro__[1:-1] if base.__module__.partition(".")[0] not in OWN]
            overridden |= {name for base in foreign for name in vars(owner).keys() & vars(base)} - {"_abc_impl"}
    ours = {name for name, _ in ours}
    # Names that both sides have: those of a trainer may be read on `self`
    trainers, theirs = (set().union(*map(private_names, owners)) for owners in (OBJECTS[:3], OBJECTS))
    touched = {
        n for n, of_self in used if n not in ours or n in trainers or (n in theirs and not of_self)
    } | overridden
    assert {name for name in touched if re.fullmatch(PRIVATE, name)} - LISTED - DOCUMENTED == set()
    assert {"_compute_loss", "_init_vllm"} <= overridden


def test_the_loop_of_tools_reads_only_what_a_team_gives_it(tool_model):
    methods = inspect.getsource(GRPOTrainer._tool_call_loop), inspect.getsource(GRPOTrainer._get_tool_suffix_ids)
    read = set(re.findall(r"\bself\.(\w+)", "".join(methods)))
    loop = ToolLoop(
        None,
        AutoTokenizer.from_pretrained(tool_model),
        with_tools(Single(), [tool_functions.add]),
        TeamSettings(),
        int,
    )
    per_stage = {"_async_tool_dicts", "_batch_environments", "_env_tools", "_sync_tool_dicts"}
    given = vars(loop).keys() | vars(ToolLoop).keys() | per_stage | {"_get_tool_suffix_ids"}
    assert read - given == {"tools"}  # of a model with images
    returned = (
        "return tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images"
    )
    assert methods[0].count("return tool_mask") == 1 and returned in methods[0]


LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
OPTIONS = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    "save_strategy": "no",
}  # fmt: skip


class Recorder(GRPOTrainer):
    """Notes in which order TRL calls what is overridden."""

    def __init__(self, model, path, **options):
        self.calls = []
        batch = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 4}
        data = Dataset.from_dict({"prompt": ["def f(x):", "assert f(3)", "def aux", "return x"]})
        args = GRPOConfig(str(path), **{**OPTIONS, **batch, **options})
        super().__init__(
            model, lambda completions, **_: [float(len(c)) for c in completions], args, data, peft_config=LORA
        )

    def _generate_single_turn(self, *args, **options):
        self.calls.append("generate")
        return super()._generate_single_turn(*args, **options)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.calls.append(("rewards", *rewards.shape))
        return rewards

    def _get_per_token_logps_and_entropies(self, *args, **options):
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **options)
        adapter = next(module for module in self.model.modules() if isinstance(module, LoraLayer))
        kind = "reference" if adapter.disable_adapters else "update" if torch.is_grad_enabled() else "old"
        self.calls.append((kind, options.get("batch_size")))
        return logps, entropies, aux_loss

    def rollout(self):
        self.model.train()
        return self._generate_and_score_completions(next(iter(self.get_train_dataloader())))


ALWAYS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}


@pytest.mark.parametrize(
    ("options", "keys", "calls"),
    [
        ({"gradient_accumulation_steps": 2}, set(), ["generate", ("rewards", 8, 1)]),
        (
            {"beta": 0.1, "steps_per_generation": 2},
            {"old_per_token_logps", "ref_per_token_logps"},
            ["generate", ("old", 4), ("reference", 4), ("rewards", 8, 1)],
        ),
    ],
)
def test_a_rollout_has_these_keys_and_calls(tiny_model, tmp_path, options, keys, calls):
    trainer = Recorder(tiny_model, tmp_path, **options)
    output = trainer.rollout()
    assert set(output) == ALWAYS | keys and trainer.calls == calls
    assert output["advantages"].shape == (8,) and output["num_items_in_batch"] == output["completion_mask"].sum()
    for name in keys:
        assert output[name].shape == output["completion_ids"].shape
    for name in ("completions/mean_length", "completions/min_length"):  # which are taken back
        assert len(trainer._metrics["train"][name]) == 1
    assert {"prompt", "completion", "rewards", "advantages", "extra"} <= set(trainer._logs)


def test_a_rollout_function_gives_rows_and_masks(tiny_model, tmp_path):
    trainer, masks = Recorder(tiny_model, tmp_path), [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
    rows = {"prompt_ids": [[5, 6]] * 4, "completion_ids": [[11, 12, 13]] * 4, "logprobs": None, "env_mask": masks}
    trainer.rollout_func = lambda prompts, given: rows if given is trainer and len(prompts) == 4 else None
    output = trainer.rollout()
    assert output["prompt_ids"].tolist() == [[5, 6]] * 4 and output["completion_ids"].tolist() == [[11, 12, 13]] * 4
    assert output["tool_mask"].tolist() == masks and output["num_items_in_batch"] == 8
    assert trainer.calls == [("rewards", 4, 1)]


def test_modules_of_others_are_not_saved_with_the_adapter(tiny_model):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LORA)
    model.get_base_model().add_module("marcog_team", torch.nn.Linear(2, 2))
    assert len(get_peft_model_state_dict(model)) == 28
    assert any("marcog_team" in name for name, _ in model.named_parameters())
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields >= set("target_parameters rank_pattern alpha_pattern use_rslora init_lora_weights use_dora".split())


def test_buffers_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    assert (config.reduce_bucket_size, config.max_live_parameters) == (REDUCE_BUCKET, LIVE_PARAMETERS)
