"""`python -m gateway` is `mlx-gateway`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
