"""The recipes' command line."""

from pathlib import Path

import pytest

from marcog_trl import MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig
from marcog_trl.trainers import launch
from marcog_trl.trainers.launch import TeamArguments, parse, set_max_steps


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
    def test_without_a_model_the_embedded_default_applies(self, default, monkeypatch):
        monkeypatch.setattr(launch, "build_default_model", lambda: "built")
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
        argv = "--base_model qwen --lora_rank 4 --learning_rate 1e-3 --num_steps 1e6 --num_agents 3 --save_dir out"
        argv += " --override trainer.num_turns=2 model.lora_rank=6 --report_to none"
        script, args, model = parse(MultiAgentPPOConfig, default, argv.split())
        assert model.model_name_or_path == "Qwen/Qwen2.5-Coder-0.5B-Instruct" and model.lora_r == 6
        assert (args.output_dir, args.num_agents, args.num_turns) == ("out", 3, 2)
        assert args.learning_rate == 1e-3 and script.num_steps == 1e6

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--lerning_rate", "1"], "unknown flag --lerning_rate; --learning_rate works"),
            (["--override", "ppo.gama=1"], "unknown flag --gama; --gamma works"),
            (["--override", "gamma"], "--override gamma has no '='"),
            (["--max_steps", "3", "4"], "the command line has '4', which belongs to no flag"),
            (["--model_name_or_path", "m", "--dataset_columns", "prompt"], "dataset_columns='prompt' has no '='"),
        ],
    )
    def test_mistakes_are_named(self, default, argv, message):
        with pytest.raises(ValueError, match=message):
            parse(MultiAgentPPOConfig, default, argv)

    @pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig])
    def test_the_files_of_the_recipes_serve_every_trainer(self, config_class, monkeypatch):
        monkeypatch.setattr(launch, "build_default_model", lambda: "built")
        files = sorted((Path(__file__).parents[2] / "recipes" / "configs").glob("*.yaml"))
        assert len(files) >= 5
        for file in files:
            _, args, _ = parse(config_class, file, ["--config", str(file), "--bf16", "false", "--report_to", "none"])
            assert args.workflow == "collaboration" and args.logging_steps in (1, 5)

    def test_unknown_keys_of_a_file_are_named(self, default, tmp_path):
        file = tmp_path / "own.yaml"
        file.write_text("model_name_or_path: m\nlearning_rat: 1\n")
        with pytest.raises(
            ValueError, match="the file of --config has an unknown key 'learning_rat'; learning_rate works"
        ):
            parse(MultiAgentPPOConfig, default, ["--config", str(file)])


class TestSplits:
    def test_training_problems_are_not_held_out(self):
        arguments = TeamArguments("builtin", dataset_train_split="train[:20]", dataset_test_split="train[18:30]")
        with pytest.raises(
            ValueError, match=r"share 2 problems, such as 'builtin/train/.* --allow_overlap true, work"
        ):
            arguments.load_splits()
        arguments.allow_overlap = True
        assert [len(split) for split in arguments.load_splits()] == [20, 12]
        arguments = TeamArguments("builtin", dataset_train_split="train[:20]", dataset_test_split="test[:5]")
        assert [len(split) for split in arguments.load_splits()] == [20, 5]


class TestSteps:
    def test_a_step_is_one_reply(self, tmp_path):
        options = {"report_to": "none", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        args = MultiAgentPPOConfig(str(tmp_path), num_iterations=2, **options)
        set_max_steps(args, 1e3)
        assert args.max_steps == 125  # 16 replies a step, each used twice
        set_max_steps(args, None)
        assert args.max_steps == 125
        with pytest.raises(ValueError, match=r"num_steps=0\.5 trains on no reply; 1e4 works"):
            set_max_steps(args, 0.5)
