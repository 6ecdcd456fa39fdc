"""Workflows that are loaded from files by name."""

import re
from pathlib import Path

import pytest

from marcog_trl import Workflow, make_workflow
from marcog_trl.team.settings import TeamSettings
from marcog_trl.workflows.from_file import load_class, names_file


FILE = """from __future__ import annotations

from dataclasses import dataclass

from marcog_trl import Agent, Pipeline, Workflow


@dataclass
class Note:
    text: str | None = None


class Duo(Workflow):
    def __init__(self, num_agents=2, num_turns=1, visible_tests=1):
        self.agents = tuple(Agent(f"a{i}", Note("Write.").text) for i in range(num_agents))
        self.num_turns, self.visible_tests = num_turns, visible_tests

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        return replies["a0"]

    def solution(self, problem, replies):
        return replies["a0"]


class Plain(Workflow):
    agents = (Agent("a", "Write."),)

    def play(self, problem):
        return (yield {"a": "?"})["a"]


class TwoTurns(Duo):
    def __init__(self):
        super().__init__(num_turns=2)


class Deaf(Duo):
    def __init__(self, num_turns=1):
        super().__init__()


class Needy(Plain):
    def __init__(self, rounds):
        pass


class Broken(Plain):
    def __init__(self):
        raise KeyError("colour")


class Silent(Workflow):
    agents = (Agent("a", "Write."),)


class Steps(Pipeline):
    pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_team.py").write_text(FILE)
    return Path("my_team.py")


def line_of(text):
    return FILE[: FILE.index(text)].count("\n") + 1


class TestLoad:
    def test_gives_the_class_and_its_source(self, file):
        workflow = make_workflow("my_team.py:Duo", num_agents=3)
        assert isinstance(workflow, Workflow) and [agent.name for agent in workflow.agents] == ["a0", "a1", "a2"]
        assert workflow.source_file.content == FILE.encode() and workflow.source_file.path == file.absolute()
        assert sorted(path.name for path in Path().iterdir()) == ["my_team.py"]  # no cached bytecode

    def test_reads_the_file_again(self, file):
        assert load_class("my_team.py:Plain").agents[0].role == "Write."
        file.write_text(FILE.replace('"Write."', '"Wrote."'))
        assert load_class("my_team.py:Plain").agents[0].role == "Wrote."

    def test_names(self):
        assert names_file("my_team.py:Duo") and names_file("/some/where/my_team.py:Duo")
        assert not any(map(names_file, ("single", "my_team.py", "my_team:Duo", "")))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "other.py:Duo",
                "workflow='other.py:Duo': the file 'other.py' cannot be read: No such file or directory.",
            ),
            (".py:Duo", "the file '.py' cannot be read"),
            ("my_team.py", "workflow='my_team.py' is unknown. Use one of 'single'"),
            ("my_team.py:", "'my_team.py' defines no class ''. Did you mean my_team.py:Duo?"),
            ("my_team.py:Dou", "'my_team.py' defines no class 'Dou'. Did you mean my_team.py:Duo?"),
            ("my_team.py:Pipeline", "defines no class 'Pipeline'"),
            ("my_team.py:Note", "Note is not a Workflow. Write 'class Note(Workflow):'"),
            (
                "my_team.py:Needy",
                "cannot be made: TypeError: Needy.__init__() missing 1 required positional argument: 'rounds'",
            ),
            ("my_team.py:Silent", "cannot be made: TypeError: Silent has no method 'play'."),
            ("my_team.py:Broken", "cannot be made: KeyError: 'colour' (my_team.py, line {colour})"),
        ],
    )
    def test_mistakes_are_one_line(self, file, name, message):
        message = message.replace("{colour}", str(line_of("raise KeyError")))
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            make_workflow(name)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (my_team.py, line 2)"),
            ("def f():\n    1 / 0\n\n\nf()\n", "ZeroDivisionError: division by zero (my_team.py, line 2)"),
            ("raise ValueError('a\\nb')", "ValueError: a b (my_team.py, line 1)"),
            ("import sys\nsys.exit(3)", "SystemExit: 3 (my_team.py, line 2)"),
            ("from my_tools import f", "ModuleNotFoundError: No module named 'my_tools' (my_team.py, line 1)"),
            ("\0", "Error: source code string cannot contain null"),  # a ValueError in Python 3.11.2
            ("", "'./my_team.py' defines no class 'Duo'. Write one that inherits from marcog_trl.Workflow."),
        ],
    )
    def test_a_file_that_does_not_import_shows_why_and_where(self, file, source, message):
        file.write_text(source)
        Path("my_tools.py").write_text("f = 1")  # is not saved with the team
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            make_workflow("./my_team.py:Duo")
        assert "\n" not in str(error.value)


class TestSettings:
    def test_are_passed_to_the_class_if_it_takes_them(self, file):
        settings = TeamSettings(workflow="my_team.py:Duo", num_agents=3, num_turns=2, visible_tests=0)
        workflow = settings.make_workflow()
        assert (len(workflow.agents), workflow.num_turns, workflow.visible_tests) == (3, 2, 0)

    def test_become_those_of_the_class(self, file):
        settings = TeamSettings(workflow="my_team.py:TwoTurns")
        assert settings.make_workflow().num_turns == settings.num_turns == 2

    def test_a_shipped_workflow_may_be_extended(self, file):
        workflow = TeamSettings(workflow="my_team.py:Steps", num_agents=2, roles={"coder": "Code."}).make_workflow()
        assert [agent.name for agent in workflow.agents] == ["planner", "coder"] and workflow.agents[1].role == "Code."

    def test_a_central_agent_keeps_the_file(self, file):
        workflow = TeamSettings(workflow="my_team.py:Duo", centralized=True).make_workflow()
        assert [agent.name for agent in workflow.agents] == ["team"] and workflow.source_file.path == file.absolute()

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            (
                "Plain",
                {"num_agents": 2},
                r"num_agents=2 is not an option of workflow='my_team.py:Plain'\. Its options are \[\]",
            ),
            ("Plain", {"roles": {"a": "b"}}, "roles={'a': 'b'} is not an option of workflow='my_team.py:Plain'"),
            (
                "Plain",
                {"num_turns": 2},
                "num_turns=2 contradicts the given workflow Plain. Leave num_turns out, or let Plain take",
            ),
            ("TwoTurns", {"num_turns": 3}, "num_turns=3 contradicts the given workflow TwoTurns"),
            ("Deaf", {"num_turns": 2}, "num_turns=2 contradicts the given workflow Deaf"),
            ("Duo", {"feedback": "plain"}, "feedback='plain' contradicts the given workflow Duo"),
            ("Duo", {"class_split": "one"}, "split='one' is not an option of workflow='my_team.py:Duo'"),
        ],
    )
    def test_that_the_class_does_not_take_are_refused(self, file, name, options, message):
        with pytest.raises(ValueError, match=message):
            TeamSettings(workflow=f"my_team.py:{name}", **options).make_workflow()
