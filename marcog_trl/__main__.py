"""`python -m marcog_trl`; see [`marcog_trl.cli.main`]."""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    sys.exit(main())
