"""Putting modules together."""

from marcog_trl.parsing.syntax import combine, parse


def test_combine_hoists_future_imports_and_lets_later_names_win():
    code = combine(
        "def aux(x):\n    return 1", "", "from __future__ import annotations\nimport math\n\ndef f(x): return 2"
    )
    assert code.startswith("from __future__ import annotations\n\n\ndef aux")
    assert parse(code) is not None
    assert combine(code) == code
