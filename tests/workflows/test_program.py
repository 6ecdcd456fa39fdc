"""Programs of one's own, played without a model."""

import asyncio
import contextlib
import functools
import os
import sys
import threading
import time
import warnings
from fractions import Fraction

import numpy as np
import openai
import pytest
import torch
from players import written
from programs import ASK, PROBLEM, answer, ask, play_programs, post, text_of

from marcog_trl import Agent, Endpoint, Program
from marcog_trl.rewards import program_reward
from marcog_trl.rollout.engine import play_tree
from marcog_trl.rollout.tree import Tree


async def two(problem, client):
    plan = text_of(await ask(client, "planner", problem["prompt"]))
    return text_of(await ask(client, "coder", plan))


def two_sync(problem, client):
    plan = text_of(ask(client, "planner", problem["prompt"]))
    return text_of(ask(client, "coder", plan))


SCRIPT = f"""{ASK}
solution = ask("coder", ask("planner", problem["prompt"]))
print(solution)
"""


@pytest.fixture
def command(tmp_path):
    """Makes the command of a Python script."""

    def make(script):
        path = tmp_path / "agent.py"
        path.write_text(script)
        return f"{sys.executable} {path}"

    return make


def failed(program, **options):
    """Why the only failing episode of two fails, beside one that does not."""

    async def either(problem, client):
        if problem["number"]:
            return text_of(await ask(client, "a", "fine"))
        return await program(problem, client)

    with pytest.warns(UserWarning, match="A program failed"):
        (bad, good), _ = play_programs(either, count=2, **options)
    assert good.turns[0].solution == "a(fine)" and not good.masked
    assert bad.masked and bad.turns[0].solution == ""
    return bad.failure


class TestPrograms:
    @pytest.mark.parametrize("kind", ["coroutine", "function", "command"])
    def test_calls_are_rows_and_what_it_returns_is_the_solution(self, kind, command):
        program = {"coroutine": two, "function": two_sync, "command": command(SCRIPT) if kind == "command" else None}[
            kind
        ]
        episodes, stages = play_programs(program, ["planner", "coder"], count=5, stage_timeout=60)
        assert [len(rows) for rows in stages] == [5, 5]
        for episode in episodes:
            assert [row.slot.agent for row in episode.rows] == ["planner", "coder"]
            assert [row.prompt for row in episode.rows] == [
                [{"role": "user", "content": text}] for text in ("Write f.", "planner(Write f.)")
            ]
            assert episode.turns[0].solution == "coder(planner(Write f.))"
            assert episode.turns[0].replies == {"planner": "planner(Write f.)", "coder": "coder(planner(Write f.))"}

    def test_calls_at_the_same_moment_are_one_stage(self, monkeypatch):
        monkeypatch.setattr("marcog_trl.workflows.program_server.SETTLE_SECONDS", 0.5)  # on a busy machine, too

        async def many(problem, client):
            asked = [ask(client, agent, f"{agent}{i}") for i in (2, 0, 1) for agent in "ba"]
            return " ".join(map(text_of, await asyncio.gather(*asked)))

        (episode, _), stages = play_programs(many, ["a", "b"], count=2, max_calls=3)
        assert [len(rows) for rows in stages] == [12]
        assert [(row.slot.agent, row.slot.act, row.prompt[0]["content"]) for row in episode.rows] == [
            (agent, i, f"{agent}{i}") for agent in "ab" for i in range(3)
        ]
        assert episode.turns[0].solution == "b(b2) a(a2) b(b0) a(a0) b(b1) a(a1)"

    def test_a_straggler_joins_a_later_stage(self):
        answered = threading.Event()

        async def slow(problem, client):
            if problem["number"]:
                await asyncio.to_thread(answered.wait)
            return text_of(await ask(client, "a", str(problem["number"])))

        def write(rows):
            answered.set()
            return answer(rows)

        episodes, stages = play_programs(slow, count=2, answer=write, stage_timeout=0.1)
        assert [[row.prompt[0]["content"] for row in rows] for rows in stages] == [["0"], ["1"]]
        assert [episode.turns[0].solution for episode in episodes] == ["a(0)", "a(1)"]

    def test_calls_by_agent_are_its_slots(self):
        assert len(Program(two, ["planner", "coder"], max_calls={"planner": 1, "coder": 3}).slots) == 4

    def test_a_stream_brings_the_whole_reply(self):
        async def stream(problem, client):
            chunks = [chunk async for chunk in await ask(client, "a", "x", stream=True)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        [episode], _ = play_programs(stream)
        assert episode.turns[0].solution == "a(x)"

    def test_text_in_parts_and_developers_are_read(self):
        async def parts(problem, client):
            messages = [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "f."}]},
            ]
            return text_of(await client.chat.completions.create(model="a", messages=messages))

        [episode], _ = play_programs(parts)
        assert episode.rows[0].prompt == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Write f."},
        ]

    def test_an_empty_reply_is_an_empty_solution(self):
        """The model wrote it, so it is scored."""

        async def one(problem, client):
            return text_of(await ask(client, "a", "x"))

        [episode], _ = play_programs(one, answer=lambda rows: [""])
        assert not episode.masked and episode.turns[0].solution == ""

    def test_models_are_the_agents(self):
        async def models(problem, client):
            await ask(client, "a", "x")
            return " ".join([model.id async for model in client.models.list()])

        [episode], _ = play_programs(models, ["a", "b"])
        assert episode.turns[0].solution == "a b"


