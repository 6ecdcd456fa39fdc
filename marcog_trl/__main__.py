"""`python -m marcog_trl solve` and `plan`; see [`marcog_trl.cli`]."""

import sys

from marcog_trl.cli import plan, solve


if __name__ == "__main__":
    sys.exit(plan.main(sys.argv[2:]) if sys.argv[1:2] == ["plan"] else solve.main())
