"""The tools that `launch` runs and `connect` prints for: what each needs to ask this gateway.

No setup holds a key: a tool reads it from the variable that its entry names. To add a tool, add an
entry to _TABLE, and a test that runs it (compat_tests/agents/test_launch.py).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# Tokens that agents need. Claude Code's first request has 23,500 before the question
# (docs/agents.md).
AGENT_CONTEXT: Final = 32_000
NO_KEY: Final = "unused"  # what a gateway without keys is sent, by tools that insist on one
_OWN_KEYS: Final = frozenset({"GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY"})


@dataclass(frozen=True, slots=True)
class Service:
    """The gateway, and the models of it that a tool is to use."""

    url: str
    model: str
    small_model: str
    context: int | None  # None if nobody knows it yet


@dataclass(frozen=True, slots=True)
class Setup:
    """What makes a tool use a service."""

    variables: Mapping[str, str | None] = field(default_factory=dict)  # None unsets one
    arguments: Sequence[str] = ()  # before the tool's own
    files: Mapping[str, str] = field(default_factory=dict)  # in the folder that `Tool.folder` names


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, and what makes it use a gateway."""

    command: str
    install: str
    key: str  # the variable in which it reads its key
    set_up: Callable[[Service], Setup]
    least_context: int = AGENT_CONTEXT
    folder: str | None = None  # the variable that names a private folder

    def environment(
        self, setup: Setup, key: str | None, around: Mapping[str, str], folder: str
    ) -> dict[str, str]:
        """Return the variables to run the tool with, and none of them the gateway's own keys."""
        outer = {name: value for name, value in around.items() if name.upper() not in _OWN_KEYS}
        variables = {**outer, **setup.variables, self.key: key or NO_KEY}
        if self.folder:
            variables[self.folder] = folder
        return {name: value for name, value in variables.items() if value is not None}

    def shell_lines(self, setup: Setup, key: str) -> list[str]:
        """Return lines for a shell that do as `launch` does; `key` is what the shell expands to
        the key.
        """
        lines = []
        for name, value in setup.variables.items():
            if value is None:
                lines.append(f"unset {name}")
            else:
                lines.append(f"export {name}={shlex.quote(value)}")
        lines.append(f"export {self.key}={key}")
        if self.folder:
            lines.append(f'export {self.folder}="$(mktemp -d)"')
        for name, text in setup.files.items():
            lines.append(f"printf '%s\\n' {shlex.quote(text)} > \"${self.folder}/{name}\"")
        if setup.arguments:
            words = shlex.join(setup.arguments)
            lines.append(f'{self.command}() {{ command {self.command} {words} "$@"; }}')
        return lines


def _claude(service: Service) -> Setup:
    context = None if service.context is None else str(service.context)
    return Setup(
        {
            "ANTHROPIC_BASE_URL": service.url,
            # Every name by which it asks for a model is one of ours.
            "ANTHROPIC_MODEL": service.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": service.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": service.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": service.small_model,
            "ANTHROPIC_SMALL_FAST_MODEL": service.small_model,
            # It compacts a conversation in time if it knows the context, which it reads as
            # 100,000 tokens at the least.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": context,
            "ANTHROPIC_API_KEY": None,
            "CLAUDE_CODE_USE_BEDROCK": None,
            "CLAUDE_CODE_USE_VERTEX": None,
        }
    )


def _codex(service: Service) -> Setup:
    # What its command line sets goes before ~/.codex/config.toml, of which the rest stays.
    options: dict[str, Any] = {
        "model": service.model,
        "model_provider": "mlx-gateway",
        "model_providers.mlx-gateway.name": "mlx-gateway",
        "model_providers.mlx-gateway.base_url": f"{service.url}/v1",
        "model_providers.mlx-gateway.wire_api": "responses",
        "model_providers.mlx-gateway.env_key": "MLX_GATEWAY_KEY",
        "review_model": service.model,
    }
    if service.context is not None:
        options["model_context_window"] = service.context
    arguments = []
    for name, value in options.items():  # a text in JSON is one in TOML
        arguments += ["-c", f"{name}={json.dumps(value, ensure_ascii=False)}"]
    return Setup(arguments=arguments)


def _opencode(service: Service) -> Setup:
    model: dict[str, Any] = {"name": service.model}
    if service.context is not None:
        model["limit"] = {"context": service.context, "output": service.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-gateway",
        "options": {"baseURL": f"{service.url}/v1", "apiKey": "{env:MLX_GATEWAY_KEY}"},
        "models": {service.small_model: {"name": service.small_model}, service.model: model},
    }
    config = {
        "model": f"mlx-gateway/{service.model}",
        "small_model": f"mlx-gateway/{service.small_model}",
        "provider": {"mlx-gateway": provider},
    }
    # It merges this JSON into the user's own configuration.
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _llm(service: Service) -> Setup:
    about = {
        "api_base": f"{service.url}/v1",
        "api_key_name": "mlx-gateway",
        "supports_tools": True,
        "supports_schema": True,
    }
    names = (service.model, service.small_model)
    models = [{"model_id": name, "model_name": name, **about} for name in names]
    # JSON is YAML.
    return Setup(
        {"LLM_MODEL": service.model}, files={"extra-openai-models.yaml": json.dumps(models)}
    )


_TABLE: Final = (
    # A token needs no approval, as a key does that it finds in the environment.
    Tool("claude", "npm install -g @anthropic-ai/claude-code", "ANTHROPIC_AUTH_TOKEN", _claude),
    Tool("codex", "npm install -g @openai/codex", "MLX_GATEWAY_KEY", _codex),
    Tool("opencode", "npm install -g opencode-ai", "MLX_GATEWAY_KEY", _opencode),
    # It reads models from a file in its folder of the user, where its keys and logs are too.
    Tool("llm", "pip install llm", "OPENAI_API_KEY", _llm, least_context=0, folder="LLM_USER_PATH"),
)
TOOLS: Final[Mapping[str, Tool]] = {tool.command: tool for tool in _TABLE}


class NoModel(Exception):
    """No model can be used, or not the one that was asked for; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A name that the model `id` is served by; the context is None if nobody knows it yet."""

    name: str
    id: str
    kind: str
    context: int | None = None


def choose(offers: Sequence[Offer], wanted: str | None, tool: Tool) -> Offer:
    """Return the offer of the wanted name, or else the first that suits a tool; raises NoModel."""
    chats = [offer for offer in offers if offer.kind == "chat"]
    candidates = [offer for offer in chats if wanted in (None, offer.name)]
    names = ", ".join(offer.name for offer in chats) or "none"
    if not candidates and wanted is not None:
        raise NoModel(f"{wanted}: there is no such chat model. The chat models are: {names}.")
    for offer in candidates:
        if _problem(offer, tool) is None:
            return offer
    lines = [f"{tool.command} can use none of the chat models:"]
    lines += [
        f"  {_problem(offer, tool)}" for offer in candidates if offer.name in (offer.id, wanted)
    ]
    raise NoModel("\n".join([*lines, "docs/models.md has larger ones, for models.yaml."]))


def _problem(offer: Offer, tool: Tool) -> str | None:
    """Return why a tool cannot use a chat model; None if it can."""
    if not tool.least_context:
        return None
    if offer.context is None:
        pull = f"mlx-gateway pull {shlex.quote(offer.id)}"
        return f"{offer.name}: it is not on disk, so its context is not known. Run: {pull}"
    if offer.context < tool.least_context:
        needed = f"{tool.command} needs {tool.least_context:,}"
        return f"{offer.name}: its context is {offer.context:,} tokens, and {needed}"
    return None
