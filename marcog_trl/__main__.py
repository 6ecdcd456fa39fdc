"""`python -m marcog_trl solve`; see [`marcog_trl.cli.solve`]."""

from marcog_trl.cli.solve import main


if __name__ == "__main__":
    main()