def posted(body, path="/chat/completions", **options):
    """Status and answer of the only request of a program that may be refused, and the episode."""
    found = []

    def program(problem, client):
        body_of_a = body if body is None else {"model": "a", "messages": [{"role": "user", "content": "x"}], **body}
        found.append(post(str(client.base_url), client.api_key, body_of_a, path))
        status, said = found[0]
        answered = status == 200 and path == "/chat/completions"
        return said["choices"][0]["message"]["content"] if answered else text_of(ask(client, "a", "y"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [episode], _ = play_programs(program, **options)
    return *found[0], episode


def called(arguments, **function):
    return {"id": "1", "type": "function", "function": {"name": "run", "arguments": arguments, **function}}


USER = {"role": "user", "content": "Write f."}


class TestMessages:
    """What clients send, and what the model reads."""

    @pytest.mark.parametrize("empty", ["", None, ...], ids=repr)
    @pytest.mark.parametrize("arguments", ["", " ", "{}", "null", None, {}, ...], ids=repr)
    def test_a_tool_may_take_and_return_nothing(self, empty, arguments):
        said = {"role": "assistant", "content": empty, "tool_calls": [called(arguments)]}
        result = {"role": "tool", "tool_call_id": "1", "content": empty}
        for message in (said, result, said["tool_calls"][0]["function"]):
            for key in [key for key, value in message.items() if value is ...]:
                del message[key]
        _, _, episode = posted({"messages": [USER, said, result]})
        assert episode.rows[0].prompt == [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [called({})]},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ]

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ({"degrees": 3}, '{"degrees": 3}'),
            ([1, "é"], '[1, "é"]'),
            ([], "[]"),
            (4, "4"),
            (False, "false"),
            ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "42"),
        ],
        ids=repr,
    )
    def test_results_of_tools_may_be_any_json(self, content, text):
        said = {"role": "assistant", "tool_calls": [called('{"a": 1}')]}
        _, _, episode = posted({"messages": [USER, said, {"role": "tool", "tool_call_id": "1", "content": content}]})
        assert episode.rows[0].prompt[-1]["content"] == text
        assert episode.rows[0].prompt[1]["tool_calls"] == [called({"a": 1})]

    def test_optional_fields_may_be_null(self):
        """As `message.model_dump()` of the package openai has them."""
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "name"))
        chat = [USER, {"role": "assistant", "content": "def f(): pass", **nothing}, USER]
        fields = dict.fromkeys(("temperature", "n", "stop", "response_format", "tools", "tool_choice", "max_tokens"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            status, _, episode = posted({"messages": chat, "stream_options": None, **fields})
        assert status == 200
        assert episode.rows[0].prompt == [USER, {"role": "assistant", "content": "def f(): pass"}, USER]

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            ({"role": "function", "name": "run", "content": "4"}, "role='function'"),
            ({"role": "human", "content": "x"}, "role='human'"),
            ({"role": "assistant", "function_call": {"name": "run", "arguments": "{}"}}, "Send tool_calls"),
            ({"role": "assistant", "tool_calls": [called("{")]}, "no arguments in JSON"),
            ({"role": "assistant", "tool_calls": [called("{}", name=None)]}, "no name"),
            ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"input": "x"}}]}, "in JSON"),
            ({"role": "user", "content": None}, "content=None"),
            ({"role": "user"}, "content=None"),
            ({"role": "user", "content": {"text": "x"}}, "which is no text"),
            ({"role": "user", "content": ["x"]}, "which is no text"),
            ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "['image_url']"),
            ({"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url"}]}, "['image_url']"),
            ({"role": "user", "content": "half of a \ud83d"}, "surrogate"),
        ],
        ids=str,
    )
    def test_what_the_model_would_not_read_is_refused(self, message, why):
        status, said, _ = posted({"messages": [USER, message, USER]})
        assert status == 400 and why in said["error"]["message"]


