"""Methods are read out of whatever agents wrote, and merged into a class that still is what they meant."""

import ast
import json
import time
from pathlib import Path
from textwrap import dedent, indent

import pytest

from marcog_trl.parsing.classes import merge_class, read_part, skeleton_of
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.syntax import parse


DATA = json.loads((Path(__file__).parents[1] / "data" / "classeval_20.json").read_text(encoding="utf-8"))
SKELETON = '''import math

class Shape(object):
    """A shape."""

    SIDES = 4

    def __init__(self, size):
        """Keep the size."""
        self.size = size

    def area(self):
        """
        Its area.
        """

    def label(self, text="a"):
        """A label."""

    @staticmethod
    def double(x):
        """Twice x."""
'''
PROBLEM = {"task_id": "shapes/1", "prompt": "Complete it.", "starter_code": SKELETON, "entry_point": "Shape"}
AREA = "def area(self):\n    return self.size ** 2"
LABEL = 'def label(self, text="a"):\n    return f"""{text}:\n  {self.size}\n"""'
DOUBLE = "@staticmethod\ndef double(x):\n    # twice\n    return 2 * x"
METHODS = [AREA, LABEL, DOUBLE]
LABEL_INDENTED = '    def label(self, text="a"):\n        return f"""{text}:\n  {self.size}\n"""'


def read(text):
    return read_part(text, skeleton_of(PROBLEM))


def merged(*texts, owners=None):
    parts = {f"agent{i}": read(text) for i, text in enumerate(texts)}
    source = merge_class(skeleton_of(PROBLEM), parts, owners)
    assert parse(source) is not None, source
    return source


def run(source):
    space = {}
    exec(source, space)
    return space["Shape"]


def in_class(*methods, name="Shape"):
    return f"class {name}:\n" + "\n\n".join(indent(method, "    ") for method in methods)


def test_what_classeval_asks_for_is_what_its_authors_list():
    for row in DATA:
        problem = {"prompt": row["skeleton"], "entry_point": row["class_name"]}
        assert list(skeleton_of(problem).asked) == [method["method_name"] for method in row["methods_info"]]


@pytest.mark.parametrize(
    "problem",
    [
        {"task_id": "f/1", "prompt": "def f(x):\n    pass\n", "entry_point": "f"},
        {"task_id": "f/1", "prompt": "Write it.", "entry_point": "Shape"},
        {"task_id": "f/1", "prompt": "class A:\n    def f(self):\n        return 1\n", "entry_point": "A"},
        {"task_id": "f/1", "prompt": "class A:\n    pass\n", "entry_point": ""},
    ],
)
def test_what_is_no_class_to_complete_is_an_error(problem):
    with pytest.raises(ValueError, match=r"Problem 'f/1' has entry_point='.*workflow='single'") as error:
        skeleton_of(problem)
    assert "\n" not in str(error.value)


