"""Rounds: replay, and runs that are killed in or after any phase."""

import json
from pathlib import Path

import pytest
import teams
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import ModelConfig

from marcog_trl import IterativeMADPOConfig, MADPOConfig, MADPORounds, MADPOTrainer, PreferenceRounds
from marcog_trl.preferences.pairs import read_pairs
from marcog_trl.preferences.rounds import replay


LENGTHS = f"{Path(__file__).parents[1]}/helpers/lengths.py:lengths"


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


class KilledAtSave(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        raise Killed


def config(folder, **settings):
    settings = {
        "num_rounds": 2, "num_candidates": 3, "min_pairs": 2, "max_steps": 2, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 6, "report_to": "none",
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "disable_tqdm": True, "isolation": "best_effort",
        **settings,
    }  # fmt: skip
    return IterativeMADPOConfig(str(folder), **settings)


class Run(MADPORounds):
    """Rounds of a tiny team with one more phase; every phase can be made to end in a kill, before or after its work."""

    def __init__(self, model, folder, kill=None, **settings):
        model = ModelConfig(model, use_peft=True, lora_target_modules=["all-linear"])
        super().__init__(config(folder, **settings), model, teams.dataset(4), reward=[LENGTHS])
        self.kill, self.done = kill, []

    def step(self, name):
        self.done.append(name)
        if self.kill == name:
            raise Killed(name)

    def start(self, path):
        super().start(path)
        self.step("start")

    def collect(self, policy, number):
        pairs = super().collect(policy, number)
        self.step(f"collect {number}")
        return pairs

    def before_training(self):
        return {"reward_model": self.reward_model}

    def reward_model(self, this, path):
        path.write_text(f"{len(this.pairs)} pairs")
        self.step(f"reward model {this.number}")

    def train(self, this, path):
        assert (this.folder / "reward_model").read_text() == f"{len(this.pairs)} pairs"
        super().train(this, path)
        self.step(f"train {this.number}")

    def fit(self, trainer, **options):
        if self.kill == f"inside {int(Path(trainer.args.output_dir).parent.name.removeprefix('round_'))}":
            trainer.add_callback(KilledAtSave())
        self.continued = options["resume_from_checkpoint"]
        super().fit(trainer, **options)

    def evaluate(self, policy, path):
        weight = load_file(policy / "adapter_model.safetensors")
        figures = {"norm": sum(x.double().square().sum().item() for x in weight.values())}
        path.write_text(json.dumps({"figures": figures}))
        self.step(f"evaluate {path.parent.name}")
        return figures


PHASES = [
    "start", "evaluate round_00", "collect 1", "reward model 1", "train 1", "evaluate round_01", "collect 2", "reward model 2",
    "train 2", "evaluate round_02",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A run of two rounds that nobody killed, and its results."""
    run = Run(tiny_model, tmp_path_factory.mktemp("rounds") / "run")
    return run, run.run()


def result_of(run):
    """What is left of a run: pairs and weights of every round."""
    found = {}
    for number in (1, 2):
        folder = run.folder / f"round_{number:02}"
        found[f"pairs {number}"] = (folder / "pairs.jsonl").read_text()
        found |= {
            f"{number} {n}": x.tolist() for n, x in load_file(folder / "policy" / "adapter_model.safetensors").items()
        }
    return found


class TestRuns:
    def test_every_phase_runs_once_and_in_order(self, whole):
        run, results = whole
        assert run.done == PHASES
        assert len(results) == 3 and len({result["norm"] for result in results}) == 3
        assert not list(run.folder.rglob("*.partial")) and not list(run.folder.rglob("checkpoint-*"))
        pairs = result_of(run)
        assert pairs["pairs 1"] != pairs["pairs 2"]
        assert run.last == 2

    @pytest.mark.parametrize(
        "kill",
        ["start", "evaluate round_00", "collect 1", "reward model 1", "train 1", "collect 2", "inside 2"],
    )
    def test_a_killed_run_ends_with_the_same_pairs_and_weights(self, whole, tiny_model, tmp_path, kill):
        run, results = whole
        killed = Run(tiny_model, tmp_path / "run", kill)
        with pytest.raises(Killed):
            killed.run()
        resumed = Run(tiny_model, tmp_path / "run")
        assert resumed.run() == results
        assert result_of(resumed) == result_of(run)
        assert kill != "inside 2" or resumed.continued
        assert not list(resumed.folder.rglob("*.partial"))
        # What was finished was not done again
        repeated = set(killed.done[:-1] if kill in PHASES else killed.done) & set(resumed.done)
        assert not repeated

    def test_more_rounds_can_follow(self, whole, tiny_model, tmp_path):
        short = Run(tiny_model, tmp_path / "run", num_rounds=1)
        short.run()
        longer = Run(tiny_model, tmp_path / "run")
        longer.run()
        assert longer.done == PHASES[6:]
        assert result_of(longer) == result_of(whole[0])

    def test_fewer_rounds_end_with_an_earlier_team(self, whole, tiny_model):
        run = Run(tiny_model, whole[0].folder, num_rounds=1)
        assert run.run() == whole[1][:2] and run.last == 1 and not run.done

    def test_the_reference_is_the_initial_team(self, whole):
        run, _ = whole
        this = run.folder / "round_02"
        pairs = read_pairs(this / "pairs.jsonl")
        args = {"report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4, "bf16": False}
        initial = run.folder / "round_00" / "policy"
        config = MADPOConfig(str(run.folder / "again"), **args)
        trainer = MADPOTrainer(run.folder / "round_01" / "policy", initial, config, train_dataset=pairs)
        ids = torch.tensor([trainer.train_dataset[0]["chosen_rows"][0]["ids"]])
        with torch.no_grad(), trainer.model.disable_adapter():
            logps = trainer.model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        row = trainer.train_dataset[0]["chosen_rows"][0]
        assert trainer.train_dataset[0]["ref_chosen_row_logps"][0] == pytest.approx(
            logps[0, row["prompt_length"] - 1 :].sum().item(), abs=1e-4
        )


class TestBadInput:
    def test_folder_of_another_run(self, whole, tiny_model):
        run, _ = whole
        with pytest.raises(ValueError, match=r"holds rounds of another run: beta is 0\.1, but 0\.5 in this run"):
            Run(tiny_model, run.folder, beta=0.5).run()

    def test_too_few_pairs_in_the_first_round(self, tiny_model, tmp_path):
        run = Run(tiny_model, tmp_path / "run", min_pairs=1000)
        with pytest.raises(ValueError, match=r"Round 1 has \d+ pairs, fewer than min_pairs=1000\. Raise"):
            run.run()
        assert "train 1" not in run.done

    def test_too_few_pairs_later_end_the_run(self, whole, tiny_model, tmp_path):
        run = Run(tiny_model, tmp_path / "run")
        collect = run.collect
        run.collect = lambda policy, number: collect(policy, number).select(range(1 if number > 1 else 9))
        with pytest.warns(UserWarning, match=r"Round 2 has 1 pairs, .* The run ends with the team of round 1"):
            results = run.run()
        assert len(results) == 2 and "train 2" not in run.done and run.last == 1

    def test_a_team_without_an_adapter_is_refused_before_any_work(self, tiny_model, tmp_path):
        teams.make(tiny_model, tmp_path / "whole", full_finetuning=True, peft_config=None).save_model()
        with pytest.raises(ValueError, match=r"start_team='.*whole' has all weights of its model and no adapter"):
            Run(tiny_model, tmp_path / "run", start_team=str(tmp_path / "whole"))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_rounds": 0}, "num_rounds=0 must be at least 1"),
            ({"replay_decay": 1.5}, "replay_decay=1.5 must be"),
            ({"num_candidates": 1}, "num_candidates=1 must be at least 2"),
            ({"push_to_hub": True}, "push_to_hub=True is not supported in rounds"),
        ],
    )
    def test_settings(self, tmp_path, settings, message):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **settings)

    def test_rounds_that_do_not_say_how_they_train(self, tiny_model, tmp_path):
        with pytest.raises(TypeError, match="abstract method"):
            PreferenceRounds(config(tmp_path), ModelConfig(tiny_model), teams.dataset(4))


def shard(name, count):
    return Dataset.from_dict({"of": [name] * count, "index": list(range(count))})


class TestReplay:
    def test_draws_have_these_shares(self):
        drawn = replay([shard("a", 4000), shard("b", 4000), shard("c", 4000)], 0.5, total=3500)
        counts = [drawn["of"].count(name) for name in "abc"]
        assert len(drawn) == 3500
        for count, share in zip(counts, (1 / 7, 2 / 7, 4 / 7), strict=True):
            assert count / 3500 == pytest.approx(share, abs=0.03)
        assert len({(row["of"], row["index"]) for row in drawn}) == 3500

    def test_the_seed_decides(self):
        shards = [shard("a", 50), shard("b", 50)]
        one, again, other = (replay(shards, 0.5, seed=seed).to_list() for seed in (1, 1, 2))
        assert one == again != other

    def test_a_round_trains_on_what_is_drawn(self, tiny_model, tmp_path):
        run = Run(tiny_model, tmp_path / "run", replay_decay=0.5, replay_pairs=6)
        run.run()
        assert (run.folder / "round_02" / "reward_model").read_text() == "6 pairs"
