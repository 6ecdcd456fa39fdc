"""Runs a program and its tests in a confined child."""

import builtins
import io
import os
import random
import socket
import sys
import traceback
import types
import unittest
from typing import Any

from . import wire
from .confine import Confinement


_PRELOADED = (
    "abc array ast asyncio base64 bisect calendar cmath collections contextlib copy csv ctypes dataclasses datetime decimal "
    "enum fractions functools hashlib heapq inspect io itertools json math numbers operator os random re statistics "
    "string struct textwrap threading time traceback types typing unittest.mock uuid warnings"
)


def preload() -> None:
    """Imports what programs commonly import, so that children find it in memory."""
    for name in _PRELOADED.split():
        __import__(name)


def child(fd: int, confinement: Confinement) -> None:
    """Reads one job from the channel, runs it, and never returns."""
    try:
        sock = socket.socket(fileno=fd)
        job = wire.receive(sock)
        confinement.confine_child(job["memory_mb"] << 20, int(job["timeout"]) + 1)
        random.seed(0)
        run(job, sock)
    finally:
        os._exit(0)


def run(job: dict, sock: socket.socket) -> None:
    if job["format"] == "stdio":
        stdio(job, sock)
        return
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.stdin = io.StringIO("")
    try:
        exec(compile(job["code"], "<solution>", "exec"), module.__dict__)
    except BaseException as error:
        wire.send(sock, {"load": describe(error)})
        return
    missing = [name for name in job["exports"] if name not in module.__dict__]
    if missing and (job["entry_point"] is None or job["entry_point"] in missing):
        wire.send(sock, {"load": f"the program does not define {', '.join(missing)}"})
        return
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    space.update((name, module.__dict__[name]) for name in job["exports"] if name not in missing)
    try:
        exec(compile(job["setup"], "<setup>", "exec"), space)
        if job["format"] != "asserts":
            exec(compile(job["tests"], "<tests>", "exec"), space)
    except BaseException as error:
        wire.send(sock, {"load": "the tests did not load: " + describe(error)})
        return
    if job["entry_point"] is not None:
        space[job["entry_point"]] = module.__dict__[job["entry_point"]]
    if job["format"] == "asserts":
        for test in job["tests"]:
            report(sock, lambda test=test: exec(compile(test, "<test>", "exec"), space))
    elif job["format"] == "check":
        report(sock, lambda: space["check"](space[job["entry_point"]]))
    else:
        for name in job["names"]:
            cls, method = name.split(".")
            report(sock, lambda cls=cls, method=method: unit(space[cls](method)))


def report(sock: socket.socket, test: Any) -> None:
    try:
        test()
    except BaseException as error:
        wire.send(sock, {"status": "failed", "message": describe(error)})
    else:
        wire.send(sock, {"status": "passed", "message": ""})


def unit(case: unittest.TestCase) -> None:
    result = unittest.TestResult()
    case.run(result)
    if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
        problems = [text for _, text in result.failures + result.errors + result.skipped]
        raise AssertionError(problems[0].strip().splitlines()[-1] if problems else "did not run")


def stdio(job: dict, sock: socket.socket) -> None:
    code = compile(job["code"], "<solution>", "exec")
    for stdin, expected in job["tests"]:
        output = io.StringIO()
        sys.stdin, sys.stdout = io.StringIO(stdin), output
        message = ""
        try:
            exec(code, {"__name__": "__main__", "__builtins__": builtins})
        except SystemExit:
            pass
        except BaseException as error:
            message = describe(error)
        if not message and output.getvalue().split() != expected.split():
            message = f"printed {output.getvalue()[:100]!r}, expected {expected[:100]!r}"
        wire.send(sock, {"status": "failed" if message else "passed", "message": message})


def describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-500:]
