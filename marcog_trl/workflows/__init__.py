"""The shipped workflows."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from marcog_trl.agents import Workflow
from marcog_trl.workflows.centralized import Centralized
from marcog_trl.workflows.classes import ClassTeam
from marcog_trl.workflows.collaboration import Collaboration
from marcog_trl.workflows.coverage import Coverage
from marcog_trl.workflows.discussion import Discussion
from marcog_trl.workflows.from_file import load_class, make, names_command, names_file
from marcog_trl.workflows.module import Module
from marcog_trl.workflows.pipeline import Pipeline
from marcog_trl.workflows.program import Program
from marcog_trl.workflows.rounds import FeedbackWorkflow, Single


__all__ = [
    "Centralized",
    "ClassTeam",
    "Collaboration",
    "Coverage",
    "Discussion",
    "FeedbackWorkflow",
    "Module",
    "Pipeline",
    "Program",
    "Single",
    "make_workflow",
]

_WORKFLOWS: dict[str, type[Workflow]] = {
    "single": Single,
    "collaboration": Collaboration,
    "coverage": Coverage,
    "pipeline": Pipeline,
    "discussion": Discussion,
    "module": Module,
    "classeval": ClassTeam,
}


def is_own(name: str) -> bool:
    """Whether the name of a workflow is a file and something in it, or a command."""
    return names_file(name) or names_command(name)


def workflow_class(name: str) -> Callable[..., Workflow]:
    """
    The class of a workflow by its name, which is a shipped one, a file and a class or a function in it, or a command.

    Raises:
        ValueError: If the name is unknown, or the file cannot be used.
    """
    if is_own(name):
        return load_class(name)
    if name not in _WORKFLOWS:
        raise ValueError(
            f"workflow={name!r} is unknown. Use one of {', '.join(map(repr, _WORKFLOWS))}, or a class of your own, such as "
            "'my_team.py:Debate'."
        )
    return _WORKFLOWS[name]


def make_workflow(name: str, **options: Any) -> Workflow:
    """
    A workflow by its name.

    Args:
        name (`str`): `"single"`, `"collaboration"`, `"coverage"`, `"pipeline"`, `"discussion"`, `"module"` or
            `"classeval"`, or a file and a class in it, such as `"my_team.py:Debate"`, or a function, for [`Program`]. The file is
            run. A command also makes a [`Program`].
        **options: Arguments of [`Single`], [`Collaboration`], [`Coverage`], [`Pipeline`], [`Discussion`], [`Module`], [`ClassTeam`],
            [`Program`], or the class in the file.

    Returns:
        `Workflow`: The workflow.

    Raises:
        ValueError: If the name, an option or its value is unknown, or the file cannot be used.
    """
    return construct(workflow_class(name), name, options)


def construct(cls: Callable[..., Workflow], name: str, options: Mapping[str, Any]) -> Workflow:
    """A workflow of a class that [`workflow_class`] returned for `name`."""
    known = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option}={options[option]!r} is not an option of workflow={name!r}. Its options are {known}."
            )
    return make(cls, name, options) if is_own(name) else cls(**options)
