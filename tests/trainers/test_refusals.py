"""What cannot work is refused with one line that names the field and its value, before the model is looked for: it does not exist."""

from pathlib import Path

import pytest
import teams
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from teams import Chain, Pair
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig

from marcog_trl import (
    Agent,
    Endpoint,
    MultiAgentGRPOTrainer,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    SHPPOTrainer,
    Team,
    Workflow,
)


GRPO, PPO, SHPPO = MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
URL = "http://127.0.0.1:9/v1"
TESTED = {"test": [["assert f(1)"]] * 8, "test_format": ["asserts"] * 8, "entry_point": ["f"] * 8}
TWO_NAMES = [["assert a + b == 3"]] * 8  # which do not tell the entry point


def problems(**columns):
    columns = {"prompt": ["?"] * 8, **columns}
    return Dataset.from_dict({name: values for name, values in columns.items() if values is not None})


class Twins(Workflow):
    agents = (Agent("main", ""), Agent("main", ""))


def outside(*names):
    """A pair some of whose agents are behind an endpoint."""
    workflow = Pair()
    workflow.agents = tuple(Agent(name, name, Endpoint("big", URL) if name in names else None) for name in "ab")
    return workflow


EXPERT = {"workflow": "collaboration", "num_turns": 2, "feedback": "expert_edits", "data": problems(**TESTED)}
LEVELS = problems(prompt=[f"{i}" for i in range(10)], level=["easy"] * 4 + ["hard"] * 4 + ["medium"] * 2)
STEPS = {"column": "level", "steps": [3, 6]}


def in_stages(curriculum, **options):
    return {"data": LEVELS, "curriculum": curriculum, **options}


BRANCHES = {"workflow": Chain(), "credit": "counterfactual", "fanout": [2, 2], "num_generations": 4}
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
QUANTISED = BitsAndBytesConfig(load_in_4bit=True)
ALL_WEIGHTS = {"full_finetuning": True, "peft_config": None}
ADAPTER = LoraConfig(task_type="CAUSAL_LM")

