"""
`accelerate launch` without the launcher's own traceback: the processes that it starts say why they end.

    python recipes/launch.py --config_file recipes/zero2.yaml recipes/train_shppo.py --seed 1
"""

from marcog_trl.cli.launch import main


if __name__ == "__main__":
    main()
