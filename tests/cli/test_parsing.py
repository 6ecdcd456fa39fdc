"""The recipes' command line."""

import importlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from marcog_trl import MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig
from marcog_trl.cli import parsing
from marcog_trl.cli.parsing import parse_override
from marcog_trl.cli.recipe import TrainingRecipe


RECIPES = Path(__file__).parents[2] / "recipes"
ANY = TrainingRecipe("MultiAgentPPOTrainer", "no default")


def parse(config_class, default, argv, recipe=ANY):
    """What the command line of a recipe sets, with another trainer and default."""
    trainer = config_class.__name__.removesuffix("Config") + "Trainer"
    return parsing.read_training_arguments(replace(recipe, trainer=trainer, default_config=default), argv)


DEFAULT = """
model_name_or_path: builtin
output_dir: from-the-file
workflow: pipeline
max_steps: 7
"""


@pytest.fixture
def default(tmp_path):
    file = tmp_path / "default.yaml"
    file.write_text(DEFAULT)
    return file


class TestParse:
    @pytest.mark.parametrize("how", ["flags", "file", "override"])
    def test_who_is_trained_and_who_speaks_through_an_endpoint(self, default, monkeypatch, how):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        there = '{"planner": {"model": "big", "base_url": "http://localhost:8000/v1", "timeout": 9}}'
        argv = {
            "flags": ["--trained_agents", "coder", "debugger", "--endpoints", there],
            "file": [],
            "override": ["--override", "trained_agents=[coder, debugger]", f"endpoints={there}"],
        }[how]
        if how == "file":
            default.write_text(f"{DEFAULT}trained_agents: [coder, debugger]\nendpoints: {there}\n")
        _, args, _ = parse(MultiAgentPPOConfig, default, [*argv, "--bf16", "false"])
        assert args.trained_agents == ["coder", "debugger"]
        workflow = args.make_workflow()
        assert [agent.endpoint is not None for agent in workflow.agents] == [True, False, False]
        assert workflow.agents[0].endpoint.timeout == 9
        with pytest.raises(ValueError, match="endpoints has 'nobody', which is not one of the team's agents"):
            parse(MultiAgentPPOConfig, default, ["--endpoints", there.replace("planner", "nobody")])

    def test_without_a_model_the_embedded_default_applies(self, default, monkeypatch):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        script, args, model = parse(SHPPOConfig, default, ["--num_turns", "2", "--report_to", "none"])
        assert model.model_name_or_path == "built" and model.use_peft
        assert (args.output_dir, args.workflow, args.max_steps, args.num_turns) == ("from-the-file", "pipeline", 7, 2)
        assert isinstance(args, SHPPOConfig) and script.reward == ["execution_reward"]

    def test_every_field_is_a_flag_and_a_file_gives_defaults(self, default, tmp_path):
        file = tmp_path / "own.yaml"
        file.write_text("gamma: 0.5\nlora_r: 3\nlearning_rate: 1.0e-4\ndataset_name: humaneval\nreport_to: none\n")
        argv = ["--config", str(file), "--model_name_or_path", "m", "--gamma=0.25", "--bf16", "false"]
        script, args, model = parse(MultiAgentPPOConfig, default, argv)
        assert (args.gamma, args.learning_rate, args.bf16, model.lora_r) == (0.25, 1e-4, False, 3)
        assert script.dataset_name == "humaneval" and args.workflow == "single"

    def test_flags_of_other_scripts_are_synonyms(self, default):
        argv = "--base_model m --lora_rank 4 --learning_rate 1e-3 --num_steps 1e6 --num_agents 3 --save_dir out --workflow pipeline"
        argv += " --override trainer.num_turns=2 model.lora_rank=6 --report_to none"
        script, args, model = parse(MultiAgentPPOConfig, default, argv.split())
        assert model.model_name_or_path == "m" and model.lora_r == 6
        assert (args.output_dir, args.num_agents, args.num_turns) == ("out", 3, 2)
        assert args.learning_rate == 1e-3 and script.num_steps == 1e6

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--lerning_rate", "1"], "unknown flag --lerning_rate. Did you mean --learning_rate"),
            (["--max_new_tokens", "1"], "unknown flag --max_new_tokens. Did you mean --max_completion_length"),
            (["--num_sample", "1"], "unknown flag --num_sample. Did you mean --num_samples"),
            (["--temp", "1"], "unknown flag --temp"),
            (
                ["--advantage", "max"],
                "--advantage is a flag of train_magrpo.py and train_marlhf.py, not of this recipe. Remove it.",
            ),
            (
                ["--latent_size", "4"],
                "--latent_size is a flag of train_shppo.py and train_madpo.py, not of this recipe. Remove it.",
            ),
            (["--override", "ppo.gama=1"], "--override has an unknown key 'ppo.gama'. Did you mean ppo.gamma"),
            (["--num_samples", "-1"], "num_samples=-1 must be at least 0. Set num_samples=4."),
            (["--eval_problems", "0"], "eval_problems=0 must be at least 1."),
            (["--num_steps", "nan"], "num_steps=nan must be a finite number."),
            (["--num_steps", "inf"], "num_steps=inf must be a finite number."),
            (["--lora_r", "0"], "lora_r=0 must be at least 1. Set lora_r=16."),
            (["--lora_alpha", "0"], "lora_alpha=0 must be at least 1. Set lora_alpha=32."),
            (["--lora_dropout", "1"], "lora_dropout=1.0 must be at least 0 and less than 1. Set lora_dropout=0.0."),
            (["--learning_rate", "-1"], "learning_rate=-1.0 must be at least 0"),
            (["--override", "gamma"], "--override gamma has no '='"),
            (["--override", "num_turns=two"], "argument --num_turns.*: invalid int value: 'two'"),
            (["--override", "num_turns=null"], "num_turns=None has the wrong type. Set num_turns=1"),
            (["--override", "ppo=3"], "ppo=3: 'ppo' is a section, and needs keys"),
            (["--override", "ppo.train_batch_size=0"], "train_batch_size=0 .* must be a whole number, at least 1"),
            (["--max_steps", "3", "4"], r"max_steps=\['3', '4'\] has the wrong type. Set max_steps=-1"),
            (["--max_steps"], "argument --max_steps.*: expected one argument"),
            (["3", "--max_steps", "4"], "'3' belongs to no flag. Write --flag value."),
            (["--config"], r"--config takes one file, not \[\]"),
            (["--config", "nowhere.yaml"], "the file nowhere.yaml of --config cannot be read: .*No such file"),
            (["--num_epochs", "0"], "num_train_epochs=0.0 trains nothing. Set num_train_epochs=1."),
            (["--model_name_or_path", "m", "--dataset_columns", "prompt"], "dataset_columns='prompt' has no '='"),
            (["--dataset_config", "full"], "dataset_config='full' is not supported. .* --dataset_name problems.jsonl"),
            (["--dataset_streaming", "true"], "dataset_streaming=True is not supported. .*'train.:1000.'."),
            (
                ["--ignore_bias_buffers"],
                "ignore_bias_buffers=True is not supported. .* Set --ignore_bias_buffers false.",
            ),
            (
                ["--no_use_peft"],
                "use_peft=False would train no adapter. Set --use_peft true, or --full_finetuning true to train all weights.",
            ),
            (["--load_in_4bit", "--load_in_8bit"], "8 bit and 4 bit precision at the same time"),
            (
                ["--load_in_4bit", "--dtype", "auto"],
                "load_in_4bit=True needs an explicit compute dtype. Set --dtype bfloat16.",
            ),
        ],
    )
    def test_mistakes_are_named(self, default, argv, message):
        with pytest.raises(ValueError, match=message):
            parse(MultiAgentPPOConfig, default, argv)

    def test_flags_of_the_model_say_how_it_is_loaded(self, default):
        def loading(*argv):
            return parse(MultiAgentPPOConfig, default, ["--model_name_or_path", "m", *argv])[1].model_init_kwargs

        assert loading() == {"dtype": "float32", "revision": "main"}
        argv = ["--dtype", "auto", "--model_revision", "abc123", "--attn_implementation", "sdpa"]
        given = {"dtype": "auto", "revision": "abc123", "attn_implementation": "sdpa"}
        assert loading(*argv) == given
        more = ["--model_init_kwargs", '{"low_cpu_mem_usage": true, "revision": "def456"}']
        assert loading(*argv, *more) == {**given, "low_cpu_mem_usage": True, "revision": "def456"}
        assert loading("--trust_remote_code", "true")["trust_remote_code"] is True

    @pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig])
    def test_the_files_of_the_recipes_serve_every_trainer(self, config_class, monkeypatch):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        files = sorted(file for file in (RECIPES / "configs").glob("*.yaml") if not file.stem.startswith("builtin-"))
        assert {"builtin", "humaneval", "coophumaneval", "mbpp"} <= {file.stem for file in files}
        for file in files:
            _, args, _ = parse(config_class, file, ["--config", str(file), "--bf16", "false", "--report_to", "none"])
            assert args.workflow == "collaboration" and args.logging_steps in (1, 5)

    @pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig])
    def test_fixing_bugs_has_an_embedded_model_of_its_own(self, config_class, monkeypatch):
        monkeypatch.setattr(parsing, "build_bugs_model", lambda: "built for bugs")
        file = str(RECIPES / "configs" / "builtin-bugs.yaml")
        script, args, model = parse(config_class, file, ["--config", file])
        assert model.model_name_or_path == "built for bugs" and args.workflow == "bugfix"
        assert (script.dataset_name, script.reward) == ("builtin_bugs", ["bugfix_reward"])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "learning_rat: 1",
                "the file .*own.yaml of --config has an unknown key 'learning_rat'. Did you mean learning_rate",
            ),
            ("ppo: {gama: 1}", "has an unknown key 'ppo.gama'. Did you mean ppo.gamma"),
            ("ppo: 1", "ppo=1: 'ppo' is a section, and needs keys"),
            (
                "tokenizer: {padding_side: left}",
                "has the section 'tokenizer'. The tokenizer is loaded as it was saved",
            ),
            ("algorithms: {gamma: 1}", "has an unknown key 'algorithms'"),
            ("[1, 2", "own.yaml of --config cannot be read: while parsing"),
            ("- 1", "own.yaml of --config must hold keys and values"),
            ("env: x", "own.yaml of --config has env='x'"),
        ],
    )
    def test_mistakes_of_a_file_are_named(self, default, tmp_path, text, message):
        file = tmp_path / "own.yaml"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            parse(MultiAgentPPOConfig, default, ["--config", str(file)])


