"""`python -m marcog_trl solve`; see [`marcog_trl.cli.solve`]."""

import sys

from marcog_trl.cli.solve import main


if __name__ == "__main__":
    sys.exit(main())
