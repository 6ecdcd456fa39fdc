"""A tool for agents that runs Python programs in the sandbox."""

from .executor import shared_executor
from .jobs import Job


SECONDS = 5.0
MEMORY_MB = 256
CHARACTERS = 2000


def python_tool(code: str) -> str:
    """
    Runs a Python program and returns what it prints. Each call starts anew, without files and network.

    Args:
        code: The program. It must print its results.
    """
    job = Job(code, [("", "")], "stdio", timeout=SECONDS, memory_mb=MEMORY_MB, kept_output=CHARACTERS + 1)
    [verdict] = shared_executor().run([job])
    [result] = verdict.tests
    output = result.output.rstrip()
    if len(output) > CHARACTERS:
        output = output[:CHARACTERS] + " ... (cut)"
    if result.raised or result.status in ("error", "timeout") or verdict.status == "infrastructure":
        # TRL tells the model of the exception, and counts the call as failed
        raise RuntimeError("\n".join(filter(None, [output, result.message])))
    return output or "The program printed nothing."
