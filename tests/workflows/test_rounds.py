"""The shipped workflows ask the right agents the right things, and these see what they may see."""

import pytest
from players import AUX, MAIN, PROBLEM, Executor, last, play

from marcog_trl.execution import CodeExecutor, TestResult, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.workflows import Collaboration, Pipeline, Single, make_workflow


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("debate", {}, "workflow='debate' is unknown. Use one of 'single', 'collaboration', 'coverage', 'pipeline'"),
        ("single", {"num_agents": 2}, "num_agents=2 is not an option of workflow='single'"),
        ("collaboration", {"num_agents": 1}, "num_agents=1 must be at least 2. Set num_agents=2"),
        ("pipeline", {"num_agents": 0}, "num_agents=0 must be at least 1"),
        ("pipeline", {"feedback": "loud"}, "feedback='loud' is unknown"),
        ("pipeline", {"visible_tests": "some"}, "visible_tests='some' must be a whole number"),
        ("pipeline", {"roles": {"helper": "Help."}}, "roles has a text for 'helper'"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_workflow(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("single", {}, ["solver"]),
        ("collaboration", {}, ["helper", "main"]),
        ("collaboration", {"num_agents": 4}, ["helper", "helper2", "helper3", "main"]),
        ("pipeline", {"num_agents": 1}, ["coder"]),
        ("pipeline", {"num_agents": 2}, ["planner", "coder"]),
        ("pipeline", {}, ["planner", "coder", "debugger"]),
        ("pipeline", {"num_agents": 5}, ["planner", "coder", "debugger", "debugger2", "debugger3"]),
    ],
)
def test_shipped_workflows_declare_what_they_play(name, options, names):
    workflow = make_workflow(name, num_turns=2, **options)
    workflow.validate()
    assert [agent.name for agent in workflow.agents] == names
    assert all(agent.role for agent in workflow.agents)
    stages = play(workflow, {name: [MAIN] * 2 for name in names}, Executor("passed"))
    spoken = [agent for stage in stages for agent in stage]
    assert spoken == [slot.agent for slot in workflow.slots]


def test_whether_a_workflow_reads_tests():
    assert not Single().needs_tests and not Collaboration().needs_tests and not Pipeline(num_agents=2).needs_tests
    assert not Collaboration(num_turns=2, feedback="plain").needs_tests
    assert Collaboration(num_turns=2).needs_tests and Single(num_turns=2).needs_tests and Pipeline().needs_tests


# What agents are asked


def test_single_asks_for_the_code_after_a_problem_in_plain_text():
    text = "2 + 2?\n\nWrite the complete Python code. Answer with one Python code block."
    for workflow, asked in ((Single(), text), (Single(roles={"solver": "Be brief."}), "Be brief.\n\n2 + 2?")):
        [stage] = play(workflow, {"solver": ["4"]}, problem={"prompt": "2 + 2?"})
        assert stage == {"solver": [{"role": "user", "content": asked}]}


def test_single_asks_messages_and_without_a_role_text_any_prompt_as_it_is():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    for workflow, prompt in ((Single(), messages), (Single(roles={"solver": ""}), "2 + 2?")):
        assert play(workflow, {"solver": ["4"]}, problem={"prompt": prompt}) == [{"solver": prompt}]
    assert Single().solution({"prompt": "2 + 2?"}, {"solver": "It is 4."}) == "It is 4."


def test_collaboration_asks_both_at_once_in_one_user_message():
    workflow = Collaboration()
    [stage] = play(workflow, {"helper": [AUX], "main": [MAIN]})
    for agent in workflow.agents:
        [message] = stage[agent.name]
        assert message["role"] == "user" and message["content"].count(PROBLEM["prompt"].strip()) == 1
        assert "{" not in message["content"]
    assert stage["helper"][0]["content"].endswith("```python\ndef aux(xs):\n```")
    assert stage["main"][0]["content"].endswith("begins with `def total(xs):`.")


def test_role_texts_place_the_problem_and_name_the_function():
    workflow = Collaboration(
        roles={"helper": "Help.\n{problem}\nWrite aux({arguments}) for {entry_point}.", "main": "Solve."}
    )
    [stage] = play(workflow, {"helper": [AUX], "main": [MAIN]})
    prompt = PROBLEM["prompt"]
    assert stage["helper"][0]["content"] == f"Help.\n{prompt.rstrip()}\nWrite aux(xs) for total."
    assert stage["main"][0]["content"] == f"Solve.\n\n{prompt}"
    other = {**PROBLEM, "prompt": "Braces {arguments} of the problem stay.", "starter_code": ""}
    [stage] = play(workflow, {"helper": [AUX], "main": [MAIN]}, problem=other)
    assert stage["helper"][0]["content"].splitlines()[1:] == [other["prompt"], "Write aux(...) for total."]