FORMS = {
    "bare": "\n\n".join(METHODS),
    "bare, with words": "Here they are:\n\n" + "\n\n".join(METHODS) + "\n\nThat's all, folks.",
    "bare, fenced": "```python\n" + "\n\n".join(METHODS) + "\n```",
    "fences apart": "First\n```python\n" + "\n```\nthen\n```\n".join(METHODS) + "\n```\nDone.",
    "fence left open": "Sure.\n```python\n" + "\n\n".join(METHODS),
    "indented": "\n\n".join([indent(AREA, "    "), LABEL_INDENTED, indent(DOUBLE, "    ")]),
    "indented, first line stripped": "\n\n".join([indent(AREA, "    "), LABEL_INDENTED, indent(DOUBLE, "    ")]).lstrip(),
    "indented, with words": "\n\n".join(["Methods:", indent(AREA, "    "), LABEL_INDENTED, indent(DOUBLE, "    "), "End."]),
    "class": "class Shape:\n" + "\n\n".join([indent(AREA, "    "), LABEL_INDENTED, indent(DOUBLE, "    ")]),
    "class, two spaces": "class Shape(object):\n"
    + "\n\n".join([indent(AREA, "  "), LABEL_INDENTED.replace("    def", "  def").replace("        return", "    return"), indent(DOUBLE, "  ")]),
    "tabs": "class Shape:\n" + "\n\n".join([indent(AREA, "\t").replace("    ", "\t"), LABEL_INDENTED.replace("    ", "\t"), indent(DOUBLE, "\t").replace("    ", "\t")]),
    "class, with words": "The class:\n\nclass Shape:\n" + "\n\n".join([indent(AREA, "    "), LABEL_INDENTED, indent(DOUBLE, "    ")]) + "\n\nIt works.",
    "windows": "\n\n".join(METHODS).replace("\n", "\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_class(form):
    part = read(FORMS[form])
    assert list(part.methods) == ["area", "label", "double"] and part.error is None
    shape = run(merged(FORMS[form]))
    assert (shape(3).area(), shape(3).label("b"), shape.double(4), shape.SIDES) == (9, "b:\n  3\n", 8, 4)
    assert shape.__doc__ == "A shape." and shape.__bases__ == (object,)


BROKEN = "def label(self):\n    y = 1\n    return (y"
BROKEN_FORMS = {
    "class": in_class(AREA, BROKEN, DOUBLE),
    "class, broken first": in_class(BROKEN, AREA, DOUBLE),
    "class, cut off": in_class(AREA, DOUBLE, BROKEN),
    "class, broken signature": in_class(AREA, "def label(self, text:\n    return text", DOUBLE),
    "class, broken docstring": in_class(AREA, DOUBLE, 'def label(self):\n    """A label.\n    return 1'),
    "bare": "\n\n".join([AREA, BROKEN, DOUBLE]),
    "indented": indent("\n\n".join([AREA, BROKEN, DOUBLE]), "    "),
    "fenced": f"```\n{in_class(AREA, BROKEN, DOUBLE)}\n```",
    "fences apart": f"```\n{AREA}\n```\n```\n{BROKEN}\n```\n```\n{DOUBLE}\n```",
}


@pytest.mark.parametrize("form", BROKEN_FORMS)
def test_a_broken_method_does_not_take_the_others_with_it(form):
    part = read(BROKEN_FORMS[form])
    assert list(part.methods) == ["area", "double"]
    assert part.error is not None and part.error.startswith("line ")
    shape = run(merged(BROKEN_FORMS[form]))
    assert (shape(3).area(), shape(3).label("b"), shape.double(4)) == (9, None, 8)


def test_where_it_breaks_is_told():
    assert read(in_class(AREA, BROKEN, DOUBLE)).error == "line 7, column 16: '(' was never closed"
    assert read(indent(f"{AREA}\n\n{BROKEN}", "    ")).error == "line 6, column 16: '(' was never closed"
    assert read(f"Here:\n```\n{BROKEN}\n```").error == "line 3, column 12: '(' was never closed"
    assert read("I cannot.").error is None


@pytest.mark.parametrize(
    "body", ["pass", "...", '"""To do."""', "raise NotImplementedError", "raise NotImplementedError('label')"]
)
def test_stubs_are_not_written(body):
    assert list(read(in_class(AREA, f"def label(self):\n    {body}")).methods) == ["area"]


def test_methods_that_are_as_given_are_not_written():
    same = 'def __init__(self, size):\n    """Other words."""\n    self.size = size  # kept'
    other = "def __init__(self, size):\n    self.size = size\n    self.names = []"
    assert list(read(in_class(same, AREA)).methods) == ["area"]
    assert list(read(in_class(other, AREA)).methods) == ["__init__", "area"]
    shape = run(merged(in_class(same, AREA), in_class(other, "def label(self):\n    return self.names")))
    assert shape(1).label() == []


def test_versions():
    one, two = "def area(self):\n    return 1", "def area(self):\n    return 2"
    assert run(merged(one, two))(0).area() == 1
    assert run(merged("I cannot.", two))(0).area() == 2
    assert run(merged(one, two, owners={"area": "agent1"}))(0).area() == 2
    assert run(merged(one, "Sorry.", owners={"area": "agent1"}))(0).area() == 1
    assert run(merged(f"```\n{one}\n```\nBetter:\n```\n{two}\n```"))(0).area() == 2


def test_what_nobody_wrote_stays_as_it_was():
    source = merged("", "I cannot.")
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(SKELETON))


def test_imports_helpers_and_constants_come_along():
    reply = dedent(
        """
        from __future__ import annotations
        import os.path as path, math
        from math import *
        try:
            import numpy
        except ImportError:
            numpy = None
        LIMIT = 3
        LIMIT = LIMIT + 1
        TABLE = {
          "a": [
        1]}
        class Side:
            length = LIMIT
        class Square(Shape):
            pass
        class Shape:
            NAMES = {
              "b": 2,
            }
            SIDES = 5
            def area(self) -> Unknown:
                return [LIMIT, TABLE, Side.length, floor(2.5), helper(1), self._own(), self.NAMES, path.basename("/x"), numpy]
            def _own(self):
                return Square(2).size
            def get(self):
                return 7
            seven = property(get)
        def helper(x):
            return x + 1
        """
    )
    shape = run(merged("def label(self, text=1):\n    return text", reply))
    assert shape(3).area()[:-1] == [4, {"a": [1]}, 4, 2, 2, 2, {"b": 2}, "x"]
    assert (shape(3).seven, shape.SIDES, shape(3).label()) == (7, 5, 1)


def test_examples_of_use_are_left_out():
    reply = (
        f"Note: this\n\n{in_class(AREA)}\n\nshape = Shape(1, 2, 3)\nresult = shape.area()\nprint(result)\nassert result == 1\n"
        "for k in range(3):\n    Shape()\nif __name__ == '__main__':\n    Shape()"
    )
    assert [statement.text for statement in read(reply).module] == []
    assert run(merged(reply))(2).area() == 4


def test_what_two_agents_bind_is_the_first_ones():
    first = f"from datetime import datetime\ndef help():\n    return 1\n{in_class(AREA)}"
    second = "import datetime\ndef help():\n    return 2\ndef label(self):\n    return help(), datetime.now"
    shape = run(merged(first, second))
    assert shape(1).label()[0] == 1
    assert merged(first, second).count("datetime") == 3


def test_properties_keep_their_setters():
    problem = {
        "prompt": "class Shape:\n    @property\n    def x(self):\n        pass\n    @x.setter\n    def x(self, value):\n        pass\n",
        "entry_point": "Shape",
    }
    skeleton = skeleton_of(problem)
    assert skeleton.asked == ("x",)
    reply = "@property\ndef x(self):\n    return self._x\n@x.setter\ndef x(self, value):\n    self._x = value"
    source = merge_class(skeleton, {"a": read_part(reply, skeleton)})
    assert source.count("def x") == 2
    shape = run(source)()
    shape.x = 3
    assert shape.x == 3


def test_whatever_is_written_the_class_stays_python():
    """Replies that are cut off anywhere, or put together of two pieces."""
    for row in DATA:
        problem = {"prompt": row["skeleton"], "entry_point": row["class_name"]}
        skeleton, text = skeleton_of(problem), row["solution_code"]
        for k in range(1, 40):
            place = len(text) * k // 40
            for reply in (text[:place], text[place:], text[place:] + text[:place], indent(text[place:], "  ")):
                source = merge_class(skeleton, {"a": read_part(reply, skeleton)})
                assert defines(source, row["class_name"]), reply


def test_deep_nesting_is_no_matter():
    part = f"def area(self):\n    return {' + '.join(['1'] * 900)}"
    assert run(merged(part))(1).area() == 900
    assert list(read(f"def area(self):\n    return {'(' * 900}1{')' * 900}").methods) == []


@pytest.mark.parametrize(
    "text", ["x = 1\n" * 10_000, "def a(self): return 1\n" * 2900, "  def a(self): return 1\n" * 2700]
)
def test_many_statements_cost_bounded_time(text):
    skeleton = skeleton_of(
        {"task_id": "x", "entry_point": "C", "prompt": 'class C:\n    def a(self):\n        """D."""\n'}
    )
    start = time.process_time()
    merge_class(skeleton, {"main": read_part(text, skeleton)})
    assert time.process_time() - start < 2
