"""The shipped workflows."""

import inspect
from typing import Any

from marcog_trl.agents import Workflow
from marcog_trl.workflows.centralized import Centralized
from marcog_trl.workflows.classes import ClassTeam
from marcog_trl.workflows.collaboration import Collaboration
from marcog_trl.workflows.discussion import Discussion
from marcog_trl.workflows.pipeline import Pipeline
from marcog_trl.workflows.rounds import Rounds, Single


__all__ = ["Centralized", "ClassTeam", "Collaboration", "Discussion", "Pipeline", "Rounds", "Single", "make_workflow"]

_WORKFLOWS: dict[str, type[Workflow]] = {
    "single": Single,
    "collaboration": Collaboration,
    "pipeline": Pipeline,
    "discussion": Discussion,
    "classeval": ClassTeam,
}


def make_workflow(name: str, **options: Any) -> Workflow:
    """
    A shipped workflow by its name.

    Args:
        name (`str`): `"single"`, `"collaboration"`, `"pipeline"`, `"discussion"` or `"classeval"`.
        **options: Arguments of [`Single`], [`Collaboration`], [`Pipeline`], [`Discussion`] or [`ClassTeam`].

    Returns:
        `Workflow`: The workflow.

    Raises:
        ValueError: If the name, an option or its value is unknown.
    """
    if name not in _WORKFLOWS:
        raise ValueError(f"workflow={name!r} is unknown. Use one of {', '.join(map(repr, _WORKFLOWS))}.")
    known = list(inspect.signature(_WORKFLOWS[name]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option}={options[option]!r} is not an option of workflow={name!r}. Its options are {known}."
            )
    return _WORKFLOWS[name](**options)
