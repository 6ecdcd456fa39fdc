"""Runs Python programs that a model wrote against tests, in confined worker processes, and says which tests passed.

It needs neither models nor training:

```python
from marcog_trl.execution import CodeExecutor, Job

job = Job(code="def add(a, b):\n    return a + b", tests=["assert add(1, 2) == 3"], entry_point="add")
with CodeExecutor(isolation="best_effort") as executor:
    (verdict,) = executor.run([job])
    print(verdict.status, executor.isolation)
```

Or from a shell: `python -m marcog_trl.execution file.py --tests tests.py`.

The folder's README says how this works, what it promises and what it does not.
"""

from .executor import CodeExecutor, available_cores, shared_executor
from .isolation import Isolation
from .jobs import Job, TestResult, UnusableTests, Verdict
from .reading import Tests, read_tests
from .tool import python_tool


__all__ = [
    "CodeExecutor",
    "Isolation",
    "Job",
    "TestResult",
    "Tests",
    "UnusableTests",
    "Verdict",
    "available_cores",
    "python_tool",
    "read_tests",
    "shared_executor",
]
