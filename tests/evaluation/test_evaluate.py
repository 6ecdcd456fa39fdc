"""What an evaluation says of a team, that nothing else decides what it samples, and that a stopped one goes on."""

import json
from pathlib import Path

import pytest
import teams
import torch
from launched import launched
from players import finished

from marcog_trl import MultiAgentPPOTrainer, MultiAgentTrainer, SHPPOTrainer, evaluate_team, load_problems
from marcog_trl.cli.main import main
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.evaluation.estimates import share_interval
from marcog_trl.evaluation.figures import summarize
from marcog_trl.execution import Verdict
from marcog_trl.report.episodes import read_rows
from marcog_trl.team.settings import TeamSettings


ROOT = Path(__file__).parents[2]
RIGHT, WRONG, BROKEN = "return x + 1", "return x", "return ("
TESTS = ["assert f(1) == 2", "assert f(0) == 0 or f(0) == 1"]


def with_tests(count=3, **columns):
    return teams.dataset(
        count,
        test=[TESTS] * count,
        test_format=["asserts"] * count,
        entry_point=["f"] * count,
        task_id=[f"problem/{i}" for i in range(count)],
        **columns,
    )


def make(model, path, trainer_class=SHPPOTrainer, **options):
    options = {"data": with_tests(), "reward": "execution_reward", "per_device_train_batch_size": 6, **options}
    return teams.make(model, path, trainer_class, isolation="best_effort", num_workers=1, **options)


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    trainer = make(tiny_model, tmp_path_factory.mktemp("evaluation"))
    yield trainer
    trainer.executor.close()


@pytest.fixture(scope="module")
def team(tiny_model, tmp_path_factory):
    """Two agents, whose adapter acts, and whose critic looks at the base model between two replies."""
    trainer = make(
        tiny_model, tmp_path_factory.mktemp("team"), MultiAgentPPOTrainer, workflow="collaboration",
        data=with_tests(7), per_device_train_batch_size=8, max_completion_length=12, critic="team",
    )  # fmt: skip
    yield trainer
    trainer.executor.close()