REFUSED = {
    "batches": [
        (PPO, {"generation_batch_size": 16, "workflow": Chain("abc", 2)}, "generation_batch_size=16 .* 12 rows .*=24"),
        (PPO, {"steps_per_generation": 1, "workflow": Chain("abc")}, "generation_batch_size=8 .*=24"),
        (PPO, {"per_device_eval_batch_size": 4, "workflow": Chain("abc")}, "per_device_eval_batch_size=4 .*=6"),
        (PPO, {"data": problems().select(range(3))}, "train_dataset has 3 problems, .* needs 4"),
        (GRPO, {**BRANCHES, "generation_batch_size": 8}, r"generation_batch_size=8 .* 6 rows \(2 \+ 4\)"),
    ],
    "workflows": [
        (PPO, {"workflow": Twins()}, r"Twins\.agents=.*2 agents named 'main'"),
        (PPO, {"workflow": "debate"}, "workflow='debate' is unknown"),
        (PPO, {"num_agents": 3}, "num_agents=3"),
        (PPO, {"num_agents": 1, "workflow": "collaboration"}, "num_agents=1"),
        (PPO, {"workflow": Pair(num_turns=2), "num_turns": 3}, "num_turns=3 contradicts"),
        (PPO, {"workflow": Pair(), "num_agents": 4}, "num_agents=4 contradicts"),
        (PPO, {"workflow": Pair(), "roles": {"a": "Be brief."}}, "roles=.* contradicts"),
        (PPO, {"workflow": Pair(), "visible_tests": 2}, "visible_tests=2 contradicts"),
        (GRPO, EXPERT, "expert=None"),
        (GRPO, {**EXPERT, "expert": {"model": "any"}}, "OPENAI_API_KEY"),
        (PPO, {"system_prompt": " "}, "system_prompt=' '"),
    ],
    "datasets": [
        (PPO, {"data": None}, "train_dataset is a NoneType"),
        (PPO, {"data": [{"prompt": "?"}]}, "train_dataset is a list"),
        (PPO, {"data": problems().select([])}, "train_dataset is empty"),
        (PPO, {"data": problems(prompt=None, question=["?"])}, "train_dataset has no column 'prompt'.*'question'"),
        (PPO, {"data": problems(prompt=None, question=["?"]).to_iterable_dataset()}, "train_dataset has no column 'prompt'"),
        (PPO, {"data": problems(prompt=["?", "", "?"])}, "train_dataset: .* row 1: .*'prompt'"),
        (PPO, {"data": problems(turn=[0] * 8), "workflow": Pair()}, "train_dataset has a column 'turn'"),
        (PPO, {"data": problems(replies=["mine"] * 8), "num_turns": 2}, "train_dataset has a column 'replies'"),
        (PPO, {"data": problems(replies=["mine"] * 8), "reward": "collaboration_reward"}, "a column 'replies'"),
        (PPO, {"eval_dataset": problems().select([])}, "eval_dataset is empty"),
        (PPO, {"eval_dataset": {"hard": problems(prompt=None, question=["?"])}}, r"eval_dataset\['hard'\] .*'prompt'"),
        (PPO, {"reward": "execution_reward", "data": problems(**TESTED | {"entry_point": ["f"] * 7 + ["g"]})},
         "row 7: its tests never use entry_point='g'"),
        (PPO, {"reward": "execution_reward", "data": problems(**TESTED | {"entry_point": ["g"] * 8})},
         "no problem can be used, .*: its tests never use entry_point='g': set it to the function"),
        (PPO, {"workflow": "collaboration", "num_turns": 2}, "'test', which workflow Collaboration needs"),
        (PPO, {"workflow": "collaboration", "data": problems(**TESTED | {"entry_point": None, "test": TWO_NAMES}), "num_generations": 4},
         "'entry_point', which workflow Collaboration needs"),
        (PPO, {"workflow": "pipeline", "data": problems(**TESTED), "eval_dataset": problems(), "num_generations": 1},
         "eval_dataset .*'test', which workflow Pipeline needs"),
    ],
    "rewards": [
        (PPO, {"reward": None}, "reward_funcs is missing"),
        (PPO, {"reward": "execution_rewards"}, "Reward 'execution_rewards' is unknown"),
        (PPO, {"reward": "accuracy"}, "Reward 'accuracy' is unknown.*reward_funcs='accuracy'"),
        (PPO, {"reward": 5}, "reward_funcs has 5"),
        (PPO, {"reward": [dict]}, "reward_funcs has <class 'dict'>"),
        (PPO, {"reward": "execution_reward"}, "'test', which reward execution_reward needs"),
        (PPO, {"reward": "execution_reward", "data": problems(test=[["assert f(1)"]] * 7 + [[]], test_format=["asserts"] * 8)},
         "row 7: .*'test', which reward execution_reward needs"),
        (PPO, {"reward": [teams.letters, "collaboration_reward"], "data": problems(test=TWO_NAMES)},
         "'entry_point', which reward collaboration_reward needs"),
        (PPO, {"reward": "collaboration_reward", "data": problems(**TESTED | {"entry_point": None, "test": TWO_NAMES})},
         "'entry_point', which reward collaboration_reward needs"),
        (PPO, {"on_reward_error": "mask", "reward_timeout": 2.0}, r"reward_timeout=2\.0 .*async def"),
    ],
    "credit": [
        (PPO, {"loss_type": "dr_grpo", "workflow": Pair()}, "loss_type='dr_grpo' .*agent_loss_weighting='agent'"),
        (GRPO, {"workflow": Pair(num_turns=2), "turn_weights": [1.0]}, r"turn_weights=\[1\.0\] .* num_turns=2"),
        (GRPO, {**GDPO, "workflow": Pair(num_turns=2)}, "num_turns=2"),
        (GRPO, {**GDPO, "advantage": "rloo"}, "advantage='rloo'"),
        (GRPO, {"credit": "group", "fanout": [2, 2]}, r"fanout=\[2, 2\] needs credit='counterfactual'"),
        (GRPO, {**BRANCHES, "fanout": [2, 4]}, r"fanout=\[2, 4\] .* num_generations=8"),
        (GRPO, {**BRANCHES, "fanout": [4, 0]}, r"fanout=\[4, 0\]"),
        (GRPO, {**BRANCHES, "fanout": [2, 2, 1]}, r"fanout=\[2, 2, 1\] .* 2 stages: a, b.* fanout=\[2, 2\]"),
        (GRPO, {**BRANCHES, "max_joint_actions": 3}, "max_joint_actions=3 .* max_joint_actions=4"),
        (GRPO, {**BRANCHES, "joint_mode": "cross"}, "joint_mode='cross'"),
        (GRPO, {**BRANCHES, "turn_tree": True}, "turn_tree=True"),
        (GRPO, {**BRANCHES, "advantage": "max"}, "advantage='max'"),
        (GRPO, {**BRANCHES, "fanout": None, "num_generations": 1}, "num_generations=1"),
        (PPO, {**BRANCHES, "fanout": None, "num_generations": 1}, "num_generations=1"),
        (PPO, {**BRANCHES, "critic_mix": 1.5}, r"critic_mix=1\.5"),
        (PPO, {**BRANCHES, "critic_mix": "best"}, "critic_mix='best'"),
        (PPO, {**BRANCHES, "critic_mix": "auto", "critic": "none"}, "critic='none'"),
        (PPO, {"critic_mix": 0.5, "num_generations": 1}, r"critic_mix=0\.5 .* num_generations=1"),
        (GRPO, {"workflow": Pair("abcde"), "joint_mode": "cross"}, "joint_mode='cross' .* 4 agents.* 5"),
        (GRPO, {"workflow": Chain(), "joint_mode": "cross"}, "joint_mode='cross' .*Chain"),
        (GRPO, {"workflow": teams.Short(), "joint_mode": "cross", "turn_tree": True}, "joint_mode='cross' .*Short"),
        (GRPO, {"workflow": Pair("abc"), "joint_mode": "cross", "num_generations": 32}, "max_joint_actions=1024 .*=32768"),
        (GRPO, {"workflow": Pair(num_turns=3), "turn_tree": True, "num_generations": 4, "max_joint_actions": 83}, "=83 .*=84"),
        (GRPO, {"workflow": Pair(num_turns=2), "turn_tree": True, "generation_batch_size": 8}, r"=8 .* 12 rows \(.* 6 groups"),
    ],
    "agents": [
        (GRPO, {"workflow": Pair(), "trained_agents": ["c"]}, r"trained_agents=\['c'\] has 'c'"),
        (GRPO, {"workflow": Pair(), "trained_agents": "main"}, "trained_agents='main' has 'main'"),
        (GRPO, {"workflow": Pair(), "trained_agents": []}, r"trained_agents=\[\]"),
        (GRPO, {"workflow": outside("b"), "trained_agents": ["b"]}, r"trained_agents=\['b'\] .* endpoint.* \['a'\]"),
        (GRPO, {"workflow": outside("a", "b")}, r"\['a', 'b'\] speak through endpoints"),
        (GRPO, {"workflow": Pair(), "endpoints": {"c": {"model": "m"}}}, "endpoints has 'c'"),
        (GRPO, {"workflow": Pair(), "endpoints": {"b": URL}}, r"endpoints\['b'\]='http"),
        (GRPO, {"workflow": Pair(), "endpoints": {"b": {"model": "m", "url": "x"}}}, r"endpoints\['b'\] .*'url'"),
        (GRPO, {"workflow": Pair(), "endpoints": {"b": {"model": "m", "base_url": "x"}}}, "agent 'b' .*base_url='x"),
        (GRPO, {"workflow": Pair(), "endpoints": {"b": {"model": "m", "timeout": "x"}}}, "agent 'b' .*timeout='x'"),
        (GRPO, {"workflow": Pair(), "endpoints": {"b": {"model": "m", "api_key_env": "NONE_SUCH"}}}, "NONE_SUCH"),
    ],
    "curriculum": [
        (GRPO, in_stages({"steps": [3]}), r"curriculum=\{'steps': \[3\]\} needs a column"),
        (GRPO, in_stages({**STEPS, "rate": 1}), "curriculum=.*'rate': 1.* may have"),
        (GRPO, in_stages({"column": "difficulty"}), "curriculum=.*'difficulty'.*no such column"),
        (GRPO, in_stages({"column": "level"}), "needs either steps or a pass_rate"),
        (GRPO, in_stages({"column": "level", "steps": [3, 2]}), r"'steps': \[3, 2\].* 3 stages"),
        (GRPO, in_stages({"column": "level", "pass_rate": 1.5}), r"pass_rate=1\.5"),
        (GRPO, in_stages({"column": "level", "pass_rate": 0.5}, per_device_train_batch_size=4), r"'pass_rate': 0\.5.* runs tests"),
        (GRPO, in_stages({"column": "level", "stages": ["easy", "harder"], "steps": [3]}), "'harder'"),
        (GRPO, in_stages(STEPS, per_device_train_batch_size=16), "'easy' has 4 problems, .* needs 8"),
        (GRPO, in_stages(STEPS, dataloader_num_workers=1), "dataloader_num_workers=1"),
        (GRPO, in_stages(STEPS, restore_callback_states_from_checkpoint=True, per_device_train_batch_size=4),
         "restore_callback_states_from_checkpoint=True"),
    ],
    "adapters": [
        (PPO, {"peft_config": LoraConfig(task_type="CAUSAL_LM", inference_mode=True)}, "inference_mode=True"),
        (SHPPO, {"peft_config": teams.lora_config(use_dora=True)}, "use_dora=True"),
        (SHPPO, {"peft_config": IA3Config(task_type="CAUSAL_LM"), "parameter_sharing": "separate"}, "peft_type=IA3"),
        (PPO, {**ALL_WEIGHTS, "peft_config": ADAPTER}, "full_finetuning=True .*peft_config"),
        (PPO, {**ALL_WEIGHTS, "quantization_config": QUANTISED}, "full_finetuning=True .*quantised"),
        (PPO, {**ALL_WEIGHTS, "model_init_kwargs": {"quantization_config": QUANTISED.to_dict()}}, "full_finetuning=True"),
        (SHPPO, ALL_WEIGHTS, "full_finetuning=True .*SHPPO"),
    ],
    "others": [
        (PPO, {"report_to": "wandbb"}, "report_to=.*wandbb"),
        (PPO, {"workflow": Pair}, "workflow=<class .*Pair'>"),
        (PPO, {"workflow": 5}, "workflow=5"),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fanout")
@pytest.mark.parametrize(
    ("trainer_class", "options", "match"),
    [pytest.param(*case, id=f"{kind}-{i}") for kind, cases in REFUSED.items() for i, case in enumerate(cases)],
)
def test_is_refused(tmp_path, monkeypatch, trainer_class, options, match):
    monkeypatch.setenv("OPENAI_API_KEY", "" if match == "OPENAI_API_KEY" else "any")
    options = {"data": problems(), "peft_config": None, **options}
    with pytest.raises((ValueError, TypeError), match=match) as error:
        teams.make("nobody/no-such-model", tmp_path, trainer_class, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("trainer_class", "arguments", "match"),
    [
        (PPO, {"args": MultiAgentPPOConfig}, "args is the class MultiAgentPPOConfig"),
        (PPO, {"args": GRPOConfig("out", report_to="none", use_cpu=True, bf16=False)}, "args is a GRPOConfig"),
        (SHPPO, {"args": MultiAgentPPOConfig("out", report_to="none")}, "SHPPOTrainer needs a SHPPOConfig"),
        (PPO, {"rollout_func": print}, "rollout_func"),
    ],
)
def test_arguments_of_another_kind(tmp_path, trainer_class, arguments, match):
    given = {"args": MultiAgentPPOConfig(tmp_path, report_to="none", use_cpu=True), **arguments}
    with pytest.raises((ValueError, TypeError), match=match):
        trainer_class("nobody/no-such-model", teams.letters, train_dataset=problems(), **given)


# What only the model tells


def adapted(model, **options):
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model), teams.lora_config(), **options)