class TestFields:
    """Fields of requests."""

    @pytest.mark.parametrize(
        "field",
        [
            {"stop_token_ids": [2]}, {"min_tokens": 5}, {"best_of": 2}, {"ignore_eos": True}, {"echo": True},
            {"guided_json": {"type": "object"}}, {"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a+"}},
            {"regex": "a+"}, {"grammar": "root ::= a"}, {"format": "json"}, {"logit_bias": {"5": 100}},
            {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template": "x"},
            {"continue_final_message": True}, {"add_generation_prompt": False}, {"parallel_tool_calls": False},
            {"function_call": {"name": "f"}}, {"top_logprobs": 5}, {"skip_special_tokens": False},
            {"extra_body": {"guided_regex": "a+"}}, {"max_tokens": 0}, {"max_completion_tokens": -1},
            {"max_tokens": "5"}, {"max_tokens": True}, {"tools": [{"type": "web_search"}]},
            {"tools": [{"type": "function", "name": "run", "parameters": {}}]},
        ],
        ids=str,
    )  # fmt: skip
    def test_that_change_what_a_reply_must_be_are_refused(self, field):
        status, said, _ = posted(field)
        name = next(iter(field.get("extra_body", field)))
        assert status == 400 and name in said["error"]["message"]

    @pytest.mark.parametrize(
        "field",
        [
            {"n": 1, "best_of": 1, "stream": False, "logprobs": False, "top_logprobs": 0, "echo": False},
            {"tool_choice": "auto", "parallel_tool_calls": True, "tools": [], "functions": [], "stop": []},
            {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "metadata": {}},
            {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0, "ignore_eos": False},
            {"chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False},
            {"max_tokens": 10000, "stream_options": {"include_usage": True}, "skip_special_tokens": True},
            {"temperature": 0.7, "top_k": 20, "chat_template_kwargs": {"enable_thinking": False}},
        ],
        ids=str,
    )
    def test_that_hold_anyway_are_taken(self, field):
        def program(problem, client):
            return text_of(ask(client, "a", "x", extra_body=field))

        workflow = Program(program, ["a"])
        workflow.holds = {"temperature": 0.7, "top_k": 20, "chat_template_kwargs": {"enable_thinking": False}}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            [episode], _ = play_programs(workflow)
        assert episode.turns[0].solution == "a(x)"

    def test_of_other_servers_have_no_effect_and_are_told(self):
        fields = ("top_k", "min_p", "repetition_penalty", "prediction", "verbosity", "reasoning_effort", "user")
        unknown = {"keep_alive": "5m", "repeat_penalty": 1.1}

        def program(problem, client):
            return text_of(ask(client, "a", "x", extra_body=dict.fromkeys(fields, 0.5) | unknown))

        workflow = Program(program, ["a"])
        with pytest.warns(UserWarning, match="has no effect") as found:
            play_programs(workflow, count=2)
            play_programs(workflow)
        assert len(found) == 1
        assert all(name in str(found[0].message) for name in (*fields, *unknown))

    def test_names_and_strict_tools_are_told(self):
        tools = [{"type": "function", "function": {"name": "run", "strict": True}}]

        def program(problem, client):
            messages = [{"role": "user", "name": "Ada", "content": "x"}]
            return text_of(client.chat.completions.create(model="a", messages=messages, tools=tools))

        workflow = Program(program, ["a"])
        workflow.knows_tools = True
        with pytest.warns(UserWarning, match=r"name \(of messages\), strict \(of tools\)"):
            [episode], _ = play_programs(workflow)
        assert episode.rows[0].prompt.tools == tools

    def test_an_endpoint_gets_no_tools_and_no_limits(self):
        endpoint = Endpoint("gpt-4o-mini", max_tokens=100)
        agents = [Agent("a", "a", endpoint=endpoint), Agent("b", "b")]
        tools = [{"type": "function", "function": {"name": "run"}}]
        found = []

        def program(problem, client):
            for options in ({"tools": tools}, {"max_tokens": 50}):
                with pytest.raises(openai.BadRequestError) as error:
                    ask(client, "a", "x", **options)
                found.append(error.value.message)
            return text_of(ask(client, "a", "x", max_tokens=100))

        play_programs(program, agents)
        assert "gets no tools" in found[0] and "set max_tokens of the Endpoint" in found[1]


class TestReplies:
    def test_usage_and_the_reason_of_the_end(self):
        async def program(problem, client):
            reply = await ask(client, "a", "x")
            return f"{reply.choices[0].finish_reason} {reply.usage.model_dump(exclude_none=True)}"

        [episode], _ = play_programs(program, answer=lambda rows: ["four"], end_tokens=[ord("r")])
        usage = {"completion_tokens": 4, "prompt_tokens": 1, "total_tokens": 5}
        assert episode.turns[0].solution == f"stop {usage}"
        [episode], _ = play_programs(program, answer=lambda rows: ["fou"], end_tokens=[ord("r")])
        assert episode.turns[0].solution.startswith("length ")

    def test_usage_of_a_stream(self):
        async def program(problem, client):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await ask(client, "a", "x", **options)]
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            return f"{reasons} {[chunk.usage.total_tokens for chunk in chunks if chunk.usage]}"

        [episode], _ = play_programs(program, end_tokens=[ord(")")])
        assert episode.turns[0].solution == "[None, 'stop'] [5]"

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("/responses", "ChatOpenAI(use_responses_api=False)"),
            ("/completions", "Use chat completions"),
            ("/embeddings", "Use chat completions"),
            ("/chat/completions/", "/v1/chat/completions, with base_url="),
            ("/../api/chat", "/v1/chat/completions, with base_url="),
            ("/models/gpt-4o", "['a']"),
        ],
    )
    @pytest.mark.parametrize("body", [{}, None], ids=["POST", "GET"])
    def test_other_paths_say_what_to_use(self, path, why, body):
        if body is not None and "models" in path:
            why = "Use chat completions"
        status, said, _ = posted(body, path)
        assert status == 404 and why in said["error"]["message"]

    def test_one_model(self):
        status, said, _ = posted(None, "/models/a")
        assert status == 200 and said["id"] == "a"


