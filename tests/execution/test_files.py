"""The scratch folder: for programs whose tests work with files, of bounded size, empty for each job, gone at the end."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marcog_trl.execution import CodeExecutor, Job, isolation
from marcog_trl.execution.analysis import uses_files
from marcog_trl.execution.sandbox import scratch


SQLITE = """
import sqlite3
class Shelf:
    def __init__(self, name):
        self.connection = sqlite3.connect(name)
        self.connection.execute('create table if not exists books (title text)')
    def add(self, title):
        self.connection.execute('insert into books values (?)', (title,))
        self.connection.commit()
"""
SQLITE_TESTS = """
import sqlite3, unittest
class T(unittest.TestCase):
    def setUp(self):
        self.connection = sqlite3.connect('test.db')
        self.connection.execute('drop table if exists books')
    def tearDown(self):
        self.connection.close()
    def test_add(self):
        shelf = Shelf('test.db')
        shelf.add('Emma')
        self.assertEqual(self.connection.execute('select title from books').fetchall(), [('Emma',)])
    def test_add_two(self):
        shelf = Shelf('test.db')
        shelf.add('Emma')
        shelf.add('Ulysses')
        self.assertEqual(len(self.connection.execute('select title from books').fetchall()), 2)
"""
WRITE = "def write(name, text):\n    with open(name, 'w') as file: file.write(text)\n    return len(text)\n"


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=5.0, isolation="best_effort") as executor:
        if executor.isolation.seccomp and not executor.isolation.landlock_abi:
            pytest.skip("without Landlock there is no scratch folder")
        yield executor


def message(executor, code, *tests, **options):
    return executor.run([Job(code, tests, **options)])[0].message


def test_tests_and_program_share_files(executor):
    assert (
        message(executor, WRITE, "assert write('a.txt', 'hello') == 5\nassert open('a.txt').read() == 'hello'") == ""
    )
    (verdict,) = executor.run([Job(SQLITE, SQLITE_TESTS, "unittest")])
    assert (verdict.status, verdict.passed) == ("passed", 2), verdict


def test_each_job_finds_it_empty(executor):
    leave = (
        "import os\n"
        + WRITE
        + "def f(x):\n    os.makedirs('a/b/c')\n    os.symlink('/etc', 'a/link')\n    return write('a/b/c/d', 'x')"
    )
    look = "import os\ndef f(x): return os.listdir('.')"
    assert message(executor, leave, "assert f(1) == 1", files=True) == ""
    assert message(executor, look, "assert f(1) == []", files=True) == ""
    assert message(executor, leave, "import os\nassert f(1) == 1 and os.path.exists('a/b/c/d')") == ""
    assert message(executor, look, "assert sorted(f(1)) == []", files=True) == ""


def test_files_are_used_as_ever(executor):
    code = """
import os, shutil, tempfile, pathlib, csv, zipfile
def f(x):
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, 'sub'))
        path = pathlib.Path(folder, 'sub', 'a.csv')
        with path.open('w', newline='') as file: csv.writer(file).writerows([[1, 2], [3, 4]])
        path.rename(path.with_suffix('.txt'))
        with zipfile.ZipFile('a.zip', 'w') as archive: archive.write(path.with_suffix('.txt'), 'a.txt')
    with tempfile.NamedTemporaryFile('w+') as file:
        file.write('x')
        file.flush()
        os.fsync(file.fileno())
        size = os.path.getsize(file.name)
    rows = zipfile.ZipFile('a.zip').read('a.txt').split()
    os.remove('a.zip')
    return size, len(rows), os.listdir('.'), shutil.disk_usage is not None