@pytest.fixture
def says(trainer, monkeypatch):
    """`says(greedy, *sampled)`: bodies of `f` that the agent of `trainer` writes; returns the calls, as they are made."""

    def script(greedy, *sampled):
        calls = []

        def generate(prompt_ids, *rest):
            takes_best = not trainer.generation_config.do_sample
            calls.append((len(prompt_ids), takes_best, trainer.model.training))
            bodies = [greedy] if takes_best else sampled
            bodies = list(bodies) * (len(prompt_ids) // len(bodies))
            return [trainer._tokenizer(f"def f(x):\n    {body}")["input_ids"] for body in bodies], None

        monkeypatch.setattr(trainer, "_generate_single_turn", generate)
        return calls

    return script


def keyed(generate):
    """What a team generates with under keyed sampling, from a function of the prompts."""
    return lambda rows, sampler: generate([row.prompt_ids for row in rows])[0]


def lines(path):
    """Problems of an evaluation, without what the clock says."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert record.pop("seconds") > 0 and record.pop("waiting_seconds") > 0
        for episode in (record["greedy"], *record["samples"]):
            assert episode.pop("execution_seconds") >= 0
    return records


def without_clock(figures):
    return {
        name: value for name, value in figures.items() if name not in ("seconds_per_problem", "waiting_per_problem")
    }


class TestFigures:
    def test_counts_what_passes_what_parses_and_what_it_earns(self, trainer, says):
        batches = says(RIGHT, RIGHT, WRONG, WRONG, BROKEN)
        random, generation = torch.random.get_rng_state(), trainer.generation_config
        trainer.model.train()
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=4, batch_size=8, sampling="stream")
        assert batches == [(8, False, False), (2, True, False), (4, False, False), (1, True, False)]
        assert trainer.model.training and trainer.generation_config is generation
        assert torch.equal(torch.random.get_rng_state(), random)
        assert not trainer._pending_metrics
        # Right: both tests; wrong: one of them; broken: none
        assert figures["solved"] == figures["pass@1"] == 0.25 and figures["solved_greedy"] == 1
        assert figures["samples"] == 12 and figures["problems"] == 3 and "pass@5" not in figures
        assert figures["tests_passed"] == figures["reward"] == (1 + 0.5 + 0.5 + 0) / 4
        assert figures["parses"] == 0.75
        # All problems alike: as of twelve samples that are independent, and of three
        assert figures["solved_interval"] == list(share_interval([1, 0, 0, 0] * 3))
        assert figures["solved_greedy_interval"] == list(share_interval([1] * 3))
        assert figures["infrastructure"] == 0

    def test_pass_at_k_takes_k_of_the_samples(self, trainer, says):
        says(WRONG, RIGHT, *[WRONG] * 9)
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=10, k=[1, 3, 10], sampling="stream")
        assert [figures[f"pass@{k}"] for k in (1, 3, 10)] == pytest.approx([0.1, 0.3, 1.0])
        assert figures["solved_greedy"] == 0

    def test_tokens_and_truncation_are_told_by_agent(self, team, monkeypatch):
        def generate(prompt_ids, *rest):
            # The helper, whose rows come first of every pair, ends after three tokens; main never ends
            return [[7, 7, teams.EOS] if i % 2 == 0 else [7] * 12 for i in range(len(prompt_ids))], None

        monkeypatch.setattr(team.team, "_generate", keyed(generate))
        figures = evaluate_team(team, team.train_dataset, num_samples=2)
        assert figures["agents/helper/tokens"] == 3 and figures["agents/main/tokens"] == 12
        assert figures["agents/helper/truncated"] == 0 and figures["agents/main/truncated"] == 1
        assert figures["tokens_per_problem"] == 2 * (3 + 12)

    def test_a_failure_of_the_executor_is_no_solution_and_is_counted(self, trainer, says, monkeypatch):
        says(RIGHT, RIGHT)

        def run(jobs):
            return [Verdict("infrastructure", 0, 2, message="no worker") for _ in jobs]

        monkeypatch.setattr(trainer.executor, "run", run)
        monkeypatch.setattr(trainer.executor, "submit", lambda jobs: finished(run(jobs)))
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=2, sampling="stream")
        assert figures["infrastructure"] == 9 and figures["solved"] == 0

    def test_several_turns_are_measured_at_their_last(self, tiny_model, tmp_path, monkeypatch):
        trainer = make(
            tiny_model, tmp_path, MultiAgentTrainer, num_turns=2, feedback="plain", max_completion_length=40,
            reward=["execution_reward", "delta_reward"], per_device_train_batch_size=8,
        )  # fmt: skip

        bodies = iter([WRONG, RIGHT])  # of the two turns

        def generate(prompt_ids, *rest):
            body = next(bodies)
            return [trainer._tokenizer(f"def f(x):\n    {body}")["input_ids"] for _ in prompt_ids], None

        monkeypatch.setattr(trainer.team, "_generate", keyed(generate))
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=2, output=tmp_path / "figures.json")
        trainer.executor.close()
        assert figures["turns"] == 2 and figures["solved"] == 1
        assert figures["rewards/execution_reward"] == figures["execution_reward/pass_rate"] == 1
        assert figures["rewards/delta_reward"] == 0.5 and figures["delta_reward/improved"] == 1
        episode = lines(tmp_path / "figures.jsonl")[0]["samples"][0]
        assert episode["agents"]["solver"]["replies"] == 2 and RIGHT in episode["code"]


def test_summary_against_hand_worked_numbers():
    def episode(status, reward, tokens, truncated=0):
        return {
            "status": status, "tests_passed": 2 if status == "passed" else 1, "tests": 2, "reward": reward, "parses": True,
            "components": {} if reward is None else {"rewards/r": reward}, "turns": 1,
            "agents": {"a": {"replies": 2, "tokens": tokens, "truncated": truncated}},
        }  # fmt: skip

    passed, failed = episode("passed", 1.0, 10), episode("failed", 0.5, 30, truncated=1)
    unjudged = episode("infrastructure", None, 20)
    clock = {"seconds": 3.0, "waiting_seconds": 1.0}
    records = [
        {"greedy": passed, "samples": [passed, failed, failed, failed], **clock},
        {"greedy": failed, "samples": [passed, passed, passed, unjudged], **clock},
    ]
    figures = summarize(records, k=[1, 2])
    assert figures["pass@1"] == figures["solved"] == 0.5
    assert figures["pass@2"] == pytest.approx((1 - 3 / 6 + 1) / 2)
    # Two problems at 1/4 and 3/4: the standard error is 0.25, as of four samples that are independent
    assert figures["pass@1_interval"] == list(share_interval([1, 1, 0, 0]))
    assert figures["solved_greedy_interval"] == list(share_interval([1, 0]))
    assert figures["solved_greedy"] == 0.5
    assert figures["reward"] == figures["rewards/r"] == pytest.approx((4 * 1.0 + 3 * 0.5) / 7)
    assert figures["tests_passed"] == pytest.approx((4 + 4 * 0.5) / 8)
    assert figures["tokens_per_problem"] == (4 * 10 + 3 * 30 + 20) / 2
    assert figures["agents/a/tokens"] == 150 / 16 and figures["agents/a/truncated"] == 3 / 16
    assert figures["infrastructure"] == 1 and figures["seconds_per_problem"] == 3
    assert "solved_interval" not in summarize(records[:1], k=[1])


class TestKeyedSampling:
    def test_batches_and_company_change_nothing(self, team, tmp_path):
        def play(name, problems=team.train_dataset, **options):
            evaluate_team(team, problems, num_samples=3, output=tmp_path / name, **options)
            records = lines((tmp_path / name).with_suffix(".jsonl"))
            return {record["task_id"]: (record["greedy"], record["samples"]) for record in records}

        whole = play("whole.json")
        assert whole == play("again.json") == play("small.json", batch_size=9) == play("tiny.json", batch_size=1)
        part = play("part.json", team.train_dataset.select([5, 2]))
        assert part == {name: whole[name] for name in ("problem/5", "problem/2")}
        nameless = team.train_dataset.select([0, 0]).map(lambda row: {"task_id": None})
        (_, first), (_, second) = play("nameless.json", nameless).values()
        assert first != second
        other = play("other.json", seed=1)
        assert other != whole
        assert [greedy for greedy, _ in other.values()] == [greedy for greedy, _ in whole.values()]
        replies = [json.dumps(episode["replies"]) for _, samples in whole.values() for episode in samples]
        assert len(set(replies)) > len(replies) / 2

    def test_settings_of_the_sampling_hold(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, top_k=1, temperature=0.7)
        evaluate_team(trainer, trainer.train_dataset, num_samples=2, output=tmp_path / "best.json")
        trainer.executor.close()
        for record in lines(tmp_path / "best.jsonl"):
            assert record["samples"] == [record["greedy"]] * 2

    def test_greedy_replies_are_those_of_greedy_decoding(self, team, tmp_path):
        for sampling in ("keyed", "stream"):
            evaluate_team(
                team, team.train_dataset, num_samples=2, sampling=sampling, output=tmp_path / f"{sampling}.json"
            )
        keyed, stream = lines(tmp_path / "keyed.jsonl"), lines(tmp_path / "stream.jsonl")
        assert [record["greedy"] for record in keyed] == [record["greedy"] for record in stream]
        assert [record["samples"] for record in keyed] != [record["samples"] for record in stream]


class TestFiles:
    def test_problems_lie_beside_the_figures_with_code_and_verdicts(self, trainer, says, tmp_path):
        says(RIGHT, RIGHT, WRONG)
        figures = evaluate_team(
            trainer, trainer.train_dataset, 2, sampling="stream", output=tmp_path / "new" / "e.json",
            description={"measured": "a test"},
        )  # fmt: skip
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["e.json", "e.jsonl", "e.parquet"]
        written = json.loads((tmp_path / "new" / "e.json").read_text())
        assert written["figures"] == figures and written["settings"]["measured"] == "a test"
        assert written["settings"]["most_tokens_per_solution"] == 6
        records = lines(tmp_path / "new" / "e.jsonl")
        assert [record["task_id"] for record in records] == [f"problem/{i}" for i in range(3)]
        wrong = records[0]["samples"][1]
        assert wrong["status"] == "failed" and wrong["tests_passed"] == 1 and wrong["failed_tests"] == [0]
        assert wrong["message"] == "AssertionError: 1 == 2 does not hold" and WRONG in wrong["code"]
        episodes = read_rows(tmp_path / "new" / "e.parquet")
        assert [row["split"] for row in episodes] == ["greedy"] * 3 + ["sampled"] * 6
        found = [row for row in episodes if row["task_id"] == "problem/0" and row["split"] == "sampled"]
        assert [row["generation"] for row in found] == [0, 1] and found[1]["message"] == wrong["message"]

    def test_a_stopped_evaluation_goes_on(self, team, tmp_path, monkeypatch):
        whole = evaluate_team(team, team.train_dataset, 2, batch_size=6, output=tmp_path / "whole.json")
        generate, calls = team.team._generate, []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return generate(*args)

        monkeypatch.setattr(team.team, "_generate", interrupted)
        output = tmp_path / "stopped.json"
        with pytest.raises(KeyboardInterrupt):
            evaluate_team(team, team.train_dataset, 2, batch_size=6, output=output)
        assert [path.name for path in tmp_path.glob("stopped*")] == ["stopped.jsonl.partial"]
        partial = tmp_path / "stopped.jsonl.partial"
        begun = partial.read_text()
        # Settings; of three blocks that were generated, two have their verdicts
        assert len(begun.splitlines()) == 1 + 2 * 2
        assert team.model.training

        with pytest.raises(
            ValueError, match=r"stopped.jsonl.partial' is an evaluation with seed=0, but this one has seed=1\."
        ):
            evaluate_team(team, team.train_dataset, 2, seed=1, output=output)
        with torch.no_grad():
            weight = next(p for name, p in team.model.named_parameters() if "lora_B" in name)
            weight[0, 0] += 1
            with pytest.raises(ValueError, match="is an evaluation with weights="):
                evaluate_team(team, team.train_dataset, 2, output=output)
            weight[0, 0] -= 1
        assert partial.read_text() == begun

        partial.write_text(begun + '{"index": 4, "task')  # a line that was being written
        resumed = evaluate_team(team, team.train_dataset, 2, batch_size=6, output=output)
        assert len(calls) == 4 + 2
        assert without_clock(resumed) == without_clock(whole)
        assert lines(tmp_path / "stopped.jsonl") == lines(tmp_path / "whole.jsonl")
        assert not partial.exists()

    def test_one_that_had_only_to_be_written_is(self, team, tmp_path, monkeypatch):
        output = tmp_path / "e.json"
        figures = evaluate_team(team, team.train_dataset, 1, output=output)
        settings = json.loads(output.read_text())["settings"]
        (tmp_path / "e.jsonl.partial").write_text(json.dumps(settings) + "\n" + (tmp_path / "e.jsonl").read_text())
        output.unlink()
        monkeypatch.setattr(team.team, "_generate", None)
        assert evaluate_team(team, team.train_dataset, 1, output=output) == figures
        assert json.loads(output.read_text())["figures"] == figures


class TestOtherFiles:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("p.jsonl", '{"prompt": "def f(x):", "test": ["assert f(1)"]}\n'),
            ("p.jsonl", ""),
            ("p.json", '{"trainer": "SHPPOTrainer", "settings": {}}'),
            ("p.json", '{"untrained": {"solved": 0.5}}'),
            ("p.json", "[]"),
            ("p.json", "mine"),
            ("p.parquet", "PAR1"),
        ],
    )
    def test_what_no_evaluation_wrote_is_not_replaced(self, team, tmp_path, monkeypatch, name, content):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(team.team, "play", None)
        message = rf"would replace '.*/{name}', which is not an evaluation. Set output='.*/p_evaluation\.json'\."
        with pytest.raises(ValueError, match=message):
            evaluate_team(team, team.train_dataset, 1, output=tmp_path / "p.json")
        assert (tmp_path / name).read_text() == content and len(list(tmp_path.iterdir())) == 1

    def test_an_earlier_evaluation_is_replaced_on_request(self, team, tmp_path):
        output = tmp_path / "e.json"
        evaluate_team(team, team.train_dataset, 1, output=output)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        message = r"e\.json' is an evaluation with problems=.*'number': 7.*, but this one has problems=.*'number': 1.*\(--overwrite_output true\)"
        with pytest.raises(ValueError, match=message):
            evaluate_team(team, team.train_dataset.select([0]), 1, output=output)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        first = json.loads(output.read_text())["settings"]
        (tmp_path / "e.jsonl.partial").write_text(json.dumps(first) + "\n")
        evaluate_team(team, team.train_dataset.select([0]), 1, output=output, overwrite_output=True)
        assert json.loads(output.read_text())["settings"]["problems"]["number"] == 1
        evaluate_team(team, team.train_dataset.select([0]), 1, output=output)  # the same once more

    def test_two_at_once_are_refused(self, team, tmp_path, monkeypatch):
        output, errors = tmp_path / "e.json", []
        generate = team.team._generate

        def evaluate_meanwhile(*args):
            with pytest.raises(
                ValueError, match=r"e\.json' is being written by another evaluation\. .*set output='.*e2\.json'\."
            ):
                evaluate_team(team, team.train_dataset, 1, output=output)
            errors.append(1)
            return generate(*args)

        monkeypatch.setattr(team.team, "_generate", evaluate_meanwhile)
        evaluate_team(team, team.train_dataset, 1, output=output)
        assert errors and len(lines(tmp_path / "e.jsonl")) == len(team.train_dataset)

    @pytest.mark.parametrize("line", ["[1]", "garbage", '{"foo": 1}', "\udcff"])
    def test_a_partial_one_that_cannot_be_read_is_named(self, team, tmp_path, line):
        output = tmp_path / "e.json"
        evaluate_team(team, team.train_dataset, 1, output=output)
        settings = json.dumps(json.loads(output.read_text())["settings"])
        partial = tmp_path / "e.jsonl.partial"
        content = f"{settings}\n{line}\n".encode(errors="surrogateescape")
        partial.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"Line 2 of '.*e\.jsonl\.partial' is not part of an evaluation: .*another output"
        ):
            evaluate_team(team, team.train_dataset, 1, output=output)
        assert partial.read_bytes() == content


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"k": [1, 5]}, r"k=\[1, 5\] has 5, which is not in 1 to 2, the number of samples\. Set k=\[2\]"),
            ({"k": [0]}, r"k=\[0\] has 0"),
            ({"k": 1}, r"k=1 must be a list of whole numbers\. Set k=\[1\]"),
            ({"num_samples": 0}, "num_samples=0 must be at least 1"),
            ({"batch_size": 0}, "batch_size=0 must be at least 1"),
            ({"sampling": "best"}, "sampling='best' is unknown. Use one of 'keyed', 'stream'"),
            ({"output": "figures.txt"}, "output='figures.txt' must end in .json"),
            (
                {"output": f"{__file__}/figures.json"},
                r"lies in '.*test_evaluate\.py', which is a file\. Choose another folder",
            ),
            ({"problems": with_tests().select([])}, "problems is empty"),
            (
                {"problems": with_tests().remove_columns("test")},
                "problems has no column 'test', which reward execution_reward needs",
            ),
            (
                {
                    "problems": with_tests(3).map(
                        lambda row, i: {"test": ["assert ("] if i else row["test"]}, with_indices=True
                    )
                },
                r"problems: 2 problems .* task_id 'problem/1', task_id 'problem/2': tests\[0\]='assert \(' does not parse",
            ),
        ],
    )
    def test_come_before_any_work(self, trainer, tmp_path, monkeypatch, options, match):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(trainer.team, "play", None)
        arguments = {"problems": trainer.train_dataset, "num_samples": 2, "output": "figures.json", **options}
        with pytest.raises(ValueError, match=match):
            evaluate_team(trainer, **arguments)
        assert not list(tmp_path.iterdir())

    def test_keyed_sampling_needs_random_numbers_that_can_be_reached(self, trainer, monkeypatch):
        monkeypatch.setattr(trainer, "use_vllm", True)
        with pytest.raises(
            ValueError, match=r"sampling='keyed' does not support use_vllm=True\. Set sampling='stream'"
        ):
            evaluate_team(trainer, trainer.train_dataset)


def test_switched_off_a_team_is_its_base_model(team, tiny_model, tmp_path):
    problems, replies = team.train_dataset, {}
    base = untrained_team(
        tiny_model,
        TeamSettings(workflow="collaboration", max_completion_length=12, isolation="best_effort", num_workers=1),
    )
    for name, trainer, switched_off in (("trained", team, False), ("off", team, True), ("base", base, False)):
        output = tmp_path / f"{name}.json"
        if switched_off:
            with trainer.model.disable_adapter():
                evaluate_team(trainer, problems, 2, output=output)
        else:
            evaluate_team(trainer, problems, 2, output=output)
        replies[name] = lines(output.with_suffix(".jsonl"))
    base.executor.close()
    assert replies["off"] == replies["base"] != replies["trained"]


@pytest.mark.parametrize(
    "options", [[], ["--single_agent", "true"], ["--num_agents", "3"], ["--override", "workflow=pipeline"], None]
)
def test_a_single_problem_is_enough(team, tiny_model, tmp_path, capfd, options):
    team.save_model(str(tmp_path / "team"))
    with_tests(1).to_json(tmp_path / "one.jsonl")
    what = ["--model_name_or_path", tiny_model] if options is None else ["--adapter", tmp_path / "team"]
    if options and "workflow=pipeline" in options:  # with more agents than the problems of a batch
        what, options = ["--model_name_or_path", tiny_model], [*options, "num_agents=3"]
    few = ["--num_samples", "1", "--output", tmp_path / "e.json", "--isolation", "best_effort", *(options or [])]
    main(list(map(str, ["evaluate", *what, "--dataset_name", tmp_path / "one.jsonl", *few])))
    assert len(lines(tmp_path / "e.jsonl")) == 1
    assert "WARNING" not in capfd.readouterr().out


def test_two_processes_write_what_one_writes(team, tmp_path):
    """As a user launches it: 7 problems in blocks of 2, so that one block is smaller and one process has none at last."""
    team.save_model(str(tmp_path / "team"))
    rows = tmp_path / "problems.jsonl"
    team.train_dataset.to_json(rows)
    figures = evaluate_team(team, load_problems(str(rows), "test"), 3, batch_size=8, output=tmp_path / "one.json")
    options = ["--dataset_name", rows, "--num_samples", "3", "--batch_size", "8", "--isolation", "best_effort"]
    options += ["--adapter", tmp_path / "team", "--output", tmp_path / "two.json"]
    printed = launched("ddp", ROOT / "recipes" / "evaluate.py", *options)
    assert "pass@1" in printed and "trained team: 7 problems" in " ".join(printed.split())
    assert lines(tmp_path / "two.jsonl") == lines(tmp_path / "one.jsonl")
    written = json.loads((tmp_path / "two.json").read_text())
    assert without_clock(written["figures"]) == without_clock(figures)


def test_the_bar_says_what_the_team_writes(team, monkeypatch):
    told = []
    monkeypatch.setattr("tqdm.auto.tqdm.set_postfix_str", lambda bar, activity, refresh: told.append(activity))
    monkeypatch.setattr(team.args, "disable_tqdm", False)
    evaluate_team(team, team.train_dataset, 1)
    assert told[:2] == [f"helper and main: writing 28 replies{end}" for end in ("", ", token 1 of at most 12")]
