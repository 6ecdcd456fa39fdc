"""
What the package relies on in TRL, transformers, PEFT, accelerate, DeepSpeed and vLLM beyond their documented interfaces.

When an upgrade breaks training, it should fail here first, and say where.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from concurrent.futures import Future
from pathlib import Path

import deepspeed.ops
import evaluate
import pytest
import teams
import tool_model as tool_functions
import torch
import trl.trainer.utils
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import BaseWatermarkingConfig
from transformers.trainer_utils import HubStrategy
from transformers.utils.import_utils import is_tracing
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import base_trainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    RepeatSampler,
    get_callable_name,
    get_comet_experiment_url,
    get_trackio_space_url,
    is_async_callable,
    shuffle_sequence_dict,
    split_tensor_dict,
    use_adapter,
)

import marcog_trl
from marcog_trl import Single
from marcog_trl.agents import Slot, with_tools
from marcog_trl.heterogeneity.cores import VARIANTS
from marcog_trl.rollout.records import Row
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


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [(owner, name, parameters) for owner, methods in SIGNATURES.items() for name, parameters in methods.items()],
    ids=lambda value: value if isinstance(value, str) and " " not in value else getattr(value, "__name__", ""),
)
def test_signature(owner, name, parameters):
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found == ["self", *parameters.split()]


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
LISTED |= {"_cdata", "_backward_cls"}  # of torch's storages, and of each autograd.Function: see TestPlans
LISTED |= {"_abc_impl"}  # Python's, of every abstract class
DOCUMENTED = {"_replace", "_fields"}  # of named tuples and syntax trees
PRIVATE = r"_[A-Za-z]\w*|__compatible_ops__"
# Objects of these classes pass through the package. vLLM is not always installed
OBJECTS = [
    GRPOTrainer, DPOTrainer, RewardTrainer, VLLMGeneration, Accelerator, AcceleratorState, PartialState, PeftModel, LoraModel, LoraLayer, LoraConfig,
    PreTrainedModel, PreTrainedTokenizerBase, DeepSpeedPlugin, deepspeed.DeepSpeedEngine,
]  # fmt: skip
if importlib.util.find_spec("vllm") is not None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    OBJECTS += [LLM, LoRARequest]
_PACKAGE = Path(marcog_trl.__file__).parent


def private_names(owners):
    """Private names that classes or modules define or set."""
    names = set()
    for owner in owners:
        names |= {name for name in vars(owner) if re.fullmatch(PRIVATE, name)}
        attribute = rf"self\.({PRIVATE})\b" if inspect.isclass(owner) else rf"\b({PRIVATE})\b"
        names |= set(re.findall(attribute, inspect.getsource(owner)))
    return names


def bases(owner):
    return owner.__mro__[:-1] if inspect.isclass(owner) else [owner]


def package_modules():
    """The name and the syntax tree of every module. What runs untrusted code touches Python's own private names."""
    for found in pkgutil.walk_packages([str(_PACKAGE)], "marcog_trl."):
        if ".execution" not in found.name:
            yield found.name, ast.parse(Path(found.module_finder.find_spec(found.name).origin).read_text())


def private_accesses(tree):
    """Private attributes and imports of a module, each with the expression that it is taken from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(PRIVATE, node.attr):
            yield node.attr, ast.unparse(node.value)
        elif isinstance(node, ast.ImportFrom):
            private = [alias.name for alias in node.names if re.fullmatch(PRIVATE, alias.name)]
            private += [part for part in (node.module or "").split(".") if re.fullmatch(PRIVATE, part)]
            yield from ((name, node.module) for name in private)


def defined_in(tree):
    """Names that a module defines, or sets on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_attributes(owner):
    assert set(ATTRIBUTES[owner].split()) <= private_names(bases(owner))