def test_role_text_goes_to_the_last_message_of_a_conversation():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write total."}]
    [stage] = play(
        Collaboration(roles={"main": "Do it."}), {"helper": [""], "main": [""]}, problem={**PROBLEM, "prompt": prompt}
    )
    assert stage["main"] == [prompt[0], {"role": "user", "content": "Do it.\n\nWrite total."}]


def test_collaboration_solution_joins_the_parts():
    workflow = Collaboration()
    replies = {"helper": f"Sure:\n```python\n{AUX}\n```", "main": f"```python\nimport math\n\n{MAIN}\n```"}
    assert workflow.solution(PROBLEM, replies) == f"{AUX}\n\n\nimport math\n\n{MAIN}"
    assert workflow.solution(PROBLEM, {"helper": "No.", "main": MAIN}) == MAIN
    for helper in (AUX, f"{AUX}\n\n{MAIN}"):  # a helper does not answer for main
        assert workflow.solution(PROBLEM, {"helper": helper, "main": "No."}) == ""
        assert workflow.solution(PROBLEM, {"helper": helper, "main": "def other(xs):\n    return 0"}).startswith(
            "def other"
        )


def test_three_agents_collaborate():
    workflow = Collaboration(num_agents=3)
    assert "aux2" in workflow.agents[1].role and "aux({arguments}) and aux2({arguments})" in workflow.agents[2].role
    replies = {
        "helper": AUX,
        "helper2": AUX.replace("aux", "aux2"),
        "main": "def total(xs):\n    return sum(aux2(aux(xs)))",
    }
    solution = workflow.solution(PROBLEM, replies)
    assert [line for line in solution.split("\n") if line.startswith("def ")] == [
        "def aux(xs):",
        "def aux2(xs):",
        "def total(xs):",
    ]


def test_prompt_imports_reach_the_solution():
    problem = {
        **PROBLEM,
        "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    '''Add up.'''\n",
    }
    replies = {
        "helper": "def aux(xs: List[int]):\n    return xs",
        "main": "def total(xs: List[int]):\n    return sum(aux(xs))",
    }
    assert Collaboration().solution(problem, replies).startswith("from typing import List\n\n\ndef aux")


def test_pipeline_hands_plan_code_and_visible_results_on():
    workflow = Pipeline(num_agents=4)
    executor = Executor("passed", "failed", "failed")
    wrong = "def total(xs):\n    return 6"
    replies = {
        "planner": ["Double, then add."],
        "coder": [f"```\n{wrong}\n```"],
        "debugger": [wrong],
        "debugger2": [MAIN],
    }
    stages = play(workflow, replies, executor)
    assert [list(stage) for stage in stages] == [["planner"], ["coder"], ["debugger"], ["debugger2"]]
    assert "\n\nPlan:\nDouble, then add.\n\nWrite" in last(stages[1]["coder"])
    assert f"\n\nCode:\n{wrong}\n\n" in last(stages[2]["debugger"])
    assert "Tests: 1 of 1 passed\n\nWrite" in last(stages[2]["debugger"])  # of those that are shown
    assert "plan" not in last(stages[2]["debugger"]).lower()
    assert executor.jobs == [solution_job(PROBLEM, wrong)] * 2  # all tests
    assert workflow.solution(PROBLEM, {name: texts[0] for name, texts in replies.items()}) == MAIN


def test_debugger_sees_broken_code_whole():
    broken = "def total(xs):\n    ys = xs\n    return sum(ys"
    executor = Executor("failed")
    stages = play(Pipeline(), {"planner": [""], "coder": [broken], "debugger": [MAIN]}, executor)
    assert broken in last(stages[2]["debugger"])
    assert "Syntax: line 3, column 15: '(' was never closed" in last(stages[2]["debugger"])


# Turns and feedback


def test_plain_feedback_asks_to_revise_and_runs_nothing():
    stages = play(
        Collaboration(num_turns=2, feedback="plain"), {"helper": ["a", "b"], "main": ["c", "d"]}, executor=None
    )
    for name, reply, function in (("helper", "a", "aux"), ("main", "c", "total")):
        assert stages[1][name] == [
            *stages[0][name],
            {"role": "assistant", "content": reply},
            {
                "role": "user",
                "content": f"Revise your answer. Answer with one Python code block that defines {function}.",
            },
        ]


