"""`python -m marcog_trl`; see [`marcog_trl.cli.main`]."""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    sys.exit(plan.main(sys.argv[2:]) if sys.argv[1:2] == ["plan"] else solve.main())
