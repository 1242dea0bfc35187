"""Make `python -m gateway` and the script `mlx-gateway` run the command."""

import os
import signal


def main() -> None:
    """Run the command. Ctrl-C during its imports ends the process without a traceback."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # some shells ignore it for background jobs
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from gateway import cli

    signal.signal(signal.SIGINT, interrupt)
    cli.main()


if __name__ == "__main__":
    main()