THEIRS = """
agent_model: {name: Qwen/Qwen2.5-Coder-3B, type: qwen, temperature: 0.6, top_p: 0.6, top_k: null, torch_dtype: bfloat16}
agents: null
critic_model: null
dataset: {name: openai/openai_humaneval, type: humaneval, train_split: "test[33:163]", eval_split: "test[:32]"}
seed: 7
output: {base_dir: out, verbose: false, save_final_model: false}
external: {mode: level_passed, sandbox_slice: 0}
magrpo:
  parallel_training: none
  num_agents: 2
  num_turns: 2
  num_train_epochs: 8
  agent_learning_rate: 2.0e-05
  num_generations: 4
  max_new_tokens: 128
  discount: 0.9
  joint_mode: aligned
  early_termination_threshold: -0.2
  rollout_buffer_size: 4
  train_batch_size: 4
  eval_interval: 4
  eval_num_samples: 3
iac:
  num_turns: 3
  critic_learning_rate: 5.0e-6
  train_batch_size: 6
reward_processor: {enabled: true, scale_factor: 0.5, shift: -4}
wandb: {project: ours, name: run-1, dir: null}
"""
MAGRPO = replace(ANY, sections=("magrpo", "marloo"), defaults={"workflow": "collaboration"})


class TestSections:
    @pytest.fixture
    def theirs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "environ", os.environ.copy())
        file = tmp_path / "theirs.yaml"
        file.write_text(THEIRS)
        return ["--config", str(file), "--bf16", "false"]

    def test_a_file_of_comlrl_trains_what_it_says(self, default, theirs):
        script, args, model = parse(MultiAgentGRPOConfig, default, theirs, MAGRPO)
        assert model.model_name_or_path == "Qwen/Qwen2.5-Coder-3B"
        assert args.model_init_kwargs == {"dtype": "bfloat16", "revision": "main"}
        assert (script.dataset_name, script.dataset_train_split) == ("humaneval", "test[33:163]")
        assert (script.dataset_test_split, script.reward) == ("test[:32]", ["collaboration_reward"])
        assert (script.eval_problems, script.save_final_model, args.output_dir) == (3, False, "out")
        assert (args.workflow, args.num_agents, args.num_turns, args.seed) == ("collaboration", 2, 2, 7)
        assert (args.temperature, args.top_p, args.top_k, args.max_completion_length) == (0.6, 0.6, 0, 128)
        assert (args.feedback, args.visible_tests, args.learning_rate) == ("level_passed", None, 2e-5)
        assert (args.gamma_turn, args.joint_mode, args.turn_tree) == (0.9, "align", True)
        assert (args.reward_scale, args.reward_shift, args.early_termination_threshold) == (0.5, -4.0, -0.2)
        # A step of 4 groups of 4 replies of 2 agents, in micro-batches of the default size
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 4)
        assert (args.eval_strategy, args.eval_steps, args.report_to, args.run_name) == ("steps", 4, ["wandb"], "run-1")
        assert os.environ["WANDB_PROJECT"] == "ours"

    def test_what_only_labels_a_run_is_listed_in_one_line(self, default, theirs, capsys):
        parse(MultiAgentGRPOConfig, default, [*theirs, "--override", "agent_model.max_length=2048"], MAGRPO)
        line = "Labels of CoMLRL, which have no effect here: agent_model.type, agent_model.max_length"
        assert capsys.readouterr().err.strip() == line

    def test_other_algorithms_are_left_aside_in_a_file(self, default, theirs):
        _, args, _ = parse(MultiAgentPPOConfig, default, theirs, replace(ANY, sections=("iac",)))
        assert (args.num_turns, args.critic_learning_rate, args.gamma_turn) == (3, 5e-6, 1.0)
        # Without groups, a sample is one reply; 6 of them of one agent are no more than a micro-batch
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (6, 1)
        message = "has the section 'iac' of train_iac.py, and none of this recipe, such as 'maac'. Run that recipe"
        with pytest.raises(ValueError, match=message):
            parse(MultiAgentPPOConfig, default, theirs, replace(ANY, sections=("maac",)))

    def test_overrides_win_over_the_file_and_the_later_over_the_earlier(self, default, theirs):
        overrides = "magrpo.num_turns=1 agent_model.name='bigcode/starcoder2-3b' dataset.train_split=train[:1000]"
        overrides += " magrpo.turn_gradient_weights=[1.5,0.5] reward_processor.enabled=false wandb=null"
        argv = [*theirs, "--num_turns", "3", "--override", *overrides.split(), "magrpo.gradient_accumulation_steps=2"]
        script, args, model = parse(MultiAgentGRPOConfig, default, argv, MAGRPO)
        assert model.model_name_or_path == "bigcode/starcoder2-3b" and script.dataset_train_split == "train[:1000]"
        assert (args.num_turns, args.turn_weights) == (1, [1.5, 0.5])
        assert (args.reward_scale, args.reward_shift, args.report_to) == (1.0, 0.0, [])
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 2)
        argv = [*theirs, "--override", "num_turns=2", "magrpo.num_turns=3", "--num_turns", "4"]
        assert parse(MultiAgentGRPOConfig, default, argv, MAGRPO)[1].num_turns == 4

    def test_an_override_takes_a_value_of_the_file_away(self, default, theirs):
        argv = [*theirs, "--override", "magrpo.early_termination_threshold=null"]
        assert parse(MultiAgentGRPOConfig, default, argv, MAGRPO)[1].early_termination_threshold is None

    def test_the_section_may_name_the_algorithm(self, default, theirs):
        for section, advantage in (("magrpo", "mean"), ("marloo", "rloo")):
            argv = [*theirs, "--override", f"{section}.num_turns=1"]
            assert parse(MultiAgentGRPOConfig, default, argv, MAGRPO)[1].advantage == advantage
        argv = [*theirs, "--advantage", "max", "--override", "marloo.num_turns=1"]
        assert parse(MultiAgentGRPOConfig, default, argv, MAGRPO)[1].advantage == "max"

    def test_legacy_flags(self, default, theirs):
        legacy = "--model_name m --num_epochs 3 --num_turns 2 --turn_gradient_weights 1.2 0.8 --output_base_dir o"
        _, args, model = parse(MultiAgentGRPOConfig, default, [*theirs, *legacy.split()], MAGRPO)
        assert (model.model_name_or_path, args.num_train_epochs, args.turn_weights) == ("m", 3, [1.2, 0.8])
        assert (args.num_turns, args.output_dir) == (2, "o")
        argv = [*theirs, "--override", "model_name=m2"]
        assert parse(MultiAgentGRPOConfig, default, argv, MAGRPO)[2].model_name_or_path == "m2"

    @pytest.mark.parametrize(
        ("argv", "max_steps", "epochs"),
        [
            ([], 7, 3.0),
            (["--num_epochs", "2"], -1, 2.0),
            (["--override", "magrpo.num_train_epochs=2"], -1, 2.0),
            (["--num_epochs", "2", "--max_steps", "5"], 5, 2.0),
        ],
    )
    def test_epochs_win_over_the_steps_of_a_file(self, default, monkeypatch, argv, max_steps, epochs):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        _, args, _ = parse(MultiAgentGRPOConfig, default, [*argv, "--report_to", "none"], MAGRPO)
        assert (args.max_steps, args.num_train_epochs) == (max_steps, epochs)

    def test_overrides_alone_take_the_embedded_default(self, default, monkeypatch):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        _, args, model = parse(MultiAgentGRPOConfig, default, ["--override", "magrpo.num_turns=2"], MAGRPO)
        assert (model.model_name_or_path, args.workflow, args.num_turns) == ("built", "pipeline", 2)
        argv = ["--override", "magrpo.num_turns=2", "agent_model.name=m"]
        _, args, model = parse(MultiAgentGRPOConfig, default, argv, MAGRPO)
        assert (model.model_name_or_path, args.workflow, args.num_turns) == ("m", "collaboration", 2)