class TestRefusals:
    """What the server answers to calls that it cannot take."""

    @staticmethod
    def refused(max_calls=1, **options):
        """Status and message of a call, as the package openai has it."""
        found = []

        async def program(problem, client):
            try:
                await ask(client.with_options(max_retries=5), **{"model": "a", "text": "x", **options})
            except openai.APIStatusError as error:
                found.append((error.status_code, error.message))
            return text_of(await ask(client, "a", "y"))

        [episode], _ = play_programs(program, ["a", "b"], max_calls=max_calls)
        assert episode.turns[0].solution == "a(y)"
        [(status, message)] = found
        return status, message

    def test_unknown_models(self):
        status, message = self.refused(model="gpt-4o")
        assert status == 404 and "gpt-4o" in message and "['a', 'b']" in message

    @pytest.mark.parametrize(
        "option",
        [
            {"n": 2},
            {"logprobs": True},
            {"stop": ["\n"]},
            {"response_format": {"type": "json_object"}},
            {"tool_choice": "required"},
        ],
        ids=str,
    )
    def test_fields_that_would_change_the_reply(self, option):
        status, message = self.refused(**option)
        assert status == 400 and next(iter(option)) in message

    def test_tools_of_a_model_that_knows_none(self):
        status, message = self.refused(tools=[{"type": "function", "function": {"name": "f"}}])
        assert status == 400 and "Qwen3" in message

    @pytest.mark.parametrize(
        "body",
        [
            b"{",
            [],
            {"model": ["a"], "messages": [{"role": "user", "content": "x"}]},
            {"model": "a"},
            {"model": "a", "messages": "x"},
            {"model": "a", "messages": []},
            {"model": "a", "messages": [{"role": "user", "content": " "}]},
            {"model": "a", "messages": [{"content": "x"}]},
            {"model": "a", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            {"model": "a", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            {"model": "a", "messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]},
        ],
        ids=repr,
    )
    def test_bodies_without_a_sense(self, body):
        found = []

        def program(problem, client):
            found.append(post(str(client.base_url), client.api_key, body))
            return text_of(ask(client, "a", "y"))

        [episode], _ = play_programs(program)
        [(status, said)] = found
        assert status == 400 and said["error"]["message"]
        assert episode.turns[0].solution == "a(y)"

    def test_too_many_calls_are_refused_once(self):
        async def program(problem, client):
            first = text_of(await ask(client, "a", "x"))
            with pytest.raises(openai.RateLimitError, match="max_calls") as refused:
                await ask(client.with_options(max_retries=5), "a", "y")
            assert refused.value.response.headers["x-should-retry"] == "false"
            return first

        [episode], _ = play_programs(program, max_calls=1)
        assert len(episode.rows) == 1 and episode.turns[0].solution == "a(x)"

    @pytest.mark.parametrize("megabytes", [9, 100])
    def test_large_bodies(self, megabytes):
        async def program(problem, client):
            try:
                await ask(client, "a", "x" * (megabytes << 20))
            except openai.APIStatusError as error:
                assert error.status_code == 413
            except openai.APIConnectionError:  # the server reads no more
                pass
            else:
                raise AssertionError
            return text_of(await ask(client, "a", "y"))

        [episode], _ = play_programs(program)
        assert episode.turns[0].solution == "a(y)"

    def test_keys_of_others_and_of_nobody(self):
        keys, found = [], []

        def program(problem, client):
            keys.append(client.api_key)
            body = {"model": "a", "messages": [{"role": "user", "content": "x"}]}
            found.append([post(str(client.base_url), key, body)[0] for key in ("", "sk-x", *keys[:-1])])
            return text_of(ask(client, "a", "y"))

        for _ in range(2):
            play_programs(program)
        assert found == [[401, 401], [401, 401, 401]]
        assert len(set(keys)) == 2

    def test_a_call_that_nobody_waits_for_ends_with_the_program(self):
        async def program(problem, client):
            task = asyncio.ensure_future(ask(client, "a", "forgotten"))
            await asyncio.sleep(0)
            reply = text_of(await ask(client, "b", "y"))
            task.add_done_callback(lambda done: done.exception())
            return reply

        [episode], _ = play_programs(program, ["a", "b"])
        assert episode.turns[0].solution == "b(y)"

    def test_a_client_that_goes_away_may_ask_again(self, monkeypatch):
        monkeypatch.setattr("marcog_trl.workflows.program_server.SETTLE_SECONDS", 0.5)  # on a busy machine, too
        gone = asyncio.Event()

        async def program(problem, client):
            if problem["number"]:
                await gone.wait()  # and the stage for it
                return text_of(await ask(client, "a", "slow"))
            with pytest.raises(openai.APITimeoutError):
                await ask(client.with_options(timeout=0.5), "a", "x")
            gone.set()
            return text_of(await ask(client, "a", "y"))

        (episode, _), stages = play_programs(program, count=2, max_calls=1, stage_timeout=60)
        assert [len(rows) for rows in stages] == [2] and episode.turns[0].solution == "a(y)"

    def test_sampling_is_a_setting_of_the_team(self):
        async def program(problem, client):
            return text_of(await ask(client, "a", "x", temperature=0.1, seed=1, top_p=0.5))

        workflow = Program(program, ["a"])
        with pytest.warns(UserWarning, match="seed, temperature, top_p") as found:
            play_programs(workflow, count=3)
        assert len(found) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            play_programs(workflow)


class TestFailures:
    def test_an_exception_shows_the_lines_of_the_program(self):
        async def program(problem, client):
            await ask(client, "a", "x")
            raise KeyError("colour")

        failure = failed(program)
        assert failure.startswith("KeyError: 'colour'") and 'raise KeyError("colour")' in failure
        assert "site-packages" not in failure

    def test_a_refused_call_that_nobody_catches(self):
        async def program(problem, client):
            return await ask(client, "b", "x")

        assert "model='b' is not an agent" in failed(program)

    def test_the_last_refusal_is_told(self, command):
        """The error of a client may hide it."""
        script = ASK.replace("planner", "a") + "ask('a', 'x'); ask('gpt-4o', 'x')"
        with pytest.raises(ValueError, match="All episodes failed") as found, pytest.warns(UserWarning):
            play_programs(command(script))
        failure = str(found.value)
        assert "HTTP Error 404" in failure and "agent.py" in failure and "urllib/request.py" not in failure
        assert "The server refused a request of the program: model='gpt-4o' is not an agent" in failure

    def test_a_refusal_that_the_program_caught_is_told_if_it_fails(self):
        async def program(problem, client):
            with contextlib.suppress(openai.NotFoundError):
                await client.responses.create(model="a", input="x")
            await ask(client, "a", "x")
            raise KeyError("colour")

        failure = failed(program)
        assert failure.startswith("KeyError: 'colour'") and "set_default_openai_api('chat_completions')" in failure

    def test_a_refusal_that_leaves_no_call(self):
        async def program(problem, client):
            with contextlib.suppress(openai.BadRequestError):
                await ask(client, "a", "x", stop=["\n"])
            return "nothing"

        failure = failed(program)
        assert failure.startswith("it asked no agent") and "stop=['\\n'] is not supported" in failure

    def test_an_error_of_a_group_of_tasks(self):
        async def program(problem, client):
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(client, "b", "x"))

        assert failed(program).startswith("openai.NotFoundError: Error code: 404")

    def test_node(self, command, tmp_path):
        """Its errors begin with their message, and end with their fields."""
        said = [
            "file:///app/node_modules/openai/core/error.mjs:41",
            "            return new BadRequestError(status, error, message, headers);",
            "BadRequestError: 400 The messages cannot be used",
            "    at APIError.generate (file:///app/node_modules/openai/core/error.mjs:41:20)",
            "    at process.processTicksAndRejections (node:internal/process/task_queues:95:5)",
            "    at async file:///app/my_agent.mjs:4:10 {",
            *(f"  field{i}: null," for i in range(30)),
            "Node.js v20.20.2",
        ]
        script = f"import sys; sys.exit({chr(10).join(said)!r})"
        with pytest.raises(ValueError, match="All episodes failed") as found, pytest.warns(UserWarning):
            play_programs(command(script))
        failure = str(found.value)
        assert (
            "BadRequestError: 400 The messages cannot be used\n    at async file:///app/my_agent.mjs:4:10" in failure
        )
        assert "node_modules" not in failure and "field15" not in failure and failure.endswith("Node.js v20.20.2")

    def test_exit(self):
        async def program(problem, client):
            await ask(client, "a", "x")
            sys.exit(3)

        assert "it called exit" in failed(program)

    def test_time(self):
        async def program(problem, client):
            await ask(client, "a", "x")
            await asyncio.sleep(60)

        assert "program_timeout" in failed(program, program_timeout=2)

    def test_a_function_that_hangs(self):
        def program(problem, client):
            reply = text_of(ask(client, "a", "x"))
            if not problem["number"]:
                time.sleep(6)
            return reply

        with pytest.warns(UserWarning, match="program_timeout"):
            (bad, good), _ = play_programs(program, count=2, program_timeout=2)
        assert bad.masked and good.turns[0].solution == "a(x)"

    @pytest.mark.parametrize("returned", [None, 3, {}, {"solution": 3}, {"rewards": 1}], ids=repr)
    def test_no_solution(self, returned):
        async def program(problem, client):
            await ask(client, "a", "x")
            return returned

        assert f"it returned {returned!r}" in failed(program)

    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("reward", "Did you mean 'rewards'?"),
            ("Rewards", "Did you mean 'rewards'?"),
            ("notes", "Return 'solution'"),
        ],
    )
    def test_keys_of_the_result_that_nobody_reads(self, key, hint):
        async def program(problem, client):
            return {"solution": text_of(await ask(client, "a", "x")), key: 1.0}

        failure = failed(program)
        assert f"unknown key {key!r}" in failure and hint in failure

    @pytest.mark.parametrize(
        "rewards",
        [
            {"b": 1.0},
            {"a": "much"},
            {"a": None},
            "much",
            "1",
            float("nan"),
            {"a": float("inf")},
            [1.0],
            10**309,
            torch.empty((), device="meta"),
            np.float32("nan"),
            torch.tensor(float("inf")),
            np.array([1.0]),
            torch.ones(1),
            np.str_("1"),
            1j,
        ],
        ids=repr,
    )
    def test_rewards_without_a_sense(self, rewards):
        async def program(problem, client):
            return {"solution": text_of(await ask(client, "a", "x")), "rewards": rewards}

        assert "its rewards=" in failed(program)

    @pytest.mark.parametrize(
        ("script", "why"),
        [
            ("import sys; print('here'); sys.exit('it broke')", "its exit code is 1\nit broke"),
            ("import os; os.kill(os.getpid(), 9)", "its exit code is -9"),
            ("import time; time.sleep(60)", "program_timeout"),
            ("import os; os.write(1, b'\\xff\\xfe')", "not text in UTF-8"),
            ("print('x' * (9 << 20))", "more than 8 MiB"),
            ("import os; os.write(2, b'x' * (9 << 20)); import time; time.sleep(60)", "more than 8 MiB"),
            ("print(1)", "it asked no agent"),
        ],
    )
    def test_commands(self, command, script, why):
        with pytest.raises(ValueError, match="All episodes failed") as found, pytest.warns(UserWarning):
            play_programs(command(script), program_timeout=5)
        assert why in str(found.value)

    def test_processes_of_a_command_end_with_it(self, command, tmp_path):
        script = f"""
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(100)
"""
        with pytest.raises(ValueError, match="All episodes failed"), pytest.warns(UserWarning):
            play_programs(command(script), program_timeout=2)
        pid = int((tmp_path / "pid").read_text())
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
            if open(f"/proc/{pid}/stat").read().split()[2] == "Z":
                return
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}")

    def test_a_command_may_answer_in_json(self, command):
        script = SCRIPT.replace("print(solution)", "print(json.dumps({'rewards': 0.5, 'solution': solution}))")
        [episode], _ = play_programs(command(script), ["planner", "coder"])
        assert episode.turns[0].solution == "coder(planner(Write f.))"
        assert program_reward(advice=[episode.advice]) == [0.5]

    @pytest.mark.parametrize(
        "printed",
        [
            "'INFO loading\\n' + result",
            "'{\"level\": \"info\"}\\n' + result + '\\ndone'",
            "'a {\\n{ log\\n' + json.dumps(json.loads(result), indent=2)",
            "'\\ufeff' + result",
        ],
    )
    def test_a_log_beside_the_result_of_a_command(self, command, printed):
        told = f"result = json.dumps({{'rewards': 0.5, 'solution': solution}}); os.write(1, ({printed}).encode())"
        [episode], _ = play_programs(command(SCRIPT.replace("print(solution)", told)), ["planner", "coder"])
        assert episode.turns[0].solution == "coder(planner(Write f.))"
        assert program_reward(advice=[episode.advice]) == [0.5]

    @pytest.mark.parametrize("printed", ['{"answer": 42}', 'x = {\n  "solution": 1\n}', "{", '{"solution": 1} # no'])
    def test_json_that_is_a_solution(self, command, printed):
        script = SCRIPT.replace("print(solution)", f"print({printed!r})")
        [episode], _ = play_programs(command(script), ["planner", "coder"])
        assert episode.turns[0].solution == printed

    @pytest.mark.parametrize("printed", ['{"Solution": "x"}', '{"reward": 1}', '{"soluton": "x", "rewards": 1}'])
    def test_mistyped_json_of_a_command(self, command, printed):
        script = SCRIPT.replace("print(solution)", f"print({printed!r})")
        with pytest.raises(ValueError, match="Did you mean"), pytest.warns(UserWarning):
            play_programs(command(script), ["planner", "coder"])

    def test_zero_scores_an_empty_solution(self):
        async def program(problem, client):
            reply = text_of(await ask(client, "a", "x"))
            return reply if problem["number"] else None

        with pytest.warns(UserWarning, match="have an empty solution"):
            (bad, good), _ = play_programs(program, count=2, on_program_error="zero")
        assert (bad.masked, bad.turns[0].solution) == (False, "") and good.turns[0].solution == "a(x)"
        assert program_reward(advice=[bad.advice, good.advice]) == [0.0, None]

    def test_raise_stops_at_the_first_one(self):
        async def program(problem, client):
            await ask(client, "a", "x")
            return 1 // 0

        with pytest.raises(ValueError, match="ZeroDivisionError"):
            play_programs(program, on_program_error="raise")

    def test_each_kind_is_told_once(self):
        async def program(problem, client):
            await ask(client, "a", "x")
            if problem["number"] == 9:
                return "x"
            raise [KeyError, ValueError][problem["number"] % 2](problem["number"])

        with pytest.warns(UserWarning, match="A program failed") as found:
            play_programs(program, count=10)
        assert len(found) == 2

    def test_all(self):
        async def program(problem, client):
            raise RuntimeError("no database")

        with pytest.raises(ValueError, match=r"All episodes failed.*no database"), pytest.warns(UserWarning):
            play_programs(program, count=3)


