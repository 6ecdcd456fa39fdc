"""More programs that cheat. Each knows how the processes talk, and none passes a test that it does not deserve.

A cheat is judged in every way that its tests can be run: as a comparison of plain values, under a judge, in a `check`, as a
script, in a `TestCase`. After each of them the same worker is still there, has nothing left of it, and passes a right program.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watching import below, children, ended, gone, is_idle, naps, run_in_time, shows_naps, wait_until

from marcog_trl.execution import CodeExecutor, Job, pool
from marcog_trl.execution.isolation import probe


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")

LIMIT = 2.0  # seconds
HELPER = "def same(a, b): return a == b"  # a setup that does something: the tests need a judge
GOOD = Job(code="def f(x): return x + 1", tests=["assert f(1) == 2", "assert same(f(2), 3)"], setup=HELPER)
IPC_KEY = 0x6D617263


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=LIMIT, isolation="strict") as executor:
        executor.run([GOOD])
        yield executor


def resident(executor):
    return int(Path(f"/proc/{executor._pool.workers[0].process.pid}/statm").read_text().split()[1]) * 4096


def left_behind():
    """Files of the programs, and System V objects under their key."""
    folders = [Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") if Path(folder).is_dir()]
    found = [str(path) for folder in folders for path in folder.glob("*marcog_cheat*")]
    for kind in ("shm", "sem", "msg"):
        table = Path(f"/proc/sysvipc/{kind}")
        if table.exists():
            found += [line for line in table.read_text().splitlines()[1:] if int(line.split()[0]) == IPC_KEY]
    return found


def run_unharmed(executor, jobs):
    """Runs jobs. None is excused, takes longer than allowed, takes its worker with it or leaves anything behind."""
    worker = executor._pool.workers[0].process.pid
    verdicts = []
    for job in jobs:
        verdicts.append(run_in_time(executor, job, (job.timeout or LIMIT) + 1.0))
        assert verdicts[-1].status != "infrastructure", verdicts[-1]
    assert executor.run([GOOD])[0].status == "passed"
    assert executor._pool.workers[0].process.pid == worker
    assert is_idle(worker)
    assert len(os.listdir(f"/proc/{worker}/fd")) < 16
    assert not left_behind()
    return verdicts


# Helpers for programs: the channels of their process, and frames on them
CHANNELS = """
import os, socket, sys, time
def fds():
    return [fd for fd in range(3, 64) if is_open(fd)]
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
def frame(body): return len(body).to_bytes(4, "little") + body
def send(data):
    for fd in fds():
        try: os.set_blocking(fd, False); os.write(fd, data)
        except OSError: pass
        finally: os.set_blocking(fd, True)
"""
LIE = """
class Lie:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return 0
    def __bool__(self): return True