def test_every_private_name_that_is_touched_is_listed():
    """An override or an access that is new belongs into one of the two tables above."""
    modules = dict(package_modules())
    accesses = [access for tree in modules.values() for access in private_accesses(tree)]
    ours = {name for tree in modules.values() for name in defined_in(tree)}
    touched = {name for name, _ in accesses} - ours - DOCUMENTED
    # Names that both sides have: those of the trainer may be read on `self`
    trainers = private_names([*GRPOTrainer.__mro__[:-1], DPOTrainer, RewardTrainer])
    touched |= {name for name, _ in accesses if name in trainers}
    others = private_names([base for owner in OBJECTS for base in bases(owner)])
    touched |= {name for name, owner in accesses if name in others and owner not in ("self", "cls")}
    assert touched - LISTED == set()


def test_every_private_override_is_listed():
    overridden = set()
    for module in (importlib.import_module(name) for name, _ in package_modules() if not name.endswith("__main__")):
        for owner in vars(module).values():
            if inspect.isclass(owner) and owner.__module__ == module.__name__:
                theirs = [
                    base for base in bases(owner) if base.__module__.partition(".")[0] not in ("marcog_trl", "typing")
                ]
                overridden |= {name for base in theirs for name in vars(owner).keys() & vars(base) if name[0] == "_"}
    assert {name for name in overridden if re.fullmatch(PRIVATE, name)} - LISTED == set()
    assert {"_compute_loss", "_init_vllm", "_load_from_state_dict"} <= overridden


def test_an_access_that_is_not_listed_is_found():
    tree = ast.parse("from peft._inner import x\nmodel._secret(1)\nfrom trl import _other\nself._own = 1")
    found = dict(private_accesses(tree))
    assert found == {"_inner": "peft._inner", "_secret": "model", "_other": "trl", "_own": "self"}
    assert set(found) - set(defined_in(tree)) == {"_inner", "_secret", "_other"}


def test_the_loop_of_tools_reads_only_what_a_team_gives_it(tool_model):
    read = set()
    for method in (GRPOTrainer._tool_call_loop, GRPOTrainer._get_tool_suffix_ids):
        read |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(method)))
    tokenizer = AutoTokenizer.from_pretrained(tool_model)
    loop = ToolLoop(None, tokenizer, with_tools(Single(), [tool_functions.add]), TeamSettings(), int)
    loop.run([], [], None, None, None)
    given = vars(loop).keys() | vars(ToolLoop).keys() | {"_get_tool_suffix_ids"}
    per_stage = {"_async_tool_dicts", "_batch_environments", "_env_tools", "_sync_tool_dicts"}
    assert read - given - per_stage == {"tools"}  # of a model with images
    returned = re.findall(r"return (tool_mask, .*)", inspect.getsource(GRPOTrainer._tool_call_loop))
    assert returned == [
        "tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images"
    ]


def test_the_constructor_passes_on_everything_that_trl_takes():
    ours = list(inspect.signature(MultiAgentTrainer.__init__).parameters)
    assert ours == [*inspect.signature(GRPOTrainer.__init__).parameters, "workflow", "algorithm"]


REPLY = [11, 12, 13]


