"""What a run shows on the console: one block in a terminal, short lines elsewhere."""

import io
import logging
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
import teams
from rich.console import Console
from tqdm import tqdm

from marcog_trl.report import live
from marcog_trl.report.live import ConsoleCallback, short


AGENTS = ["helper", "main"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def log(**more):
    metrics = {"reward": 0.25, "episodes/solved": 0.125, "entropy": 0.5, "tokens_per_second": 1234.4}
    return metrics | {f"agents/{agent}/reward": 0.25 for agent in AGENTS} | more


def state(step=0, main=True, history=()):
    return SimpleNamespace(global_step=step, max_steps=20, is_world_process_zero=main, log_history=list(history))


def begun(live=False, agents=AGENTS, **options):
    console = ConsoleCallback(agents, "a [team]", live=live)
    console.on_train_begin(None, state(**options), None)
    return console


def rendered(console, width=80):
    screen = Console(width=width, record=True, file=io.StringIO())
    screen.print(console.block())
    return screen.export_text()


class TestLines:
    """Not a terminal."""

    def test_one_short_line_per_log(self, capsys):
        console = begun()
        console.on_step_end(None, state(5), None)
        console.on_log(None, state(5), None, logs=log())
        console.on_log(
            None, state(5), None, logs={"eval_reward": 0.5, "eval_episodes/solved": 0.25, "eval_runtime": 7.0}
        )
        console.on_log(None, state(20), None, logs={"train_runtime": 100.0, "train_loss": 0.1})
        assert capsys.readouterr().out.splitlines() == [
            "step 5 of 20  reward 0.250  solved 0.125  entropy 0.500  tokens/s 1,234",
            "step 5 of 20  held-out problems: reward 0.500  solved 0.250  in 0:00:07",
            "step 20 of 20  trained in 0:01:40",
        ]

    def test_rewards_of_agents_are_told_apart_where_they_differ(self):
        console = begun()
        assert "helper 0.250  main 0.750" in console.line({"step": 5, **log(**{"agents/main/reward": 0.75})})
        agents = [f"agent{i}" for i in range(8)]
        many = {f"agents/{agent}/reward": i / 10 for i, agent in enumerate(agents)}
        assert "tokens/s 1,234  agents 0.000 to 0.700" in begun(agents=agents).line({"step": 5, **log(**many)})

    def test_time_left_is_that_of_the_steps_so_far(self):
        console = begun()
        clock = iter(range(0, 1000, 10))
        console._progress.get_time = lambda: float(next(clock))
        for step in (1, 2, 3):
            console.on_step_end(None, state(step), None)
        assert console.line({"step": 3, **log()}).endswith("0:02:50 left")  # 17 steps of 10 seconds

    def test_what_was_not_logged_is_left_out(self):
        assert begun().line({"step": 1, "grad_norm": 1.0}).strip() == "step 1 of 20"
        assert short({"reward": None, "entropy": 0.5}, AGENTS) == {"entropy": "0.500"}
        assert "solo" not in short(log(**{"agents/solo/reward": 1.0}), ["solo"])

    def test_a_trainer_on_preferences_shows_its_accuracy(self):
        of_madpo = {"step": 1, "loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 0.25, "entropy": 0.1}
        assert begun().line(of_madpo).endswith("loss 0.500  accuracy 0.750  margin 0.250  entropy 0.100")
        of_reward_model = {"step": 1, "loss": 0.5, "accuracy": 0.75, "margin": 0.25}
        assert begun(agents=[]).line(of_reward_model).endswith("loss 0.500  accuracy 0.750  margin 0.250")

    def test_other_processes_print_nothing(self, capsys):
        console = begun(main=False)
        console.on_log(None, state(main=False), None, logs=log())
        console.on_train_end(None, state(main=False), None)
        assert capsys.readouterr().out == ""

    def test_what_a_trainer_does_is_said_after_silence(self, capsys, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
        console, other = begun(step=3), begun(main=False)
        for seconds, activity in ((14.9, "early"), (0.2, "judging 8 episodes"), (14.9, "early"), (0.2, "learning")):
            now[0] += seconds
            console.tell(activity)
            other.tell(activity)
        console.on_log(None, state(4), None, logs=log())
        console.on_train_end(None, state(20), None)
        now[0] += 100
        console.tell("after the end")
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["step 4 of 20  judging 8 episodes", "step 4 of 20  learning"]
        assert len(lines) == 3 and lines[2].startswith("step 4 of 20  reward")

    def test_a_trainer_tells_what_it_does(self, tiny_model, tmp_path):
        trainer = teams.make(
            tiny_model, tmp_path, workflow=teams.Chain(), gradient_accumulation_steps=2, per_device_train_batch_size=4,
            generation_kwargs={"min_new_tokens": 6},
        )  # fmt: skip
        told = []
        trainer.on_activity = told.append
        trainer.train()
        each = [f"token {i} of at most 6" for i in range(1, 7)]
        assert told == [
            *(f"a: writing 4 replies{end}" for end in ("", *(f", {token}" for token in each))),
            *(f"b: writing 4 replies{end}" for end in ("", *(f", {token}" for token in each))),
            "judging 4 episodes",
            "learning from part 1 of 2 of the replies",
            "learning from part 2 of 2 of the replies",
        ]

    def test_a_trainer_prints_a_line_for_each_of_its_logs(self, tiny_model, tmp_path, capsys):
        trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair(), max_steps=2)
        teams.script(trainer)
        with ConsoleCallback(trainer.agents, "team") as console:
            trainer.add_callback(console)
            trainer.train()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        assert [line.split("  ")[0] for line in lines] == ["step 1 of 2", "step 2 of 2", "step 2 of 2"]
        assert "tokens/s" in lines[0] and "entropy" in lines[0] and "trained in" in lines[2]


class TestBlock:
    def test_shows_what_the_trainer_does_until_it_ends(self):
        console = begun()
        console.tell("judging 8 episodes")
        assert "judging 8 episodes" in rendered(console)
        console.on_train_end(None, state(20), None)
        assert "judging" not in rendered(console)

    def test_shows_everything_that_people_look_at(self):
        console = begun()
        for step in range(1, 6):
            console.on_step_end(None, state(step), None)
            console.on_log(None, state(step), None, logs=log(**{"reward": step / 10, "agents/main/reward": 0.75}))
        console.on_log(
            None, state(5), None, logs={"eval_reward": 0.5, "eval_episodes/solved": 0.25, "eval_runtime": 7.0}
        )
        text = rendered(console)
        for part in (
            "a [team]",
            "step 5 of 20",
            " left",
            "reward 0.500",
            "solved 0.125",
            "entropy 0.500",
            "tokens/s 1,234",
        ):
            assert part in text
        assert "helper 0.250" in text and "main 0.750" in text and "solved 0.250   at step 5" in text
        history = [line.split()[1:3] for line in text.splitlines()[-4:-1]]
        assert history == [["3", "0.300"], ["4", "0.400"], ["5", "0.500"]]

    def test_a_resumed_run_shows_what_came_before(self):
        history = [{"step": 5, **log(reward=0.5)}, {"step": 5, "eval_reward": 0.75, "eval_runtime": 7.0}]
        text = rendered(begun(step=5, history=history))
        assert "step 5 of 20" in text and "reward 0.500" in text and "reward 0.750   at step 5" in text

    @pytest.mark.parametrize("width", [40, 60, 200])
    def test_fits_into_the_terminal(self, width):
        agents = [f"a_long_name_{i}" for i in range(9)]
        console = begun(agents=agents)
        assert "step 0 of 20" in rendered(console, width)
        console.on_log(None, state(1), None, logs=log(**{f"agents/{agent}/reward": 1.0 for agent in agents}))
        text = rendered(console, width)
        assert max(map(len, text.splitlines())) == width and all(agent in text for agent in agents)


class TestTerminal:
    """What happens around the block."""

    @pytest.fixture(autouse=True)
    def screen(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "80")

    @contextmanager
    def terminal(self):
        """Both streams. pytest replaces them between a fixture and its test."""
        with redirect_stdout(Terminal()) as stdout, redirect_stderr(Terminal()) as stderr:
            yield stdout, stderr

    def test_is_live_in_a_terminal_only(self, monkeypatch):
        with self.terminal():
            assert ConsoleCallback(AGENTS, "team").live
            monkeypatch.setenv("TERM", "dumb")
            assert not ConsoleCallback(AGENTS, "team").live
        monkeypatch.setenv("TERM", "xterm-256color")
        with redirect_stdout(io.StringIO()):
            assert not ConsoleCallback(AGENTS, "team").live
            monkeypatch.setenv("FORCE_COLOR", "1")  # as in CI
            assert not ConsoleCallback(AGENTS, "team").live

    def test_others_print_whole_lines_above_it(self):
        logger = logging.getLogger("of.a.library")
        with self.terminal() as (stdout, stderr):
            handler = logging.StreamHandler()
            logger.addHandler(handler)
            with ConsoleCallback(AGENTS, "team") as console:
                console.on_train_begin(None, state(), None)
                print("printed")
                print("to stderr", file=sys.stderr)
                logger.error("logged")
                Console().print("[bold]from another console")
                for _ in tqdm(range(3), desc="a bar"):
                    pass
                print("half a line", end="", flush=True)
                during = stdout.getvalue()
                console.on_log(None, state(5), None, logs=log())
            assert sys.stdout is stdout and sys.stderr is stderr and handler.stream is stderr
        logger.removeHandler(handler)
        lines = ("printed", "to stderr", "logged", "from another console", "a bar: 100%")
        assert [during.count(line) for line in lines] == [1] * 5 and "a bar:   0%" not in during
        assert "half a line" not in during and stdout.getvalue().count("half a line") == 1
        assert stderr.getvalue() == ""  # all of it went through the block's console

    def test_streams_that_are_no_terminal_are_left_alone(self):
        with self.terminal(), redirect_stderr(io.StringIO()) as stderr, ConsoleCallback(AGENTS, "team") as console:
            console.on_train_begin(None, state(), None)
            print("an error", file=sys.stderr)
        assert stderr.getvalue() == "an error\n"

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_an_end_leaves_the_terminal_in_order(self, error):
        with self.terminal() as (stdout, _):
            with pytest.raises(error), ConsoleCallback(AGENTS, "team") as console:
                console.on_train_begin(None, state(), None)
                console.on_log(None, state(5), None, logs=log())
                raise error
            assert sys.stdout is stdout
            print("after")
        show, hide = "\x1b[?25h", "\x1b[?25l"  # the cursor
        text = stdout.getvalue()
        assert hide in text and text.rindex(show) > text.rindex(hide)
        assert text.rindex("0.250") < text.rindex("╰") < text.rindex("after\n")

    def test_it_can_train_again(self):
        with self.terminal() as (stdout, _), ConsoleCallback(AGENTS, "team") as console:
            for _ in range(2):
                console.on_train_begin(None, state(), None)
                assert sys.stdout is not stdout
                console.on_train_end(None, state(20), None)
                assert sys.stdout is stdout
