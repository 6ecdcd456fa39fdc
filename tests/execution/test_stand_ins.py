"""What the tests see of the program's objects is what they would see beside the program, or the test does not pass.

Each test runs in one process with the program, as plain Python, and under a judge; both must say the same.
"""

import textwrap

import pytest

from marcog_trl.execution import CodeExecutor, Job


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=2, timeout=10.0, isolation="best_effort") as executor:
        yield executor


def native(code, tests):
    """Which tests pass in the same process as the program."""
    space, passed = {"__name__": "solution"}, []
    import sys
    import types

    module = types.ModuleType("solution")
    before = sys.modules.get("solution")
    sys.modules["solution"] = module
    module.__dict__.update(space)
    try:
        exec(code, module.__dict__)
        for test in tests:
            try:
                exec(test, module.__dict__)
                passed.append(True)
            except Exception:
                passed.append(False)
    finally:
        sys.modules.pop("solution")
        if before is not None:
            sys.modules["solution"] = before
    return passed


# name: (program, tests); blank lines separate the tests
HONEST = {
    "attributes with private names": (
        """
        class A:
            def __init__(self): self._number = 5; self._kind = "k"; self._session = [1]; self.__own = 3
            def _generation(self): return 7
            def own(self): return self.__own
        """,
        """
        a = A()
        assert (a._number, a._kind, a._session, a._generation(), a._A__own, a.own()) == (5, "k", [1], 7, 3, 3)

        a = A()
        a._number += 1
        assert a._number == 6 and vars(a)["_number"] == 6

        assert not hasattr(A(), "_missing") and not hasattr(A(), "_place") and not hasattr(A, "_session")
        """,
    ),
    "keywords of any name": (
        """
        def f(what, function, server, self): return what + function + server + self
        class C:
            def __init__(this, self, what, cls=0): this.sum = self + what + cls
        def g(**kwargs): return sorted(kwargs)
        """,
        """
        assert f(what=1, function=2, server=3, self=4) == 10

        assert C(self=1, what=2, cls=3).sum == 6

        assert g(thing=1, name=2, args=3, kwargs=4, frame=5) == ["args", "frame", "kwargs", "name", "thing"]
        """,
    ),
    "iterators": (
        """
        class Countdown:
            def __init__(self, n): self.n = n
            def __iter__(self): self.left = self.n; return self
            def __next__(self):
                if self.left <= 0: raise StopIteration
                self.left -= 1
                return self.left + 1
        class Bag:
            def __init__(self, items): self.items = items
            def __iter__(self): return iter(self.items)
        class Old:
            def __getitem__(self, k):
                if k > 2: raise IndexError(k)
                return k * k
        def gen():
            got = yield 1
            while True:
                try: got = yield got
                except KeyError as error: got = "caught " + str(error)
        closed = []
        def tidy():
            try:
                yield 1
                yield 2
            finally: closed.append("tidy")
        """,
        """
        c = Countdown(3)
        assert list(c) == [3, 2, 1] and list(c) == [3, 2, 1]

        c = Countdown(40)
        for k, x in enumerate(c): assert x == 40 - k and c.left == 39 - k

        assert list(Bag([1, 2])) == [1, 2] and 2 in Bag([1, 2]) and sorted(Bag("ba")) == ["a", "b"] and max(Bag([1, 5])) == 5

        assert list(Old()) == [0, 1, 4] and 4 in Old() and list(zip(Old(), "abc"))[2] == (4, "c")

        g = gen()
        assert next(g) == 1 and g.send(5) == 5 and g.throw(KeyError("k")) == "caught 'k'" and next(g) is None

        g = gen(); next(g)
        try: g.throw(ValueError, "out")
        except ValueError as e: assert str(e) == "out"
        else: raise AssertionError

        g = tidy(); next(g); g.close()
        assert closed == ["tidy"] and list(g) == []

        assert list(tidy()) == [1, 2] and len(closed) == 2

        import collections.abc as c
        assert isinstance(gen(), c.Generator) and isinstance(Countdown(1), c.Iterator) and isinstance(Bag([]), c.Iterable)

        assert not isinstance(Bag([]), c.Iterator) and not isinstance(Bag([]), c.Sized) and not isinstance(Old(), c.Iterable)
        """,
    ),
    "exceptions of the program": (
        """
        class Empty(ValueError):
            code = 7
            def __init__(self, n): super().__init__(f"no {n}"); self.n = n
            def __str__(self): return f"<{self.n}>"
            def double(self): return self.n * 2
        class Plain(Exception): pass
        class Two(KeyError, OSError): pass
        class Made(Exception):
            def __init__(self, *, a, b): self.a, self.b = a, b
        def f(n): raise Empty(n)
        def caused():
            try: 1 / 0
            except ZeroDivisionError as e: raise Empty(1) from e
        def chained():
            try: {}["k"]
            except KeyError: raise Plain("p")
        def hidden():
            try: {}["k"]
            except KeyError: raise Plain("p") from None
        def noted():
            e = ValueError("v"); e.add_note("first"); e.add_note("second"); e.code = 3
            raise e
        def group(): raise ExceptionGroup("g", [ValueError(1), Empty(2), TypeError(3)])
        def two(): raise Two("t")
        def made(): raise Made(a=1, b=[2])
        def give(): return Empty(3)
        def classes(): return [Empty, Plain, ValueError]
        def reraise(e): raise e
        def handle(e): return type(e).__name__, str(e), isinstance(e, Empty)
        """,
        """
        e = Empty(4)
        assert str(e) == "<4>" and e.n == 4 and e.args == ("no 4",) and e.double() == 8 and isinstance(e, ValueError)

        try: f(3)
        except Empty as e: assert str(e) == "<3>" and e.n == 3 and e.code == 7 and type(e) is Empty and e.double() == 6
        else: raise AssertionError

        try: raise Empty(5)
        except ValueError as e: assert e.n == 5 and str(e) == "<5>"

        try: raise Plain
        except Plain as e: assert e.args == () and str(e) == ""

        try: caused()
        except Empty as e: assert type(e.__cause__) is ZeroDivisionError and e.__context__ is e.__cause__

        try: chained()
        except Plain as e: assert type(e.__context__) is KeyError and e.__cause__ is None and not e.__suppress_context__

        try: hidden()
        except Plain as e: assert e.__suppress_context__ and e.__cause__ is None

        try: noted()
        except ValueError as e: assert e.__notes__ == ["first", "second"] and e.code == 3

        seen = []
        try: group()
        except* ValueError as g: seen.append([type(x).__name__ for x in g.exceptions])
        except* TypeError as g: seen.append(len(g.exceptions))
        assert seen == [["ValueError", "Empty"], 1]

        try: two()
        except OSError as e: assert isinstance(e, KeyError) and type(e).__mro__[0] is Two

        try: made()
        except Made as e: assert (e.a, e.b) == (1, [2])

        e = give()
        assert isinstance(e, Empty) and isinstance(e, Exception) and e.n == 3

        assert classes() == [Empty, Plain, ValueError] and issubclass(Empty, ValueError) and not issubclass(Plain, ValueError)

        try: reraise(Empty(1))
        except Empty as e: assert e.n == 1

        try: reraise(KeyError("x"))
        except KeyError as e: assert e.args == ("x",)

        assert handle(Empty(2)) == ("Empty", "<2>", True) and handle(ValueError("v")) == ("ValueError", "v", False)

        import unittest
        with unittest.TestCase().assertRaisesRegex(Empty, "<9>") as found: f(9)
        assert found.exception.n == 9

        class Mine(Exception): pass
        mine = Mine("m")
        try: reraise(mine)
        except Mine as e: assert e is mine
        """,
    ),
    "exceptions of the standard library": (
        """
        import dataclasses, queue, sqlite3, asyncio, subprocess, json, zlib, copy, struct, configparser
        @dataclasses.dataclass(frozen=True)
        class P:
            x: int
        def frozen(): P(1).x = 2
        def empty(): queue.Queue().get_nowait()
        def sql(): sqlite3.connect(":memory:").execute("select")
        def called(): raise subprocess.CalledProcessError(3, ["ls"])
        def bad(): json.loads("{")
        def full(): raise asyncio.QueueFull
        def opened(): raise FileNotFoundError(2, "No such file", "name")
        def decoded(): b"\\xff".decode()
        def section(): configparser.ConfigParser().get("a", "b")
        """,
        """
        import dataclasses
        try: frozen()
        except dataclasses.FrozenInstanceError as e: assert isinstance(e, AttributeError)
        else: raise AssertionError

        try: frozen()
        except AttributeError: pass

        import queue
        try: empty()
        except queue.Empty: pass
        else: raise AssertionError

        import subprocess
        try: called()
        except subprocess.CalledProcessError as e: assert e.returncode == 3 and e.cmd == ["ls"]

        import json
        try: bad()
        except json.JSONDecodeError as e: assert e.pos == 1 and e.lineno == 1 and "Expecting" in e.msg

        import asyncio
        try: full()
        except asyncio.QueueFull: pass

        try: opened()
        except FileNotFoundError as e: assert e.errno == 2 and e.filename == "name"

        try: decoded()
        except UnicodeDecodeError as e: assert e.start == 0 and e.object == b"\\xff"

        import configparser
        try: section()
        except configparser.NoSectionError as e: assert e.section == "a"
        """,
    ),
    "named tuples": (
        """
        from typing import NamedTuple
        from collections import namedtuple
        class P(NamedTuple):
            x: int
            y: int = 2
            @property
            def sum(self): return self.x + self.y
            def scaled(self, k): return P(self.x * k, self.y * k)
            @classmethod
            def origin(cls): return cls(0, 0)
        Q = namedtuple("Q", "a b")
        def make(): return P(3)
        def pair(): return {"k": [Q(1, [2])]}
        def total(p): return p.sum
        """,
        """
        p = make()
        assert p == (3, 2) and p.sum == 5 and p.scaled(2) == (6, 4) and p.x == 3 and p[1] == 2 and P.origin() == (0, 0)

        assert isinstance(make(), P) and isinstance(make(), tuple) and type(make()) is P and P(1).scaled(3).sum == 9

        p = make()
        x, y = p
        assert p._asdict() == {"x": 3, "y": 2} and p._replace(x=1) == (1, 2) and p._fields == ("x", "y") and (x, y) == (3, 2)

        q = pair()["k"][0]
        q.b.append(3)
        assert q == (1, [2, 3]) and q.b == [2, 3] and Q(5, 6).b == 6 and Q._fields == ("a", "b")

        assert total(P(4, 5)) == 9 and sorted([P(2), P(1)]) == [(1, 2), (2, 2)] and len({P(1), P(1)}) == 1

        assert repr(P(1)) == "P(x=1, y=2)" and str(Q(1, 2)) == "Q(a=1, b=2)"
        """,
    ),
    "callbacks": (
        """
        import inspect
        seen = []
        def same(f): return any(f is g for g in seen) or seen.append(f)
        def name(f): return f.__name__
        def arity(f): return len(inspect.signature(f).parameters)
        def optional(f): return [p.default is not p.empty for p in inspect.signature(f).parameters.values()]
        def ident(x): return x
        listeners = []
        def on(f): listeners.append(f)
        def off(f): listeners.remove(f)
        def fire(*a): return [f(*a) for f in listeners]
        def retry(f, times, exceptions):
            for _ in range(times - 1):
                try: return f()
                except exceptions: pass
            return f()
        """,
        """
        def f(a, b=1, *c): pass
        assert same(f) is None and same(f) is True and same(lambda: 0) is None and name(f) == "f" and arity(f) == 3

        assert name(lambda x: x) == "<lambda>" and arity(lambda x, y: x) == 2 and optional(f) == [False, True, False]

        assert ident(f) is f and ident(len) is not None

        def l(x): return x + 1
        on(l); assert fire(1) == [2]
        off(l); assert fire(1) == []

        class Mine(Exception): pass
        calls = []
        def flaky():
            calls.append(1)
            if len(calls) < 3: raise Mine("again")
            return "done"
        assert retry(flaky, 3, (Mine,)) == "done" and len(calls) == 3

        error = Mine("always")
        def never(): raise error
        try: retry(never, 2, (Mine, ValueError))
        except Mine as e: assert e is error
        else: raise AssertionError

        import queue
        def empty(): raise queue.Empty
        try: retry(empty, 1, (queue.Empty,))
        except queue.Empty: pass
        """,
    ),
    "objects of the tests": (
        """
        def area(shape): return shape.area()
        def total(items): return sum(item.price * item.count for item in items)
        def rename(thing, name): thing.name = name; return thing
        def read(file): return [line.strip() for line in file]
        def write(file, text): file.write(text); return file
        def size(x): return len(x)
        def double(x): return x * 2
        def ident(x): return x
        def use(lock):
            with lock as k: return k
        """,
        """
        class Square:
            def __init__(self, a): self.a = a
            def area(self): return self.a ** 2
        s = Square(3)
        assert area(s) == 9 and ident(s) is s and rename(s, "n") is s and s.name == "n"

        class Item:
            def __init__(self, price, count): self.price, self.count = price, count
        assert total([Item(2, 3), Item(1, 1)]) == 7

        import io
        assert read(io.StringIO("a\\n b\\n")) == ["a", "b"]

        out = io.StringIO()
        write(out, "text")
        assert out.getvalue() == "text"

        class Sized:
            def __len__(self): return 4
        assert size(Sized()) == 4

        try: size(object())
        except TypeError: pass
        else: raise AssertionError

        from unittest.mock import Mock
        shape = Mock()
        shape.area.return_value = 5
        assert area(shape) == 5
        shape.area.assert_called_once_with()

        import enum
        class E(enum.Enum):
            A = 1
        assert ident(E.A) is E.A

        class Guard:
            def __enter__(self): return 8
            def __exit__(self, *a): self.left = True
        g = Guard()
        assert use(g) == 8 and g.left
        """,
    ),
    "numbers and texts of own classes": (
        """
        import enum
        class Level(enum.IntEnum):
            LOW = 1
            HIGH = 5
        class Color(enum.Enum):
            RED = "r"
            BLUE = "b"
            @property
            def long(self): return self.name.lower()
        class Perm(enum.Flag):
            R = 4
            W = 2
        class Mode(str, enum.Enum):
            ON = "on"
        class Meters(float):
            def feet(self): return self * 3
        class Stack(list):
            def push(self, x): self.append(x); return self
            @property
            def top(self): return self[-1]
        class Table(dict):
            def twice(self, k): return self[k] * 2
        def level(): return Level.HIGH
        def mode(): return Mode.ON
        """,
        """
        assert isinstance(level(), int) and isinstance(level(), Level) and level() == 5 and level() + 1 == 6 and level() > Level.LOW

        assert level() is Level.HIGH and Level(1) is Level.LOW and [x.name for x in Level] == ["LOW", "HIGH"] and len(Level) == 2

        assert Color("r") is Color.RED and Color["BLUE"].value == "b" and Color.RED.long == "red" and Color.RED in Color

        assert Color.RED == Color("r") and Color.RED != Color.BLUE and {Color.RED: 1}[Color("r")] == 1 and hash(Color.RED) == hash(Color("r"))

        assert repr(Color.RED) == "<Color.RED: 'r'>" and str(Color.RED) == "Color.RED" and f"{Level.LOW:03d}" == "001"

        assert Perm.R | Perm.W == Perm.R | Perm.W and (Perm.R | Perm.W).value == 6 and Perm.R in (Perm.R | Perm.W) and not Perm.R & Perm.W

        assert mode() == "on" and isinstance(mode(), str) and mode().upper() == "ON" and mode() in {"on": 1}

        m = Meters(2.5)
        assert m + 1 == 3.5 and m.feet() == 7.5 and isinstance(m, float) and round(m) == 2 and m < 3

        s = Stack([1])
        assert s.push(2) is s and s == [1, 2] and s.top == 2 and len(s) == 2 and isinstance(s, list) and s + [3] == [1, 2, 3]

        s = Stack([3, 1])
        s.append(2); s.sort()
        assert list(s) == [1, 2, 3] and s[0] == 1 and s[1:] == [2, 3] and 2 in s and 9 not in s and s != [1]

        t = Table(a=1)
        t["b"] = 2
        assert t == {"a": 1, "b": 2} and t.twice("b") == 4 and isinstance(t, dict) and dict(t) == {"a": 1, "b": 2} and "a" in t

        try: hash(Stack())
        except TypeError: pass
        else: raise AssertionError
        """,
    ),
    "protocols": (
        """
        import abc, collections, dataclasses
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
        class Square(Shape):
            "A square."
            sides = 4
            def __init__(self, a): self.a = a
            def area(self): return self.a ** 2
        class Vector:
            __slots__ = ("x", "y", "__weakref__")
            def __init__(self, x, y): self.x, self.y = x, y
            def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
            def __neg__(self): return Vector(-self.x, -self.y)
            def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
            def __bool__(self): return bool(self.x or self.y)
            def __iter__(self): yield self.x; yield self.y
            def __iadd__(self, o): self.x += o.x; return self
        class Cache(collections.abc.MutableMapping):
            def __init__(self): self.data = {}
            def __getitem__(self, k): return self.data[k]
            def __setitem__(self, k, v): self.data[k] = v
            def __delitem__(self, k): del self.data[k]
            def __iter__(self): return iter(self.data)
            def __len__(self): return len(self.data)
        @dataclasses.dataclass
        class Point:
            x: int
            y: int = 0
        class Adder:
            def __init__(self, n): self.n = n
            def __call__(self, m): return self.n + m
        class Node: pass
        """,
        """
        try: Shape()
        except TypeError: pass
        else: raise AssertionError

        s = Square(3)
        assert s.area() == 9 and isinstance(s, Shape) and issubclass(Square, Shape) and type(s) is Square and s.__class__ is Square

        assert Square.__name__ == "Square" and type(s).__name__ == "Square" and Square.__doc__ == "A square." == s.__doc__ and s.sides == Square.sides

        assert Square.__mro__[1] is Shape and Square.__bases__ == (Shape,) and callable(Square) and not callable(s)

        v = Vector(3, 4)
        assert abs(v) == 5 and list(v + v) == [6, 8] and (-v).x == -3 and bool(v) and not Vector(0, 0)

        v = Vector(1, 1)
        v += Vector(2, 2)
        x, y = v
        assert (x, y) == (3, 1)

        c = Cache()
        c["a"] = 1
        c.update(b=2)
        assert c["a"] == 1 and len(c) == 2 and "b" in c and c.get("z") is None and dict(c) == {"a": 1, "b": 2} and c.pop("a") == 1

        import collections.abc
        assert isinstance(Cache(), collections.abc.Mapping) and list(Cache().items()) == []

        try: Cache()["no"]
        except KeyError as e: assert e.args == ("no",)

        p = Point(1)
        assert repr(p) == "Point(x=1, y=0)" and (p.x, p.y) == (1, 0) and p == p

        import dataclasses
        assert dataclasses.is_dataclass(Point(1)) and dataclasses.is_dataclass(Point)

        assert Adder(1)(2) == 3 and callable(Adder(1)) and list(map(Adder(1), [1])) == [2]

        assert Node() != Node() and len({Node(), Node()}) == 2 and hash(Node()) is not None and bool(Node())

        n = Node()
        n.next = n
        n.items = []
        n.items.append(4)
        assert n.next is n and n.items == [4] and vars(n)["items"] == [4] and hasattr(n, "items")
        del n.items
        assert not hasattr(n, "items")

        import copy
        n = Node(); n.items = [1]
        m, k = copy.copy(n), copy.deepcopy(n)
        n.items.append(2)
        assert m.items == [1, 2] and k.items == [1] and type(k) is Node

        try: len(Node())
        except TypeError: pass
        else: raise AssertionError

        try: Node() < Node()
        except TypeError: pass
        else: raise AssertionError

        try: Node()()
        except TypeError: pass
        else: raise AssertionError

        import types, inspect
        assert inspect.isfunction(Square.area) and inspect.isclass(Square) and inspect.ismethod(s.area) and isinstance(Square.area, types.FunctionType)

        assert list(inspect.signature(Square.area).parameters) == ["self"] and Square.area.__name__ == "area" and Square.area is Square.area

        assert isinstance(Adder(1), collections.abc.Callable) and not isinstance(s, collections.abc.Hashable) is False
        """,
    ),
    "what is new and what has changed in one message": (
        """
        def add(xs): new = [1]; xs.append(new); return new
        def wrap(xs): xs.append(3); return {"k": xs, "e": [Plain(xs), Plain(xs)]}
        class Plain(Exception): pass
        def fail(xs): xs.append(4); raise Plain(xs, Plain(xs))
        kept = []
        def keep(x, y): kept.extend([x, y]); return kept
        class Pair(tuple):
            def first(self): return self[0]
        def pairs(): p = Pair([[], Pair()]); p[0].append(p[1]); return p
        """,
        """
        xs = []
        new = add(xs)
        assert xs == [[1]] and xs[0] is new
        new.append(2)
        assert xs == [[1, 2]]

        xs = []
        found = wrap(xs)
        assert found["k"] is xs and xs == [3] and found["e"][0].args[0] is xs and type(found["e"][1]) is Plain

        xs = []
        try: fail(xs)
        except Plain as e: assert e.args[0] is xs and e.args[1].args == ([4],) and xs == [4]

        x = []
        y = [x]
        x.append(1)
        assert keep(x, y)[1][0] is x and y == [[1]]

        p = pairs()
        assert p[0][0] is p[1] and p.first() == [()]
        """,
    ),
    "coroutines": (
        """
        import asyncio, contextlib
        async def double(x, wait=0.0):
            await asyncio.sleep(wait)
            return 2 * x
        async def fail(): raise KeyError("k")
        async def count(n):
            for k in range(n):
                await asyncio.sleep(0)
                yield k
        class Ticker:
            def __init__(self, n): self.n = n
            def __aiter__(self): return self
            async def __anext__(self):
                if self.n == 0: raise StopAsyncIteration
                self.n -= 1
                return self.n
        class Session:
            state = "new"
            async def __aenter__(self): self.state = "open"; return self
            async def __aexit__(self, kind, error, trace): self.state = "closed"; return kind is KeyError
        @contextlib.asynccontextmanager
        async def managed():
            yield 5
        class Soon:
            def __await__(self): return asyncio.sleep(0, "soon").__await__()
        queue = []
        async def produce(n):
            for k in range(n):
                queue.append(k); await asyncio.sleep(0.001)
        async def consume(n):
            while len(queue) < n: await asyncio.sleep(0.001)
            return list(queue)
        """,
        """
        import asyncio
        async def main(): return await double(4)
        assert asyncio.run(main()) == 8 and asyncio.run(double(1)) == 2

        async def main(): return await asyncio.gather(double(1), double(2), double(3))
        assert asyncio.run(main()) == [2, 4, 6]

        async def main(): return [x async for x in count(3)]
        assert asyncio.run(main()) == [0, 1, 2]

        async def main(): return [x async for x in Ticker(3)]
        assert asyncio.run(main()) == [2, 1, 0]

        async def main():
            async with Session() as s: assert s.state == "open"
            assert s.state == "closed"
            async with s: raise KeyError
            async with managed() as five: return five
        assert asyncio.run(main()) == 5

        async def main(): return await Soon()
        assert asyncio.run(main()) == "soon"

        try: asyncio.run(fail())
        except KeyError as e: assert e.args == ("k",)

        async def main(): return (await asyncio.gather(produce(3), consume(3)))[1]
        assert asyncio.run(main()) == [0, 1, 2]

        async def main():
            try: await asyncio.wait_for(double(1, 5.0), 0.05)
            except asyncio.TimeoutError: return "late"
        assert asyncio.run(main()) == "late"

        async def main():
            found = await asyncio.gather(fail(), double(1), return_exceptions=True)
            return type(found[0]), found[1]
        assert asyncio.run(main()) == (KeyError, 2)

        import inspect
        assert inspect.iscoroutinefunction(double) and inspect.isawaitable(Soon())
        """,
    ),
}


