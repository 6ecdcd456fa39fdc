"""The syntax tree decides what code is and does."""

import pytest

from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper, returns_value


@pytest.mark.parametrize(
    ("code", "defined", "returns"),
    [
        ("def f(x):\n    return x", True, True),
        ("async def f(x):\n    return x", True, True),
        ("def f(x):\n    yield x", True, True),
        ("f = lambda x: x", True, True),
        ("f: object = lambda x: x", True, True),
        ("def f(x):\n    pass", True, False),
        ("def f(x):\n    return", True, False),
        ("def f(x):\n    return None", True, False),
        ("def f(x):\n    print('return x')", True, False),
        ("def f(x):\n    def g():\n        return x", True, False),
        ("def f(x):\n    return x\n\ndef f(x):\n    pass", True, False),
        ("if True:\n    def f(x):\n        return x", True, True),
        ("try:\n    import numpy\nexcept ImportError:\n    def f(x):\n        return x", True, True),
        ("class f:\n    pass", True, False),
        ("class A:\n    def f(self):\n        return 1", False, False),
        ("# def f(x): return x", False, False),
        ("'''\ndef f(x): return x\n'''", False, False),
        ("def f(x:", False, False),
    ],
)
def test_defines_and_returns_value(code, defined, returns):
    assert (defines(code, "f"), returns_value(code, "f")) == (defined, returns)


@pytest.mark.parametrize(
    ("body", "called", "thin", "ignored"),
    [
        ("return aux(x)", True, True, False),
        ("'''Doc.'''\n    return aux(x, k=1)", True, True, False),
        ("r = aux(x)\n    return r", True, True, False),
        ("return aux([x.y, *x])", True, True, False),
        ("return aux(sorted(x))", True, False, False),
        ("return aux(x) + 1", True, False, False),
        ("r = aux(x)\n    return r[0]", True, False, False),
        ("return list(map(aux, x))", True, False, False),
        ("return sorted(x, key=aux)", True, False, False),
        ("return [aux(v) for v in x]", True, False, False),
        ("y = []\n    y.append(aux(x))\n    return y", True, False, False),
        ("a, b = aux(x)\n    return a", True, False, False),
        ("aux(x)\n    return 1", True, False, True),
        ("_ = aux(x)\n    return 1", True, False, True),
        ("a, b = aux(x)\n    return 1", True, False, True),
        ("aux(x)\n    return aux(x) + 1", True, False, False),
        ("return 1", False, False, False),
        ("return 'aux(x)'  # aux(x)", False, False, False),
        ("y = aux\n    return 1", False, False, False),
        ("def aux(x):\n        return x\n    return aux(x)", False, True, False),
        ("aux = x\n    return aux(x)", False, False, False),
        ("return x.aux(x)", False, False, False),
    ],
)
def test_use_of_the_helper(body, called, thin, ignored):
    code = f"def f(x):\n    {body}\n"
    assert calls(code, "f") == called
    assert ignores_result(code, "f") == ignored
    if called:
        assert is_thin_wrapper(code, "f") == thin


def test_use_of_the_helper_through_other_functions():
    code = "def g(x):\n    return aux(x)\n\ndef f(x):\n    return g(x)\n"
    assert calls(code, "f") and is_thin_wrapper(code, "f") and not ignores_result(code, "f")
    assert not calls("def g(x):\n    return aux(x)\n\ndef f(x):\n    return x\n", "f")
    assert not calls("def f(aux):\n    return aux(1)\n", "f")
    assert is_thin_wrapper("f = aux", "f") and is_thin_wrapper("f = lambda x: aux(x)", "f")
    assert calls("def f(x):\n    return aux2(x)", "f", "aux2") and not calls("def f(x):\n    return aux2(x)", "f")
    # functions that call each other end the search
    assert not is_thin_wrapper("def f(x):\n    return g(x)\n\ndef g(x):\n    return f(x)\n", "f")