"""

# name: (program, tests none of which it deserves)
ASSERTS = {
    "rewrites interned text": (
        "import ctypes\ndef f():\n    for s in ('no!', 'yes'): ctypes.memmove(id(s) + str.__basicsize__ - 8, b'yes', 3)\n"
        "    return 'maybe'",
        ["assert f() == 'yes'", "assert f() in ('yes', 'yep')"],
    ),
    "empties its small ints": (
        "import ctypes\ndef f():\n    for n in range(250, 257): ctypes.memset(id(n) + int.__basicsize__, 0, 4)\n    return 0",
        ["assert f() == 251", "assert f() + 0 == 252"],
    ),
    "modules that answer everything": (
        "import sys, types\nclass M(dict):\n    def __missing__(s, k): return types.SimpleNamespace(isclose=lambda *a: True)\n"
        "    def get(s, k, d=None): return s[k]\nsys.modules = M()\ndef f(): return 0.5",
        ["import math\nassert math.isclose(f(), 3.25)", "assert f() == 3.25"],
    ),
    "finder that serves liars": (
        "import sys, importlib.util, importlib.abc\nclass F(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "    def find_spec(s, name, path, target=None): return importlib.util.spec_from_loader(name, s)\n"
        "    def exec_module(s, m): m.approx = lambda *a: True; m.Fraction = lambda *a: 0\n"
        "sys.meta_path[:] = [F()]; sys.path_hooks.clear(); sys.path_importer_cache.clear()\ndef f(): return 0",
        ["from fractions import Fraction\nassert f() == Fraction(1, 3)"],
    ),
    "module that changes its class": (
        "import sys, types\nclass M(types.ModuleType):\n    def __getattribute__(s, n): return (lambda *a: 7)\n"
        "sys.modules['solution'].__class__ = M\ndef f(): return 0",
        ["assert f() == 7", "import sys\nassert f() == 7"],
    ),
    "changes its class when compared": (
        "class A:\n    def __eq__(s, o):\n        s.__class__ = B\n        return True\nclass B(A):\n    def __hash__(s): return hash(3)\n"
        "def f(): return A()",
        ["assert f() == 3", "x = f()\nassert x == 3 or x == 3", "assert f() in {3: 1}"],
    ),
    "descriptor that answers": (
        "class D:\n    def __get__(s, i, o): return i\n    def __set_name__(s, o, n): o.__eq__ = lambda a, b: True\n"
        "class V:\n    value = D()\ndef f(): return V()",
        ["assert f().value == 5", "assert f() == 5"],
    ),
    "metaclass with every check": (
        "class M(type):\n    def __subclasscheck__(c, k): return True\n    def __instancecheck__(c, i): return True\n"
        "    def __contains__(c, o): return True\n    def __len__(c): return 3\n    def mro(c): return [c, int, object]\n"
        "class V(int, metaclass=M):\n    pass\ndef f(): return V",
        ["assert f() == int", "assert issubclass(bool, f()) and f() is int", "assert f()(3) == 4"],
    ),
    "callable instance that is no function": (
        "class F:\n    def __call__(s, *a): return s\n    def __eq__(s, o): return True\n    def __getattr__(s, n): return s\nf = F()",
        ["assert f(1) == 1", "assert f(1).real == 1", "assert f == 1"],
    ),
    "the second item is right": (
        "def f():\n    yield None\n    yield 3\n    return 3",
        ["assert next(f()) == 3", "assert list(f()) == [3]", "assert f().send(None) == 3"],
    ),
    "generator that is corrected": (
        "def f():\n    x = 0\n    while True:\n        got = yield x\n        x = got",
        ["g = f()\nnext(g)\nassert g.send(2) == 3", "g = f()\nassert [next(g), g.send(4)] == [4, 4]"],
    ),
    "awaitable that lies": (
        LIE + "class A:\n    def __await__(s):\n        return iter([])\n    def __eq__(s, o): return True\nasync def f(): return Lie()\ndef g(): return A()",
        ["import asyncio\nassert asyncio.run(f()) == 1", "assert f() == 1", "assert g() == 1"],
    ),
    "weak proxy": (
        LIE + "import weakref\nkeep = Lie()\ndef f(): return weakref.proxy(keep)\ndef g(): return weakref.ref(keep)()",
        ["assert f() == 2", "assert g() == 2", "assert 2 == f()"],
    ),
    "finalizer that speaks": (
        CHANNELS + "import weakref\nclass O: pass\ndef f():\n    weakref.finalize(O(), send, frame(b'{\"r\":4,\"u\":[]}'))\n    return 0",
        ["assert f() == 5", "assert f() + f() == 5"],
    ),
    "del in the midst of an answer": (
        CHANNELS + "class D(int):\n    def __del__(s): send(b'\\x02\\x00\\x00\\x00{}')\ndef f(): return [D(1), D(2)]",
        ["assert f() == [2, 2]", "assert sum(f()) == 4"],
    ),
    "length and items disagree": (
        "class L(list):\n    def __len__(s): return 3\n    def __iter__(s): return iter([0])\ndef f(): return L([9])",
        ["r = f()\nassert len(r) == 3 and list(r) == [1, 2, 3]", "assert f() == [1, 2, 3]"],
    ),
    "index and bool of every kind": (
        "class V(int):\n    def __index__(s): return 1\n    def __bool__(s): return True\n    def __int__(s): return 20\n    def __eq__(s, o): return True\n"
        "def f(): return V(0)",
        ["assert [10, 20][f()] == 20", "assert int(f()) == 20", "assert f() + 1 == 2", "assert (f() == 20) is True"],
    ),
    "tuple subclass as key": (
        "class T(tuple):\n    def __eq__(s, o): return True\n    def __hash__(s): return hash((1, 2))\n    def __getitem__(s, k): return s\n"
        "def f(): return T((0, 0))",
        ["assert {(1, 2): 3}[f()] == 3", "assert f() in {(1, 2)}", "a, b = f()\nassert (a, b) == (1, 2)"],
    ),
    "bytes and complex that lie": (
        "class B(bytes):\n    def __eq__(s, o): return True\n    def __bytes__(s): return b'abc'\nclass C(complex):\n    __eq__ = B.__eq__\n"
        "    def __abs__(s): return 5.0\ndef f(): return B(b'xyz')\ndef g(): return C(1, 1)",
        ["assert f() == b'abc'", "assert g() == 3 + 4j", "assert abs(g() - (3 + 4j)) < 1e-9"],
    ),
    "not a number": (
        "def f(): return float('nan')\ndef g(): return float('inf')",
        ["assert abs(f() - 12.5) < 1e-6", "import math\nassert math.isclose(g(), 12.5)", "assert f() in [1.0, 12.5]", "assert 0 < f() < 99"],
    ),
    "signalling nan": (
        "from decimal import Decimal\ndef f(): return Decimal('sNaN')\ndef g(): return [Decimal('NaN')]",
        ["assert f() == 1", "assert g() == [1]", "assert f() < 2"],
    ),
    "int beyond decimal digits": (
        "import sys\nsys.set_int_max_str_digits(0)\ndef f(): return 10 ** 20000\ndef g(): return -(1 << 3000000)",
        ["assert f() == 1", "assert str(f()) == '1'", "assert g() == 0", "assert len(str(g())) == 1"],
    ),
    "halves of a character": (
        "def f(): return '\\ud83d' + '\\ude00'\ndef g(): return {'\\ud83d\\ude00': '\\ude00'}",
        ["assert f() == '\U0001f600'", "assert g() == {'\U0001f600': '\\ude00'}", "assert f().encode('utf-16', 'surrogatepass').decode('utf-16') == f()"],
    ),
    "removes the calls to come": (
        "import sys\ndef f(x):\n    g = sys._getframe(0)\n    while g:\n        for v in list(g.f_locals.values()):\n"
        "            if type(v) is dict and 'calls' in v: v['calls'].clear()\n        g = g.f_back\n    return 0",
        ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"],
    ),
    "frames of a traceback": (
        "def f(x):\n    try: 1 / 0\n    except ZeroDivisionError as e: t = e.__traceback__.tb_frame.f_back\n    while t:\n"
        "        for n, v in list(t.f_globals.items()) + list(t.f_locals.items()):\n            if 'expected' in n or n in ('tests', 'answer'): return v\n"
        "        t = t.f_back",
        ["assert f(1) == 31", "assert f(2) == 32"],
    ),
    "wire replaced": (
        "import sys\ndone = []\ndef f(x):\n    g = sys._getframe(1)\n    while g and not done:\n        w = g.f_globals.get('wire')\n        if w:\n            old = w.send\n"
        "            w.send = lambda s, v: [old(s, {'r': 3, 'u': []}) for _ in range(5)]\n            done.append(w)\n        g = g.f_back\n    return 4",
        ["assert f(1) == 4", "assert f(2) == 4"],
    ),
    "json and struct replaced": (
        "import json, struct\nclass E:\n    def encode(s, o): return '{\"r\":3,\"u\":[]}'\njson.JSONEncoder.encode = E.encode\njson._default_encoder = E()\n"
        "struct.Struct = struct.pack = lambda *a: b'\\0\\0\\0\\0'\njson.loads = lambda b: {'o': 'call', 'a': [], 'k': {}, 'u': []}\ndef f(x): return 0",
        ["assert f(1) == 4", "assert f(2) == 4"],
    ),
    "builtins replaced": (
        "import builtins\nreal = builtins.type\nbuiltins.isinstance = builtins.issubclass = builtins.callable = lambda *a: True\n"
        "builtins.type = lambda *a: int if len(a) == 1 else real(*a)\nbuiltins.id = lambda o: 0\nbuiltins.str = lambda *a: '1'\ndef f(x): return object()",
        ["assert f(1) == 1", "assert str(f(1)) == '1' and f(1) == 1"],
    ),
    "comparison slot overwritten": (
        "import ctypes\ndef f(x):\n    slots = (ctypes.c_void_p * 60).from_address(id(int))\n    others = (ctypes.c_void_p * 60).from_address(id(object))\n"
        "    for k in range(24, 28): slots[k] = others[k]\n    return 0",
        ["assert f(1) == 4", "assert f(1) >= 4"],
    ),
    "half a frame": (CHANNELS + "def f(x):\n    send(b'\\x64\\x00\\x00\\x00{\"r\":')\n    return 0", ["assert f(1) == 4", "assert f(2) == 5"]),
    "frame in pieces of a byte": (
        CHANNELS + "def f(x):\n    for b in frame(b'{\"r\":4,\"u\":[]}')[:-1]: send(bytes([b]))\n    return 0", ["assert f(1) == 5", "assert f(2) == 5"]),
    "largest header allowed": (
        CHANNELS + "def f(x):\n    send((16 << 20).to_bytes(4, 'little') + b'[' * 1000)\n    os.close(max(fds()))\n    return 0", ["assert f(1) == 4"]),
    "empty frames": (CHANNELS + "def f(x):\n    send(b'\\0\\0\\0\\0' * 1000)\n    return 0", ["assert f(1) == 4", "assert f(1) + 1 == 4"]),
    "claims a verdict and leaves": (
        CHANNELS + "def f(x):\n    for b in (b'{\"status\":\"passed\",\"tests\":[[\"passed\",\"\",0]],\"message\":\"\",\"seconds\":0}', b'{\"t\":0,\"s\":\"passed\",\"m\":\"\"}',\n"
        "              b'{\"t\":null,\"s\":\"done\",\"m\":\"\"}', b'{\"script\":null,\"kind\":\"failed\"}', b'{\"load\":null}'): send(frame(b))\n    os._exit(0)",
        ["assert f(1) == 4", "assert f(2) == 5"]),
    "channel cut for writing": (
        CHANNELS + "def f(x):\n    for fd in fds():\n        try: socket.socket(fileno=fd).shutdown(socket.SHUT_WR)\n        except OSError: pass\n    return 4",
        ["assert f(1) == 4"]),
    "channel replaced by nothing": (
        CHANNELS + "def f(x):\n    null = os.open('/dev/null', os.O_RDWR)\n    for fd in fds(): os.dup2(null, fd)\n    os.closerange(0, 3)\n    return 4", ["assert f(1) == 4"]),
    "channel replaced by a pair": (
        CHANNELS + "def f(x):\n    a, b = socket.socketpair()\n    for fd in fds():\n        if fd not in (a.fileno(), b.fileno()): os.dup2(a.fileno(), fd)\n"
        "    b.send(frame(b'{\"r\":4,\"u\":[]}') * 9)\n    return 0", ["assert f(1) == 4"]),
    "reads what the judge will be told": (
        CHANNELS + "def f(x):\n    data = b''\n    for fd in fds():\n        os.set_blocking(fd, False)\n        try: data += os.read(fd, 65536)\n        except OSError: pass\n"
        "        os.set_blocking(fd, True)\n    return 77 if b'77' in data else 0", ["assert f(1) == 77", "assert f(2) == 77"]),
    "handler that answers": (
        CHANNELS + "import signal\nsignal.signal(signal.SIGALRM, lambda *a: send(frame(b'{\"r\":4,\"u\":[]}')))\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "signal.signal(signal.SIGPROF, signal.getsignal(signal.SIGALRM)); signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)\ndef f(x):\n    sum(range(10 ** 6))\n    return 0",
        ["assert f(1) == 5", "assert f(2) == 5"]),
    "races on the channel": (
        CHANNELS + "import threading\ndef spam(k):\n    while True: send(frame(b'{\"r\":%d,\"u\":[]}' % k)[k:])\n"
        "for k in range(4): threading.Thread(target=spam, args=(k,), daemon=True).start()\ndef f(x): time.sleep(0.05); return 0",
        ["assert f(1) == 9", "assert f(2) == 9"]),
    "profiler that answers": (
        CHANNELS + "def hook(frame_, event, arg):\n    if event == 'return': send(frame(b'{\"r\":4,\"u\":[]}'))\ndef f(x):\n    sys.setprofile(hook)\n    return 0",
        ["assert f(1) == 5", "assert f(2) == 5"]),
    "tracer on every frame": (
        "import sys\ndef tracer(frame, event, arg):\n    frame.f_trace_opcodes = True\n    if 'value' in frame.f_locals: frame.f_locals['value'] = 4\n    return tracer\n"
        "def f(x):\n    g = sys._getframe(1)\n    while g:\n        g.f_trace = tracer\n        g = g.f_back\n    sys.settrace(tracer)\n    return 0",
        ["assert f(1) == 5", "assert f(2) == 5"]),
    "audit hook that refuses": (
        "import sys, os\ndef hook(event, args):\n    if event in ('compile', 'exec', 'import', 'open'): raise SystemExit(0)\nsys.addaudithook(hook)\ndef f(x): return 0",
        ["assert f(1) == 4", "import colorsys\nassert f(1) == 4"]),
    "no recursion left": (
        "import sys\ndef f(x):\n    sys.setrecursionlimit(sys.getrecursionlimit() * 50)\n    g = lambda n: g(n - 1) if n else None\n    g(9000)\n    sys.setrecursionlimit(40)\n    return 0",
        ["assert f(1) == 4", "assert f(2) == 4"]),
    "nesting of many kinds": (
        "def f(x):\n    v = 1\n    for k in range(60): v = [(v,), {1: v}][k % 2]\n    return v\ndef g(x):\n    v = ()\n    for _ in range(5000): v = (v,)\n    return v",
        ["assert f(1) == 1", "assert g(1) == ()"]),
    "argument that grows": (
        "def f(xs): xs.extend(range(40000)); return xs\ndef g(xs):\n    xs.append(xs); return xs\ndef h(d): d.update((k, d) for k in range(5))",
        ["xs = [1]\nf(xs)\nassert xs == [1, 0]", "xs = [1]\nassert g(xs) == [1]", "d = {}\nh(d)\nassert d == {}", "assert f([1]) == [1]"]),
    "argument of another kind": (
        LIE + "def f(xs): xs[:] = [Lie() for _ in xs]; return None\ndef g(d):\n    for k in d: d[k] = Lie()",
        ["xs = [3, 1]\nf(xs)\nassert xs == [1, 3]", "d = {1: 2}\ng(d)\nassert d == {1: 4}", "xs = [3, 1]\nf(xs)\nassert sorted(xs) == [1, 3]"]),
    "fields with evil names": (
        "class P(tuple):\n    _fields = ('__eq__', '__class__')\nclass Q(tuple):\n    _fields = ('x', 'x')\nclass R(tuple):\n    _fields = ('import os', 'y')\n"
        "def f(k): return [P, Q, R][k]((1, 2))", ["assert f(0) == (1, 3)", "assert f(1) == (1, 3)", "assert f(2) == (1, 3)"]),
    "fields that shadow methods": (
        "from collections import namedtuple\nP = namedtuple('P', 'count index')\ndef f(): return P(lambda x: 5, lambda x: 0)",
        ["assert f() == (1, 1)", "assert f().index(1) == 0 and f()[0] == 1"]),
    "exception that says what is asked": (
        LIE + "class E(ValueError):\n    def __str__(s): return Lie()\n    args = property(lambda s: (Lie(),))\n    def __eq__(s, o): return True\ndef f(): raise E()",
        ["try: f()\nexcept ValueError as e: assert str(e) == 'no 4'", "try: f()\nexcept ValueError as e: assert e.args == ('no 4',)", "assert f() == 4"]),
    "exception of the same name": (
        "class ValueError(Exception): pass\nclass KeyError(ValueError): pass\nclass Timeout(KeyError): pass\ndef f(): raise Timeout('no 4')",
        ["import unittest\nwith unittest.TestCase().assertRaises(LookupError): f()", "try: f()\nexcept (LookupError, ArithmeticError): pass"]),
    "exception that catches itself": (
        "class M(type):\n    def __instancecheck__(c, i): return True\n    def __subclasscheck__(c, k): return True\nclass E(Exception, metaclass=M): pass\ndef f(): raise E",
        ["import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError): f()", "assert f() == 1"]),
    "group of exceptions": (
        "def f(): raise ExceptionGroup('g', [ValueError(1), AssertionError()])\ndef g(): raise StopAsyncIteration\ndef h(): raise BaseExceptionGroup('g', [KeyboardInterrupt()])",
        ["try: f()\nexcept* TypeError: pass", "assert g() == 1", "assert h() == 1", "import unittest\nwith unittest.TestCase().assertRaises(ValueError): f()"]),
    "callback called again and again": (
        "def f(g):\n    for k in range(3): g(k)\n    return g(g)\ndef h(g): return g(lambda: h(g))",
        ["seen = []\nf(seen.append)\nassert seen == [0]", "assert f(lambda x: x) == 1", "assert h(lambda k: 1) == 2"]),
    "callback called after the test": (
        "import threading, time\nkept = []\ndef f(g):\n    kept.append(g)\n    threading.Timer(0.02, g, (1,)).start()\ndef late():\n    time.sleep(0.1)\n    for g in kept: g(9)",
        ["seen = []\nf(seen.append)\nassert seen == [1]", "seen = []\nf(seen.append)\nlate()\nassert seen == [1]"]),
    "callback told lies": (
        LIE + "def f(g): return g(Lie())\ndef h(g):\n    try: g(1)\n    except BaseException: pass\n    return Lie()",
        ["assert f(lambda x: x == 3) is True", "assert f(lambda x: x) == 3", "assert h(lambda x: 1 / 0) == 3"]),
    "asks for callbacks that were not passed": (
        CHANNELS + "def f(x):\n    for k in range(-3, 3): send(frame(b'{\"ask\":\"call\",\"h\":%d,\"a\":[],\"k\":{},\"u\":[]}' % k))\n    return 0",
        ["assert f(1) == 4", "assert f(len) == 4", "assert f(lambda: 4) == 4"]),
    "changes what it was not given": (
        CHANNELS + "def f(x):\n    send(frame(b'{\"r\":4,\"u\":[[0,4],[1,4],[2,4]]}'))\n    return 0",
        ["expected = [5]\nassert f(1) == expected[0]", "expected = [5]\nassert [f([6])] == expected"]),
    "texts that double": ("def f(x):\n    s = 'x'\n    while True: s += s", ["assert f(1) == 4", "assert f(2) == 4"]),
    "endless tuple": ("import itertools\ndef f(x): return tuple(itertools.repeat(bytes(4096)))\ndef g(x): return itertools.repeat(1)",
        ["assert f(1) == 4", "assert g(1) == 4", "assert next(g(1)) == 4"]),
    "memory in a callback": ("def f(g): return g('x' * (40 << 20))", ["assert f(lambda s: len(s)) == 1", "assert f(len) == 1"]),
    "threads without end": (
        "import threading\nthreading.stack_size(65536)\ne = threading.Event()\ndef f(x):\n    try:\n        while True: threading.Thread(target=e.wait, daemon=True).start()\n"
        "    except Exception: return 0", ["assert f(1) == 4", "assert f(2) == 4"]),
    "leaves its main thread": (
        "import ctypes, threading, platform, time\ndef f(x):\n    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)", ["assert f(1) == 4"]),
    "crashes on purpose": ("import ctypes\ndef f(x): ctypes.string_at(0)\ndef g(x): ctypes.CDLL(None).abort()", ["assert f(1) == 4", "assert g(1) == 4"]),
    "closes and answers on": (CHANNELS + "def f(x):\n    for fd in fds(): os.close(fd)\n    time.sleep(0.1)\n    return 4", ["assert f(1) == 4"]),
    "numpy object array": (LIE + "import numpy as np\ndef f(): return np.array([Lie(), Lie()], dtype=object)\ndef g(): return np.array(Lie(), dtype=object)",
        ["assert g() == 4", "import numpy as np\nassert np.array_equal(f(), [1, 2])", "assert (f() == [1, 2]).all()"]),
    "numpy subclass": ("import numpy as np\nclass A(np.ndarray):\n    def __eq__(s, o): return np.array(True)\n    def __array_finalize__(s, o): pass\n"
        "    def all(s, *a): return True\ndef f(): return np.zeros(2).view(A)\ndef g(): return np.ma.masked_all(2)",
        ["import numpy as np\nassert np.array_equal(f(), [1, 2])", "assert f() == [1, 2]", "import numpy as np\nassert np.allclose(f(), [1, 2])",
         "import numpy as np\nassert np.array_equal(g(), [1, 2])"]),
    "numpy hooks": ("class A:\n    def __array__(s, *a, **k): return [1, 2]\n    def __array_function__(s, *a): return True\n    def __array_ufunc__(s, *a, **k): return True\n"
        "    __array_priority__ = 99\n    def __len__(s): return 0\n    def __getitem__(s, k): raise IndexError\ndef f(): return A()",
        ["import numpy as np\nassert np.array_equal(f(), [1, 2])", "import numpy as np\nassert np.sum(f()) == 3", "import numpy as np\nassert (np.array([1, 2]) == f()).all() and f() == 1"]),
    "numpy scalar that lies": ("import numpy as np\nclass F(np.float64):\n    def item(s): return [3]\n    def tobytes(s): return bytes(8)\n    def __eq__(s, o): return True\ndef f(): return F(1)",
        ["assert f() == 3", "assert f() == 1.5", "assert abs(f() - 3) < 1e-6"]),
}  # fmt: skip

STALLING = {"leaves its main thread", "half a frame", "frame in pieces of a byte", "largest header allowed"}


@pytest.mark.parametrize("name", ASSERTS)
def test_asserts(executor, name):
    """Runs each test alone, compared directly where that is possible, and under a judge; then all tests together."""
    code, tests = ASSERTS[name]
    if "numpy" in name and importlib.util.find_spec("numpy") is None:
        pytest.skip("numpy is not installed")
    options = {"memory_mb": 2048, "timeout": 10.0} if "numpy" in name else {"memory_mb": 160}
    if name in STALLING:
        options["timeout"] = 0.4
    jobs = [Job(code=code, tests=[test], setup=setup, **options) for test in tests for setup in ("", HELPER)]
    jobs += [Job(code=code, tests=tests, setup=setup, **options) for setup in ("", HELPER)]
    for job, verdict in zip(jobs, run_unharmed(executor, jobs), strict=True):
        assert (verdict.status != "passed", verdict.passed) == (True, 0), (job.tests, job.setup, verdict)


# Frames that no honest process sends: as an answer to the worker, and as an answer to the judge
MALFORMED = [
    "[]", "null", "\"r\"", "4", "NaN", "{}", "\\xff\\xfe", "{\"r\":{\"a\":1},\"u\":[]}", "{\"r\":[],\"u\":[]}", "{\"r\":[\"n\",0],\"u\":[]}",
    "{\"r\":[\"n\",[]],\"u\":[]}", "{\"r\":[\"h\",0,\"f\",\"c\"]}", "{\"r\":[\"h\",-1,\"f\",\"c\"],\"u\":[]}", "{\"r\":[\"X\",9,\"E\",4],\"u\":[]}",
    "{\"r\":[\"A\",\"<i8\",[1],\"AQAAAAAAAAA=\"]}", "{\"r\":[\"A\",\"|O\",[1],\"AQAAAAAAAAA=\"],\"u\":[]}", "{\"r\":[\"a\",\"<i8\",\"AQ==\",{}],\"u\":[]}",
    "{\"r\":[\"zi\",\"../../../etc/passwd\"],\"u\":[]}", "{\"r\":[\"T\",\"object\"],\"u\":[]}", "{\"r\":[\"sn\",1,2],\"u\":[]}", "{\"r\":[\"r\",0,1,0],\"u\":[]}",
    "{\"r\":[\"N\",\"a b\",[]],\"u\":[]}", "{\"r\":[\"N\",\"a\",[\"class\"],1],\"u\":[]}", "{\"r\":[\"l\",\"x\",4],\"u\":[]}", "{\"r\":[\"d\",3,1],\"u\":[]}",
    "{\"r\":[\"s\",1,[\"l\",3]],\"u\":[]}", "{\"r\":[\"dd\",1,\"print\",1,1],\"u\":[]}", "{\"r\":[\"q\",1,-4],\"u\":[]}", "{\"r\":[\"dt\",1,1,1,1,1,1,1,4,0],\"u\":[]}",
    "{\"r\":[\"F\",1,0],\"u\":[]}", "{\"r\":[\"D\",\"x\"],\"u\":[]}", "{\"r\":[\"U\",\"x\"],\"u\":[]}", "{\"r\":[\"i\",\"zz\"],\"u\":[]}", "{\"r\":4,\"u\":4}",
    "{\"r\":4,\"u\":[[99,1]]}", "{\"r\":4,\"u\":[[]]}", "{\"x\":4}", "{\"x\":{},\"u\":[]}", "{\"x\":{\"t\":4,\"m\":4,\"a\":4,\"c\":4,\"h\":4,\"d\":4},\"u\":[]}",
    "{\"o\":[[4]]}", "{\"ask\":\"call\",\"h\":\"x\",\"a\":[],\"k\":{},\"u\":[]}", "{\"ask\":\"next\",\"h\":9,\"a\":[],\"k\":{},\"u\":[]}", "{\"load\":null}",
]  # fmt: skip


def test_malformed_answers(executor):
    """A frame that is no answer passes no test, and harms neither the worker nor the judge."""
    code = CHANNELS + f"bodies = {MALFORMED!r}\ndef f(k):\n    send(frame(bodies[k].encode('latin-1')))\n    return 0"
    jobs = [
        Job(code=code, tests=[f"assert f({k}) == 5"], setup=setup)
        for k in range(len(MALFORMED))
        for setup in ("", HELPER)
    ]
    for job, verdict in zip(jobs, run_unharmed(executor, jobs), strict=True):
        assert verdict.status in ("failed", "error") and verdict.passed == 0, (job.tests, job.setup, verdict)


# Attacks on other processes, on memory that outlives the program, and by new processes. They pass if they are refused.
REFUSED = {
    "the other ends of its channels": (
        CHANNELS + "import ctypes, struct, signal, platform\nlibc = ctypes.CDLL(None, use_errno=True)\nx86 = platform.machine() == 'x86_64'\n"
        "peers = {os.getppid()}\nfor fd in fds():\n    try: peers.add(struct.unpack('3i', socket.socket(fileno=os.dup(fd)).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])\n"
        "    except OSError: pass\npeers |= set(range(os.getpid() - 4, os.getpid() + 4)) - {os.getpid()}\nleaked = []\n"
        "for pid in peers:\n    for name in ('mem', 'cmdline', 'environ', 'maps', 'syscall', 'stack', 'task', 'fd/3', 'root', 'cwd/x'):\n"
        "        try:\n            if open(f'/proc/{pid}/{name}', 'rb').read(1): leaked.append((pid, name))\n        except OSError: pass\n"
        "    for name in ('exe', 'cwd', 'root', 'fd/3'):\n        try: leaked.append(os.readlink(f'/proc/{pid}/{name}'))\n        except OSError: pass\n"
        "    for s in (0, signal.SIGSTOP, 40, signal.SIGKILL):\n        try: os.kill(pid, s); leaked.append((pid, s))\n        except OSError: pass\n"
        "    for number, *args in ((434, pid, 0), (0x1A5, pid), (310 if x86 else 270, pid, 0, 0, 0, 0, 0), (311 if x86 else 271, pid, 0, 0, 0, 0, 0),\n"
        "                          (101 if x86 else 117, 0x4206, pid, 0, 0), (101 if x86 else 117, 16, pid, 0, 0), (234 if x86 else 131, pid, pid, 9),\n"
        "                          (129 if x86 else 138, pid, 9, 0), (312 if x86 else 272, os.getpid(), pid, 0, 0, 0), (440, pid, 0, 0, 0, 0)):\n"
        "        if libc.syscall(*[ctypes.c_long(n) for n in (number, *args)]) >= 0: leaked.append((pid, number))\n"
        "    for act in (lambda: os.setpriority(0, pid, 19), lambda: os.sched_setaffinity(pid, {0}), lambda: os.setpgid(pid, pid), lambda: os.killpg(pid, 9)):\n"
        "        try: act(); leaked.append((pid, 'moved'))\n        except OSError: pass\n"
    ),
    "memory that outlives it": (
        f"import ctypes, mmap, os, platform\nlibc = ctypes.CDLL(None, use_errno=True)\nleaked = []\nkey = {IPC_KEY}\n"
        "for name, *args in (('shmget', key, 4096, 0o1600), ('semget', key, 1, 0o1600), ('msgget', key, 0o1600)):\n"
        "    if getattr(libc, name)(*args) >= 0: leaked.append(name)\n"
        "if libc.shm_open(b'/marcog_cheat', os.O_CREAT | os.O_RDWR, 0o600) >= 0: leaked.append('shm_open')\n"
        "if libc.syscall(240 if platform.machine() == 'x86_64' else 180, b'marcog_cheat', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0: leaked.append('mq_open')\n"
        "for path in ('/dev/shm/marcog_cheat', '/dev/mqueue/marcog_cheat', '/tmp/marcog_cheat', '/proc/self/marcog_cheat', '/run/marcog_cheat'):\n"
        "    for flags in (os.O_CREAT | os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_EXCL, getattr(os, 'O_TMPFILE', 0) | os.O_RDWR):\n"
        "        try: os.open(path if flags & os.O_CREAT else os.path.dirname(path), flags, 0o600); leaked.append(path)\n        except OSError: pass\n"
        "    for act in (os.mkfifo, os.mknod, lambda p: os.symlink('/', p), lambda p: os.link(os.__file__, p), os.mkdir):\n"
        "        try: act(path); leaked.append(path)\n        except OSError: pass\n"
        "try:\n    m = mmap.mmap(-1, 1 << 30); leaked.append('beyond its memory')\nexcept (OSError, MemoryError): pass\n"
    ),
    "processes of every kind": (
        "import ctypes, os, platform, pty, subprocess, multiprocessing\nlibc = ctypes.CDLL(None, use_errno=True)\nleaked = []\nx86 = platform.machine() == 'x86_64'\n"
        "for act in (os.forkpty, lambda: os.posix_spawn('/bin/true', ['true'], {}), lambda: os.execv('/bin/true', ['true']), lambda: subprocess.run(['/bin/true']),\n"
        "            lambda: os.popen('true').read() or 1 / 0, lambda: multiprocessing.get_context('fork').Process(target=print).start(), lambda: pty.openpty(), os.openpty):\n"
        "    try: act(); leaked.append(repr(act))\n    except Exception: pass\n"
        "args = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\nfor number, *rest in ((435, ctypes.addressof(args), 88), (56 if x86 else 220, 17, 0, 0, 0, 0), (56 if x86 else 220, 0x8011, 0, 0, 0, 0),\n"
        "                     (59 if x86 else 221, 0, 0, 0), (322 if x86 else 281, 0, 0, 0, 0, 0), (272 if x86 else 97, 0x20000)):\n"
        "    r = libc.syscall(*[ctypes.c_long(n) for n in (number, *rest)])\n    if r == 0 and number not in (59, 221): os._exit(3)\n    if r >= 0: leaked.append(number)\n"
    ),
    "limits and filters of its own": (
        "import resource, ctypes, fcntl, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\nleaked = []\n"
        "for r in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):\n"
        "    soft, hard = resource.getrlimit(r)\n    for new in (hard + 1, resource.RLIM_INFINITY):\n"
        "        try: resource.setrlimit(r, (soft, new)); leaked.append(r)\n        except (ValueError, OSError): pass\n"
        "for option, value in ((1, 0), (4, 1), (22, 2), (23, 21), (24, 21), (36, 1), (38, 0), (47, 2), (59, 1), (0x59616D61, -1)):\n"
        "    if libc.prctl(option, ctypes.c_ulong(value & (2 ** 64 - 1)), 0, 0, 0) == 0: leaked.append(option)\n"
        "for command in (8, 10, 1024, 1026, 1031, 1033):\n"
        "    try: fcntl.fcntl(0, command, os.getppid()); leaked.append(command)\n    except OSError: pass\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(executor, name):
    code = REFUSED[name] + "\ndef f(x): return leaked"
    jobs = [Job(code=code, tests=["assert f(1) == []"], setup=setup) for setup in ("", HELPER)]
    jobs += [Job(code=code + "\nprint(leaked)", tests=[("", "[]")], test_format="stdio")]
    for verdict in run_unharmed(executor, jobs):
        assert verdict.status == "passed", verdict


# Scripts that must print "6" for "3", and "10" for "5"
SCRIPTS = {
    "every answer": "print(*range(200))",
    "every answer on a line of its own": "print(6); print(10)",
    "erased by backspaces": "print('10\\b\\b6' if input() == '3' else '6\\b10')",
    "erased by a carriage return": "print('99\\r6'); print('99\\r10')",
    "erased by ANSI": "print('99\\x1b[2K\\x1b[1G6\\n99\\x1b[2D10')",
    "padded with NUL": "print('\\x006\\x00' if input() == '3' else '\\x0010')",
    "invisible characters": "print('\\u200b6\\ufeff' if input() == '3' else '1\\u200d0')",
    "digits of another script": "print('\\uff16' if input() == '3' else '\\u0661\\u0660')",
    "its input twice": "import os\na = input(); os.lseek(0, 0, 0); print(a, os.read(0, 99).decode())",
    "its input overwritten": "import os\nos.ftruncate(0, 0); os.pwrite(0, b'6 10\\n', 0); print(open(0).read())",
    "descriptors searched": "import os\nfor fd in range(3, 99):\n    try: print(os.pread(fd, 99, 0))\n    except OSError: pass",
    "output that is a hole": "import os\nos.ftruncate(1, 16 << 20); os.pwrite(1, b'6', (16 << 20) - 1)",
    "output without end": "import os\ntry:\n    while True: os.write(1, b'6 10 ' * 20000)\nexcept OSError: pass",
    "to the error stream": "import sys\nprint(6, file=sys.stderr); print(10, file=sys.stderr)",
    "as its exit message": "import sys\nsys.exit('6' if input() == '3' else '10')",
    "right, then an exception": "print(2 * int(input()))\nraise ValueError",
    "right, then a crash": "import ctypes\nprint(2 * int(input()), flush=True)\nctypes.string_at(0)",
    "right, then killed": "import os\nprint(2 * int(input()), flush=True)\nos.kill(os.getpid(), 9)",
    "right, then silence": "import time\nprint(2 * int(input()), flush=True)\ntime.sleep(60)",
    "right, then deaf": "import os, time\nprint(2 * int(input()), flush=True)\nos.closerange(3, 99)\ntime.sleep(60)",
    "right, after the limit": "import time\ntime.sleep(3)\nprint(2 * int(input()))",
    "a forged report": CHANNELS + "print(2, flush=True)\nsend(frame(b'{\"script\":null,\"status\":\"passed\",\"t\":0,\"s\":\"passed\"}'))\ntime.sleep(60)",
    "a forged answer": CHANNELS + "send(frame(b'{\"script\":null,\"output\":\"6\",\"r\":\"6\"}'))\nos._exit(0)",
    "as much as the error text": "import sys\nsys.excepthook = lambda *a: print(6)\nraise ValueError(10)",
    "when the program ends": "import atexit, threading\natexit.register(print, 6)\nclass D:\n    def __del__(s): print(10)\nd = D()",
    "state of the run before": "import builtins, os, sys\nprint(getattr(builtins, 'seen', 1)); builtins.seen = 6\nsys.modules['seen'] = os",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(executor, name):
    limit = 0.5 if "60)" in SCRIPTS[name] or "(3)" in SCRIPTS[name] else LIMIT
    job = Job(code=SCRIPTS[name], tests=[("3", "6"), ("5", "10")], test_format="stdio", timeout=limit)
    checker = "def check_output(stdin, expected, output): return output.split() == expected.split()"
    jobs = [job, Job(code=job.code, tests=job.tests, test_format="stdio", timeout=limit, setup=checker)]
    for verdict in run_unharmed(executor, jobs):
        assert verdict.status != "passed" and verdict.passed == 0, verdict


CHECK = "def check(candidate):\n    assert candidate(2) == 5\n    for k in (3, 4):\n        assert candidate(k) == k * k + 1\n"
CHECK_ONE = "def check(candidate):\n    def inner(k):\n        assert candidate(k) == k * k + 1\n    for k in (2, 3): inner(k)\n"
CASE = (
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.k = 2\n    def test_equal(self): self.assertEqual(f(self.k), 5)\n"
    "    def test_almost(self): self.assertAlmostEqual(f(3), 10.25)\n    def test_in(self): self.assertIn(f(4), (17, 18))\n"
    "    def test_count(self): self.assertCountEqual(f([1, 2]), [1, 4])\n    def test_raises(self):\n        with self.assertRaisesRegex(ValueError, 'no'): f('x')\n"
    "    def test_greater(self): self.assertGreater(f(5), 25)\n    def test_list(self): self.assertListEqual(f([3]), [9])\n"
)
FUNCTIONS = {
    "an object that agrees": LIE + "def f(k): return Lie()",
    "a check of its own": "def check(candidate): pass\ndef candidate(k): return k * k + 1\ndef inner(k): pass\ndef f(k): return 0",
    "a case of its own": "import unittest\nclass T(unittest.TestCase):\n    def test_equal(self): pass\n    def run(self, result=None): pass\nclass unittest:\n    TestCase = T\ndef f(k): return 0",
    "a result that is always right": "import unittest\nunittest.TestResult.wasSuccessful = lambda s: True\nunittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a: None\nunittest.TestSuite.run = lambda s, r: r\ndef load_tests(*a): return unittest.TestSuite()\ndef setUpModule(): raise unittest.SkipTest\ndef f(k): return 0",
    "a skip": "import unittest\nclass S(unittest.SkipTest): pass\ndef f(k): raise S('no')",
    "a control exception of unittest": "from unittest import case\ndef f(k): raise [case._ShouldStop, case._UnexpectedSuccess, case.SkipTest][hash(str(k)) % 3]",
    "an interrupt in its repr": LIE + "class V:\n    def __repr__(s): raise KeyboardInterrupt\n    __str__ = __format__ = __repr__\ndef f(k): return V()",
    "an exit in its repr": "class V:\n    def __repr__(s):\n        import os\n        os._exit(0)\ndef f(k): return V()",
    "a repr without end": "class V:\n    def __repr__(s): return repr([s]) * 9\ndef f(k): return V()",
    "exceptions named like those expected": "class ValueError(Exception):\n    def __str__(s): return 'no'\nclass AssertionError(BaseException): pass\ndef f(k): raise ValueError if k == 'x' else AssertionError",
    "a lying sequence": "class L(list):\n    def __eq__(s, o): return True\n    def __len__(s): return 2\n    def count(s, x): return 1\n    __iter__ = lambda s: iter([s, s])\ndef f(k): return L()",
    "a class as entry point": "class M(type):\n    def __call__(c, *a): return c\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\n    __gt__ = __lt__ = __eq__\nclass f(metaclass=M): pass",
    "a death in every call": "import os\ndef f(k): os._exit(0)",
    "right only once": "seen = []\ndef f(k):\n    seen.append(k)\n    raise SystemExit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checks_and_cases(executor, name):
    code = FUNCTIONS[name]
    jobs = [Job(code=code, tests=tests, test_format="check", entry_point="f") for tests in (CHECK, CHECK_ONE)]
    jobs += [Job(code=code, tests=CHECK, test_format="check", entry_point="f", setup=HELPER)]
    jobs += [Job(code=code, tests=CASE, test_format="unittest", entry_point=entry) for entry in (None, "f")]
    for job, verdict in zip(jobs, run_unharmed(executor, jobs), strict=True):
        assert verdict.status != "passed" and verdict.passed == 0, (job.test_format, verdict)


def test_right_answers_pass_in_every_format(executor):
    """A right program may do what the cheats above may not."""
    code = "def f(k):\n    if k == 'x': raise ValueError('no')\n    if type(k) is list: return [x * x for x in k]\n    return k * k + (1.25 if k == 3 else 1)"
    jobs = [
        Job(code=code, tests=CASE, test_format="unittest"),
        Job(code=code.replace(".25", ""), tests=CHECK, test_format="check", entry_point="f"),
        Job(code=code.replace(".25", ""), tests=CHECK_ONE, test_format="check", entry_point="f"),
        Job(code="print(2 * int(input()))", tests=[("3", "6"), ("5", "10")], test_format="stdio"),
    ]
    assert [verdict.status for verdict in run_unharmed(executor, jobs)] == ["passed"] * 4


# At the limit

SLOW = {
    "sleeps to the limit": "import time\nt = time.monotonic()\ndef f(x):\n    time.sleep(max(0, 0.55 - time.monotonic() + t))\n    return 0",
    "answers after the limit": CHANNELS + "def f(x):\n    time.sleep(0.8)\n    send(frame(b'{\"r\":4,\"u\":[]}'))\n    return 4",
    "a timer at the limit": "import signal\ndef ring(*a): raise SystemExit(0)\nsignal.signal(signal.SIGALRM, ring)\nsignal.setitimer(signal.ITIMER_REAL, 0.58)\ndef f(x):\n    while True: pass",
    "a long comparison of its own": "class V(int):\n    def __eq__(s, o):\n        while True: pass\ndef f(x):\n    return V(3) == 4",
    "drips its answer": CHANNELS + "def f(x):\n    for b in frame(b'{\"r\":4,\"u\":[]}'):\n        send(bytes([b]))\n        time.sleep(0.1)",
    "floods with part of an answer": CHANNELS + "def f(x):\n    send((16 << 20).to_bytes(4, 'little'))\n    while True: send(b' ' * 1000)",
    "an iterator that stalls": "import time\ndef f(x):\n    time.sleep(0.3)\n    while True: yield time.sleep(0.2)",
    "waits for its own lock": "import threading\nlock = threading.Lock()\ndef f(x):\n    lock.acquire(); lock.acquire()",
}  # fmt: skip


def test_limits_hold():
    """Each program ends within one second of its limit, whatever it waits for."""
    tests = [("assert f(1) == 4", ""), ("x = f(1)\nassert x == 4 or list(x) == [4]", HELPER)]
    jobs = [Job(code=code, tests=[test], setup=setup) for code in SLOW.values() for test, setup in tests]
    with CodeExecutor(num_workers=2, timeout=0.6) as executor:
        for job, verdict in zip(jobs, executor.run(jobs), strict=True):
            assert verdict.status in ("failed", "error", "timeout") and verdict.passed == 0, (job, verdict)
            assert verdict.seconds < 1.6, (job, verdict)


# Known holes

ANSWER = "import sys, time\ndef answer(body):\n    control = sys._getframe(2).f_locals['control']\n    control.sendall(len(body).to_bytes(4, 'little') + body)\n    time.sleep(9)\n"


def test_death_by_an_unnamed_signal():
    """The death of a program by any signal is an error of the program."""
    code = "import os\ndef f(x): os.kill(os.getpid(), 40)"
    jobs = [Job(code=code, tests=["assert f(1) == 1"], setup=setup) for setup in ("", HELPER)]
    jobs += [Job(code=code + "\nf(1)", tests=[("", "1")], test_format="stdio")]
    with CodeExecutor(num_workers=1, timeout=LIMIT) as executor:
        assert [verdict.status for verdict in executor.run(jobs)] == ["error"] * 3


def test_a_frozenset_that_takes_long_to_build():
    """A forged answer of numbers with equal hashes does not delay the worker beyond the limit."""
    items = "b','.join(b'%d' % (k * (2 ** 61 - 1)) for k in range(24000))"
    code = ANSWER + f"body = b'{{\"r\":[\"f\",' + {items} + b']}}'\ndef f(x): answer(body)"
    with CodeExecutor(num_workers=1, timeout=0.7) as executor:
        executor.run([GOOD])
        run_in_time(executor, Job(code=code, tests=["assert f(1) == 1"]), 1.7)


def test_classes_sent_to_the_worker_are_forgotten(executor):
    code = (
        ANSWER
        + "body = b'{\"r\":[\"t\",' + b','.join(b'[\"N\",\"a%d\",[]]' % k for k in range(12000)) + b']}'\ndef f(x): answer(body)"
    )
    before = resident(executor)
    (verdict,) = executor.run([Job(code=code, tests=["assert f(1) == 1"], timeout=5.0)])
    assert verdict.status == "failed"
    assert resident(executor) - before < 8 << 20


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_a_namespace_is_no_window_on_the_judge(executor):
    """Memory has the same addresses in the judge as in the program, and numpy trusts an object about the address of its data."""
    code = (
        "import types\ndef f(n):\n    where = {'data': (id(n), True), 'shape': (int.__basicsize__ + 4,), 'typestr': '|u1', 'version': 3}\n"
        "    return types.SimpleNamespace(__array_interface__=where)"
    )
    tests = ["import numpy as np\nraw = np.asarray(f(200))\nassert raw.shape and raw.tolist()[-4] == 200"]
    assert executor.run([Job(code=code, tests=tests, timeout=10.0)])[0].passed == 0


def test_a_number_is_one_number(executor):
    """An object that derives from an immutable value has one value, even if the program answers differently each time."""
    code = (
        "import sys\nclass N(int): pass\ndef f(n):\n    answers = iter([1, 5, 5])\n"
        "    sys._getframe(2).f_globals['PLAIN_VALUE'][int] = lambda value: next(answers)\n    return N(1)"
    )
    (verdict,) = executor.run([Job(code=code, tests=["r = f(12)\nassert 12 % r == 0 and 1 < r < 12", "assert f(0)"])])
    assert [test.status for test in verdict.tests] == ["failed", "passed"], verdict  # the second: f raises nothing


@pytest.mark.parametrize("test", ["assert f(1)", "assert not f(1)"])
def test_truth_of_an_object(executor, test):
    """Compared directly or under a judge, an object has the truth value that it reports."""
    code = "class V:\n    def __len__(s): return 0\ndef f(x): return V()"
    direct, judged = executor.run([Job(code=code, tests=[test]), Job(code=code, tests=[test], setup=HELPER)])
    assert judged.passed == ("not" in test) and direct.passed == judged.passed


def test_a_large_matrix_changed_in_place(executor):
    code = "def f(m):\n    for row in m: row[0] = 7"
    test = "m = [[0] for _ in range(100)]\nf(m)\nassert m == [[7]] * 100"
    assert executor.run([Job(code=code, tests=[test])])[0].status == "passed"


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_an_array_changed_in_place(executor):
    test = "import numpy as np\na = np.array([3, 1, 2])\nf(a)\nassert a.tolist() == [1, 2, 3]"
    job = Job(code="def f(a): a.sort()", tests=[test], memory_mb=2048, timeout=10.0)
    assert executor.run([job])[0].status == "passed"


def test_an_exception_that_the_check_suppresses(executor):
    check = "import contextlib\ndef check(candidate):\n    with contextlib.suppress(ZeroDivisionError):\n        assert candidate(0) == 5\n    assert candidate(1) == 1\n"
    job = Job(code="def f(x): return 1 // x", tests=check, test_format="check", entry_point="f")
    assert executor.run([job])[0].status == "passed"


def test_messages_can_be_printed(executor):
    code = "def f(x): raise ValueError('\\ud800\\x1b[2J')\ndef g(x): raise type('\\udc80', (Exception,), {})"
    jobs = [Job(code=code, tests=["assert f(1) == 1"], setup=setup) for setup in ("", HELPER)]
    jobs += [
        Job(code=code, tests=["assert g(1) == 1"]),
        Job(code=code + "\nf(1)", tests=[("", "")], test_format="stdio"),
    ]
    for verdict in executor.run(jobs):
        assert verdict.message.encode() and "\x1b" not in verdict.message


# Lifecycle


def owner(script):
    """Runs a script in a new process, after making an executor with two workers and printing their process ids."""
    start = (
        "import os, signal, sys, threading, time\nfrom marcog_trl.execution import CodeExecutor, Job\n"
        "good = Job(code='def f(x): return x', tests=['assert f(1) == 1', 'assert abs(f(2)) == 2'])\n"
        "busy = Job(code='def f(x):\\n    while True: pass', tests=['assert f(1) == 1'], timeout=30)\n"
        "executor = CodeExecutor(num_workers=2)\nassert {v.status for v in executor.run([good] * 8)} == {'passed'}\n"
        "print(*[worker.process.pid for worker in executor._pool.workers], flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", start + script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


OWNERS = {
    "an exception under with": "with executor:\n    future = executor.submit([busy] * 3)\n    time.sleep(0.2)\n    print('now', flush=True)\n    raise ValueError",
    "an exception without with": "future = executor.submit([busy] * 3)\ntime.sleep(0.2)\nprint('now', flush=True)\nraise ValueError",
    "an exit in another thread's wait": "thread = threading.Thread(target=lambda: executor.run([busy]), daemon=True)\nthread.start()\ntime.sleep(0.2)\nprint('now', flush=True)\nsys.exit(1)",
    # what runs in the background of a shell ignores interrupts, and so would its children
    "an interrupt": "signal.signal(signal.SIGINT, signal.default_int_handler)\nprint('now', flush=True)\nexecutor.run([busy] * 3)",
    "SIGTERM with a handler": "signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))\nprint('now', flush=True)\nexecutor.run([busy] * 3)",
    "os._exit": "executor.submit([busy] * 3)\ntime.sleep(0.2)\nprint('now', flush=True)\nos._exit(1)",
}  # fmt: skip


@pytest.mark.parametrize("name", OWNERS)
def test_nothing_survives_the_owner(name):
    process = owner(OWNERS[name])
    workers = [int(pid) for pid in process.stdout.readline().split()]
    everything = {*workers, *(pid for worker in workers for pid in below(worker))}
    assert process.stdout.readline() == "now\n"
    everything |= {pid for worker in workers for pid in below(worker)}
    if "interrupt" in name or "SIGTERM" in name:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT if "interrupt" in name else signal.SIGTERM)
    assert process.wait(timeout=10) != 0
    assert len(workers) == 2 and len(everything) >= 4 and gone(everything)


def test_forks_and_threads_together():
    """Threads of a process and of its fork use an executor, each with its own workers, while other jobs run."""
    script = (
        "def work(results):\n    for _ in range(5): results.extend(v.status for v in executor.run([good] * 2))\n"
        "def many():\n    results = []\n    threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]\n"
        "    for thread in threads: thread.start()\n    for thread in threads: thread.join()\n    return results == ['passed'] * 40\n"
        "pending = executor.submit([Job(code='import time\\ndef f(x):\\n    time.sleep(1)\\n    return x', tests=good.tests[:1])])\n"
        "pid = os.fork()\nif pid == 0:\n    right = many()\n    executor.close()\n    os._exit(7 if right else 1)\n"
        "right = many()\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert right and pending.result()[0].status == 'passed' and many()\nexecutor.close()\nprint('done')"
    )
    process = owner(script)
    output = process.communicate(timeout=60)[0]
    assert output.endswith("done\n") and process.returncode == 0
    assert gone(map(int, output.split()[:2]))


def kill_children(worker, pids):
    """Kills children while they and the worker are stopped: it sees all of them die at once, and none sees another die."""
    os.kill(worker, signal.SIGSTOP)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a child of the last job may be ending by itself
                os.kill(pid, number)
    assert gone(pids)
    os.kill(worker, signal.SIGCONT)


NAP = "import time\ndef f(x):\n    time.sleep(SECONDS)\n    return x + 1"


@pytest.mark.parametrize(
    ("victim", "setup"),
    [
        ("zygote", ""),
        ("zygote", HELPER),
        ("children", ""),
        ("children", HELPER),
        ("stopped zygote", ""),
        ("stopped worker", HELPER),
    ],
)
def test_a_process_lost_in_the_midst_of_a_job(monkeypatch, victim, setup):
    """A job is run again if the machine failed. A program whose process was killed does not pass."""
    monkeypatch.setattr(pool, "_GRACE", 0.4)
    with CodeExecutor(num_workers=1, timeout=1.0) as executor:
        executor.run([GOOD])
        worker = executor._pool.workers[0].process.pid
        (zygote,) = children(worker)
        seconds = 10 if victim == "children" else 0.4
        code = NAP.replace("SECONDS", str(seconds))
        future = executor.submit([Job(code=code, tests=["assert f(1) == 2"], setup=setup, timeout=seconds + 0.6)])
        if shows_naps():
            assert wait_until(lambda: any(map(naps, below(zygote))))
        else:
            time.sleep(0.2)
        before = {worker, *below(worker)}
        if victim == "children":
            kill_children(worker, before - {worker, zygote})
        elif victim == "zygote":
            os.kill(zygote, signal.SIGKILL)
        else:
            os.kill(worker if "worker" in victim else zygote, signal.SIGSTOP)
        verdict = future.result(timeout=20)[0]
        assert verdict.status in (("error", "failed") if victim == "children" else ("passed",))
        executor.run([GOOD] * 2)  # those that waited for them were killed too
        assert executor.run([GOOD])[0].status == "passed"
        if victim == "zygote":
            assert gone(before)


def test_a_waiting_child_that_is_killed_costs_no_program():
    with CodeExecutor(num_workers=1, timeout=LIMIT) as executor:
        executor.run([GOOD])
        worker = executor._pool.workers[0].process.pid
        (zygote,) = children(worker)
        waiting = below(zygote)
        kill_children(worker, waiting)
        assert wait_until(lambda: all(map(ended, waiting)))
        assert [verdict.status for verdict in executor.run([GOOD] * 3)] == ["passed"] * 3
