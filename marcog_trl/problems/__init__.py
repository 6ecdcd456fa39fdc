"""
Problem sets in one schema: `task_id`, `prompt`, `entry_point`, `test`, `test_format`, `setup`, `canonical_solution`,
`starter_code`.
"""

from marcog_trl.problems.loading import load_problems
from marcog_trl.problems.schema import check_problems, make_job, solution_job


__all__ = ["check_problems", "load_problems", "make_job", "solution_job"]
