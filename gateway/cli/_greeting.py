"""What a terminal shows once the gateway is ready: its address, and a request to paste."""

import ipaddress
import json
import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.registry import ChatSpec, ModelSpec
from gateway.settings import Settings

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_EMBEDDING = {"input": "Hello"}


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a listening socket: a port of a host, or a path."""

    host: str
    port: int | None = None


def find_places(opened: Sequence[str]) -> list[Place]:
    """Return the places of Hypercorn's binds, those with a port first, without unknown ones."""
    places = [_place(int(bind.removeprefix("fd://"))) for bind in opened if bind[:5] == "fd://"]
    return sorted(filter(None, places), key=lambda each: each.port is None)


def _place(descriptor: int) -> Place | None:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        name = listener.getsockname()
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            return Place(name[0], name[1])
    return Place(os.path.abspath(name)) if isinstance(name, str) and name else None


def write_greeting(places: Sequence[Place], models: Sequence[ModelSpec], settings: Settings) -> str:
    """Return where the gateway is, and how to ask one of the loaded models."""
    if not places:
        return "mlx-gateway is ready."
    place, scheme = places[0], "https" if settings.tls_cert else "http"
    if place.port is None:
        url, where = f"{scheme}://localhost", f"unix:{place.host}"
        options = ["--unix-socket", shlex.quote(place.host)]
    else:
        host = ANYWHERE.get(place.host, place.host)
        url = where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{place.port}"
        options = _host_header(host, settings)
    ready = f"mlx-gateway is ready on {where}"
    chat = next((spec for spec in models if isinstance(spec, ChatSpec)), None)
    if (spec := chat or next(iter(models), None)) is None:
        return f"{ready} (Ctrl-C stops it). No model is loaded yet."
    if settings.tls_cert:
        options.append("--insecure")  # few certificates are valid for this address
    if settings.api_keys:
        first = "${GATEWAY_API_KEYS%%,*}" if len(settings.api_keys) > 1 else "$GATEWAY_API_KEYS"
        options.append(f'-H "Authorization: Bearer {first}"')
    path = "/v1/embeddings" if chat is None else "/v1/chat/completions"
    body = {"model": spec.id, **(_EMBEDDING if chat is None else _CHAT)}
    command = ["curl", *options, shlex.quote(url + path), "-d", shlex.quote(json.dumps(body))]
    return f"{ready} (Ctrl-C stops it). Ask it something:\n\n{' '.join(command)}"


def _host_header(host: str, settings: Settings) -> list[str]:
    """Return the Host header that a gateway without keys requires, if the address is none."""
    is_known = settings.api_keys or {host, "*"} & set(settings.allowed_hosts)
    return [] if is_known or ipaddress.ip_address(host).is_loopback else ["-H 'Host: localhost'"]
