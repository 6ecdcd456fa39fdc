import ast
import subprocess
import sys
from collections import Counter

import pytest

from marcog_trl.parsing.syntax import combine
from marcog_trl.problems.builtin import SIZES, STEPS, generate, generate_exercises, pairings, write_aux, write_main


def solved(row, code):
    """Whether our own code passes all tests of a row; nothing here comes from a model."""
    namespace = {}
    exec(code, namespace)
    for test in row["test"]:
        try:
            exec(test, namespace)
        except Exception:
            return False
    return True


@pytest.fixture(scope="module")
def rows():
    return {split: generate(split) for split in SIZES}


def test_sizes_and_columns(rows):
    for split, size in SIZES.items():
        assert len(rows[split]) == size
        assert len({row["task_id"] for row in rows[split]}) == size
        assert len({row["canonical_solution"] for row in rows[split]}) == size
        assert all(len(row["test"]) >= 5 and row["test_format"] == "asserts" for row in rows[split])
    assert SIZES["test"] >= 100


def test_reference_solutions_pass(rows):
    for row in (row for split in rows.values() for row in split):
        assert solved(row, row["canonical_solution"])
        assert combine(row["aux"], row["main"]) + "\n" == row["canonical_solution"]


def test_example_of_the_docstring_is_the_first_test(rows):
    for row in rows["test"]:
        call, value = row["test"][0].removeprefix("assert ").split(" == ")
        assert f">>> {call}\n    {value}\n" in row["prompt"]


def test_splits_share_steps_but_no_pairing(rows):
    pairs = {split: {(row["first"], row["second"]) for row in rows[split]} for split in rows}
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["validation"]
    assert not pairs["validation"] & pairs["test"]
    for split in ("validation", "test"):
        for place in (0, 1):
            assert {pair[place] for pair in pairs[split]} <= {pair[place] for pair in pairs["train"]}
    assert all(pairs[split] <= set(pairings()[split]) for split in rows)
    assert max(Counter((row["first"], row["second"]) for row in rows["test"]).values()) <= 5


def test_exercises_have_pairs_of_no_split():
    exercises = generate_exercises()
    pairs = {(row["first"], row["second"]) for row in exercises}
    assert len(pairs) == len(exercises) > 800
    for first, second in pairs:
        assert STEPS[first].gives != STEPS[second].takes
    assert not pairs & {pair for split in pairings().values() for pair in split}
    for row in exercises:
        steps = [STEPS[row[place]] for place in ("first", "second")]
        texts = [step.text.format(k=row[f"{place}_k"]) for step, place in zip(steps, ("first", "second"), strict=True)]
        head, statement, empty, call, result, end, last = row["prompt"].split("\n")
        assert (head, empty, end, last) == (f"def solve({steps[0].takes}):", "", '    """', "")
        assert statement == f'    """First {texts[0]}, then {texts[1]}.'
        shown = (
            ast.literal_eval(call.removeprefix("    >>> solve(").removesuffix(")")),
            ast.literal_eval(result.strip()),
        )
        kinds = {"numbers": list, "n": int, "text": str}
        assert tuple(map(type, shown)) == (kinds[steps[0].takes], kinds[steps[1].gives])
    assert generate_exercises(1) != exercises


def test_mistakes_and_half_solutions_fail(rows):
    for row in rows["test"]:
        first, second = STEPS[row["first"]], STEPS[row["second"]]
        for mistake in first.mistakes:
            assert not solved(row, write_aux(first, row["first_k"], mistake) + "\n" + row["main"])
        for mistake in second.mistakes:
            main = write_main(second, row["second_k"], first.takes, mistake)
            assert not solved(row, row["aux"] + "\n" + main)
        assert not solved(row, f"def solve({first.takes}):\n    return aux({first.takes})\n{row['aux']}")
        assert not solved(row, f"def aux({first.takes}):\n    return {first.takes}\n{row['main']}")


def test_no_other_composition_passes(rows):
    """Independent of the generator's own search: all pairs of steps, written out and run as programs."""
    for row in rows["test"][:6]:
        first, second = STEPS[row["first"]], STEPS[row["second"]]
        passing = [
            (f.name, j, g.name, k)
            for f in STEPS.values()
            if f.takes == first.takes
            for g in STEPS.values()
            if g.takes == f.gives and g.gives == second.gives
            for j in f.ks
            for k in g.ks
            if solved(row, write_aux(f, j) + "\n" + write_main(g, k, f.takes))
        ]
        assert passing == [(row["first"], row["first_k"], row["second"], row["second_k"])]


def test_steps_are_well_formed():
    for step in STEPS.values():
        for code in (step.code, *step.mistakes):
            assert code.count("{x}") == 1
            assert step.ks != (0,) or "{k}" not in code
        assert ("{k}" in step.text) == (step.ks != (0,))
        assert len({step.code, *step.mistakes}) == 1 + len(step.mistakes) >= 3


def test_seed_changes_problems_and_not_pairings(rows):
    other = generate("validation", seed=1)
    assert {row["prompt"] for row in other} != {row["prompt"] for row in rows["validation"]}
    assert {(row["first"], row["second"]) for row in other} <= set(pairings()["validation"])


def test_generation_does_not_depend_on_the_hash_seed(rows):
    script = "from marcog_trl.problems.builtin import generate; print([r['test'] for r in generate('validation')])"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "123"}
    )
    assert output.stdout.strip() == str([row["test"] for row in rows["validation"]])
