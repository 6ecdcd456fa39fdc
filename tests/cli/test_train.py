"""What `train` of the recipes does before training."""

from dataclasses import replace

import pytest

from marcog_trl import MultiAgentPPOConfig, MultiAgentPPOTrainer, load_problems
from marcog_trl.cli import rounds
from marcog_trl.cli import train as training
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.train import set_max_steps
from marcog_trl.endpoints import EndpointError
from marcog_trl.execution import isolation
from marcog_trl.preferences import PreferenceRounds
from marcog_trl.rollout.player import WorkflowError


class TestTrain:
    @pytest.fixture
    def train(self, tmp_path):
        """`train(trainer class, *flags)`: a recipe of MultiAgentPPO with this trainer."""
        default = tmp_path / "default.yaml"
        default.write_text("model_name_or_path: builtin\nworkflow: pipeline\n")
        recipe = replace(RECIPES["ppo"], default_config=str(default))
        flags = ["--dataset_train_split", "train[:2]", "--dataset_test_split", "test[:2]", "--report_to", "none"]
        flags += ["--output_dir", str(tmp_path / "out")]
        return lambda trainer_class, *argv: training.train(recipe, [*flags, *argv], trainer_class=trainer_class)

    def test_confinement_that_is_not_possible_is_one_line(self, train, tiny_model, monkeypatch):
        monkeypatch.setattr(isolation, "probe", lambda: (0, True))
        with pytest.raises(SystemExit, match=r"isolation='strict' is not possible here: .*--isolation best_effort"):
            train(MultiAgentPPOTrainer, "--model_name_or_path", tiny_model)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_a_base_in_few_bits(self, train, tiny_model, bits):
        Stop = type("Stop", (BaseException,), {})

        class Trainer(MultiAgentPPOTrainer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                raise Stop(self)

        pytest.importorskip("bitsandbytes")
        flags = ["--model_name_or_path", tiny_model, "--workflow", "collaboration", "--isolation", "best_effort"]
        with pytest.raises(Stop) as stopped:
            train(Trainer, *flags, f"--load_in_{bits}bit", "--attn_implementation", "eager")
        config = stopped.value.args[0].model.get_base_model().config
        assert getattr(config.quantization_config, f"load_in_{bits}bit") and config._attn_implementation == "eager"

    def test_what_is_not_installed_is_one_line(self, train, tiny_model):
        class Needy(MultiAgentPPOTrainer):
            def __init__(self, *args, **kwargs):
                raise ImportError("flash_attn is not installed;\npip install flash_attn")

        flags = ["--model_name_or_path", tiny_model, "--workflow", "collaboration"]
        with pytest.raises(SystemExit, match=r"^error: flash_attn is not installed; pip install flash_attn$"):
            train(Needy, *flags)

    def test_what_is_not_there_is_one_line(self, train, monkeypatch):
        with pytest.raises(SystemExit, match=r"^error: model_name_or_path='/nowhere' cannot be loaded"):
            train(MultiAgentPPOTrainer, "--model_name_or_path", "/nowhere")
        monkeypatch.setenv("MARCOG_TRL_CACHE", "/proc/nowhere")
        with pytest.raises(SystemExit, match=r"'/proc/nowhere'\. Set MARCOG_TRL_CACHE to another folder") as ended:
            train(MultiAgentPPOTrainer)
        assert str(ended.value).startswith("error: There is no folder for embedded models")

    @pytest.mark.parametrize("error", [EndpointError, ImportError, WorkflowError])
    def test_what_fails_in_rounds_is_one_line(self, tiny_model, tmp_path, monkeypatch, error):
        def fail(rounds):
            raise error("It is\nbroken")

        monkeypatch.setattr(PreferenceRounds, "run", fail)
        flags = ["--dataset_train_split", "train[:2]", "--dataset_test_split", "test[:2]", "--report_to", "none"]
        flags += ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", tiny_model]
        with pytest.raises(SystemExit, match=r"^error: It is broken$"):
            rounds.train(RECIPES["madpo"], flags)


class TestSteps:
    def test_a_step_is_one_reply(self, tmp_path):
        options = {"report_to": "none", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        args = MultiAgentPPOConfig(str(tmp_path), num_iterations=2, **options)
        set_max_steps(args, 1e3)
        assert args.max_steps == 125  # 16 replies a step, each used twice
        set_max_steps(args, None)
        assert args.max_steps == 125


class TestSplits:
    def test_overlap_may_be_allowed(self):
        splits = {"dataset_train_split": "train[:20]", "dataset_test_split": "train[18:30]"}
        with pytest.raises(ValueError, match="share 2 problems"):
            TeamArguments("builtin", **splits).load_splits()
        assert [len(split) for split in TeamArguments("builtin", **splits, allow_overlap=True).load_splits()] == [
            20,
            12,
        ]

    @pytest.mark.parametrize(("number", "taken"), [(None, 5), (2, 2), (9, 5)])
    def test_evaluations_before_and_after_training_play_as_many_problems(self, number, taken):
        script = TeamArguments("builtin", dataset_test_split="test[:5]", num_eval_problems=number)
        _, test = script.load_splits()
        assert test["task_id"] == load_problems("builtin", "test[:5]")["task_id"][:taken]
        assert len(script.eval_split(test)) == taken

    @pytest.mark.parametrize(("number", "taken"), [(2, 2), (9, 5)])
    def test_evaluations_during_training_may_take_fewer_problems(self, number, taken):
        test = load_problems("builtin", "test[:5]")
        assert TeamArguments(num_eval_problems=number).eval_split(test)["task_id"] == test["task_id"][:taken]


def test_the_home_folder_in_files_and_flags(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "set.jsonl").write_text('{"prompt": "Write f.", "test": ["assert f() == 1"]}\n')
    (tmp_path / "file.yaml").write_text(
        f"model_name_or_path: {tiny_model}\ndataset_name: ~/set.jsonl\noutput_dir: ~/run\nreward: ['~/my_reward.py:shortest']\n"
    )
    script, args, _ = read_training_arguments(RECIPES["magrpo"], ["--config", "~/file.yaml"])
    assert script.dataset_name == str(tmp_path / "set.jsonl") and args.output_dir == str(tmp_path / "run")
    assert script.reward == [str(tmp_path / "my_reward.py:shortest")]
    for flags in (["--dataset_name=~/set.jsonl"], ["--override", "dataset_name=~/set.jsonl"]):
        script, _, _ = read_training_arguments(RECIPES["magrpo"], ["--model_name_or_path", tiny_model, *flags])
        assert script.dataset_name == str(tmp_path / "set.jsonl")


def test_a_file_of_settings_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "file.yaml").write_bytes("# Größe\nnum_turns: 2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"file.yaml' is not UTF-8 text: line 1 has the byte 0xf6; it may be CP1252"):
        read_training_arguments(RECIPES["magrpo"], ["--config", str(tmp_path / "file.yaml")])
