import json
import sys
import threading
import time
import warnings

import pytest
from chat_server import KEY, completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture

from marcog_trl.endpoints import Endpoint
from marcog_trl.workflows.expert import ExpertEdits, expert_question


def question(text):
    return [{"role": "user", "content": text}]


def expert_at(endpoint, **options):
    return ExpertEdits(Endpoint("expert-1", f"http://127.0.0.1:{endpoint.port}/v1", **{"timeout": 5.0, **options}))


def quiet(expert, questions):
    """Answers of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return expert(questions)


# What is asked and answered


def test_answers_come_in_the_order_of_the_questions(endpoint):
    def answer(text, attempt):
        time.sleep(0.02 * (9 - int(text)))  # the first ones take longest
        return 200, completion(f"  edit {text}\n"), {}

    endpoint.answer = answer
    expert = expert_at(endpoint, concurrency=4)
    assert quiet(expert, [question(str(i)) for i in range(9)]) == [f"edit {i}" for i in range(9)]
    assert expert.failed == 0
    assert len(endpoint.requests) == 9


def test_a_request_carries_key_model_and_settings(endpoint, monkeypatch):
    monkeypatch.setenv("EXPERT_KEY", "another-key")
    expert = expert_at(endpoint, api_key_env="EXPERT_KEY", max_tokens=77, temperature=0.5)
    assert quiet(expert, [question("a")]) == ["edit a"]
    [(path, headers, body)] = endpoint.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer another-key"
    assert body == {"model": "expert-1", "messages": question("a"), "max_tokens": 77, "temperature": 0.5}


def test_equal_questions_of_one_call_are_asked_once(endpoint):
    expert = expert_at(endpoint)
    assert quiet(expert, [question("a"), question("b"), question("a")]) == ["edit a", "edit b", "edit a"]
    assert sorted(endpoint.seen) == ["a", "b"]
    assert expert.failed == 0
    assert quiet(expert, [question("a")]) == ["edit a"]
    assert len(endpoint.seen) == 3  # another call asks again


def test_questions_go_out_together_and_no_more_than_allowed(endpoint):
    together = threading.Barrier(3, timeout=60)  # breaks unless three requests are under way at once
    under_way, most = set(), []

    def answer(text, attempt):
        with endpoint.lock:
            under_way.add(text)
            most.append(len(under_way))
        together.wait()
        time.sleep(0.1)
        with endpoint.lock:
            under_way.discard(text)
        return 200, completion(text), {}

    endpoint.answer = answer
    expert = expert_at(endpoint, concurrency=3)
    assert quiet(expert, [question(str(i)) for i in range(9)]) == [str(i) for i in range(9)]
    assert max(most) == 3


# Failures


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_not_retried_and_do_not_tell_the_key(endpoint, status):
    refusal = json.dumps({"error": {"message": f"no access with {KEY}", "code": "refused"}})
    endpoint.answer = lambda text, attempt: (status, refusal, {})
    expert = expert_at(endpoint)
    with pytest.warns(RuntimeWarning) as caught:
        assert expert([question("a")]) == [None]
    assert len(endpoint.seen) == 1
    [warning] = caught
    text = str(warning.message)
    assert f"Error code: {status}" in text and "no access with ***" in text
    assert "expert-1" in text and f"http://127.0.0.1:{endpoint.port}/v1" in text
    assert KEY not in text
    assert warning.filename == __file__


def test_only_the_first_failure_warns_and_all_different_ones_are_counted(endpoint):
    endpoint.answer = lambda text, attempt: (400, "{}", {}) if "bad" in text else (200, completion("fine"), {})
    expert = expert_at(endpoint)
    assert quiet(expert, [question("good")]) == ["fine"]
    with pytest.warns(RuntimeWarning) as caught:
        answers = expert([question(text) for text in ("bad 1", "good", "bad 2", "bad 2")])
    assert answers == [None, "fine", None, None]
    assert len(caught) == 1
    assert quiet(expert, [question("bad 3")]) == [None]
    assert quiet(expert, [question("good")]) == ["fine"]
    assert expert.failed == 3 and endpoint.seen.count("good") == 3


def test_slow_answers_time_out_and_are_retried(endpoint):
    given_up = threading.Event()

    def answer(text, attempt):
        if text == "slow" or (text == "warming up" and not attempt):
            given_up.wait(60)
        return 200, completion("done"), {}

    endpoint.answer = answer
    expert = expert_at(endpoint, timeout=2.0, max_retries=1)
    with pytest.warns(RuntimeWarning, match=r"APITimeoutError: Request timed out"):
        assert expert([question("slow"), question("warming up"), question("quick")]) == [None, "done", "done"]
    given_up.set()
    assert endpoint.seen.count("slow") == 2
    assert expert.failed == 1


@pytest.mark.parametrize(
    "body",
    [
        "this is { no JSON",
        "",
        "null",
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        '{"error": "busy"}',
        "[" * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_answers_that_are_no_chat_completion_fail(endpoint, body):
    endpoint.answer = lambda text, attempt: (200, body, {})
    expert = expert_at(endpoint)
    with pytest.warns(RuntimeWarning, match="not a chat completion") as caught:
        assert expert([question("a")]) == [None]
    assert body[:100] in str(caught[0].message)
    assert expert.failed == 1


@pytest.mark.parametrize("content", [None, "", " \n", [{"type": "text", "text": "edit"}]])
def test_empty_answers_fail(endpoint, content):
    endpoint.answer = lambda text, attempt: (200, completion(content), {})
    expert = expert_at(endpoint)
    with pytest.warns(RuntimeWarning, match="empty"):
        assert expert([question("a")]) == [None]
    assert expert.failed == 1


def test_a_question_that_cannot_be_sent_fails_alone(endpoint):
    expert = expert_at(endpoint)
    with pytest.warns(RuntimeWarning, match="UnicodeEncodeError"):
        assert expert([question("lone \ud800"), question("a")]) == [None, "edit a"]


# An endpoint that goes away


@pytest.mark.parametrize("failure", [None, (502, "bad gateway", {})], ids=["hangs up", "502"])
def test_an_endpoint_that_is_down_costs_one_request_a_call(endpoint, failure):
    works = endpoint.answer
    endpoint.answer = lambda text, attempt: failure
    expert = expert_at(endpoint, max_retries=2, concurrency=2)
    questions = [question(str(i)) for i in range(5)]
    with pytest.warns(RuntimeWarning, match="5 of 5 questions"):
        assert expert(questions) == [None] * 5
    assert sorted(endpoint.seen) == ["0"] * 3 + ["1"] * 3  # as many as go out together, with retries
    for _ in range(2):
        endpoint.seen.clear()
        assert quiet(expert, questions) == [None] * 5
        assert endpoint.seen == ["0"]
    assert expert.failed == 15

    endpoint.answer = lambda text, attempt: works(text, attempt) if text == "0" or attempt else failure
    endpoint.seen.clear()
    assert quiet(expert, questions) == [f"edit {i}" for i in range(5)]
    assert endpoint.seen[0] == "0" and sorted(endpoint.seen) == list("011223344")  # the others with retries
    endpoint.answer = lambda text, attempt: works(text, attempt) if attempt else failure
    endpoint.seen.clear()
    assert quiet(expert, questions) == [f"edit {i}" for i in range(5)]  # and in the next call all of them


def test_refusals_of_everything_do_not_count_as_down(endpoint):
    works = endpoint.answer
    endpoint.answer = lambda text, attempt: (400, "{}", {})
    expert = expert_at(endpoint)
    with pytest.warns(RuntimeWarning):
        assert expert([question("a"), question("b")]) == [None, None]
    endpoint.answer = lambda text, attempt: works(text, attempt) if text == "b" else (400, "{}", {})
    assert quiet(expert, [question("a"), question("b")]) == [None, "edit b"]


# Before training


@pytest.mark.parametrize(
    "option",
    [
        {"model": " "},
        {"timeout": 0.0},
        {"timeout": float("nan")},
        {"max_retries": -1},
        {"concurrency": 0},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"base_url": "localhost:8000/v1"},
        {"base_url": "http://"},
    ],
    ids=str,
)
def test_settings_are_checked(option):
    [name] = option
    with pytest.raises(ValueError, match=rf"{name}=.* Set {name}="):
        Endpoint(**{"model": "expert-1", "base_url": "http://localhost:8000/v1", **option}).check()


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="base_url contains") as caught:
        Endpoint("expert-1", "http://me:hunter2@localhost/v1").check()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", [None, ""])
def test_a_missing_key_is_named(monkeypatch, key):
    monkeypatch.delenv("EXPERT_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("EXPERT_KEY", key)
    with pytest.raises(ValueError, match="EXPERT_KEY"):
        Endpoint("expert-1", api_key_env="EXPERT_KEY").check()


@pytest.mark.parametrize("key", ["two words", "line\n", "schlüssel"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as caught:
        Endpoint("expert-1").check()
    assert key not in str(caught.value)


def test_without_openai_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install marcog-trl\[expert\]"):
        Endpoint("expert-1").check()


# The question


def test_a_question_holds_task_answer_and_results():
    problem = {"prompt": "Write f.", "entry_point": "f", "test": "assert f(1) == 2", "canonical_solution": "SECRET"}
    [message] = expert_question(problem, "Write only aux.", "def aux():\n    return 1\n", "Tests: 0 of 1 passed")
    assert message["role"] == "user"
    text = message["content"]
    parts = [
        text.index(part)
        for part in (
            "Write only aux.",
            "Write f.",
            "def aux():\n    return 1",
            "Tests: 0 of 1 passed",
            "Suggest edits",
        )
    ]
    assert parts == sorted(parts)
    assert "SECRET" not in text and "assert f(1)" not in text


def test_a_question_takes_chat_prompts_and_empty_replies():
    prompt = [{"role": "system", "content": "You code."}, {"role": "user", "content": "Write f."}]
    [message] = expert_question({"prompt": prompt}, "Write aux.", " \n", "Tests: 0 of 1 passed")
    assert "Write aux.\n\nYou code.\n\nWrite f." in message["content"]
    assert "The agent's answer:\n(empty)" in message["content"]
