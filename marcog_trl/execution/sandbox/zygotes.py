"""The zygotes of a worker: chooses the one that forks a job's children, and empties the scratch folder after a job."""

import os
import re
import signal
from collections.abc import Callable
from typing import Any

from . import scratch
from .driver import Driver
from .zygote import Zygote


class Zygotes:
    """
    Starts zygotes when they are first needed: the plain one at once, and those with packages or with a scratch folder with
    the first job that needs them.

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
        self.plain = self._start(files=False, loaded=False)

    def report(self) -> dict[str, Any]:
        """What the executor has to know about the confinement of programs."""
        zygote = self.plain
        return {"refused": zygote.refusal, "left_out": zygote.left_out, "threads": zygote.threads_are_bounded}

    def run(self, driver: Driver, job: dict[str, Any], announce: Callable[[], None]) -> dict[str, Any]:
        """
        Runs a job.

        Args:
            driver (`Driver`): Runs the job.
            job (`dict`): The job.
            announce (`Callable`): Called if a zygote has to be started first, which is slow.

        Returns:
            `dict`: The verdict as a frame.
        """
        zygote = self._fitting(job, announce)
        if zygote.refusal is not None:
            return {"infrastructure": zygote.refusal}
        driver.zygote = zygote
        if zygote.folder is None:
            return driver.run(job)
        with scratch.watched(zygote.folder, lambda: _stop_programs(driver)) as overfull:
            verdict = driver.run(job)
        zygote.settle()
        scratch.empty(zygote.folder)
        if overfull.is_set() and verdict["status"] != "passed":
            verdict["message"] = (
                f"the program wrote more than {scratch.MOST_BYTES >> 20} MiB or {scratch.MOST_FILES} files"
            )
        return verdict

    def _start(self, files: bool, loaded: bool) -> Zygote:
        if files:
            scratch.make(self.folder)
        terms = {**self.terms, "folder": self.folder if files else None, "load": self.load if loaded else []}
        zygote = self.zygotes[files, loaded] = Zygote(self.command, terms)
        return zygote

    def _fitting(self, job: dict[str, Any], announce: Callable[[], None]) -> Zygote:
        # without Landlock, programs that may write to a folder may write anywhere, which is accepted only without seccomp
        files = job["files"] and (self.terms["landlock"] or not self.terms["seccomp"])
        loaded = self._imports_packages(job)
        if (files, loaded) not in self.zygotes:
            announce()
            zygote = self._start(files, loaded)
            if not zygote.single:  # its forks would lack the threads that a package has started
                zygote.close()
                self.load = []
                return self._fitting(job, announce)
        return self.zygotes[files, loaded]

    def _imports_packages(self, job: dict[str, Any]) -> bool:
        if not self.load:
            return False
        tests = [job["tests"]] if isinstance(job["tests"], str) else job["tests"] or []
        text = "\n".join([job["code"], job["setup"], *(test for test in tests if isinstance(test, str))])
        return self.imports.search(text) is not None or any(module in self.load for _, module in job["modules"])


def _stop_programs(driver: Driver) -> None:
    for child in driver.children:
        if child.running and child.runs_program:
            os.kill(child.pid, signal.SIGKILL)  # its process id cannot belong to another process yet