def split(text):
    return textwrap.dedent(text).strip("\n").split("\n\n")


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_are_judged_as_in_plain_python(executor, name):
    code, tests = textwrap.dedent(HONEST[name][0]), split(HONEST[name][1])
    assert native(code, tests) == [True] * len(tests)
    verdict = executor.run([Job(code, tests, setup="judged = True")])[0]
    wrong = {test: result.message for test, result in zip(tests, verdict.tests, strict=True) if result.message}
    assert verdict.status == "passed", wrong


V = """
class V:
    def __init__(self, x=0): self.x = x
    def __add__(self, o): return 7
    __radd__ = __sub__ = __mul__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __iadd__ = __add__
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __hash__(self): return 1
class W:
    def __contains__(self, x): return True
    def __iter__(self): return iter([])
class L(list):
    def __eq__(self, o): return True
    def __contains__(self, x): return True
class T(str):
    def __eq__(self, o): return True
    __hash__ = str.__hash__
class M(type):
    def __instancecheck__(cls, x): return True
class N(metaclass=M): pass
class E(Exception):
    def __init__(self, n): pass
    def __str__(self): return "right"
class Quiet:
    def close(self): return 1
def gen():
    try: yield 1
    except GeneratorExit: pass
    yield 2
def give(x): return 1
class Bad:
    def __init__(self): raise KeyError("init")
class Own:
    __slots__ = ()
"""
# tests that fail in plain Python, and that no stand-in may pass
DISHONEST = """
try: V() + 5
except TypeError: pass
else: raise AssertionError

try: 5 + V()
except TypeError: pass
else: raise AssertionError

x = V()
try: x += 1
except TypeError: pass
else: raise AssertionError

import contextlib
with contextlib.suppress(TypeError):
    V() < V()
    raise AssertionError

import unittest
with unittest.TestCase().assertRaises(TypeError): sorted([V(1), V(2)])

try: give(object)
except TypeError: pass
else: raise AssertionError

import threading
try: give(threading.Lock())
except TypeError: pass
else: raise AssertionError

assert V(1) != V(2)

assert not V(1) == V(2)

assert V() != 5

assert not (V(1) == 3) and True

assert V(1) not in [V(2), V(3)]

assert [V(1)] != [V(2)]

assert {"k": V(1)} != {"k": V(2)}

assert len({V(1), V(2)}) == 2

assert not L([1]) == [2]

assert 7 not in L([1])

assert not T("a") == "b"

assert not "b" == T("a")

assert 5 not in W()

import unittest
unittest.TestCase().assertNotIn(5, W())

import unittest
unittest.TestCase().assertNotEqual(V(1), V(2))

assert not isinstance(5, N)

assert str(E(1)) != "right"

assert str(E(1)) == "1"

try: Bad()
except KeyError: raise AssertionError

g = gen()
next(g)
g.close()

import weakref
weakref.ref(Own())

assert hasattr(V(), "__len__") or hasattr(V(), "__iter__") or hasattr(V(), "__call__") or hasattr(V(), "__enter__")

assert hasattr(V(), "__getattr__") or hasattr(V, "__getattr__") or hasattr(V(), "__copy__") or hasattr(V, "__deepcopy__")

assert hasattr(V(), "__slots__") or hasattr(V, "__slots__") or hasattr(V(), "__await__") or hasattr(V(), "__fspath__")

assert callable(V()) or type(V()) is type(W()) or type(V()) is not V or isinstance(V(), W)

hash(L())

assert L.__hash__ is not None

class Sub(V):
    def __init__(self): pass
assert Sub().__init__ is None

import pickle
try: pickle.dumps(V())
except TypeError: pass
else: raise AssertionError
"""


