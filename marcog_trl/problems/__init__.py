"""
Problem sets with common columns: `task_id`, `prompt`, `entry_point`, `test`, `test_format`, `setup`, `canonical_solution`
and `starter_code`. See the README of this folder.
"""

from marcog_trl.problems.loading import load_problems
from marcog_trl.problems.schema import check_problems, make_job, solution_job


__all__ = ["check_problems", "load_problems", "make_job", "solution_job"]