class TestDeclaration:
    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"agents": "a"}, "agents='a'"),
            ({"agents": []}, "agents="),
            ({"agents": ["a", "a"]}, "2 agents named 'a'"),
            ({"max_calls": 0}, "max_calls=0"),
            ({"max_calls": {"b": 1}}, "max_calls={'b': 1}"),
            ({"program_timeout": -1}, "program_timeout=-1"),
            ({"stage_timeout": 0}, "stage_timeout=0"),
            ({"on_program_error": "skip"}, "on_program_error='skip'"),
            ({"program": 3}, "program=3"),
            ({"program": "no-such-program x"}, "no-such-program"),
            ({"program": "'"}, "is not a command"),
            ({"program": lambda problem: ""}, "client"),
            ({"program": functools.partial(two, client=None)}, "client"),
            ({"agents": [Agent("a", "a", tools=[print])]}, "has tools"),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    def test_what_cannot_be_played_is_refused(self, arguments, match):
        with pytest.raises(ValueError, match=match):
            Program(**{"program": two, "agents": ["a"], **arguments}).validate()

    @pytest.mark.parametrize(
        ("rewards", "expected"),
        [
            (0.5, 0.5), ({"a": 1}, {"a": 1, "b": 0}), (None, None), (True, 1), (np.sum([1, 0, 1]), 2), (np.float32(0.5), 0.5),
            (np.bool_(True), 1), ({"a": np.int64(1), "b": torch.tensor(0.5)}, {"a": 1, "b": 0.5}), (np.array(0.5), 0.5),
            (torch.tensor(True), 1), (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5), (Fraction(1, 2), 0.5),
        ],
        ids=repr,
    )  # fmt: skip
    def test_a_program_may_reward(self, rewards, expected):
        async def program(problem, client):
            return {"solution": text_of(await ask(client, "a", "x")), "rewards": rewards}

        [episode], _ = play_programs(program, ["a", "b"])
        assert program_reward(advice=[episode.advice]) == [expected]
        found = expected.values() if isinstance(expected, dict) else [expected]
        given = episode.advice[-1].rewards
        assert all(
            value is None or type(value) is float for value in (given.values() if isinstance(given, dict) else [given])
        )
        assert len(found) == (2 if isinstance(given, dict) else 1)

    def test_rewards_of_a_program_need_one(self):
        with pytest.raises(ValueError, match="needs a program"):
            program_reward(advice=[[]])


