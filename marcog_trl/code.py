"""
Reading Python out of what a model wrote, decided on the syntax tree.

Nothing here runs code or knows of tests, agents or training.
"""

import ast


def extract_code(text: str, entry_point: str | None = None) -> str:
    text = text.replace("\r\n", "\n")
    if "```" in text:
        text = text.split("```")[1].removeprefix("python")
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    return text.strip("\n")


def combine(*sources: str) -> str:
    return "\n\n\n".join(source for source in sources if source)
