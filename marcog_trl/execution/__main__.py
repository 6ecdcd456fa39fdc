"""Runs a program against a file of tests and prints the result of each test:
`python -m marcog_trl.execution file.py --tests tests.py`."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from ..checks import instead_of
from .executor import CodeExecutor
from .isolation import ISOLATION_LEVELS
from .jobs import TEST_FORMATS, Job
from .reading import read_tests


class OneLineParser(argparse.ArgumentParser):
    """A parser that does not take abbreviated flags, and reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}\n")

    def parse_args(self, args=None, namespace=None):
        for argument in sys.argv[1:] if args is None else args:
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown flag {name}. {instead_of(name, self._option_string_actions)}")
        return super().parse_args(args, namespace)


def read_file(path: Path) -> str:
    """
    Reads a text file.

    Raises:
        ValueError: If the file cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {str(path)!r}: it is not UTF-8 text ({error.reason}).") from None


def main() -> int:
    parser = OneLineParser(prog="python -m marcog_trl.execution", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="the program")
    parser.add_argument(
        "--tests", type=Path, required=True, help="asserts, check(candidate), tests of unittest or pytest, or JSON"
    )
    parser.add_argument("--setup", type=Path, help="imports and helpers of the tests")
    parser.add_argument("--test-format", choices=TEST_FORMATS, help="found in the tests if not given")
    parser.add_argument("--entry-point", help="name that the program must define; required for check")
    parser.add_argument("--packages", nargs="+", default=(), help="installed packages that may be imported")
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="limit of the CPU time of the whole job in seconds"
    )
    parser.add_argument("--memory-mb", type=int, default=512, help="limit of the program's address space in MiB")
    parser.add_argument(
        "--isolation", choices=ISOLATION_LEVELS, default="strict", help="what to do if the kernel lacks something"
    )
    args = parser.parse_args()
    try:
        code, source = read_file(args.file), read_file(args.tests)
        setup = read_file(args.setup) if args.setup else ""
        limits = {"timeout": args.timeout, "memory_mb": args.memory_mb}
        with CodeExecutor(num_workers=1, isolation=args.isolation, packages=args.packages, **limits) as executor:
            tests = read_tests(source, args.test_format, args.entry_point, setup)
            job = Job(code, tests.tests, tests.test_format, tests.setup, tests.entry_point)
            executor.check(job)  # raises an error if the tests cannot be run
            print(f"isolation: {executor.isolation}")
            (verdict,) = executor.run([job])
    except (ValueError, RuntimeError) as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError):
            parser.error(f"{str(args.tests)!r} is not Python: {cause.msg}, line {cause.lineno}.")
        parser.error(str(error))
    for number, result in enumerate(verdict.tests, start=1):
        print(f"{number:4d}  {result.status:8s} {result.seconds * 1e3:8.1f} ms  {result.message}".rstrip())
    print(f"{verdict.status}: {verdict.passed} of {verdict.total} tests passed in {verdict.seconds:.2f} s")
    return 0 if verdict.status == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