class TestRecipe:
    FIXED = replace(
        ANY,
        sections=("grpo",),
        defaults={"scale_rewards": "group"},
        fixed={"workflow": "single", "advantage": "mean"},
        elsewhere="train_magrpo.py",
    )

    @pytest.mark.parametrize(
        ("workflow", "agent", "kept"), [("pipeline", "planner", None), ("single", "solver", {"solver": "Write."})]
    )
    def test_role_texts_of_a_file_are_those_of_its_workflow(self, tmp_path, workflow, agent, kept):
        file = tmp_path / "team.yaml"
        file.write_text(f"workflow: {workflow}\nroles: {{{agent}: Write.}}\nmodel_name_or_path: m\nreport_to: none\n")
        _, args, _ = parse(MultiAgentGRPOConfig, file, ["--config", str(file)], self.FIXED)
        assert (args.workflow, args.roles) == ("single", kept)

    @pytest.mark.parametrize(
        ("argv", "roles"), [([], {"solver": ""}), (["--roles", '{"solver": "Write."}'], {"solver": "Write."})]
    )
    def test_the_embedded_model_alone_continues_plain_text(self, default, monkeypatch, argv, roles):
        monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
        _, args, _ = parse(MultiAgentGRPOConfig, default, [*argv, "--bf16", "false"], self.FIXED)
        assert args.roles == roles
        argv = [*argv, "--bf16", "false", "--model_name_or_path", "other"]
        _, args, _ = parse(MultiAgentGRPOConfig, default, argv, self.FIXED)
        assert args.roles == (roles if roles["solver"] else None)

    def test_what_makes_the_recipe_wins_over_a_file(self, tmp_path):
        file = tmp_path / "team.yaml"
        file.write_text("workflow: pipeline\nnum_agents: 3\nadvantage: max\nmodel_name_or_path: m\nreport_to: none\n")
        _, args, _ = parse(MultiAgentGRPOConfig, file, ["--config", str(file)], self.FIXED)
        assert (args.workflow, args.num_agents, args.advantage, args.scale_rewards) == (
            "single",
            None,
            "mean",
            "group",
        )
        argv = ["--config", str(file), "--override", "grpo.advantage_normalization=false", "grpo.num_agents=1"]
        _, args, _ = parse(MultiAgentGRPOConfig, file, argv, self.FIXED)
        assert (args.scale_rewards, args.num_agents) == ("none", None)

    @pytest.mark.parametrize("argv", [["--workflow", "pipeline"], ["--override", "grpo.workflow=pipeline"]])
    def test_what_makes_the_recipe_is_not_overridden(self, default, argv):
        with pytest.raises(
            ValueError,
            match=r"workflow=pipeline does not fit this recipe, which has workflow=single\. Use train_magrpo\.py",
        ):
            parse(MultiAgentGRPOConfig, default, argv, self.FIXED)

    @pytest.mark.parametrize(
        ("recipe", "override", "message"),
        [
            ("magrpo", "magrpo.num_turn=1", "Did you mean magrpo.num_turns?"),
            ("grpo", "grpo.num_turns=0", "num_turns=0 must be at least 1. Set num_turns=1."),
            ("iac", "iac.gamma=0.9", "Use train_ppo.py."),
        ],
    )
    def test_a_mistake_ends_in_one_line(self, recipe, override, message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(RECIPES)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"train_{recipe}").RECIPE.run(["--override", override, "agent_model.name=m"])
        assert re.fullmatch(r"error: [^\n]*", ended.value.code) and message in ended.value.code
        assert not list(tmp_path.iterdir())


