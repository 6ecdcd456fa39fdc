"""Reads `--num_agents` and the YAML file of `--agents`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


_EXAMPLE = "Write [{name: helper, role: Write aux.}, {name: main, role: Write the function.}], for example."


class _OneOfEach(yaml.SafeLoader):
    """Refuses a mapping with a repeated key, of which YAML would take the last."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} {names.count(name)} times. Rename one of them, such as to '{name}2'.")
        return super().construct_mapping(node, deep)


def agent_settings(num_agents: int | None = None, agents: str | Path | None = None) -> dict[str, Any]:
    """
    Reads `--num_agents` and `--agents` into settings of [`Team.from_pretrained`].

    Args:
        num_agents (`int`, *optional*): Number of agents.
        agents (`str` or `Path`, *optional*): YAML file with the agents. A list of `{name: ..., role: ...}` is the whole team.
            A mapping of names to role texts replaces the texts of some agents. The names are those of the workflow's agents.

    Returns:
        `dict[str, Any]`: `num_agents` and `roles`, if given.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key, a repeated name, an empty text, or a list whose length
            is not `num_agents`.
    """
    settings: dict[str, Any] = {} if num_agents is None else {"num_agents": num_agents}
    if agents is None:
        return settings
    try:
        content = yaml.load(Path(agents).read_text(encoding="utf-8"), _OneOfEach)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"agents={str(agents)!r} cannot be read: {error}. {_EXAMPLE}") from error
    except ValueError as error:
        raise ValueError(f"agents={str(agents)!r} has {error}") from error
    if isinstance(content, list):
        pairs = [_agent(agents, i, entry) for i, entry in enumerate(content)]
        if num_agents is not None and num_agents != len(pairs):
            raise ValueError(
                f"agents={str(agents)!r} lists {len(pairs)} agents, but num_agents={num_agents}. Set num_agents={len(pairs)}, or "
                "write a mapping of names to role texts into the file."
            )
        settings["num_agents"] = len(pairs)
    else:
        pairs = list(content.items()) if isinstance(content, dict) else []
    if not pairs:
        raise ValueError(f"agents={str(agents)!r} has no agents. {_EXAMPLE}")
    names = [name for name, _ in pairs]
    for name, role in pairs:
        if names.count(name) > 1:
            raise ValueError(
                f"agents={str(agents)!r} has {name!r} {names.count(name)} times. Rename one of them, such as to '{name}2'."
            )
        for what, text in (("name", name), ("role", role)):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"agents={str(agents)!r} has {what}={text!r} for agent {name!r}, which must be a text. {_EXAMPLE}"
                )
    return settings | {"roles": dict(pairs)}


def _agent(agents: str | Path, i: int, entry: Any) -> tuple[Any, Any]:
    """Name and role text of a list entry."""
    if not isinstance(entry, dict) or entry.keys() != {"name", "role"}:
        found = f"the keys {list(entry)}" if isinstance(entry, dict) else repr(entry)
        raise ValueError(f"agents={str(agents)!r} has {found} at {i}, but needs the keys name and role. {_EXAMPLE}")
    return entry["name"], entry["role"]
