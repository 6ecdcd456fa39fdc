"""Runs model-written Python against tests, in worker processes, and says truthfully what passed.

Knows nothing about training and is usable alone:

```python
from marcog_trl.execution import CodeExecutor, Job

job = Job(code="def add(a, b):\\n    return a + b", tests=["assert add(1, 2) == 3"], entry_point="add")
with CodeExecutor(isolation="best_effort") as executor:
    (verdict,) = executor.run([job])
    print(verdict.status, executor.isolation)
```

What it promises: no program runs in the calling process; limits on wall-clock time, CPU time and memory hold, and nothing
of a program outlives its verdict; with `isolation="strict"`, programs can neither reach files, network and other processes
nor make processes. What it does not: a kernel exploit escapes; weak tests and memorised answers remain hackable; and tests
run in the same process as the program, so that a program written to fool them can.
"""

from .executor import CodeExecutor, available_cores, shared_executor
from .isolation import Isolation
from .jobs import Job, TestResult, Verdict


__all__ = ["CodeExecutor", "Isolation", "Job", "TestResult", "Verdict", "available_cores", "shared_executor"]