def test_what_cannot_be_judged_does_not_pass(executor):
    tests = split(DISHONEST)
    assert native(V, tests) == [False] * len(tests)
    verdict = executor.run([Job(V, tests, setup="judged = True", timeout=20.0)])[0]
    passed = [test for test, result in zip(tests, verdict.tests, strict=True) if result.status == "passed"]
    assert not passed, passed


# programs that attack the objects that the tests pass to them; none of the tests pass
MEDDLERS = {
    "a mock's assertions": "def f(m): m.assert_called_once_with = lambda *a: None",
    "a mock's counts": "def f(m):\n    m.called = True; m.call_count = 1",
    "a mock's configuration": "def f(m): m.configure_mock(called=True, call_count=1)",
    "a method": "def f(m): type(m); m.right = lambda: True",
    "a frame": "def f(m): m.gi_frame",
    "a module": "def f(m): m.right.__globals__['f'] = None",
    "a skip": "def f(m): m.skipTest('no')",
}


@pytest.mark.parametrize("name", MEDDLERS)
def test_what_the_tests_lend_stays_theirs(executor, name):
    mock = "from unittest.mock import Mock\nm = Mock()\ntry: f(m)\nexcept AttributeError: pass\n"
    own = "class Own:\n    def right(self): return False\no = Own()\ntry: f(o)\nexcept AttributeError: pass\nassert o.right()"
    tests = [mock + "m.assert_called_once_with(1)", mock + "assert m.called", mock + "assert m.call_count == 1", own]
    tests += ["def g(): yield\nx = g()\ntry: f(x)\nexcept AttributeError: assert False\nassert f(x) == 1"]
    case = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        f(self)\n        self.assertEqual(1, 2)\n"
    jobs = [Job(MEDDLERS[name], tests), Job(MEDDLERS[name], case, "unittest")]
    assert [verdict.passed for verdict in executor.run(jobs)] == [0, 0]


