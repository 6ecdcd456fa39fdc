"""
Runs programs, and answers their requests as an OpenAI-compatible server.

One server per process listens on 127.0.0.1. The API key of a request names the [`Run`] that it belongs to, and ends with it.
A request waits until the workflow has a reply for it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import json
import math
import os
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
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from aiohttp import web
from trl.trainer.utils import is_async_callable, start_event_loop_in_daemon

from marcog_trl.agents import LATER
from marcog_trl.parsing.prompts import Prompt, ToolCalls, ToolChat
from marcog_trl.problems.schema import fault_of_prompt


BODY_BYTES = 8 << 20
OUTPUT_BYTES = 8 << 20
SETTLE_SECONDS = 0.03
_IGNORED = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "logit_bias",
    "reasoning_effort",
    "presence_penalty",
    "frequency_penalty",
)
_REFUSED: dict[str, tuple[Any, ...]] = {  # field -> values that change nothing
    "n": (None, 1),
    "logprobs": (None, False),
    "stop": (None, [], ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}


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
    """

    solution: str = ""
    rewards: float | Mapping[str, float] | None = None
    failure: str | None = None
    differs: bool = False


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
        knows_tools (`bool`): Whether the model can call tools.

    Attributes:
        key (`str`): Its API key.
        result ([`Result`], *optional*): How it ended, once it has.
        ignored (`set[str]`): Fields of its requests that changed nothing.
    """

    program: Callable | str
    problem: dict[str, Any]
    calls_left: dict[str, int]
    timeout: float
    knows_tools: bool
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    result: Result | None = None
    ignored: set[str] = field(default_factory=set)
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
        agent = body.get("model")
        if agent not in self.calls_left:
            raise _Refusal(404, f"model={agent!r} is not an agent of the team. Use one of {list(self.calls_left)}.")
        for name, harmless in _REFUSED.items():
            if body.get(name) not in harmless:
                raise _Refusal(400, f"{name}={body[name]!r:.80} is not supported. Leave it out.")
        prompt = _messages(body.get("messages"))
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        if tools and not self.knows_tools:
            raise _Refusal(
                400,
                "tools need a model whose chat template describes tools, and whose calls TRL can read, such as Qwen2.5, "
                "Qwen3 or Llama 3.1. Leave tools out, or use such a model.",
            )
        if tools:
            prompt = ToolChat(prompt, tools)
        if not self.calls_left[agent]:
            raise _Refusal(
                429,
                f"The program asked {agent!r} more often than max_calls allows. Set a higher max_calls, or ask less.",
            )
        self.ignored.update(name for name in _IGNORED if body.get(name) is not None)
        self.calls_left[agent] -= 1
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        call = Call(agent, prompt)
        same = next((i for i, (before, _) in enumerate(self._recorded) if before == call), None)
        if same is not None:
            reply.set_result(self._recorded.pop(same)[1])
        elif self._recorded:
            self._finish(_differs(f"asked {agent!r} something else"))
            raise _Refusal(409, "The program is not replayable.")
        else:
            self._pending.append(_Pending(call, reply))
            server().notify()
        return reply

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
            self.result = result
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
            said = errors.decode(errors="replace").strip().splitlines()[-10:]
            return Result(failure="\n".join([f"its exit code is {process.returncode}", *said]))
        try:
            text = output.decode()
        except UnicodeDecodeError:
            return Result(failure="its standard output is not text in UTF-8")
        try:
            found = json.loads(text)
        except ValueError:
            return text.strip()
        return found if isinstance(found, dict) and "solution" in found else text.strip()


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


def _result(returned: Any, agents: list[str]) -> Result:
    solution, rewards = returned, None
    if isinstance(returned, Mapping):
        solution, rewards = returned.get("solution"), returned.get("rewards")
    if not isinstance(solution, str):
        return Result(
            failure=f"it returned {returned!r:.80}. Return the solution as text, or a dict with 'solution' and 'rewards'."
        )
    if isinstance(rewards, Mapping) and not set(rewards) - set(agents):
        rewards = {agent: rewards.get(agent, 0.0) for agent in agents}
        numbers = list(rewards.values())
    else:
        numbers = [] if rewards is None else [rewards]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return Result(
            failure=f"its rewards={rewards!r:.80} are neither a number nor numbers of agents among {agents}."
        )
    return Result(solution, rewards)


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of a request, as chat templates take them. Raises `_Refusal`."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Refusal(400, f"messages={messages!r:.80} is not a list of chat messages.")
    chat = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
            if kinds - {"text"}:
                raise _Refusal(400, f"A message has parts of the kinds {kinds}. Only text is supported.")
            content = "".join(part["text"] for part in content)
        role = "system" if message.get("role") == "developer" else message.get("role")
        made = {"role": role, "content": "" if content is None else content}
        if message.get("tool_calls"):
            made["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        chat.append(made)
    if (fault := fault_of_prompt(chat)) is not None:
        raise _Refusal(400, f"The messages cannot be used: {fault.replace('its prompt', 'messages')}.")
    return chat


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as a dict, which chat templates expect, in place of JSON."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, LookupError, TypeError):
        raise _Refusal(400, f"The call of a tool {call!r:.80} has no arguments in JSON.") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}


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
        run = self.runs.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if run is None or run.result is not None:
            raise _Refusal(401, "The API key belongs to no episode that is played now.")
        return run

    async def _list_models(self, request: web.Request) -> web.Response:
        agents = self._run_of(request).calls_left
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "marcog_trl"} for name in agents]
        return web.json_response({"object": "list", "data": models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request)
        try:
            body = await request.json()
        except ValueError:
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
    message: dict[str, Any] = {"role": "assistant", "content": str(text)}
    reason = "stop"
    if isinstance(text, ToolCalls):
        reason = "tool_calls"
        message["tool_calls"] = [
            {
                "index": i,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for i, call in enumerate(text.calls)
        ]
    base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return web.json_response({**base, "object": "chat.completion", "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for delta, end in ((message, None), ({}, reason)):
        chunk = {**base, "object": "chat.completion.chunk"}
        chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": end}]
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    try:
        return await handler(request)
    except _Refusal as refusal:
        status, message = refusal.status, str(refusal)
    except web.HTTPException as error:
        status, message = error.status, f"{request.method} {request.path}: {error.reason}."
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
    paths = get_paths()
    others = (str(Path(__file__).parents[1]), paths["stdlib"], paths["purelib"], paths["platlib"], "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    lines = "".join(traceback.format_list(frames)).rstrip().splitlines()[-10:]
    return "\n".join([*"".join(traceback.format_exception_only(error)).rstrip().splitlines()[:3], *lines])