class TestForks:
    """Trees of episodes: the first replies are shared."""

    @staticmethod
    def tree(program, agents=("planner", "coder"), replies=(2, 2), count=2, **options):
        workflow = Program(program, list(agents), max_calls=1, **options)
        asked = []

        def answer(rows):
            asked.append([(row.slot.agent, row.prompt[-1]["content"]) for row in rows])
            return [f"{row.slot.agent}{len(asked)}{i}" for i, row in enumerate(rows)]

        problems = [{**PROBLEM, "number": i} for i in range(count)]
        stages = Tree.of_stages([(slot,) for slot in workflow.slots], replies)
        [episodes] = play_tree(workflow, problems, *written(answer), stages)
        return episodes, asked

    @pytest.mark.parametrize("program", [two, two_sync])
    def test_a_replayable_program_branches(self, program):
        episodes, asked = self.tree(program, replayable=True)
        assert [len(stage) for stage in asked] == [4, 8]
        assert asked[1] == [("coder", f"planner1{i}") for i in range(4) for _ in range(2)]
        assert [episode.turns[0].solution for episode in episodes] == [f"coder2{i}" for i in range(8)]

    def test_slow_programs_branch_together(self):
        async def slow(problem, client):
            plan = text_of(await ask(client, "planner", "x"))
            await asyncio.sleep(0.5 * problem["number"])
            return text_of(await ask(client, "coder", plan))

        _, asked = self.tree(slow, replayable=True, stage_timeout=0.1)
        assert [len(stage) for stage in asked] == [4, 8]

    @pytest.mark.parametrize("how", ["other text", "other agent", "less"])
    def test_a_program_that_is_not_replayable_is_found(self, how):
        runs = []

        async def fickle(problem, client):
            runs.append(1)
            again = len(runs) > 1
            if again and how == "less":
                return "x"
            agent = "coder" if again and how == "other agent" else "planner"
            text = f"x{len(runs)}" if how == "other text" else "x"
            return text_of(await ask(client, agent, text))

        with pytest.raises(ValueError, match="not replayable"):
            self.tree(fickle, replayable=True, count=1)
