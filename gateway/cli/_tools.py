"""The tools that `launch` runs and `connect` prints for: what each needs to ask this gateway.

Neither holds a key: a tool reads it from the variable that its entry here names. To add a tool, add
an entry to TOOLS, and a test that runs it (compat_tests/agents/test_launch.py).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    def fill(self, template: Any) -> Any:
        """Put the service's words into the texts of a template: {url}, {model}, {small_model}.

        {context} and {output} are whole numbers; what needs one that is not known is left out.
        """
        context = self.context
        numbers = {"{context}": context, "{output}": context and context // 4}
        if isinstance(template, Mapping):
            filled = {self.fill(key): self.fill(value) for key, value in template.items()}
            return {key: value for key, value in filled.items() if value not in (None, {})}
        if isinstance(template, list):
            return [self.fill(value) for value in template]
        if not isinstance(template, str) or template in numbers:
            return numbers.get(template, template)
        words = {"url": self.url, "model": self.model, "small_model": self.small_model}
        return template.format_map(words)


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, and what makes it use a gateway: templates for `Service.fill`."""

    command: str
    install: str
    key: str  # the variable in which it reads its key
    least_context: int = AGENT_CONTEXT
    variables: Mapping[str, Any] = field(default_factory=dict)  # None unsets one
    options: Mapping[str, Any] = field(default_factory=dict)  # each is `-c name=value`
    folder: str | None = None  # the variable that names a private folder, for `files`
    files: Mapping[str, Any] = field(default_factory=dict)

    def filled(self, service: Service) -> "Tool":
        """Return it for a service: what is no text is JSON."""
        variables = {name: _text(service.fill(value)) for name, value in self.variables.items()}
        files = {name: _text(service.fill(value)) for name, value in self.files.items()}
        options = service.fill(self.options)
        return replace(self, variables=variables, options=options, files=files)

    @property
    def arguments(self) -> list[str]:
        # A text in JSON is one in TOML.
        pairs = (
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return [word for pair in pairs for word in ("-c", pair)]

    def environment(
        self, key: str | None, around: Mapping[str, str], folder: str
    ) -> dict[str, str]:
        """Return the variables to run the tool with, and none of them the gateway's own keys."""
        variables = {**self.variables, self.key: key or NO_KEY}
        if self.folder:
            variables[self.folder] = folder
        outer = {name: value for name, value in around.items() if name.upper() not in _OWN_KEYS}
        return {name: value for name, value in (outer | variables).items() if value is not None}

    def shell_lines(self, key: str) -> list[str]:
        """Return lines for a shell that do as `launch` does; `key` is what the shell expands to
        the key.
        """
        lines = []
        for name, value in self.variables.items():
            is_unset = value is None
            lines.append(f"unset {name}" if is_unset else f"export {name}={shlex.quote(value)}")
        lines.append(f"export {self.key}={key}")
        if self.folder:
            lines.append(f'export {self.folder}="$(mktemp -d)"')
        for name, text in self.files.items():
            lines.append(f"printf '%s\\n' {shlex.quote(text)} > \"${self.folder}/{name}\"")
        if self.arguments:
            words = shlex.join(self.arguments)
            lines.append(f'{self.command}() {{ command {self.command} {words} "$@"; }}')
        return lines


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _llm_model(name: str) -> Mapping[str, Any]:
    return {
        "model_id": name,
        "model_name": name,
        "api_base": "{url}/v1",
        "api_key_name": "mlx-gateway",
        "supports_tools": True,
        "supports_schema": True,
    }


_TABLE: Final = (
    Tool(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        # A token needs no approval, as a key does that it finds in the environment.
        key="ANTHROPIC_AUTH_TOKEN",
        variables={
            "ANTHROPIC_BASE_URL": "{url}",
            # Every name by which it asks for a model is one of ours.
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{small_model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{small_model}",
            # It compacts a conversation in time if it knows the context, which it reads as
            # 100,000 tokens at the least.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
            "ANTHROPIC_API_KEY": None,
            "CLAUDE_CODE_USE_BEDROCK": None,
            "CLAUDE_CODE_USE_VERTEX": None,
        },
    ),
    Tool(
        "codex",
        "npm install -g @openai/codex",
        key="MLX_GATEWAY_KEY",
        # What its command line sets goes before ~/.codex/config.toml, of which the rest stays.
        options={
            "model": "{model}",
            "model_provider": "mlx-gateway",
            "model_providers.mlx-gateway.name": "mlx-gateway",
            "model_providers.mlx-gateway.base_url": "{url}/v1",
            "model_providers.mlx-gateway.wire_api": "responses",
            "model_providers.mlx-gateway.env_key": "MLX_GATEWAY_KEY",
            "review_model": "{model}",
            "model_context_window": "{context}",
        },
    ),
    Tool(
        "opencode",
        "npm install -g opencode-ai",
        key="MLX_GATEWAY_KEY",
        variables={
            # This JSON is merged into the user's own configuration.
            "OPENCODE_CONFIG_CONTENT": {
                "model": "mlx-gateway/{model}",
                "small_model": "mlx-gateway/{small_model}",
                "provider": {
                    "mlx-gateway": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "mlx-gateway",
                        "options": {"baseURL": "{url}/v1", "apiKey": "{{env:MLX_GATEWAY_KEY}}"},
                        "models": {
                            "{small_model}": {"name": "{small_model}"},
                            "{model}": {
                                "name": "{model}",
                                "limit": {"context": "{context}", "output": "{output}"},
                            },
                        },
                    }
                },
            }
        },
    ),
    Tool(
        "llm",
        "pip install llm",
        key="OPENAI_API_KEY",
        least_context=0,
        variables={"LLM_MODEL": "{model}"},
        # It reads models from a file in its folder of the user, where its keys and logs are too.
        folder="LLM_USER_PATH",
        files={  # JSON is YAML
            "extra-openai-models.yaml": [_llm_model("{model}"), _llm_model("{small_model}")]
        },
    ),
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
    if not candidates and wanted is not None:
        names = ", ".join(offer.name for offer in chats) or "none"
        raise NoModel(f"{wanted}: there is no such chat model. The chat models are: {names}.")
    suited = [offer for offer in candidates if _problem(offer, tool) is None]
    if suited:
        return suited[0]
    lines = [f"{tool.command} can use no chat model of models.yaml:"] if wanted is None else []
    models = [offer for offer in candidates if offer.name in (offer.id, wanted)]
    lines += [f"  {_problem(offer, tool)}" for offer in models] or ["  there are none"]
    unknown = next((offer for offer in models if offer.context is None), None)
    others = [offer.name for offer in chats if _problem(offer, tool) is None]
    if others:
        lines.append(f"Choose another by --model: {', '.join(others)}.")
    if unknown is not None:
        launch = f"mlx-gateway launch {tool.command} --model {shlex.quote(unknown.name)}"
        lines += ["Run:", f"  mlx-gateway pull {shlex.quote(unknown.id)}", f"  {launch}"]
    if not others and unknown is None:
        lines.append("Add a larger one to models.yaml: docs/models.md has some.")
    raise NoModel("\n".join(lines).strip())


def _problem(offer: Offer, tool: Tool) -> str | None:
    """Return why a tool cannot use a chat model; None if it can."""
    if not tool.least_context:
        return None
    if offer.context is None:
        return f"{offer.name}: it is not on disk, so its context is not known"
    if offer.context < tool.least_context:
        context, least = f"{offer.context:,}", f"{tool.least_context:,}"
        return f"{offer.name}: its context is {context} tokens, and {tool.command} needs {least}"
    return None
