"""Runs model-written Python against tests, confined, in worker processes, and says truthfully what passed.

Knows nothing about training and is usable alone:

```python
from marcog_trl.execution import CodeExecutor, Job

job = Job(code="def add(a, b):\n    return a + b", tests=["assert add(1, 2) == 3"], entry_point="add")
with CodeExecutor(isolation="best_effort") as executor:
    (verdict,) = executor.run([job])
    print(verdict.status, executor.isolation)
```

Or from a shell: `python -m marcog_trl.execution file.py --tests tests.py`.

How it works. Each worker is a fresh interpreter (`sandbox/main.py`) that never runs a program. It owns a *zygote*, confined
at start, which forks the children that do: a *solution* process that runs the program and never sees a test, and a *judge*
process that runs the tests and never runs the program. Between them travel values of builtin types and of common types of
the standard library, as tagged JSON; any other object stays in the solution's process, and the tests hold a stand-in for
it, of a class with the special methods that the program's class has. A judge
is kept for the next program with the same tests, which run in a fresh namespace. Tests of the form
`assert f(literals) == literal` need no judge: the worker compares.

What it promises:

- No program runs in the calling process, or in a process that knows an expected value.
- With `isolation="strict"` (Linux with Landlock and seccomp), programs cannot read files but those of the standard library
  and of the packages that they may import, write files but in their scratch folder, see other files or processes, open
  sockets, make processes, signal others, read other processes' memory, or keep anything from one job to the
  next. With `"best_effort"` this holds as far as the kernel goes along; `CodeExecutor.isolation` says how far. Elsewhere
  than on Linux there are only limits.
- Limits on wall-clock time, CPU time, memory, output and descriptors hold, and no process outlives its verdict.
- A program cannot get `infrastructure` for a verdict; that is kept for failures of the machine.

What it does not promise:

- The kernel is shared: an exploit of the kernel escapes. Put the whole training into a virtual machine if that matters.
- Weak tests and memorised answers remain hackable, and so is a test that takes a helper from the program: put helpers that
  the tests rely on into `Job.setup`.
- Programs have no network. They import the standard library, numpy, and what `CodeExecutor(packages=[...])` names. They have
  a scratch folder only if their tests work with files, or if `files=True`.
- The program's own `__eq__`, `__lt__` and `__contains__` are not believed, and operators do not show it values of the tests.
  `Point(1, 2) == Point(1, 2)` is false unless the tests or the set-up define `Point` too: then their `__eq__` compares. A
  test that turns on what cannot be judged fails, whatever it expects, and the verdict's message says why. That also loses
  right programs: `assert Vector(1, 2) * 3 == ...`, `assert Point(1) != 5` and `assert 7 not in interval` fail if the class
  has an operator of its own.
- Tests cannot derive a class from one of the program's, nor pass it modules, locks or test cases. They can pass it their
  own objects, mocks, files in memory, functions, exceptions and iterators.
- The wall clock counts what the machine is busy with besides.
"""

from .cores import available_cores
from .executor import CodeExecutor, shared_executor
from .isolation import Isolation
from .jobs import Job, TestResult, Verdict


__all__ = ["CodeExecutor", "Isolation", "Job", "TestResult", "Verdict", "available_cores", "shared_executor"]