def test_level_feedback_says_what_happened_and_shows_own_history_only():
    executor = Executor("failed", "passed", "failed")
    unused = "def total(xs):\n    aux(xs)\n    return 5"
    workflow = Collaboration(num_turns=3)
    stages = play(workflow, {"helper": ["Hm.", AUX, AUX], "main": [unused, MAIN, MAIN]}, executor)
    assert last(stages[1]["helper"]).split("\n") == [
        "Definition of aux: missing",
        "Syntax: no error",
        "Tests: 0 of 1 passed",
        "assert total([1, 2]) == 6: AssertionError",
        "Revise your answer. Answer with one Python code block that defines aux.",
    ]
    assert last(stages[1]["main"]).split("\n") == [
        "Definition of total: found",
        "Syntax: no error",
        "Helper aux: called, but its result is not used",
        "Tests: 0 of 1 passed",
        "assert total([1, 2]) == 6: AssertionError",
        "Revise your answer. Answer with one Python code block that defines total.",
    ]
    assert "Helper aux: called\n" in last(stages[2]["main"])
    assert [message["role"] for message in stages[2]["main"]] == ["user", "assistant"] * 2 + ["user"]
    text = "".join(message["content"] for message in stages[2]["main"])
    assert "[2 * x for x in xs]" not in text  # the helper's code
    assert "total([5])" not in text and "total([])" not in text  # hidden tests
    # what was executed is the turn's whole job, so that the reward can take the verdict over
    turns = [{"helper": "Hm.", "main": unused}, {"helper": AUX, "main": MAIN}]
    assert executor.jobs == [solution_job(PROBLEM, workflow.solution(PROBLEM, replies)) for replies in turns]
    assert executor.jobs[0].tests == tuple(PROBLEM["test"])


SCRIPTS = {  # as CodeContests' problems, which name no function
    "prompt": "Double the number.",
    "entry_point": "",
    "test": [["1\n", "2\n"], ["2\n", "4\n"]],
    "test_format": "stdio",
    "starter_code": "",
}


def test_feedback_on_a_problem_that_names_no_function():
    right, wrong = "print(2 * int(input()))", "n = int(input())\nprint(n + 1)"
    text = f"No:\n```\n{wrong}\n```\nYes:\n```\n{right}\n```"
    assert solution_job(SCRIPTS, text).code == right
    _, second, third = play(
        Single(num_turns=3), {"solver": [text, "Hm.", right]}, Executor("passed", "failed"), SCRIPTS
    )
    assert last(second["solver"]).split("\n")[:-1] == ["Code: found", "Syntax: no error", "Tests: 1 of 1 passed"]
    assert last(third["solver"]).startswith("Code: missing\nSyntax: no error\n")
    workflow = Pipeline()
    replies = {"planner": "Double.", "coder": text, "debugger": text}
    executor = Executor("passed")
    stages = play(workflow, {name: [reply] for name, reply in replies.items()}, executor, SCRIPTS)
    told = last(stages[2]["debugger"])
    assert f"Code:\n{right}\n\nCode: found\nSyntax: no error\nTests: 1 of 1 passed" in told
    assert workflow.solution(SCRIPTS, replies) == executor.jobs[0].code == right


@pytest.mark.parametrize(
    ("feedback", "helper", "main"),
    [
        ("plain", [], []),
        ("passed", ["The solution does not pass the tests."], ["The solution does not pass the tests."]),
        (
            "level_passed",
            ["Definition of aux: failed", "Syntax: passed", "Tests: failed"],
            ["Definition of total: passed", "Syntax: passed", "Helper aux: failed", "Tests: failed"],
        ),
    ],
)
def test_shorter_feedback(feedback, helper, main):
    replies = {"helper": ["Hm.", AUX], "main": ["def total(xs):\n    aux(xs)\n    return 5", MAIN]}
    executor = Executor("failed", "passed")
    stages = play(Collaboration(num_turns=2, feedback=feedback), replies, executor)
    assert last(stages[1]["helper"]).split("\n") == [
        *helper,
        "Revise your answer. Answer with one Python code block that defines aux.",
    ]
    assert last(stages[1]["main"]).split("\n") == [
        *main,
        "Revise your answer. Answer with one Python code block that defines total.",
    ]
    assert bool(executor.jobs) == (feedback != "plain")


def test_passed_feedback_counts_the_visible_tests_only():
    replies = {"helper": [AUX] * 2, "main": [MAIN] * 2}
    shown = (
        (1, "The solution passes the tests."),
        (None, "The solution does not pass the tests."),
        (0, "Revise your answer. Answer with one Python code block that defines total."),
    )
    for visible_tests, says in shown:
        workflow = Collaboration(num_turns=2, feedback="passed", visible_tests=visible_tests)

        class Half(Executor):
            def run(self, jobs):
                self.jobs += jobs
                results = (TestResult("passed"), *[TestResult("failed", "no")] * (len(jobs[0].tests) - 1))
                return [Verdict("failed", 1, len(results), results)]

        assert last(play(workflow, replies, Half())[1]["main"]).split("\n")[0] == says