def test_a_test_after_one_that_cannot_be_judged_is_judged(executor):
    tests = ["try: V() + 5\nexcept TypeError: pass", "assert give(2) == 1", "assert V(3).x == 3"]
    verdict = executor.run([Job(V, tests, setup="judged = True")])[0]
    assert [result.status for result in verdict.tests] == ["failed", "passed", "passed"]
    assert "cannot be combined with int of the tests" in verdict.tests[0].message


def test_threads_of_a_program_each_get_their_answers(executor):
    code = (
        "import threading\ndef f(g, n):\n    found = {}\n    def work(k):\n        for j in range(20): found[k, j] = g(k, j)\n"
        "    threads = [threading.Thread(target=work, args=(k,)) for k in range(n)]\n"
        "    for thread in threads: thread.start()\n    for thread in threads: thread.join()\n    return found"
    )
    tests = [
        "assert f(lambda k, j: (k, j), 4) == {(k, j): (k, j) for k in range(4) for j in range(20)}",
        "seen = []\nf(lambda k, j: seen.append((k, j)), 3)\nassert sorted(seen) == [(k, j) for k in range(3) for j in range(20)]",
    ]
    for _ in range(3):
        assert executor.run([Job(code, tests)])[0].status == "passed"


BOTH = """
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int = 0
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def __eq__(self, other): return other is not None and self.value == other.value and self.next == other.next
"""


