"""The Python code in the guides."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[2]


def code_of(guide):
    """The Python blocks of a guide, given by its path in the repository, as one module."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / guide).read_text(), re.DOTALL | re.MULTILINE))
