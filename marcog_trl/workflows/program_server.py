"""
Runs programs, and answers their requests as an OpenAI-compatible server.

One server per process listens on 127.0.0.1. The API key of a request names the [`Run`] that it belongs to, and ends with it.
A request waits until the workflow has a reply for it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import re
import resource
import secrets
import shlex
import signal
import subprocess
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from trl.trainer.utils import is_async_callable, start_event_loop_in_daemon

from marcog_trl.agents import LATER
from marcog_trl.checks import nearest
from marcog_trl.parsing.prompts import ChatReply, ChatRequest, Prompt
from marcog_trl.problems.schema import fault_of_prompt
from marcog_trl.tracebacks import own_frames


BODY_BYTES = 8 << 20
OUTPUT_BYTES = 8 << 20
SETTLE_SECONDS = 0.03
_LIMITS = ("max_tokens", "max_completion_tokens", "max_completion_length", "max_new_tokens")
_TAKEN = {"model", "messages", "tools", "stream", "stream_options", *_LIMITS}
# Fields that say what a reply must be or what it is read from, or that ask for more than a reply -> values that hold anyway
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,),
    "audio": (), "modalities": (["text"],), "web_search_options": (),
    # Where it ends
    "stop": ([], ""), "stop_sequences": ([],), "stop_token_ids": ([],), "stop_regex": ([], ""), "min_tokens": (0,),
    "ignore_eos": (False,),
    # Its format and its words
    "response_format": ({"type": "text"},), "structured_outputs": ({},), "format": ("",), "json_schema": (), "regex": (),
    "ebnf": (), "grammar": ("",), "guided_json": (), "guided_json_object": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "logit_bias": ({}, []), "bad_words": ([],), "allowed_token_ids": (), "skip_special_tokens": (True,),
    # Calls of tools
    "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,), "functions": ([],), "function_call": ("auto", "none"),
    # The prompt
    "prompt": (), "chat_template": (), "chat_template_kwargs": ({},), "enable_thinking": (), "documents": ([],),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    "truncate_prompt_tokens": (), "lora_path": (),
}  # fmt: skip
# Fields that a reply need not keep to, as all that are not known -> values that hold anyway
_IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (), "min_p": (), "repetition_penalty": (), "presence_penalty": (0,),
    "frequency_penalty": (0,), "seed": (), "reasoning_effort": (), "verbosity": (), "prediction": (), "service_tier": (),
    "user": (), "store": (False,), "metadata": ({},),
}  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool")
_RESPONSES = (
    "Switch the SDK to chat completions. OpenAI: client.chat.completions.create(...). Agents SDK: "
    "set_default_openai_api('chat_completions'), in JavaScript setOpenAIAPI('chat_completions'). LangChain: "
    "ChatOpenAI(use_responses_api=False). AI SDK of Vercel: openai.chat('agent')."
)


@dataclass(frozen=True)
class Call:
    """A request of a program: what it asks an agent (`str`)."""

    agent: str
    prompt: Prompt


@dataclass(frozen=True)
class Result:
    """
    How a program ended.

    Args:
        solution (`str`): The solution.
        rewards (`float` or `Mapping[str, float]`, *optional*): Its own reward, for all agents or by agent.
        failure (`str`, *optional*): Why it failed, if it did.
        differs (`bool`): Whether it asked something else than before, given the same replies.
        refusal (`str`, *optional*): Why the last of its requests that were refused was.
    """

    solution: str = ""
    rewards: float | Mapping[str, float] | None = None
    failure: str | None = None
    differs: bool = False
    refusal: str | None = None


@dataclass(eq=False)
class _Pending:
    call: Call
    reply: asyncio.Future[str]


class _Refusal(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Run:
    """
    One run of a program: an episode.

    Args:
        program (`Callable` or `str`): The program: a function or a coroutine function of problem and client, or a command.
        problem (`dict`): The dataset row.
        calls_left (`dict[str, int]`): How often each agent may be asked.
        timeout (`float`): Seconds that the program may take between two calls.
        check (`Callable`): `check(agent, request)` raises a `ValueError` if the agent cannot answer the request.
        holds (`Mapping[str, Any]`): Values that hold for fields of requests: settings of the team.

    Attributes:
        key (`str`): Its API key.
        result ([`Result`], *optional*): How it ended, once it has.
        ignored (`set[str]`): Fields of its requests that changed nothing.
        refusal (`str`, *optional*): Why the last request that was refused was.
    """

    program: Callable | str
    problem: dict[str, Any]
    calls_left: dict[str, int]
    timeout: float
    check: Callable[[str, ChatRequest], None]
    holds: Mapping[str, Any]
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    result: Result | None = None
    ignored: set[str] = field(default_factory=set)
    refusal: str | None = None
    _pending: list[_Pending] = field(default_factory=list)
    _asked: list[_Pending] = field(default_factory=list)
    _recorded: list[tuple[Call, str]] = field(default_factory=list)
    _busy_since: float | None = None
    _end: Callable[[], object] = lambda: None

    def answer(self, calls: Sequence[Call], replies: Sequence[str]) -> None:
        """Answers calls. Before the program has started, they are recorded for the calls that it will make first."""
        if self._busy_since is None:
            self._recorded += zip(calls, replies, strict=True)
        else:
            server().loop.call_soon_threadsafe(self._answer, replies)

    def close(self) -> None:
        """Ends the program, and its key."""
        if self._busy_since is not None:
            server().loop.call_soon_threadsafe(self._close)

    # In the thread of the server

    @property
    def is_busy(self) -> bool:
        """Whether the program computes, instead of waiting for a reply."""
        return self.result is None and not self._pending

    @property
    def seconds_left(self) -> float:
        """Time until the program has computed too long."""
        assert self._busy_since is not None
        return self._busy_since + self.timeout - time.monotonic()

    def start(self) -> None:
        """Starts the program, unless it runs."""
        if self._busy_since is not None:
            return
        self._busy_since = time.monotonic()
        server().runs[self.key] = self
        program = self.program
        if isinstance(program, str):
            task = asyncio.ensure_future(self._run_command(program))
            task.add_done_callback(self._ended)
            self._end = task.cancel
            return
        if is_async_callable(program):
            running = asyncio.run_coroutine_threadsafe(_without_exit(program, self), _programs_loop())
            self._end = running.cancel
        else:  # nothing can end a thread, but its key ends
            running = _in_thread(program, self)
        running.add_done_callback(lambda done: server().loop.call_soon_threadsafe(self._ended, done))

    def next(self) -> tuple[Call, ...] | Result | Any:
        """The request that the program waits for, or its result. `LATER` if it computes."""
        if self.result is not None:
            return self.result
        if not self._pending:
            return LATER
        # Calls that are made at the same moment arrive in any order
        names = list(self.calls_left)
        self._asked = sorted(self._pending, key=lambda each: (names.index(each.call.agent), repr(each.call.prompt)))
        return tuple(pending.call for pending in self._asked)

    def expire(self) -> None:
        """Ends the program because it computed too long."""
        self._end()
        self._finish(
            Result(failure=f"it computed {self.timeout:g} seconds without a call. Set a longer program_timeout.")
        )

    def admit(self, body: Mapping[str, Any]) -> asyncio.Future[str]:
        """Takes a request. Raises `_Refusal`, or another error if it has an unknown format."""
        if isinstance(body.get("extra_body"), dict):  # the package of JavaScript sends it as it is
            body = {**body, **body["extra_body"], "extra_body": None}
        agent = body.get("model")
        if agent not in self.calls_left:
            raise _Refusal(
                404, f"model={agent!r:.80} is not an agent of the team. Use one of {list(self.calls_left)}."
            )
        ignored = self._without_effect(body)
        prompt = ChatRequest(_messages(body.get("messages")), _tools(body), _limit(body))
        try:
            self.check(agent, prompt)
        except ValueError as error:
            raise _Refusal(400, str(error)) from None
        if not self.calls_left[agent]:
            raise _Refusal(
                429,
                f"The program asked {agent!r} more often than max_calls allows. Set a higher max_calls, or ask less.",
            )
        ignored |= {"name (of messages)" for message in prompt if "name" in message and message["role"] != "tool"}
        ignored |= {"strict (of tools)" for tool in prompt.tools or () if tool["function"].get("strict")}
        self.ignored |= ignored
        self.calls_left[agent] -= 1
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        call = Call(agent, prompt)
        same = next((i for i, (before, _) in enumerate(self._recorded) if repr(before) == repr(call)), None)
        if same is not None:
            reply.set_result(self._recorded.pop(same)[1])
        elif self._recorded:
            self._finish(_differs(f"asked {agent!r} something else"))
            raise _Refusal(409, "The program is not replayable.")
        else:
            self._pending.append(_Pending(call, reply))
            server().notify()
        return reply

    def _without_effect(self, body: Mapping[str, Any]) -> set[str]:
        """Fields that change nothing, although they ask for it. Raises `_Refusal` for those that a reply must keep to."""
        found = set()
        for name, value in body.items():
            refused = name in _REFUSED
            harmless = _REFUSED[name] if refused else _IGNORED.get(name, ())
            if name in _TAKEN or value is None or value in harmless:
                continue
            if name in self.holds and value == self.holds[name]:
                continue
            if refused:
                raise _Refusal(400, f"{name}={value!r:.80} is not supported. Leave it out.")
            found.add(f"{name:.40}")
        return found

    def withdraw(self, reply: asyncio.Future[str]) -> None:
        """Forgets a call that the program does not wait for any more. It counts if its reply is being written."""
        for pending in self._pending:
            if pending.reply is reply and pending not in self._asked:
                self.calls_left[pending.call.agent] += 1
        self._pending = [pending for pending in self._pending if pending.reply is not reply]
        self._busy_since = time.monotonic()
        server().notify()

    def _answer(self, replies: Sequence[str]) -> None:
        for pending, reply in zip(self._asked, replies, strict=True):
            if not pending.reply.done():
                pending.reply.set_result(reply)
        self._pending = [pending for pending in self._pending if pending not in self._asked]
        self._busy_since = time.monotonic()

    def _ended(self, done: Any) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            result = Result(failure="it was cancelled.")
        elif error is not None:
            result = Result(failure=_own_lines(error))
        elif isinstance(done.result(), Result):
            result = done.result()
        else:
            result = _result(done.result(), list(self.calls_left))
        self._finish(result if not self._recorded else _differs("asked less"))

    def _finish(self, result: Result) -> None:
        if self.result is None:
            self.result = dataclasses.replace(result, refusal=self.refusal)
            server().notify()

    def _close(self) -> None:
        server().runs.pop(self.key, None)
        self._end()
        for pending in self._pending:
            pending.reply.cancel()
        self._pending = []

    async def _run_command(self, command: str) -> Any:
        """Runs a command with the problem as JSON on standard input, and returns its standard output."""
        local = "127.0.0.1,localhost"
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=OUTPUT_BYTES,
            start_new_session=True,
            env={**os.environ, "OPENAI_BASE_URL": server().url, "OPENAI_API_KEY": self.key}
            | {"OPENAI_API_BASE": server().url}  # the name that LangChain and LiteLLM read first
            | {
                name: f"{local},{os.environ[name]}" if os.environ.get(name) else local
                for name in ("NO_PROXY", "no_proxy")
            },
        )
        try:
            assert process.stdin and process.stdout and process.stderr
            reading = asyncio.gather(_read(process.stdout), _read(process.stderr))
            with suppress(ConnectionError):  # a program need not read the problem
                process.stdin.write(json.dumps(self.problem, default=str).encode())
                await process.stdin.drain()
            process.stdin.close()
            output, errors = await reading
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            said = _own_output(errors.decode(errors="replace"))
            return Result(failure="\n".join([f"its exit code is {process.returncode}", *said]))
        try:
            text = output.decode("utf-8-sig")
        except UnicodeDecodeError:
            return Result(failure="its standard output is not text in UTF-8")
        return _printed(text)


async def _read(pipe: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while part := await pipe.read(1 << 16):
        found += part
        if len(found) > OUTPUT_BYTES:
            raise ValueError(f"it wrote more than {OUTPUT_BYTES >> 20} MiB")
    return bytes(found)


def _differs(how: str) -> Result:
    return Result(
        failure=f"it is not replayable: given the same replies, it {how}. Set replayable=False, or remove what differs between "
        "two runs, such as the time or random numbers.",
        differs=True,
    )


_RESULT = ("solution", "rewards")
_DECODER = json.JSONDecoder()


def _printed(text: str) -> Any:
    """What a command printed: its result, if that is JSON on lines of its own, perhaps among lines of a log; else text."""
    found, end = None, 0
    for match in re.finditer(r"^[ \t]*(?=\{)", text, re.MULTILINE):
        if match.start() < end:
            continue
        try:
            value, end = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        alone = not text[end:].partition("\n")[0].strip()
        if alone and ("solution" in value or (value and all(nearest(key.lower(), _RESULT) for key in value))):
            found = value
    return text.strip() if found is None else found


def _result(returned: Any, agents: list[str]) -> Result:
    solution, rewards = returned, None
    if isinstance(returned, Mapping):
        for key in returned:
            if key not in _RESULT:
                near = nearest(str(key).lower(), _RESULT)
                hint = f"Did you mean {near!r}?" if near else f"Return {_RESULT[0]!r} and {_RESULT[1]!r} only."
                return Result(failure=f"its result has an unknown key {key!r:.40}. {hint}")
        solution, rewards = returned.get("solution"), returned.get("rewards")
    if not isinstance(solution, str):
        return Result(
            failure=f"it returned {returned!r:.80}. Return the solution as text, or a dict with 'solution' and 'rewards'."
        )
    try:
        if isinstance(rewards, Mapping) and not set(rewards) - set(agents):
            return Result(solution, {agent: _reward(rewards.get(agent, 0.0)) for agent in agents})
        return Result(solution, None if rewards is None else _reward(rewards))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not numbers
        return Result(
            failure=f"its rewards={rewards!r:.80} are neither a number nor numbers of agents among {agents}."
        )


def _reward(given: Any) -> float:
    """A number of Python, NumPy or PyTorch. Raises an error if it is something else, or not finite."""
    if isinstance(given, str | bytes) or getattr(given, "ndim", 0) != 0:
        raise TypeError(f"{given!r} is not a number")
    number = float(given.item() if hasattr(given, "item") else given)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of a request, as chat templates take them. Raises `_Refusal`."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Refusal(400, f"messages={messages!r:.80} is not a list of chat messages.")
    chat = []
    for message in messages:
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in _ROLES:
            raise _Refusal(400, f"A message has role={role!r:.80}. Use one of {['developer', *_ROLES]}.")
        if message.get("function_call"):
            raise _Refusal(400, "A message has a function_call. Send tool_calls, and results with the role 'tool'.")
        calls = message.get("tool_calls")
        made = {"role": role, "content": _content(role, message.get("content"))}
        if calls:
            made["tool_calls"] = [_with_arguments(call) for call in calls]
        for name in ("tool_call_id", "name", "reasoning_content"):
            if message.get(name) is not None:
                made[name] = message[name]
        chat.append(made)
    if (fault := fault_of_prompt(chat)) is not None:
        raise _Refusal(400, f"The messages cannot be used: {fault.replace('its prompt', 'messages')}.")
    try:
        json.dumps(chat, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Refusal(
            400, "The messages have half of a surrogate pair, which is no text: a character was cut."
        ) from None
    return chat


def _content(role: str, content: Any) -> str:
    """The text of a message: the assistant and tools may say nothing, and tools may give any JSON."""
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):
        return ""
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        kinds = {str(part["type"]) for part in content}
        if kinds != {"text"}:
            raise _Refusal(400, f"A message has parts of the kinds {sorted(kinds)}. Only text is supported.")
        return "".join(part["text"] for part in content)
    if role == "tool":
        return json.dumps(content, ensure_ascii=False)
    raise _Refusal(400, f"A message of the role {role!r} has content={content!r:.80}, which is no text.")


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as a dict, which chat templates expect, in place of JSON."""
    try:
        function = {**call["function"]}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, LookupError, TypeError):
        raise _Refusal(400, f"The call of a tool {call!r:.80} has no arguments in JSON.") from None
    if not isinstance(function.get("name"), str):
        raise _Refusal(400, f"The call of a tool {call!r:.80} has no name of a function.")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a request, if the model may call some. Raises `_Refusal`."""
    tools = body.get("tools") or []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Refusal(
                400,
                f"tools has {tool!r:.80}, which chat completions do not know. Describe functions: "
                "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}.",
            )
    return tools if tools and body.get("tool_choice") != "none" else None


def _limit(body: Mapping[str, Any]) -> int | None:
    """Tokens that a reply may have at most, if a request says so. Raises `_Refusal`."""
    limits = {name: body[name] for name in _LIMITS if body.get(name) is not None}
    for name, number in limits.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise _Refusal(400, f"{name}={number!r:.80} is not a number of tokens. Set at least 1, or leave it out.")
    return min(limits.values(), default=None)


class Server:
    """
    The server of this process.

    Attributes:
        url (`str`): Its `base_url`.
        runs (`dict[str, Run]`): Programs that run, by key.
        loop (`asyncio.AbstractEventLoop`): Its event loop, in a thread of its own.
    """

    def __init__(self) -> None:
        # A call that waits has two ends in this process
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if most != resource.RLIM_INFINITY else 1 << 16, most))
        _, self.loop, ready = start_event_loop_in_daemon(name="marcog_trl-programs")
        ready.wait()
        self.runs: dict[str, Run] = {}
        self._arrivals = 0
        self._changed = asyncio.Event()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()
        atexit.register(self._end_all)

    async def _listen(self) -> str:
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model:.+}", self._list_models)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    def advance(self, runs: Sequence[Run], stage_timeout: float) -> list[Any]:
        """
        Waits until every program has ended or waits for replies, or `stage_timeout` seconds if at least one does.

        Args:
            runs (`Sequence[Run]` of length R): The programs, which are started if they do not run.
            stage_timeout (`float`): The limit, in seconds.

        Returns:
            `list` of length R: Per program, a tuple of [`Call`]s, a [`Result`], or `LATER`.
        """
        return asyncio.run_coroutine_threadsafe(self._advance(runs, stage_timeout), self.loop).result()

    async def _advance(self, runs: Sequence[Run], stage_timeout: float) -> list[Any]:
        for run in runs:
            run.start()
        end = time.monotonic() + stage_timeout
        while True:
            changed, arrivals = self._changed, self._arrivals
            busy = [run for run in runs if run.is_busy]
            for run in busy:
                if run.seconds_left <= 0:
                    run.expire()
            busy = [run for run in busy if run.is_busy]
            enough = not busy or (len(busy) < len(runs) and time.monotonic() >= end)
            waits = [run.seconds_left for run in busy] + ([end - time.monotonic()] if len(busy) < len(runs) else [])
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS if enough else max(min(waits), SETTLE_SECONDS)):
                    await changed.wait()
            if enough and self._arrivals == arrivals:
                return [run.next() for run in runs]

    def _end_all(self) -> None:
        """Ends the programs that still run when this process ends."""

        async def end() -> None:
            for run in [*self.runs.values()]:
                run._close()
            await asyncio.sleep(0)  # lets them kill their processes

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(timeout=5)

    def notify(self) -> None:
        """Wakes up who waits for programs."""
        self._arrivals += 1
        self._changed, changed = asyncio.Event(), self._changed
        changed.set()

    def _run_of(self, request: web.Request) -> Run:
        run = self.runs.get(_key(request))
        if run is None or run.result is not None:
            raise _Refusal(
                401,
                "The API key belongs to no episode that is played now. Use the client that the program receives, or its api_key; "
                "commands find it in OPENAI_API_KEY.",
            )
        return run

    async def _list_models(self, request: web.Request) -> web.Response:
        agents = self._run_of(request).calls_left
        models = {name: {"id": name, "object": "model", "created": 0, "owned_by": "marcog_trl"} for name in agents}
        asked = request.match_info.get("model")
        if asked is None:
            return web.json_response({"object": "list", "data": list(models.values())})
        if asked not in models:
            raise _Refusal(404, f"model={asked!r:.80} is not an agent of the team. Use one of {list(agents)}.")
        return web.json_response(models[asked])

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        self._run_of(request)
        hint = f"Use chat completions, POST {self.url}/chat/completions, with base_url='{self.url}'."
        if request.path.rstrip("/").endswith("/responses"):
            hint = _RESPONSES
        raise _Refusal(404, f"{request.method} {request.path} is not served. {hint}")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request)
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise _Refusal(400, "The body of the request is not a JSON object.")
        try:
            reply = run.admit(body)
        except (AttributeError, LookupError, TypeError) as error:
            raise _Refusal(400, f"The body of the request cannot be read: {error!r}.") from None
        try:
            text = await reply
        except asyncio.CancelledError:
            if run.key in self.runs:  # the client went away
                run.withdraw(reply)
                raise
            raise _Refusal(401, "The episode has ended.") from None
        return await _respond(request, body, text)


async def _respond(request: web.Request, body: Mapping[str, Any], text: str) -> web.StreamResponse:
    reply = text if isinstance(text, ChatReply) else ChatReply(text)
    message: dict[str, Any] = {"role": "assistant", "content": str(reply)}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "index": i,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for i, call in enumerate(reply.calls)
        ]
    reason = "length" if reply.truncated else "tool_calls" if reply.calls else "stop"
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    base["object"] = "chat.completion.chunk"
    chunks = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in ((message, None), ({}, reason))
    ]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**base, "choices": [], "usage": usage})
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    try:
        return await handler(request)
    except _Refusal as refusal:
        status, message = refusal.status, str(refusal)
    except web.HTTPException as error:
        status, message = error.status, f"{request.method} {request.path}: {error.reason}."
    if (run := server().runs.get(_key(request))) is not None:
        run.refusal = message
    content = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
    return web.json_response(content, status=status, headers={"x-should-retry": "false"})


@functools.cache
def server() -> Server:
    """The server of this process, started when it is first needed."""
    return Server()


# Programs in this process


@functools.cache
def _programs_loop() -> asyncio.AbstractEventLoop:
    """The loop of all coroutine functions, which may block without blocking the server."""
    _, loop, ready = start_event_loop_in_daemon(name="marcog_trl-coroutines")
    ready.wait()
    return loop


@functools.cache
def _clients() -> tuple[Any, Any]:
    """Clients whose connections all programs of this process share: `openai.OpenAI` and `openai.AsyncOpenAI`."""
    import httpx
    import openai

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    options: dict[str, Any] = {"api_key": "none", "base_url": server().url, "max_retries": 0, "timeout": None}
    wire: dict[str, Any] = {"limits": limits, "timeout": None, "trust_env": False}  # proxies are not asked
    return (
        openai.OpenAI(**options, http_client=openai.DefaultHttpxClient(**wire)),
        openai.AsyncOpenAI(**options, http_client=openai.DefaultAsyncHttpxClient(**wire)),
    )


async def _without_exit(program: Callable, run: Run) -> Any:
    try:
        return await program(run.problem, _clients()[1].with_options(api_key=run.key))
    except SystemExit as error:  # would end the loop
        raise RuntimeError(f"it called exit: {error!r}").with_traceback(error.__traceback__) from None


def _in_thread(program: Callable, run: Run) -> Any:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(program(run.problem, _clients()[0].with_options(api_key=run.key)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="marcog_trl-program").start()
    return future


def _own_lines(error: BaseException) -> str:
    """The error, and the last ten lines of its traceback that are in the user's own files."""
    while isinstance(error, BaseExceptionGroup):  # as of `asyncio.TaskGroup`
        error = error.exceptions[0]
    lines = "".join(traceback.format_list(own_frames(error))).rstrip().splitlines()[-10:]
    return "\n".join([*"".join(traceback.format_exception_only(error)).rstrip().splitlines()[:3], *lines])


_FRAME = re.compile(r"\s*(File \"|at |file://|/)")
_IN_PACKAGE = re.compile(r"(site-packages|dist-packages|node_modules|lib[/\\]python3\.\d+)[/\\]|node:internal")
_MOST_OUTPUT = 16  # lines


def _own_output(text: str) -> list[str]:
    """The first and the last lines of an error output, without blank lines, and without frames of Python, Node and packages."""
    lines, in_package = [], False
    for line in text.splitlines():
        if _FRAME.match(line):
            in_package = _IN_PACKAGE.search(line) is not None
        elif not line.startswith("    "):
            in_package = False
        if line.strip() and not in_package:
            lines.append(line)
    half = _MOST_OUTPUT // 2
    return lines if len(lines) <= _MOST_OUTPUT else [*lines[:half], "...", *lines[-half:]]