class TestParseOverride:
    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("a.b=1", 1),
            ("a.b=2.0e-05", 2e-5),
            ("a.b=1e-5", "1e-5"),  # text to YAML; the parser of flags makes it a number
            ("a.b=True", True),
            ("a.b=false", False),
            ("a.b=no", "no"),
            ("a.b=None", None),
            ("a.b=null", None),
            ("a.b=none", "none"),
            ("a.b=[1.5,0.5]", [1.5, 0.5]),
            ("a.b=[x, 'y z']", ["x", "y z"]),
            ("a.b={k: 1}", {"k": 1}),
            ("a.b='bigcode/starcoder2-3b'", "bigcode/starcoder2-3b"),
            ("a.b=train[:1000]", "train[:1000]"),
            ("a.b=test[33:163]", "test[33:163]"),
            ("a.b=x=y", "x=y"),
            ("a.b=note: this", "note: this"),
            ("a.b=2026-01-02", "2026-01-02"),
            ("a.b=@home", "@home"),
        ],
    )
    def test_values(self, argument, value):
        name, read = parse_override(argument)
        assert name == "a.b" and read == value and type(read) is type(value)

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("magrpo.num_turns", r"--override magrpo\.num_turns has no '='\. Write --override num_turns=2"),
            ("a.b=[1.5,", r"--override a\.b=\[1\.5, is not a valid YAML list\. Write a\.b=\[1\.5,0\.5\]"),
        ],
    )
    def test_mistakes(self, argument, message):
        with pytest.raises(ValueError, match=message):
            parse_override(argument)
