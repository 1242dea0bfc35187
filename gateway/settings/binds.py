"""What Hypercorn listens on: completed, and told apart."""

import ipaddress


def is_local(bind: str) -> bool:
    """Tell whether a Hypercorn bind can be reached from this machine only."""
    if bind.startswith("unix:"):
        return True
    host = with_port(bind, 0).rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an inherited socket: nobody knows where it leads


def is_socket(bind: str) -> bool:
    """Tell whether a bind is no host and port."""
    return bind.startswith(("unix:", "fd://"))


def with_port(bind: str, port: int) -> str:
    """Complete `host`, `::1` and `[::1]`; leave sockets and what has a port."""
    if is_socket(bind) or (bind.startswith("[") and "]:" in bind) or bind.count(":") == 1:
        return bind
    host = bind.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