def test_adapters_that_cannot_be_trained(tiny_model, tmp_path):
    other = adapted(tiny_model, adapter_name="helper")
    with pytest.raises(ValueError, match=r"\['helper'\]"):
        teams.make(other, tmp_path, peft_config=None)
    other.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    frozen = PeftModel.from_pretrained(base, tmp_path / "adapter" / "helper")
    with pytest.raises(ValueError, match="is_trainable=True"):
        teams.make(frozen, tmp_path, peft_config=None)
    with pytest.raises(ValueError, match="parameter_sharing='separate'"):
        teams.make(adapted(tiny_model), tmp_path, SHPPO, peft_config=None, parameter_sharing="separate")
    with pytest.raises(ValueError, match="full_finetuning=True"):
        teams.make(adapted(tiny_model), tmp_path, **ALL_WEIGHTS)


def test_a_model_that_does_not_know_all_tokens(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model.resize_token_embeddings(tokenizer.vocab_size - 1)
    with pytest.raises(
        ValueError, match=f"the tokenizer has {tokenizer.vocab_size} tokens, .* {tokenizer.vocab_size - 1} "
    ):
        teams.make(model, tmp_path, processing_class=tokenizer)
    model.resize_token_embeddings(tokenizer.vocab_size)
    model.save_pretrained(tmp_path / "base")
    teams.make(str(tmp_path / "base"), tmp_path / "run", processing_class=tokenizer)


def of_configuration(model):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))


