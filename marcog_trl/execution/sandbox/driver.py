"""Runs one job after another in children of a zygote, and turns what they report into verdicts.

What a child reports is data only: a value to compare, or a judge's result of a test. Anything else is an error.
"""

import operator
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import limits, scratch, values, wire
from .children import BROKE, Child, Zygote
from .judge import shorten


_JUDGE_GRACE = 1.0  # seconds for a judge to name the test it was running, after its solution process was ended
_ALARM_BYTES = 1 << 16  # larger messages are decoded under an alarm
_CHECKED_OUTPUT = 1 << 20  # bytes of a script's output that `check_output` gets, and that may surround expected words


_HOLDS: dict[str, Callable[[Any, Any], Any]] = {  # values of exact builtin types
    **{"==": operator.eq, "!=": operator.ne, "is": operator.is_, "is not": operator.is_not},
    **{"true": lambda found, _: found, "false": lambda found, _: not found},
}


class OutOfTime(BaseException):
    """Decoding a value took too long."""


class Opaque:
    """Replaces a value that could not be sent. It equals nothing."""

    def __init__(self, why: str):
        self.why = why

    def __repr__(self) -> str:
        return f"<{self.why}>"


class Results:
    """The results of a job's tests, as they arrive."""

    def __init__(self, total: int):
        self.reset(total)

    def reset(self, total: int) -> None:
        self.entries: list[list | None] = [None] * total
        self.outputs: dict[int, str] = {}  # what scripts printed, if the job keeps it
        self.lost = 0  # tests that timed out or ended their process
        self.last = time.monotonic()

    def put(self, index: int, status: str, message: str = "", raised: bool = False) -> None:
        now = time.monotonic()
        self.entries[index] = [status, message, now - self.last, raised]
        self.last = now
        if status in ("timeout", "error"):
            self.lost += 1

    def first_open(self) -> int:
        """The first test without a result; the last one if all have one."""
        return next((k for k, entry in enumerate(self.entries) if entry is None), len(self.entries) - 1)

    def fill(self, status: str, message: str, raised: bool = False) -> None:
        self.entries = [[status, message, 0.0, raised] if entry is None else entry for entry in self.entries]

    def verdict(self, start: float) -> dict:
        self.fill("skipped", "not reached")
        entries = [[status, _printable(text), *rest] for status, text, *rest in filter(None, self.entries)]
        for index, output in self.outputs.items():  # of scripts, which have all of their entries
            entries[index].append(_printable(output))
        entries = [entry for entry in entries if entry[0] != "left out"] or [
            ["failed", "all tests are skipped", 0.0, False]
        ]
        seen = {entry[0] for entry in entries}
        status = next((name for name in ("timeout", "error", "failed", "skipped") if name in seen), "passed")
        order = (status, "timeout", "error", "failed", "skipped")
        message = next((entry[1] for name in order for entry in entries if entry[0] == name and name != "passed"), "")
        return {
            "status": "failed" if status == "skipped" else status,
            "tests": entries,
            "message": message,
            "seconds": time.monotonic() - start,
        }


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _printable(text: str) -> str:
    """The text with control characters and surrogates escaped, so that any terminal, log or file can take it."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class Driver:
    """
    Runs jobs, one at a time.

    Zygotes start when they are first needed: the plain one at once, and those with packages or with a scratch folder with the
    first job that needs them.

    Args:
        terms (`dict`): Settings of the executor: `landlock`, `seccomp`, `strict` and `readable` of `Confinement`; `modules`
            and `load` of `Zygote`; `folder`, the path of the scratch folder.
        command (`list[str]`): Command line of a zygote.
    """

    def __init__(self, terms: dict[str, Any], command: list[str]):
        self.folder, self.load = terms.pop("folder"), terms.pop("load")
        self.terms = terms
        self.command = command
        names = "|".join(map(re.escape, self.load))
        self.imports = re.compile(rf"^[ \t]*(?:import|from)\b.*\b(?:{names})\b", re.MULTILINE)
        self.zygotes: dict[tuple[bool, bool], Zygote] = {}
        self.zygote = self.start_zygote(files=False, loaded=False)
        signal.signal(signal.SIGPROF, _ring)

    def report(self) -> dict[str, Any]:
        """Facts about the confinement of programs, for the executor."""
        zygote = self.zygote
        return {"refused": zygote.refusal, "left_out": zygote.left_out, "threads": zygote.threads_are_bounded}

    def start_zygote(self, files: bool, loaded: bool) -> Zygote:
        if files:
            scratch.make(self.folder)
        terms = {**self.terms, "folder": self.folder if files else None, "load": self.load if loaded else []}
        zygote = self.zygotes[files, loaded] = Zygote(self.command, terms)
        return zygote

    def zygote_for(self, job: dict, announce: Callable[[], None]) -> Zygote:
        # without Landlock, programs that may write to a folder may write anywhere, which is accepted only without seccomp
        files = job["files"] and (self.terms["landlock"] or not self.terms["seccomp"])
        loaded = self.imports_packages(job)
        if (files, loaded) not in self.zygotes:
            announce()
            zygote = self.start_zygote(files, loaded)
            if not zygote.single:  # its forks would lack the threads that a package has started
                zygote.close()
                self.load = []
                return self.zygote_for(job, announce)
        return self.zygotes[files, loaded]

    def imports_packages(self, job: dict) -> bool:
        if not self.load:
            return False
        tests = [job["tests"]] if isinstance(job["tests"], str) else job["tests"] or []
        text = "\n".join([job["code"], job["setup"], *(test for test in tests if isinstance(test, str))])
        return self.imports.search(text) is not None or any(module in self.load for _, module in job["modules"])

    def run(self, job: dict, announce: Callable[[], None]) -> dict:
        """Runs a job and returns its verdict as a frame. Calls `announce` if a zygote has to be started first, which is
        slow."""
        self.zygote = self.zygote_for(job, announce)
        if self.zygote.refusal is not None:
            return {"infrastructure": self.zygote.refusal}
        folder = self.zygote.folder
        if folder is None:
            return self.run_tests(job)
        with scratch.watched(folder, self.stop_programs) as overfull:
            verdict = self.run_tests(job)
        self.zygote.settle()
        scratch.empty(folder)
        if overfull.is_set() and verdict["status"] != "passed":
            verdict["message"] = (
                f"the program wrote more than {scratch.MOST_BYTES >> 20} MiB or {scratch.MOST_FILES} files"
            )
        return verdict

    def stop_programs(self) -> None:
        for child in self.children:
            if child.running and child.runs_program:
                os.kill(child.pid, signal.SIGKILL)  # its process id cannot belong to another process yet

    def run_tests(self, job: dict) -> dict:
        self.start = time.monotonic()
        self.job = job
        self.cpu_seconds = limits.cpu_seconds(job["timeout"])
        self.children: list[Child] = []
        self.allowance = limits.Allowance(job["timeout"], self.cpu_time)
        self.lost: tuple[str, str] | None = None  # how a solution process ended that was taken from its judge
        results = Results(job["total"])
        try:
            if job["format"] == "stdio":
                self.scripts(results)
            elif job["calls"] is not None:
                self.direct(results)
            else:
                self.judged(results)
        except (OSError, EOFError):
            raise  # raised by the worker's own processes: the job is tried again in another worker
        except Exception as error:  # caused by the program, which must not count as a failure of the machine
            results.fill("error", f"{BROKE}: {type(error).__name__}")
        finally:
            for child in self.children:
                child.end()
        return results.verdict(self.start)

    def child(self, role: str, payload: dict, fds: list[int]) -> Child:
        limits = {"role": role, "memory_mb": self.job["memory_mb"], "cpu_seconds": self.cpu_seconds}
        child = Child(self.zygote, {**limits, **payload}, fds)
        self.children.append(child)
        return child

    def cpu_time(self) -> float:
        """CPU time that the programs and the judges of the job have used, in seconds."""
        return sum(child.cpu_time() for child in self.children)

    def of_test(self) -> limits.Allowance:
        """The time that the test which begins now may take."""
        limit = self.job["test_timeout"]
        return self.allowance if limit is None else limits.Allowance(limit, self.cpu_time, self.allowance)

    def may_go_on(self, results: Results) -> bool:
        return results.lost < self.job["max_timeouts"] and not self.allowance.is_used_up()

    def loaded(self, child: Child, results: Results) -> bool:
        """Waits until the program is loaded; returns `False`, with the reason in the results, if it cannot be."""
        frame = child.receive(self.allowance)
        if frame is wire.TIMEOUT:
            results.fill("timeout", "time limit reached while the program was loading")
        elif frame is None:
            status, message = child.autopsy()
            results.fill(status, message + " while loading")
        elif "load" not in frame or not (frame["load"] is None or type(frame["load"]) is str):
            results.fill("error", BROKE)
        elif frame["load"] is not None:
            results.fill("error", frame["load"][:1000])
        else:
            results.last = time.monotonic()
            return True
        return False

    # Tests that are calls with literal arguments, compared with literals here

    def direct(self, results: Results) -> None:
        calls, position = self.job["calls"], 0
        program = {"code": self.job["code"], "exports": self.job["exports"], "entry_point": self.job["entry_point"]}
        while position < len(calls):
            child = self.child("direct", {**program, "call": calls[position]["call"]}, [])
            self.zygote.order()
            if not self.loaded(child, results):
                return
            while position < len(calls):
                frame = child.receive(self.of_test())
                if frame is wire.TIMEOUT or frame is None:
                    lost = ("timeout", "time limit reached") if frame else child.autopsy()
                    results.put(position, *lost)
                    position += 1
                    break
                if position + 1 < len(calls):
                    child.send(calls[position + 1]["call"], self.of_test())
                results.put(position, *self.compare(calls[position], frame, child.reader.size))
                position += 1
            child.end()
            if not self.may_go_on(results):
                return

    def compare(self, call: dict, frame: dict, size: int) -> tuple[str, str] | tuple[str, str, bool]:
        """Status and message of a direct test, and whether the program raised, given its answer of `size` bytes."""
        if type(frame.get("x")) is str:
            return "failed", frame["x"][:1000], True
        asks_truth = call["operator"] in ("true", "false")
        if "o" in frame and asks_truth and type(frame.get("b")) is not bool:
            return "failed", f"TypeError: its truth value is unknown: {str(frame.get('b'))[:200]}", True
        codec = values.Codec(shared=False)
        try:
            with self.alarm(size):
                if "o" not in frame:
                    found: Any = codec.decode(frame["r"])
                else:  # a value that could not be sent: its truth value is what the program says
                    found = frame["b"] if asks_truth else Opaque(str(frame["o"])[:200])
                expected = codec.decode(call["expected"])
                if _HOLDS[call["operator"]](found, expected):
                    return "passed", ""
                if asks_truth:
                    return "failed", f"{_written(call['call'], codec)} returned {shorten(found)}"
                wanted = {"==": "", "is": ""}.get(call["operator"], call["operator"] + " ") + shorten(expected)
                return "failed", f"{_written(call['call'], codec)} returned {shorten(found)}, expected {wanted}"
        except OutOfTime:
            return "timeout", "time limit reached while a value was read"
        except (wire.BrokenChannel, KeyError):
            return "error", BROKE
        except Exception as error:  # the comparison raised, so the test fails
            return "failed", f"{type(error).__name__}: {error}"[:300]

    @contextmanager
    def alarm(self, size: int) -> Iterator[None]:
        """Interrupts the decoding of a large message when it has taken the CPU time that is left of the job."""
        if size < _ALARM_BYTES:
            yield
            return
        signal.setitimer(signal.ITIMER_PROF, min(max(0.01, self.allowance.left), wire.LONGEST_WAIT), 0.05)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    # Tests that need a judge

    def judged(self, results: Results) -> None:
        if not self.try_judged(results):  # something on the machine killed the judge; programs cannot
            for child in self.children:
                child.end()
            self.lost = None
            results.reset(self.job["total"])
            if not self.try_judged(results):
                results.fill("failed", "the judge's process was killed twice")

    def try_judged(self, results: Results) -> bool:
        """Runs the tests; returns `False` if the judge was killed while the program was not."""
        job = self.job
        tests = {
            name: job[name]
            for name in (
                "format",
                "codes",
                "counted",
                "functions",
                "modules",
                "entry_point",
                "candidate",
                "exports",
                "seeded",
            )
        }
        program = {name: job[name] for name in ("code", "exports", "entry_point")}
        solution, theirs = self.solution(program)
        self.zygote.order()
        with theirs:
            if not self.loaded(solution, results):
                return True
            memory_mb = max(limits.JUDGE_MEMORY_MB, job["memory_mb"])
            judge = self.child("judge", {**tests, "memory_mb": memory_mb}, [theirs.fileno()])
        while True:
            frame = self.next_report(judge, solution, results)
            if frame is wire.TIMEOUT:
                return True
            if frame is None:
                status, message = judge.autopsy()
                if judge.exit == -signal.SIGKILL and status != "timeout" and not self.was_killed(solution):
                    return False
                results.fill("failed", message.replace("the program's", "the judge's"))
                return True
            if "count" in frame:  # of test methods
                results.reset(frame["count"])
                continue
            status = frame["s"]
            if status == "done":
                results.fill("passed", "")
                return True
            if status == "raised":
                results.entries[results.first_open()] = ["failed", frame["m"], 0.0, frame["r"]]
                results.fill("failed", frame["m"], frame["r"])
                return True
            if status != "gone":
                before = results.entries[frame["t"]]
                # a test that runs several times passes if it passed each time
                if before is None or before[0] == "passed":
                    results.put(frame["t"], status, frame["m"], frame["r"])
                results.last = time.monotonic()
                continue
            lost = self.lost or solution.autopsy()
            self.lost = None
            results.put(results.first_open() if frame["t"] is None else frame["t"], *lost)
            if frame["t"] is None or not self.may_go_on(results):
                return True
            solution.end()
            solution, theirs = self.solution(program)
            with theirs:
                judge.hand(theirs)
            if not self.loaded(solution, results):
                return True

    def was_killed(self, solution: Child) -> bool:
        """Whether a signal has ended the program's process. The death of its judge does not: it ends normally then."""
        if solution.is_there():
            return False
        solution.autopsy()
        return solution.exit < 0

    def solution(self, program: dict) -> tuple[Child, socket.socket]:
        """A solution process and the judge's end of the channel to it."""
        ours, theirs = socket.socketpair()
        child = self.child("solution", program, [theirs.fileno()])
        theirs.close()
        return child, ours

    def next_report(self, judge: Child, solution: Child, results: Results) -> Any:
        """The judge's next report; `None` if the judge is gone; `wire.TIMEOUT`, after filling the results, if time is up."""
        allowance = self.of_test()
        while True:
            frame = judge.receive(allowance)
            if frame is not wire.TIMEOUT:
                return frame
            if self.lost is not None or self.allowance.is_used_up():  # the judge itself hangs
                results.put(results.first_open(), "timeout", "time limit reached")
                return wire.TIMEOUT
            self.lost = ("timeout", "time limit reached")
            solution.end()
            allowance = limits.Allowance(_JUDGE_GRACE, self.cpu_time, self.allowance)

    # Scripts with standard input and output

    def scripts(self, results: Results) -> None:
        outputs: list[str] | None = [] if self.job["checker"] else None
        for index, (stdin, expected) in enumerate(self.job["tests"]):
            with _memory_file(stdin.encode("utf-8", "surrogateescape")) as source, _memory_file(b"") as sink:
                child = self.child("script", {"code": self.job["code"]}, [source.fileno(), sink.fileno()])
                self.zygote.order()
                frame = child.receive(self.of_test())
                if frame is wire.TIMEOUT:
                    results.put(index, "timeout", "time limit reached")
                elif frame is None:
                    status, message = child.autopsy()
                    if child.exit == 0:
                        results.put(index, *self.judge_output(sink, expected, outputs))
                    else:
                        results.put(index, status, message)
                elif type(frame.get("script")) is str:
                    status = "error" if frame.get("kind") == "error" else "failed"
                    results.put(index, status, frame["script"][:1000], raised=status == "failed")
                else:
                    results.put(index, *self.judge_output(sink, expected, outputs))
                child.end()
                kept = self.job["kept_output"]
                results.outputs[index] = self.printed(sink, 4 * kept)[:kept]
            if not self.may_go_on(results):
                break
        if outputs:
            self.check_outputs(outputs, results)

    def judge_output(self, sink: Any, expected: str, outputs: list | None) -> tuple[str, str]:
        """Compares what a script printed, word by word, or keeps it for the tests' own `check_output`."""
        if outputs is not None:
            outputs.append(self.printed(sink, _CHECKED_OUTPUT))
            return "unchecked", ""
        words, most = expected.split(), _CHECKED_OUTPUT + 4 * len(expected)
        found = self.printed(sink, most)
        if found.split(None, len(words)) == words and os.fstat(sink.fileno()).st_size <= most:
            return "passed", ""
        return "failed", f"printed {shorten(found)}, expected {shorten(expected)}"

    def printed(self, sink: Any, most: int) -> str:
        """The first `most` bytes of what a script has printed so far."""
        return os.pread(sink.fileno(), most, 0).decode("utf-8", "replace")

    def check_outputs(self, outputs: list[str], results: Results) -> None:
        """Has a judge call the tests' `check_output` on each output."""
        unchecked = [(k, entry) for k, entry in enumerate(results.entries) if entry and entry[0] == "unchecked"]
        cases = [[*self.job["tests"][k], output] for (k, _), output in zip(unchecked, outputs, strict=True)]
        payload = {"format": "outputs", "codes": self.job["codes"], "tests": cases, "exports": [], "modules": []}
        payload["seeded"] = []
        judge = self.child("judge", {**payload, "entry_point": None, "memory_mb": limits.JUDGE_MEMORY_MB}, [])
        problem: tuple[str, str] | None = None
        for _, entry in unchecked:
            if problem is None:
                frame = judge.receive(self.allowance)
                if frame is wire.TIMEOUT:
                    problem = "timeout", "time limit reached in check_output"
                elif frame is None or frame["t"] is None:
                    problem = "failed", "check_output did not run" if frame is None else frame["m"]
                else:
                    entry[:2] = frame["s"], frame["m"]
                    continue
            entry[:2] = problem


def _written(call: list, codec: values.Codec) -> str:
    """A call, written as in a test."""
    name, args, kwargs = call
    arguments = [shorten(codec.decode(arg)) for arg in args]
    arguments += [f"{key}={shorten(codec.decode(value))}" for key, value in kwargs.items()]
    return f"{name}({', '.join(arguments)})"[:200]


def _memory_file(content: bytes) -> Any:
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("stream", os.MFD_CLOEXEC), "w+b", buffering=0)
    else:
        import tempfile

        file = tempfile.TemporaryFile(buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _ring(number: int, frame: Any) -> None:
    raise OutOfTime
