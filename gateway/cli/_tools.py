"""The tools that `launch` runs and `connect` prints for: what each needs to ask this gateway.

Setups hold no key: a tool reads it from the variable that its entry here names. To add a tool, add
an entry to TOOLS, and a test that runs it (compat_tests/agents/test_launch.py).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AGENT_CONTEXT: Final = 32_000
"""Tokens that agents need. Claude Code's first request has 23,500 before the question
(docs/agents.md).
"""
NO_KEY: Final = "unused"  # what a gateway without keys is sent, by tools that insist on one
_PROVIDER: Final = "mlx-gateway"
_KEY_VARIABLE: Final = "MLX_GATEWAY_KEY"  # of tools in which its name is free


@dataclass(frozen=True, slots=True)
class Service:
    """The gateway, and the models of it that a tool is to use."""

    url: str
    model: str
    small_model: str
    context: int | None


@dataclass(frozen=True, slots=True)
class Setup:
    """What makes a tool use a gateway.

    A variable of None is to be unset. `files` are for a private folder, which the variable
    `folder` names.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, the variable in which it reads its key, and its setup for a gateway."""

    command: str
    install: str
    key: str
    least_context: int
    setup: Callable[[Service], Setup]

    def environment(
        self, setup: Setup, key: str | None, around: Mapping[str, str], folder: str
    ) -> dict[str, str]:
        """Return the variables to run the tool with, and none of them the gateway's own keys."""
        given = {**setup.variables, self.key: key or NO_KEY}
        if setup.folder:
            given[setup.folder] = folder
        kept = {name: value for name, value in around.items() if name.upper() not in _OWN_KEYS}
        return {name: value for name, value in (kept | given).items() if value is not None}

    def shell_lines(self, setup: Setup, key: str) -> list[str]:
        """Return lines for a shell that do as `launch` does; `key` is what the shell expands to
        the key.
        """
        lines = [
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in setup.variables.items()
        ]
        lines.append(f"export {self.key}={key}")
        if setup.folder:
            lines.append(f'export {setup.folder}="$(mktemp -d)"')
        for name, text in setup.files.items():
            lines.append(f"printf '%s\\n' {shlex.quote(text)} > \"${setup.folder}/{name}\"")
        if setup.arguments:
            given = shlex.join(setup.arguments)
            lines.append(f'{self.command}() {{ command {self.command} {given} "$@"; }}')
        return lines


_OWN_KEYS: Final = frozenset({"GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY"})


def _claude(service: Service) -> Setup:
    """Every name by which Claude Code asks for a model is one of ours.

    A token needs no approval, as a key does that it finds in the environment. It compacts a
    conversation in time if it knows the context, which it reads as 100,000 tokens at the least.
    """
    large = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    small = ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    elsewhere = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    window = None if service.context is None else str(service.context)
    return Setup(
        {
            "ANTHROPIC_BASE_URL": service.url,
            **dict.fromkeys(large, service.model),
            **dict.fromkeys(small, service.small_model),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": window,
            **dict.fromkeys(elsewhere),
        }
    )