def test_objects_of_classes_that_tests_and_program_define_are_compared_by_the_tests(executor):
    """The set-up and the program both define the classes that a prompt gives."""
    code = BOTH + (
        "def move(p): return Point(p.x + 1, p.y)\ndef shift(p): p.x += 1\ndef same(p): return p\n"
        "def reverse(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last\n"
        "def build(xs):\n    n = None\n    for x in reversed(xs): n = Node(x, n)\n    return n\n"
        "def points(): return {'k': [Point(1), Point(2)]}\ndef is_point(p): return isinstance(p, Point)\n"
    )
    right = [
        "assert move(Point(1, 2)) == Point(2, 2) and move(Point(1)) != Point(1)",
        "p = Point(1)\nshift(p)\nassert p.x == 2 and same(p) is p and is_point(p)",
        "a = Node(1, Node(2))\nb = reverse(a)\nassert b == Node(2, Node(1)) and b.next is a and a.next is None",
        "assert build([1, 2, 3]) == Node(1, Node(2, Node(3))) and build([1, 2]) != Node(1)",
        "assert points() == {'k': [Point(1), Point(2)]} and isinstance(move(Point(0)), Point)",
    ]
    verdict = executor.run([Job(code, right, setup=BOTH)])[0]
    assert verdict.status == "passed", verdict
    lie = code.replace(
        "def __eq__(self, other): return self.value", "def __eq__(self, other): return True or self.value"
    )
    lie = lie.replace("class Point:\n", "class Point:\n    def __eq__(self, other): return True\n")
    lie = lie.replace("Point(p.x + 1, p.y)", "Point(9)").replace("Node(x, n)", "Node(9, n)")
    tests = [
        right[0].partition(" and ")[0],
        right[3].partition(" and ")[0],
        "p = Point(1)\np2 = move(p)\nassert p2.x == 2",
    ]
    assert executor.run([Job(lie, tests, setup=BOTH)])[0].passed == 0
    hides = (
        code
        + "class Sure(int):\n    __eq__ = lambda self, other: True\ndef move(p):\n    p = Point(5)\n    p.__dict__['__eq__'] = lambda other: True\n    return p\n"
    )
    assert executor.run([Job(hides, tests[:1], setup=BOTH)])[0].passed == 0
