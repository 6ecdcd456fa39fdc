"""The right code comes out of the markup in which models write it."""

import time

import pytest

from marcog_trl.parsing.extract import extract_code, syntax_error
from marcog_trl.parsing.markup import blocks_of, normalise


CODE = "def f(x):\n    return 2 * x"
DRAFT = "```python\ndef f(x):\n    return x\n```\n"
FORMS = {
    "in a list": "- ```python\n  def f(x):\n      return 2 * x\n  ```",
    "in a numbered list": "1. First:\n\n    ```python\n    def f(x):\n        return 2 * x\n    ```\n2. Done.",
    "after words": f"{DRAFT}So the answer is: ```python\n{CODE}\n```",
    "after words without a space": f"{DRAFT}代码如下：```python\n{CODE}\n```",
    "after an apostrophe": f"{DRAFT}It's: ```python\n{CODE}\n```",
    "bold": f"**Answer:**```python\n{CODE}\n```**",
    "in a quote": "> ```python\n> def f(x):\n>     return 2 * x\n> ```\n> It doubles.",
    "begins in the line of the fence": "```python def f(x):\n    return 2 * x\n```",
    "four backticks": f"{DRAFT}````py\n{CODE}\n````",
    "tildes": f"{DRAFT}~~~python\n{CODE}\n~~~\n",
    "attributes": f'```python title="f.py" linenos\n{CODE}\n```',
    "braces": f"```{{python}}\n{CODE}\n```",
    "nested in a longer fence": f"````markdown\n# Title\n```python\n{CODE}\n```\n````",
    "nested in a fence of the same length": f"```markdown\nHere it is:\n```python\n{CODE}\n```\n```",
    "the draft is never closed": f"{DRAFT.removesuffix('```' + chr(10))}Better:\n```python\n{CODE}\n```",
    "the opening fence is in the prompt": f"{CODE}\n```\nFor example:\n```python\nprint(f(3))\n```",
    "closed by a fence with words": f"```python\n{CODE}\n``` That's it. It's good.",
    "<code>": f"<code>\n{CODE}\n</code>",
    "<pre><code>": f'{DRAFT}<pre><code class="language-python">{CODE}\n</code></pre>',
    "<answer>": f"<reasoning>\n{DRAFT}</reasoning>\n<answer>\n{CODE}\n</answer>",
    "<answer> with a fence": f"{DRAFT}<answer>\n```python\n{CODE}\n```\n</answer>",
    "[PYTHON]": f"{DRAFT}[PYTHON]\n{CODE}\n[/PYTHON]",
    "\\begin{lstlisting}": f"\\begin{{lstlisting}}[language=Python]\n{CODE}\n\\end{{lstlisting}}",
    "several languages": f"```cpp\nint f(int x) {{ return 2 * x; }}\n```\n```python\n{CODE}\n```\n```bash\npython f.py\n```",
    "usage": f"```python\n{CODE}\n```\nSave it, then:\n```python\nfrom solution import f\nprint(f(3))\n```",
    "Windows line ends": f"Here:\n```python\n{CODE}\n```\nDone.".replace("\n", "\r\n"),
    "after thoughts in its line": f"so it doubles. </think> {CODE}",
    "after [THINK]": f"[THINK]\n{DRAFT}[/THINK]{CODE}",
    "after ◁think▷": f"◁think▷{DRAFT}◁/think▷{CODE}",
    "after a marked thought": f"<|begin_of_thought|>\n{DRAFT}<|end_of_thought|>\n<|begin_of_solution|>\n{CODE}\n<|end_of_solution|>",
    "in the final channel": "<|channel|>analysis<|message|>def f(x): return 0<|end|><|start|>assistant<|channel|>final<|message|>"
    f"{CODE}<|return|>",
    "a header": f"<|start_header_id|>assistant<|end_header_id|>\n\n{CODE}<|eot_id|><|eot_id|>",
    "another turn follows": f"{CODE}<|im_end|>\n<|im_start|>user\nThanks!\n<|im_start|>assistant\n{DRAFT}",
    "a fence, then an end token": f"```python\n{CODE}```<|im_end|>",
    **{f"ends in {token}": f"{CODE}{token}" for token in (
        "<|endoftext|>", "</s>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<eos>", "<｜end▁of▁sentence｜>", "</s></s>", "<|endoftext|>Human: more",
    )},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_code_is_found_in_the_markup_of_a_reply(form):
    code = extract_code(FORMS[form], "f")
    assert code == CODE
    assert extract_code(code, "f") == code
    assert syntax_error(FORMS[form], "f") is None


@pytest.mark.parametrize(
    "text",
    [
        "```python def f(x): return 2 * x```",
        "Use ```def f(x): return 2 * x``` here.",
        "It is `def f(x): return 2 * x`.",
    ],
)
def test_code_is_found_in_a_line(text):
    assert extract_code(text, "f") == "def f(x): return 2 * x"


def test_html_is_unescaped_in_tags_of_html_only():
    code = "def f(x):\n    return x if 1 < x else '&amp;'"
    assert "1 < x" in extract_code(f"<code>{code.replace('<', '&lt;')}</code>", "f")
    assert extract_code(f"<answer>\n{code}\n</answer>", "f") == code


@pytest.mark.parametrize("quote", ['"""', "'''"])
@pytest.mark.parametrize("fence", ["```", "```python", "~~~"])
def test_a_fence_in_a_docstring_is_none(quote, fence):
    code = f"def f(x):\n    {quote}Doubles.\n\n    {fence}\n    f(2)\n    {fence[:3]}\n    {quote}\n    return 2 * x"
    for text in (
        f"```python\n{code}\n```",
        f"Here:\n```python\n{code}\n```\nIt's 4:\n```\n4\n```",
        f"Here:\n\n{code}\n\nDone.",
    ):
        assert extract_code(text, "f") == code


@pytest.mark.parametrize(
    "body",
    [
        "return x.split('</s>')[0]",
        'return f"<|im_start|>{x}<|im_end|>\\n"',
        "return '<s>' + x + '</s> '",
        "return f'<s>{x}</s> <br>'",
        'return x.replace("```", "~~~")',
        'return x.partition("</think>")[2] or "</answer>"',
    ],
)
def test_strings_are_no_markup(body):
    code = f"def f(x):\n    {body}"
    for text in (code, f"```python\n{code}\n```", f"Here:\n\n{code}\n\nDone."):
        assert extract_code(text, "f") == code


def test_a_string_that_never_ends_hides_no_later_block():
    text = f'```python\ndef f(x):\n    """Doubles.\n    return x\n```\nBetter:\n```python\n{CODE}\n```'
    assert extract_code(text, "f") == CODE


def test_blocks_have_languages():
    found = blocks_of("```Python\na\n```\nb\n~~~ bash\nc\n~~~\n```\nd")
    assert [(block.text, block.language, block.closed) for block in found] == [
        ("a", "python", True),
        ("c", "bash", True),
        ("d", "", False),
    ]
    assert [block.is_foreign for block in found] == [False, True, False]


def test_indentation_of_a_body_is_kept():
    body = "    return 2 * x"
    assert normalise(f"<|im_start|>assistant\n{body}<|im_end|>") == normalise(f"<think></think>\n{body}") == body


HELPER = "def g(x):\n    return 2 * x"
CALLER = "def f(x):\n    return g(x)"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{CALLER}\n```\nwith\n```python\n{HELPER}\n```",
        f"First:\n```python\n{HELPER}\n```\nThen:\n```python\n{CALLER}\n```",
        f"First a helper:\n\n{HELPER}\n\nThen it's this:\n\n{CALLER}\n\nDone.",
        f"It's this:\n\n{CALLER}\n\nwith this helper:\n\n{HELPER}\n\nDone.",
    ],
)
def test_helpers_come_before_code_that_needs_them(text):
    assert extract_code(text, "f") == f"{HELPER}\n\n\n{CALLER}"


PROGRAM = "n = int(input())\nprint(2 * n)"


@pytest.mark.parametrize(
    "after",
    [
        "The core:\n```python\ndef double(n):\n    return 2 * n\n```",
        "To try it:\n```python\nimport io, sys\nsys.stdin = io.StringIO('2')\nprint(2 * int(input()))\n```",
        "From a file:\n```python\nimport sys\nsys.stdin = open('input.txt')\nprint(2 * int(input()))\n```",
        "```bash\npython a.py\n```",
        "It prints:\n```text\nprint(int(input()))\n```",
        "It prints:\n```\n4\n```",
        "Use:\n```python\nprint(double(3))\n```",
        "Tests:\n```python\nassert double(2) == 4\n```",
        "```python\nwith patch('builtins.input', return_value='2'):\n    main()\n```",
        "Never called:\n```python\ndef main():\n    print(int(input()))\n```",
    ],
)
def test_a_program_is_the_last_block_that_reads_and_prints(after):
    assert extract_code(f"```python\n{PROGRAM}\n```\n{after}") == PROGRAM
    assert syntax_error(f"```python\n{PROGRAM}\n```\n{after}") is None


def test_a_program_in_two_blocks():
    whole = "def solve():\n    print(2 * int(input()))"
    assert extract_code(f"```python\n{whole}\n```\nCall it:\n```python\nsolve()\n```") == f"{whole}\n\n\nsolve()"
    read, write = PROGRAM.split("\n")
    assert extract_code(f"```python\n{read}\n```\nthen\n```python\n{write}\n```") == f"{read}\n\n\n{write}"
    assert extract_code("```python\nprint(7)\n```\nor\n```python\ndef seven():\n    return 7\n```") == "print(7)"


HOSTILE = {
    "backticks": "```\n" + "`" * 65_000 + "x\n",
    "fences in a line": "``` " * 16_000,
    "languages in a line": "a ```py " * 8000,
    "tags": "<code>" * 10_000,
    "quoted end tokens": '"</s>x' * 10_000,
    "spaces after a token": f"<s>{' ' * 60_000}x",
    "thoughts": "<think>\n" * 8000,
    "ends of thoughts": "'</think>" * 7000,
    "escaped quotes": "```\n" + '"""\n\\"""\n' * 6000,
    "mixed quotes": "```\n" + "'''\n\"\"\"\n```\n" * 5000,
    "quote marks": "> " * 30_000 + "```\na\n",
    "code in lines": "`def f(x): return 2`\n" * 3000,
    "blocks that act": "".join(f"```\nprint(g{i})\ndef g{i}(): return g{i + 1}\n```\n" for i in range(1200)),
    "pieces that act": "".join(f"print(g{i})\n\ndef g{i}(): return g{i + 1}\n:\n" for i in range(1200)),
    "list marks": "- " * 30_000 + "```\nx",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_markup_costs_bounded_time(name):
    """Each of them is 64 KiB. They would take minutes if a text were scanned once for each mark."""
    start = time.process_time()
    for entry_point, prompt in (("f", "def f(x):\n"), (None, None)):
        extract_code(HOSTILE[name], entry_point, prompt)
        syntax_error(HOSTILE[name], entry_point, prompt)
    assert time.process_time() - start < 4 * 1.0  # a call takes 0.2 s or less where nothing else runs