def test_feedback_of_ones_own():
    seen = []

    def feedback(problem, agent, reply, results):
        seen.append((problem["entry_point"], agent, reply, results))
        return f"{agent}, {results.splitlines()[0]}"

    replies = {"helper": [AUX] * 2, "main": [MAIN] * 2}
    workflow = Collaboration(num_turns=2, feedback=feedback)
    assert workflow.needs_tests
    stages = play(workflow, replies, Executor("failed"))
    assert last(stages[1]["main"]).split("\n") == [
        "main, Tests: 0 of 1 passed",
        "Revise your answer. Answer with one Python code block that defines total.",
    ]
    assert [entry[:3] for entry in seen] == [("total", "helper", AUX), ("total", "main", MAIN)]
    with pytest.raises(TypeError, match=r"feedback returned None for agent 'helper'\. Return text"):
        play(Collaboration(num_turns=2, feedback=lambda *args: None), replies, Executor("failed"))


def test_an_expert_is_asked_about_every_agent_and_a_missing_answer_is_plain_feedback():
    asked = []

    def expert(questions):
        asked.extend(questions)
        return ["Name the list.", None]

    replies = {"helper": [AUX] * 2, "main": [MAIN] * 2}
    workflow = Collaboration(num_turns=2, feedback="expert_edits", expert=expert)
    assert workflow.needs_tests
    _, second = play(workflow, replies, Executor("failed"))
    assert (
        last(second["helper"])
        == "Name the list.\nRevise your answer. Answer with one Python code block that defines aux."
    )
    assert last(second["main"]) == "Revise your answer. Answer with one Python code block that defines total."
    for question, reply in zip(asked, (AUX, MAIN), strict=True):
        assert reply in last(question) and "Tests: 0 of 1 passed" in last(question)
    with pytest.raises(ValueError, match="feedback='expert_edits' needs an expert"):
        Collaboration(num_turns=2, feedback="expert_edits")


@pytest.mark.parametrize(
    ("main", "state"),
    [
        ("def total(xs):\n    return 1", "not called"),
        ("def total(xs):\n    return aux(xs)", "called, but total does nothing else"),
        (f"{AUX}\n\n{MAIN}", "defined by you, which is not allowed"),
    ],
)
def test_level_feedback_on_the_use_of_the_helper(main, state):
    stages = play(Collaboration(num_turns=2), {"helper": [AUX] * 2, "main": [main] * 2}, Executor("passed"))
    assert f"Helper aux: {state}\n" in last(stages[1]["main"])


def test_pipeline_turns_continue_every_agents_own_chat():
    replies = {"planner": ["Plan one.", "Plan two."], "coder": [AUX, MAIN], "debugger": [AUX, MAIN]}
    executor = Executor("failed")
    stages = play(Pipeline(num_turns=2), replies, executor)
    assert [next(iter(stage)) for stage in stages] == ["planner", "coder", "debugger"] * 2
    planner, coder = stages[3]["planner"], stages[4]["coder"]
    assert [message["content"] for message in planner[1:]] == [
        "Plan one.",
        "Tests: 0 of 1 passed\nassert total([1, 2]) == 6: AssertionError\nRevise your answer.",
    ]
    assert coder[: len(stages[1]["coder"])] == stages[1]["coder"]
    assert last(coder).endswith("Revise your answer. Answer with one Python code block that defines total.")
    assert "Definition of total: missing" in last(coder) and last(coder).startswith("Plan:\nPlan two.\n\n")
    assert len(executor.jobs) == 3  # the coder's code in both turns, and the solution between them


def test_feedback_from_real_execution():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        stages = play(
            Collaboration(num_turns=2, visible_tests=None),
            {"helper": [AUX] * 2, "main": ["def total(xs):\n    return sum(aux(xs)) if xs else None", MAIN]},
            executor,
        )
        assert "Tests: 2 of 3 passed\nassert total([]) == 0: " in last(stages[1]["helper"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_turns": "2"}, "num_turns='2' must be a whole number"),
        ({"num_agents": "3"}, "num_agents='3' must be a whole number"),
        ({"num_agents": 2.0}, "num_agents=2.0 must be a whole number"),
        ({"visible_tests": "two"}, "visible_tests='two' must be a whole number"),
        ({"visible_tests": True}, "visible_tests=True must be a whole number"),
        ({"roles": "Write."}, "roles='Write.' is not a mapping"),
        ({"roles": {"main": None}}, "roles.'main'.=None is not text"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_workflow("collaboration", **options)