def resized(model):
    model = AutoModelForCausalLM.from_pretrained(model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return model


def changed_by_an_adapter(model, **options):
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model), teams.lora_config(**options)).merge_and_unload()


def made_in_memory(model):
    config = AutoConfig.from_pretrained(model)
    config.name_or_path = ""
    return AutoModelForCausalLM.from_config(config)


class TestWeightsThatAreInNoFolder:
    """A team on them could never be loaded again, and the folder that the model names would give another team."""

    @pytest.mark.parametrize(
        ("bring", "match"),
        [
            (of_configuration, "those in '.*tiny' are others"),
            (made_in_memory, "it was made in memory"),
            (resized, "'.*tiny' has a vocabulary of 320 tokens, and model one of 328"),
            (changed_by_an_adapter, "those in '.*tiny' are others"),
            (
                lambda model: changed_by_an_adapter(model, r=1, target_modules=["layers.1.self_attn.v_proj"]),
                "are others",
            ),
            (lambda model: get_peft_model(changed_by_an_adapter(model), teams.lora_config()), "are others"),
        ],
    )
    def test_are_refused(self, tiny_model, tmp_path, bring, match):
        model, tokenizer = bring(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
        peft_config = None if isinstance(model, PeftModel) else ADAPTER
        with pytest.raises(ValueError, match=rf"^model has weights that are in no folder.*{match}.*save_pretrained"):
            teams.make(
                model, tmp_path, GRPO, processing_class=tokenizer, peft_config=peft_config, save_strategy="epoch"
            )

    def test_train_in_memory_if_nothing_is_saved_meanwhile(self, tiny_model, tmp_path):
        model, tokenizer = made_in_memory(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
        model.save_pretrained(tmp_path / "base")
        model.config.name_or_path = ""
        with pytest.warns(UserWarning, match="model was made in memory"):
            trainer = teams.make(model, tmp_path / "team", GRPO, processing_class=tokenizer, save_strategy="no")
        trainer.save_model()
        with pytest.raises(ValueError, match=r"made in memory\. Set base_model to the folder"):
            Team.from_pretrained(tmp_path / "team")
        with pytest.raises(ValueError, match="base"):
            Team.from_pretrained(tmp_path / "team", base_model=tiny_model)
        Team.from_pretrained(tmp_path / "team", base_model=str(tmp_path / "base")).solve("def f(x):\n")

    def test_are_saved_with_the_team_if_all_are_trained(self, tiny_model, tmp_path):
        model, tokenizer = changed_by_an_adapter(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
        teams.make(model, tmp_path, GRPO, processing_class=tokenizer, **ALL_WEIGHTS)
        with pytest.raises(ValueError, match="from which its team or its reference could be loaded"):
            teams.make(model, tmp_path, GRPO, processing_class=tokenizer, beta=0.1, **ALL_WEIGHTS)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_are_not_those_of_another_type(self, tiny_model, tmp_path, dtype):
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype),
            AutoTokenizer.from_pretrained(tiny_model),
        )
        teams.make(model, tmp_path, GRPO, processing_class=tokenizer)


class TestOptimizers:
    """An optimizer of the user's, which was made before the trainer."""

    def test_of_the_model_before_its_adapter(self, tiny_model, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        optimizers = torch.optim.AdamW(model.parameters(), lr=1e-2), None
        processing_class = AutoTokenizer.from_pretrained(tiny_model)
        with pytest.raises(ValueError, match=r"optimizers .* no trainable parameter"):
            teams.make(model, tmp_path, GRPO, optimizers=optimizers, processing_class=processing_class)

    @pytest.mark.parametrize(
        ("trainer_class", "options", "missing"),
        [
            (GRPO, {}, None),
            (PPO, {"critic": "none"}, None),
            (PPO, {}, "value_head"),
            (SHPPO, {}, "core_decoder, inference_net, latent_net, value_head"),
        ],
    )
    def test_that_lacks_the_team_s_modules(self, tiny_model, tmp_path, trainer_class, options, missing):
        model = adapted(tiny_model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        options |= {"optimizers": (torch.optim.SGD(trainable, lr=0.5), None), "workflow": Pair()}
        options |= {"peft_config": None, "processing_class": AutoTokenizer.from_pretrained(tiny_model)}
        if missing is not None:
            with pytest.raises(ValueError, match=f"optimizer lacks the team's {missing}"):
                teams.make(model, tmp_path, trainer_class, **options)
            return
        trainer = teams.make(model, tmp_path, trainer_class, **options)
        before = teams.trainable(trainer)
        trainer.train()
        assert not any(torch.equal(tensor, before[name]) for name, tensor in teams.trainable(trainer).items())


def test_a_saved_team_is_no_model(tmp_path):
    (tmp_path / "team.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a saved team.*resume_from_checkpoint"):
        teams.make(str(tmp_path), tmp_path / "run", GRPO)


def test_a_workflow_that_contradicts_the_configuration(tmp_path):
    with pytest.raises(ValueError, match="workflow='pipeline' contradicts workflow='discussion'"):
        GRPO(
            "nowhere/model", teams.letters, teams.CONFIGS[GRPO](str(tmp_path), workflow="discussion", **teams.QUIET),
            problems(), workflow="pipeline",
        )  # fmt: skip


def test_an_output_folder_without_a_name():
    with pytest.raises(ValueError, match="output_dir='' has no name of its own"):
        teams.CONFIGS[GRPO]("", **teams.QUIET)


def test_the_model_may_be_a_path(tiny_model, tmp_path):
    assert teams.make(Path(tiny_model), tmp_path, GRPO).team.description.base_model == tiny_model
