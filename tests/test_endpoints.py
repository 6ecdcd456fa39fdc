"""The client of endpoints: what answers cost, and which requests are sent. What fails is tested in `workflows/test_expert.py`."""

import pytest
from chat_server import completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture

from marcog_trl.endpoints import Endpoint, EndpointClient


def chats(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def client_of(endpoint, **options):
    return EndpointClient(Endpoint("big", endpoint.url, **{"timeout": 5.0, **options}))


def test_answers_say_what_they_cost(endpoint):
    answers = {
        "counted": completion(" text\n", "stop", prompt_tokens=5, completion_tokens=2),
        "cut": completion("text", "length", prompt_tokens=6, completion_tokens=3),
        "not counted": completion("text"),
        "null": '{"choices": [{"message": {"content": "text"}}], "usage": null}',
        "nonsense": '{"choices": [{"message": {"content": "text"}}], "usage": [1]}',
    }
    endpoint.answer = lambda text, attempt: (200, answers[text], {})
    found = client_of(endpoint).ask(chats(*answers), share_equal=False)
    counts = [(answer.prompt_tokens, answer.completion_tokens, answer.truncated) for answer in found]
    assert counts == [(5, 2, False), (6, 3, True), (0, 0, False), (0, 0, False), (0, 0, False)]
    assert [answer.text for answer in found] == [
        " text\n",
        *["text"] * 4,
    ]  # as it is: code begins with its indentation
    assert all(answer.sent and answer.error is None and answer.seconds > 0 for answer in found)


@pytest.mark.parametrize("share_equal", [False, True])
def test_equal_chats_share_a_request_or_have_their_own(endpoint, share_equal):
    answers = client_of(endpoint).ask(chats("a", "b", "a", "a"), share_equal)
    assert sorted(endpoint.seen) == (["a", "b"] if share_equal else ["a", "a", "a", "b"])
    assert [answer.text for answer in answers] == ["edit a", "edit b", "edit a", "edit a"]
    assert [answer.sent for answer in answers] == [True, True, not share_equal, not share_equal]


def test_nothing_is_sent_to_an_endpoint_that_is_down(endpoint):
    endpoint.answer = lambda text, attempt: (503, "", {})
    client = client_of(endpoint, concurrency=2, max_retries=0)
    answers = client.ask(chats(*"abcde"), share_equal=False)
    assert sorted(endpoint.seen) == ["a", "b"]
    assert [answer.sent for answer in answers] == [True, True, False, False, False]
    assert all(answer.error is not None and answer.text == "" for answer in answers)
    assert client.ask([], share_equal=False) == []
