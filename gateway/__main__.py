"""Make `python -m gateway` run the `mlx-gateway` command."""

from gateway.cli import main

if __name__ == "__main__":
    main()