"""
    assert message(executor, code, "assert f(1) == (1, 2, [], True)", files=True) == ""


@pytest.mark.skipif(not all(isolation.probe()), reason="Landlock or seccomp are missing")
def test_only_who_needs_it_has_it_and_only_it(executor):
    refused = "PermissionError: [Errno 13] Permission denied: 'a.txt' (line 2)"
    assert message(executor, WRITE, "assert write('a.txt', 'x') == 1") == refused
    assert message(executor, WRITE, "assert write('a.txt', 'x') == 1", files=False) == refused
    for path in ("/tmp/marcog_canary", "/dev/shm/marcog_canary", "../marcog_canary"):
        assert "PermissionError" in message(executor, WRITE, f"assert write('{path}', 'x') == 1", files=True)
    assert "PermissionError" in message(
        executor, "def f(x): return open(x).read()", "assert f('/etc/passwd')", files=True
    )
    with CodeExecutor(num_workers=1, isolation="best_effort", files=True) as generous:
        assert message(generous, WRITE, "assert write('a.txt', 'x') == 1") == ""
    with CodeExecutor(num_workers=1, isolation="best_effort", files=False) as strict:
        assert "PermissionError" in message(strict, WRITE, "assert write('a.txt', 'x') == 1\nopen('a.txt')")


FILLING = {
    "large files": "for k in range(40): open(f'{k}', 'wb').write(bytes(10 << 20))",
    "many files": "for k in range(20000): open(f'{k}', 'wb')",
    "deep folders": "for k in range(20000):\n        os.mkdir('d')\n        os.chdir('d')",
    "a folder that is hidden": "os.mkdir('d', 0o300)\n    for k in range(40): open(f'd/{k}', 'wb').write(bytes(10 << 20))",
    "a large hole": "f = open('a', 'wb')\n    f.seek(1 << 40)\n    f.write(b'x')\n    f.flush()",
}
# Refuses the system call that mounting needs, so that the scratch folder is an ordinary folder
UNMOUNTABLE = """
import ctypes, platform
from marcog_trl.execution.sandbox import seccomp
libc, instructions, refusal = ctypes.CDLL(None, use_errno=True), seccomp.Instructions(), seccomp.Instructions()
machine = platform.machine()
refusal.ret(seccomp.ERRNO | 1)
instructions.load_number()
instructions.when({"x86_64": 272, "aarch64": 97}[machine], refusal)
instructions.ret(seccomp.ALLOW)
assert libc.prctl(38, 1, 0, 0, 0) == 0
seccomp.Filter(instructions, machine, libc).install(LISTEN)
"""


@pytest.mark.skipif(not all(isolation.probe()), reason="Landlock or seccomp are missing")
@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize("nobody", [True, False])
def test_its_size_is_bounded(mounted, nobody):
    """The mounted file system limits its size, or else the worker does. Nothing of it is left at the end."""
    script = "import os, time\n" + ("os.setgid(65534)\nos.setuid(65534)\n" if nobody else "")
    script += "" if mounted else UNMOUNTABLE.replace("LISTEN", "")
    script += f"""
from marcog_trl.execution import CodeExecutor, Job
with CodeExecutor(num_workers=1, timeout=5.0, files=True) as executor:
    for name, body in {FILLING!r}.items():
        (verdict,) = executor.run([Job("import os\\ndef f(x):\\n    " + body + "\\n    return 1", ["assert f(1) == 1"])])
        assert verdict.status in ("failed", "error"), (name, verdict)
        (verdict,) = executor.run([Job("import os\\ndef f(x): return os.listdir('.')", ["assert f(1) == []"])])
        assert verdict.status == "passed", (name, verdict)
"""
    if nobody and os.getuid() != 0:
        pytest.skip("needs to start as root")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": "/"}
    python = sys.executable if not nobody else "/usr/bin/python3"
    process = subprocess.Popen([python, "-c", script], **options)
    _, errors = process.communicate(timeout=100)
    if nobody and any(word in errors for word in ("Permission", "ModuleNotFoundError", "No such file")):
        pytest.skip("an unprivileged user may not read this checkout, or has no Python of the right version")
    assert process.returncode == 0, errors
    assert not list(Path("/dev/shm").glob(f"marcog-scratch-{process.pid}-*"))


def test_what_a_killed_executor_left_is_removed(tmp_path):
    left = Path(scratch.reserve())
    left.mkdir()
    (left / "deep" / "er").mkdir(parents=True)
    (left / "deep" / "er" / "file").write_text("x")
    os.utime(left, (time.time() - 100,) * 2)
    held = Path(scratch.reserve())
    held.mkdir()
    fd = scratch.hold(str(held))
    os.utime(held, (time.time() - 100,) * 2)
    fresh = scratch.reserve()
    scratch.make(fresh)
    assert Path(fresh).exists() and held.exists() and not left.exists()
    os.close(fd)
    scratch.remove(str(held))
    scratch.remove(fresh)


@pytest.mark.parametrize(
    ("tests", "wanted"),
    [
        ("assert f(open('a').read())", True),
        ("import sqlite3\nx = f()", True),
        ("from os import remove", True),
        ("import os\nassert os.path.exists(f())", True),
        ("assert pathlib.Path(f()).name", True),
        ("import os\nassert os.sep in f('open')", False),
        ("assert f('open(1)') == 'sqlite3'", False),
        ("door.open()", False),
        ("c = Cookies('data/cookies.json')", True),
        ("assert f('a.b') == 'one.two'", False),
    ],
)
def test_tests_that_work_with_files(tests, wanted):
    assert uses_files(ast.walk(ast.parse(f"import math\n{tests}"))) is wanted