class Recorder(GRPOTrainer):
    """Notes in which order, and with what, TRL calls what is overridden."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        result = super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        self.calls.append(("generate", prompt_ids, result))
        return result

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        result = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.calls.append(("rewards", inputs, result))
        return result

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        result = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)
        adapter = next(m for m in self.model.modules() if isinstance(m, BaseTunerLayer))
        kind = "reference" if adapter.disable_adapters else "update" if torch.is_grad_enabled() else "old"
        self.calls.append((kind, kwargs.get("batch_size"), result))
        return result


def make(model, path, trainer_class=Recorder, callbacks=(), **options):
    def reward(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    config = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **options,
    }
    data = Dataset.from_dict({"prompt": ["def f(x):", "assert f(3)", "def aux", "return x"]})
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    args = GRPOConfig(str(path), **config)
    return trainer_class(model, reward, args, data, peft_config=lora, callbacks=list(callbacks))


def batch_of(trainer):
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    return rows, trainer._generate_and_score_completions(rows)


class TestRollout:
    def test_rollout_func_supplies_rows_masks_and_log_probabilities(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        seen = []

        def rollout(prompts, given):
            seen.append((prompts, given))
            masks = [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
            return {
                "prompt_ids": [[5, 6]] * 4,
                "completion_ids": [REPLY] * 4,
                "logprobs": None,
                "env_mask": masks,
            }

        trainer.rollout_func = rollout
        rows, output = batch_of(trainer)
        [(prompts, given)] = seen
        assert prompts == [row["prompt"] for row in rows] and given is trainer
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        assert output["prompt_ids"].tolist() == [[5, 6]] * 4
        assert output["completion_ids"].tolist() == [REPLY] * 4
        assert output["tool_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
        assert output["num_items_in_batch"].ndim == 0 and output["num_items_in_batch"] == 8
        assert not [call for call in trainer.calls if call[0] == "generate"]
        assert "env_mask" not in rows[0]  # not among what rewards are given

    def test_the_output_has_these_keys(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, beta=0.1, steps_per_generation=2, gradient_accumulation_steps=1)
        _, output = batch_of(trainer)
        assert set(output) == {
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "completion_mask",
            "advantages",
            "num_items_in_batch",
            "old_per_token_logps",
            "ref_per_token_logps",
        }
        rows, width = output["completion_ids"].shape
        assert output["advantages"].shape == (rows,) == (8,)
        assert output["old_per_token_logps"].shape == output["ref_per_token_logps"].shape == (rows, width)
        # Old ones before the reference's, in chunks of the micro-batch; rewards afterwards
        assert [call[0] for call in trainer.calls] == ["generate", "old", "reference", "rewards"]
        assert [call[1] for call in trainer.calls[1:3]] == [4, 4]

    def test_old_log_probabilities_are_left_out_where_they_are_the_new_ones(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, steps_per_generation=1, gradient_accumulation_steps=2)
        _, output = batch_of(trainer)
        assert not {"old_per_token_logps", "ref_per_token_logps", "tool_mask"} & set(output)

    def test_generation_returns_ids_that_end_at_the_end_of_sequence(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        completion_ids, logprobs = trainer._generate_single_turn([[5, 6], [7]], None, {}, 1)
        assert logprobs is None and len(completion_ids) == 2
        for ids in completion_ids:
            assert isinstance(ids, list) and 1 <= len(ids) <= 4
            assert trainer._tokenizer.eos_token_id not in ids[:-1]

    def test_rewards_are_gathered_one_row_per_prompt_and_one_column_per_function(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        inputs = [{"prompt": "a", "answer": i} for i in range(3)]
        rewards = trainer._calculate_rewards(inputs, ["a"] * 3, ["x", "yy", "zzz"], [[1]] * 3)
        assert rewards.tolist() == [[1], [2], [3]]
        trainer.reward_funcs = [lambda completions, **kwargs: [None, 1.0, None]]
        assert trainer._calculate_rewards(inputs, ["a"] * 3, ["x"] * 3, [[1]] * 3).isnan().tolist() == [
            [True],
            [False],
            [True],
        ]

    def test_rows_without_any_reward_have_no_advantage_and_stay_in_the_loss(self, tiny_model, tmp_path):
        """Which is why masked episodes are taken out of the loss by their mask."""
        trainer = make(tiny_model, tmp_path)
        trainer.reward_funcs = [lambda completions, **kwargs: [None, 1.0, 2.0, 3.0]]
        _, output = batch_of(trainer)
        assert output["advantages"][0] == 0
        assert output["num_items_in_batch"] == output["completion_mask"].sum()


class TestLoss:
    def inputs(self, dead=0):
        torch.manual_seed(0)
        rows = 4 + dead
        mask = torch.ones(rows, 3, dtype=torch.long)
        mask[4:] = 0
        return {
            "prompt_ids": torch.full((rows, 2), 5),
            "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
            "completion_ids": torch.tensor(REPLY).expand(rows, 3),
            "completion_mask": torch.ones(rows, 3, dtype=torch.long),
            "tool_mask": mask,
            "advantages": torch.cat([torch.randn(4, 3), torch.zeros(dead, 3)]),
            "num_items_in_batch": mask.sum(),
        }

    @pytest.fixture(scope="class")
    def trainer(self, tiny_model, tmp_path_factory):
        trainer = make(
            tiny_model, tmp_path_factory.mktemp("loss"), steps_per_generation=4, gradient_accumulation_steps=2
        )
        trainer.current_gradient_accumulation_steps = 2
        trainer.model.train()
        return trainer

    def test_advantages_may_differ_by_token(self, trainer):
        inputs = self.inputs()
        loss = trainer._compute_loss(trainer.model, inputs)
        # Ratio 1: minus the mean advantage, over the share of an optimizer step in the generation batch
        expected = -(inputs["advantages"] * inputs["tool_mask"]).sum() / (12 * 2 / 4)
        torch.testing.assert_close(loss, expected)
        trainer.model.eval()
        torch.testing.assert_close(trainer._compute_loss(trainer.model, inputs), expected * 2 / 4)
        trainer.model.train()

    def test_masked_tokens_do_not_count(self, trainer):
        inputs = self.inputs()
        inputs["tool_mask"] = inputs["tool_mask"].clone()
        inputs["tool_mask"][1] = 0
        inputs["num_items_in_batch"] = inputs["tool_mask"].sum()
        expected = -(inputs["advantages"] * inputs["tool_mask"]).sum() / (9 * 2 / 4)
        torch.testing.assert_close(trainer._compute_loss(trainer.model, inputs), expected)

    @pytest.mark.parametrize(
        ("loss_type", "over_rows"),
        [
            ("grpo", True), ("sapo", True), ("dr_grpo", True), ("luspo", True),
            ("dapo", False), ("bnpo", False), ("cispo", False), ("vespo", False),
        ],
    )  # fmt: skip
    def test_which_losses_are_means_over_rows_that_dead_rows_dilute(self, trainer, monkeypatch, loss_type, over_rows):
        monkeypatch.setattr(trainer, "loss_type", loss_type)
        plain = trainer._compute_loss(trainer.model, self.inputs())
        diluted = trainer._compute_loss(trainer.model, self.inputs(dead=4))
        assert plain != 0
        torch.testing.assert_close(diluted, plain / 2 if over_rows else plain)

    def test_one_pass_makes_the_loss_with_gradient_and_three_results(self, trainer):
        trainer.calls.clear()
        trainer._compute_loss(trainer.model, self.inputs())
        [(kind, batch_size, (logps, entropies, aux))] = trainer.calls
        assert kind == "update" and batch_size is None and aux is None
        assert logps.shape == entropies.shape == (4, 3) and logps.requires_grad

    def test_the_kl_term_goes_with_beta(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, beta=0.5)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = {**self.inputs(), "ref_per_token_logps": torch.zeros(4, 3)}
        with_kl = trainer._compute_loss(trainer.model, inputs)
        trainer.beta = 0.0
        without = trainer._compute_loss(trainer.model, inputs)
        assert with_kl > without + 1
        assert len(trainer._metrics["train"]["kl"]) == 1


class TestCycle:
    def test_rows_are_shuffled_and_split_with_whatever_has_their_length(self):
        batch = {
            "ids": torch.arange(6).view(6, 1),
            "z": torch.arange(6.0).view(6, 1, 1),
            "count": torch.tensor(7),
            "absent": None,
        }
        parts = split_tensor_dict(shuffle_sequence_dict(batch), 3)
        assert [part["count"].item() for part in parts] == [7] * 3
        for part in parts:
            assert part["ids"].shape == (2, 1) and part["absent"] is None
            assert torch.equal(part["ids"].float().unsqueeze(-1), part["z"])
        assert sorted(torch.cat([part["ids"] for part in parts]).flatten().tolist()) == list(range(6))

    def test_a_generation_batch_is_used_for_so_many_steps(self, tiny_model, tmp_path):
        steps = []

        class Note(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                steps.append((trainer._step, trainer.current_gradient_accumulation_steps))

        trainer = make(
            tiny_model,
            tmp_path,
            callbacks=[Note()],
            max_steps=4,
            per_device_train_batch_size=2,
            steps_per_generation=2,
            num_iterations=2,
            gradient_accumulation_steps=2,
        )
        trainer.train()
        assert [call[0] for call in trainer.calls].count("generate") == 2
        assert steps == [(0, 2), (2, 2), (4, 2), (6, 2)]
        assert len(trainer._buffered_inputs) == 2
        assert trainer.args.generation_batch_size == 4

    def test_the_sampler_repeats_problems_next_to_each_other(self):
        sampler = RepeatSampler("abcde", mini_repeat_count=2, batch_size=2, repeat_count=3, seed=7)
        first = list(sampler)
        assert first[:4] == first[4:8] == first[8:12] and first[0] == first[1] != first[2] == first[3]
        assert len(first) == len(sampler) == 24
        assert (sampler.num_samples, sampler.seed, sampler.shuffle) == (5, 7, True)
        assert list(sampler) != first  # the next epoch, of the same generator
        sampler.generator.manual_seed(7)
        assert list(sampler) == first

    def test_the_epoch_in_the_state_is_whole_when_an_epoch_begins(self, tiny_model, tmp_path):
        epochs = []

        class Note(RepeatSampler):
            def __iter__(self):
                epochs.append(trainer.state.epoch)
                return super().__iter__()

        class Noting(Recorder):
            def _get_train_sampler(self, dataset=None):
                return Note(self.train_dataset, 2, 2, 1, seed=0)

        trainer = make(tiny_model, tmp_path, Noting, max_steps=5)
        trainer.train()
        assert epochs == [0, 1, 2]

    def test_evaluation_uses_one_batch_at_a_time(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, per_device_eval_batch_size=2, num_generations_eval=2)
        assert trainer.num_generations_eval == 2 and trainer.num_generations == 2
        trainer.eval_dataset = trainer.train_dataset
        metrics = trainer.evaluate()
        assert [call[0] for call in trainer.calls].count("generate") == 4
        assert "eval_reward" in metrics


class TestState:
    def test_the_trainer_has_these_attributes(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, beta=0.1)
        assert trainer.reward_func_names == ["reward"] and trainer.reward_weights.tolist() == [1]
        assert trainer.chat_template_kwargs == {} and trainer._is_vlm is False
        assert trainer._tokenizer.eos_token_id in trainer.eos_token_ids
        assert trainer.ref_model is None and trainer.beta == 0.1 and trainer.loss_type == trainer.args.loss_type
        assert trainer._step == 0 and trainer._buffered_inputs is None and trainer.rollout_func is None
        assert set(trainer._metrics) == {"train", "eval"}
        assert {"prompt", "completion", "rewards", "advantages", "extra"} <= set(trainer._logs)
        assert not trainer._pending_metrics and not trainer._pending_extra_logs
        assert set(GRPOTrainer._paper) == {"title", "id", "citation"} and GRPOTrainer._tag_names and GRPOTrainer._name

    def test_metrics_that_are_taken_back_exist(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        batch_of(trainer)
        for name in ("completions/mean_length", "completions/min_length"):
            assert len(trainer._metrics["train"][name]) == 1
        assert len(trainer._logs["advantages"]) == 4

    def test_the_configuration_completes_batches_so(self, tmp_path):
        options = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 4}
        args = GRPOConfig(str(tmp_path), num_generations=4, gradient_accumulation_steps=3, **options)
        assert (args.steps_per_generation, args.generation_batch_size) == (3, 12)
        args = GRPOConfig(str(tmp_path), num_generations=4, generation_batch_size=8, **options)
        assert args.steps_per_generation == 2
        for wrong in ({"num_generations": 3}, {"num_generations": 1}):
            with pytest.raises(ValueError):
                GRPOConfig(str(tmp_path), **wrong, **options)
        assert GRPOConfig(str(tmp_path), scale_rewards=False, num_generations=4, **options).scale_rewards == "none"
        restated = ("learning_rate", "num_generations", "num_generations_eval", "scale_rewards", "disable_dropout")
        fields = {field.name for field in dataclasses.fields(GRPOConfig)}
        assert fields >= {*restated, "per_device_eval_batch_size", "save_steps", "multi_objective_aggregation"}

    def test_callables_are_named_and_recognised(self):
        async def judge(completions, **kwargs):
            return []

        assert get_callable_name(judge) == "judge" and is_async_callable(judge)
        assert not is_async_callable(print)

    def test_the_card_of_a_trainer_has_the_metadata_that_ours_keeps(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        trainer.create_model_card("name", "problems")
        data = ModelCard((tmp_path / "README.md").read_text()).data
        assert data.model_name == "name" and data.datasets == "problems" and "trl" in data.tags
        assert isinstance(trainer._name, str) and {"title", "id", "citation"} <= trainer._paper.keys()
        assert get_comet_experiment_url() is None and get_trackio_space_url() is None  # outside of a run


class TestModel:
    @pytest.fixture
    def model(self, tiny_model):
        torch.manual_seed(0)
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_hooks_on_the_decoder_run_once_per_pass_and_see_the_last_state(self, tiny_model, tmp_path, checkpointing):
        trainer = make(tiny_model, tmp_path, gradient_checkpointing=checkpointing)
        causal_lm = trainer.model.get_base_model()
        seen = []
        causal_lm.get_decoder().register_forward_pre_hook(lambda module, args: seen.append("before"))
        causal_lm.get_decoder().register_forward_hook(lambda module, args, output: seen.append(output[0]))
        ids = torch.full((2, 5), 7)
        trainer.model.train()
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)
        logps.sum().backward()
        assert len(seen) == 2 and seen[0] == "before"
        logits = seen[1] @ causal_lm.get_output_embeddings().weight.T
        expected = logits[:, 1:-1].log_softmax(-1).gather(2, ids[:, 2:, None]).squeeze(2)
        torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-4)

    def test_hooks_on_lora_layers_act_and_disabling_the_adapter_bypasses_them(self, model):
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        assert len(layers) == 14
        for layer in layers:
            assert layer.r["default"] == 4 and layer.scaling["default"] == 2 and not layer.merged
            layer.lora_A["default"].register_forward_hook(lambda module, args, output: output * 0)
        ids = torch.full((1, 4), 9)
        with torch.no_grad():
            hooked = model(ids).logits
            with use_adapter(model, adapter_name=None):
                assert layers[0].disable_adapters and layers[0].active_adapters == ["default"]
                assert torch.equal(model(ids).logits, hooked)
        assert not layers[0].disable_adapters

    def test_modules_of_others_are_not_saved_with_the_adapter(self, model, tmp_path):
        model.get_base_model().add_module("marcog_team", torch.nn.Linear(2, 2))
        state = get_peft_model_state_dict(model)
        assert len(state) == 28 and all("lora_" in key for key in state)
        assert any("marcog_team" in name for name, _ in model.named_parameters())

    def test_a_lora_config_has_the_fields_that_are_refused(self):
        fields = {field.name for field in dataclasses.fields(LoraConfig)}
        assert {"target_parameters", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"} <= fields
        assert "use_dora" in fields and "use_dora" in VARIANTS


class TestSampling:
    """A team generates by itself what TRL generates for it."""

    @pytest.mark.parametrize(
        "options", [{}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2}]
    )
    def test_a_team_draws_the_tokens_that_trl_draws(self, tiny_model, tmp_path, options):
        data = Dataset.from_dict({"prompt": ["def f(x):"] * 4})
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentTrainer, data=data, per_device_train_batch_size=4, **options
        )
        prompts = [[5, 6, 7], [8], [9, 10]]
        rows = [Row(i, Slot("solver"), 0, "", ids) for i, ids in enumerate(prompts)]
        replies = []
        for generate in (
            lambda: trainer._generate_single_turn(prompts, None, {}, 1)[0],
            lambda: trainer.team._generate(rows, None),
        ):
            torch.manual_seed(0)
            replies.append(generate())
        assert replies[0] == replies[1] and len({tuple(reply) for reply in replies[0]}) > 1

    def test_a_watermark_sees_the_scores_before_temperature_and_after_penalties(self, tiny_model):
        """In greedy decoding, where `GivenDraws` is one."""
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        seen = []

        class Watch(BaseWatermarkingConfig):
            def validate(self):
                pass

            def construct_processor(self, vocab_size, device):
                assert vocab_size == model.config.vocab_size and device == model.device
                return lambda ids, scores: seen.append(scores) or scores

        config = GenerationConfig(
            max_new_tokens=1, do_sample=False, repetition_penalty=2.0, pad_token_id=0, eos_token_id=1,
            watermarking_config=Watch(),
        )  # fmt: skip
        ids = torch.full((1, 4), 7)
        model.to(torch.bfloat16).generate(ids, generation_config=config)
        with torch.no_grad():
            logits = model(ids).logits[:, -1].float()
        assert seen[0].dtype == torch.float32
        changed = ((seen[0] - logits).abs() > 1e-4).nonzero()[:, 1].tolist()
        assert changed == [7]


class TestPushes:
    def test_the_trainer_copies_and_pushes_a_checkpoint_unless_a_push_is_under_way(
        self, tiny_model, tmp_path, monkeypatch
    ):
        """Which is what the agents of a checkpoint are written for."""
        trainer = make(tiny_model, tmp_path, hub_strategy="every_save", save_strategy="steps")
        pushed = []

        class Api:
            def upload_folder(self, **options):
                pushed.append(options)
                return Future()

        monkeypatch.setattr("transformers.trainer.hf_api", Api)
        trainer.hub_model_id, trainer.push_in_progress = "someone/team", None
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "checkpoint-1" / "adapter_config.json").write_text("{}")
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        [options] = pushed
        assert options["folder_path"] == str(tmp_path) and options["run_as_future"]
        assert (tmp_path / "adapter_config.json").is_file()
        assert not trainer.push_in_progress.is_done()
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        assert len(pushed) == 1
        trainer.push_in_progress.jobs[0].set_result(None)
        assert trainer.push_in_progress.is_done()
        trainer._finish_current_push()
        trainer.args.hub_strategy = HubStrategy.END
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        assert len(pushed) == 1


class TestDPO:
    """What [`MADPOTrainer`] counts on in TRL's DPO trainer."""

    def make(self, model, path, **options):
        data = Dataset.from_dict(
            {"prompt": ["def f(x):"] * 2, "chosen": [" return x", " aux"], "rejected": [" 1", " 2"]}
        )
        config = {
            "report_to": "none", "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "disable_tqdm": True, **options
        }  # fmt: skip
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        return DPOTrainer(model, args=DPOConfig(str(path), **config), train_dataset=data, peft_config=lora)

    def batch(self):
        return {
            "input_ids": torch.tensor([[10, 11, 12, 1], [10, 11, 13, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
            "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
            "ref_chosen_logps": torch.tensor([-1.0]),
            "ref_rejected_logps": torch.tensor([-2.0]),
        }

    def test_the_loss_asks_the_model_once_and_sums_its_log_probabilities(self, tiny_model, tmp_path):
        trainer, calls = self.make(tiny_model, tmp_path), []
        trainer.precompute_ref_logps = True  # read at every step, so that it may be set after construction

        def model(**inputs):
            calls.append(inputs)
            zeros = torch.zeros(2, 3)
            logps = torch.tensor([[0.0, -0.5, -1.5], [0.0, -3.0, 0.0]])
            return FusedCausalLMOutput(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

        loss = trainer._compute_loss(model, self.batch(), False)
        [call] = calls
        assert set(call) == {"input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head"}
        assert call["labels"].tolist() == [[-100, -100, 12, 1], [-100, -100, 13, -100]]
        # chosen -2 + 1, rejected -3 + 2: equal ratios
        assert loss.item() == pytest.approx(0.693147, abs=1e-6)
        assert trainer._metrics["train"]["rewards/margins"] == [0.0]

    def test_a_reference_model_is_asked_with_the_adapter_on(self, tiny_model, tmp_path):
        trainer, seen = self.make(tiny_model, tmp_path), []

        def model(**inputs):
            adapter = next(m for m in trainer.model.modules() if isinstance(m, BaseTunerLayer))
            seen.append((adapter.disable_adapters, torch.is_grad_enabled()))
            return FusedCausalLMOutput(log_probs=torch.tensor([[0.0, -0.5, -1.5], [0.0, -3.0, 0.0]]))

        for reference in (None, model):
            trainer.ref_model = reference
            chosen, rejected = trainer.compute_ref_log_probs(model, self.batch())
            assert (chosen.item(), rejected.item()) == (-2.0, -3.0)
        assert seen == [(True, False), (False, False)]

    def test_the_fused_head_gives_these_fields(self, tiny_model, tmp_path):
        trainer, batch = self.make(tiny_model, tmp_path), self.batch()
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        output = trainer.model(**inputs, labels=labels, use_cache=False, fused_lm_head=True)
        for name in ("log_probs", "entropy", "mean_logits", "is_top1"):
            assert name in output and output[name].shape == (2, 3)
        assert output.log_probs[0, 0] == 0 and (output.log_probs[0, 1:] < 0).all()

    def test_pairs_are_chosen_first_and_columns_are_kept_by_name(self, tiny_model, tmp_path):
        trainer = self.make(tiny_model, tmp_path)
        trainer._set_signature_columns_if_needed()
        assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(trainer._signature_columns)
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"].shape[0] == 4 and batch["completion_mask"].shape == batch["input_ids"].shape


class TestReward:
    """What [`TeamRewardTrainer`] counts on in TRL's reward trainer."""

    def test_token_ids_are_taken_as_they_are_and_scored_at_their_end(self, tiny_model, tmp_path):
        data = Dataset.from_dict(
            {"chosen_ids": [[40, 41, 1], [42, 1]], "rejected_ids": [[43, 1], [44] * 9], "task_id": ["a", "b"]}
        )
        args = RewardConfig(str(tmp_path), max_length=8, report_to="none", use_cpu=True, bf16=False)
        trainer = RewardTrainer(tiny_model, args, train_dataset=data)
        assert trainer.train_dataset["chosen_ids"] == [[40, 41, 1]]  # the longer pair is left out
        assert trainer.train_dataset["task_id"] == ["a"]
        batch = trainer.data_collator([trainer.train_dataset[0]])
        assert batch["input_ids"].tolist() == [[40, 41, 1], [43, 1, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
        with torch.no_grad():
            both = trainer.model(**batch).logits
            alone = trainer.model(input_ids=torch.tensor([[43, 1]])).logits
        assert both.shape == (2, 1) and torch.allclose(both[1], alone[0], atol=1e-6)


class TestPlans:
    """What marcog_trl.trainers.plan takes for granted."""

    def test_models_run_on_fake_tensors(self, tiny_model):
        with FakeTensorMode():
            one = torch.zeros(2)
            assert one.untyped_storage()._cdata == one[1:].untyped_storage()._cdata  # names the memory behind a tensor
            assert torch.autograd.Function._backward_cls  # made by torch
            assert is_tracing(torch.zeros(1))  # so no branch depends on data
            cache = DynamicCache(config=AutoConfig.from_pretrained(tiny_model))
            cache.update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), 0)
            assert isinstance(cache.layers[0], DynamicLayer) and cache.layers[0].keys.shape == (1, 2, 3, 32)

    def test_buffers_of_deepspeed(self):
        config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
        assert (config.reduce_bucket_size, config.max_live_parameters) == (REDUCE_BUCKET, LIVE_PARAMETERS)