def _codex(service: Service) -> Setup:
    """What its command line sets goes before ~/.codex/config.toml, of which the rest stays."""
    provider = f"model_providers.{_PROVIDER}"
    settings: dict[str, str | int] = {
        "model": service.model,
        "model_provider": _PROVIDER,
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{service.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _KEY_VARIABLE,
        "review_model": service.model,
    }
    if service.context is not None:
        settings["model_context_window"] = service.context
    # A text in JSON is one in TOML.
    pairs = (f"{key}={json.dumps(each, ensure_ascii=False)}" for key, each in settings.items())
    return Setup(arguments=tuple(word for pair in pairs for word in ("-c", pair)))


def _opencode(service: Service) -> Setup:
    """This JSON is merged into the user's own configuration."""
    context = service.context
    limit = {"limit": {"context": context, "output": context // 4}} if context else {}
    config = {
        "model": f"{_PROVIDER}/{service.model}",
        "small_model": f"{_PROVIDER}/{service.small_model}",
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _PROVIDER,
                "options": {"baseURL": f"{service.url}/v1", "apiKey": f"{{env:{_KEY_VARIABLE}}}"},
                "models": {
                    service.small_model: {"name": service.small_model},
                    service.model: {"name": service.model, **limit},
                },
            }
        },
    }
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _llm(service: Service) -> Setup:
    """It reads models from a file in its folder of the user, where its keys and logs are too."""
    models = [
        {
            "model_id": name,
            "model_name": name,
            "api_base": f"{service.url}/v1",
            "api_key_name": _PROVIDER,
            "supports_tools": True,
            "supports_schema": True,
        }
        for name in dict.fromkeys((service.model, service.small_model))
    ]
    return Setup(
        {"LLM_MODEL": service.model},
        folder="LLM_USER_PATH",
        files={"extra-openai-models.yaml": json.dumps(models)},  # JSON is YAML
    )


TOOLS: Final[Mapping[str, Tool]] = {
    "claude": Tool(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        "ANTHROPIC_AUTH_TOKEN",
        AGENT_CONTEXT,
        _claude,
    ),
    "codex": Tool("codex", "npm install -g @openai/codex", _KEY_VARIABLE, AGENT_CONTEXT, _codex),
    "opencode": Tool(
        "opencode", "npm install -g opencode-ai", _KEY_VARIABLE, AGENT_CONTEXT, _opencode
    ),
    "llm": Tool("llm", "pip install llm", "OPENAI_API_KEY", 0, _llm),
}


class NoModel(Exception):
    """No model can be used, or not the one that was asked for; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A name that the model `id` is served by; the context is None if nobody knows it yet. If
    `is_capped`, models.yaml has a `max_context` of it.
    """

    name: str
    id: str
    kind: str
    context: int | None = None
    is_capped: bool = False


def choose(offers: Sequence[Offer], wanted: str | None, tool: Tool) -> Offer:
    """Return the offer of the wanted name, or else the first that suits a tool; raises NoModel."""
    chats = [offer for offer in offers if offer.kind == "chat"]
    suited = [offer for offer in chats if _problem(offer, tool) is None]
    if wanted is None:
        if suited:
            return suited[0]
        models = [offer for offer in chats if offer.name == offer.id]
        problems = [f"\n  {_problem(offer, tool)}" for offer in models]
        listed = "".join(problems) or "\n  there are none"
        advice = "Add a larger one to models.yaml: docs/models.md has some."
        if (unknown := next((each for each in models if each.context is None), None)) is not None:
            advice = _commands(unknown, tool)
        raise NoModel(f"{tool.command} can use no chat model of models.yaml:{listed}\n{advice}")
    offer = next((each for each in offers if each.name == wanted), None)
    if offer is None or offer.kind != "chat":
        what = "there is no such model" if offer is None else f"it is a model for {offer.kind}"
        names = ", ".join(each.name for each in chats) or "none"
        raise NoModel(f"{wanted}: {what}. The chat models are: {names}.")
    if problem := _problem(offer, tool):
        others = ", ".join(each.name for each in suited)
        advice = f" Or choose another by --model: {others}." if others else ""
        commands = f"\n{_commands(offer, tool)}" if offer.context is None else ""
        raise NoModel(f"{problem}.{advice}{commands}")
    return offer


def _commands(offer: Offer, tool: Tool) -> str:
    """Return the commands by which a tool can use a model that is not on disk yet."""
    launch = f"mlx-gateway launch {tool.command} --model {shlex.quote(offer.name)}"
    return f"Run:\n  mlx-gateway pull {shlex.quote(offer.id)}\n  {launch}"


def _problem(offer: Offer, tool: Tool) -> str | None:
    """Return why a tool cannot use a chat model, and what to do; None if it can."""
    if not tool.least_context:
        return None
    if offer.context is None:
        return f"{offer.name}: it is not on disk, so its context is not known"
    if offer.context < tool.least_context:
        cap = " (models.yaml sets its `max_context`)" if offer.is_capped else ""
        return (
            f"{offer.name}: its context is {offer.context:,} tokens{cap}, and {tool.command} needs "
            f"{tool.least_context:,}"
        )
    return None
