"""The setups of the tools that `launch` runs and `connect` prints commands for.

No setup contains an API key, since tools read their keys from environment variables. A tool in
_TABLE needs a test that runs it (compat_tests/agents/test_launch.py).
"""

import json
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

# Tokens of context that agents need. Claude Code's first request has 23,500 tokens before the
# question (docs/agents.md).
AGENT_CONTEXT: Final = 32_000
SMALL_CONTEXT: Final = 16_000  # tokens; enough for agents whose system prompt has fewer than 6,000
FOLDER: Final = "{private folder}"  # placeholder for a path; no model's name has a space
NO_KEY: Final = "unused"  # the key for tools that require one, if the gateway has none
_OWN_KEYS: Final = frozenset({"GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY"})


@dataclass(frozen=True, slots=True)
class Service:
    """A gateway, and the models that a tool uses there."""

    url: str
    model: str
    small_model: str
    context: int | None  # None if it is not known
    folder: str = FOLDER
    modalities: Sequence[str] = ("text",)

    @property
    def answer(self) -> int:
        return (self.context or AGENT_CONTEXT) // 4

    @property
    def sees(self) -> bool:
        return "image" in self.modalities


@dataclass(frozen=True, slots=True)
class Setup:
    """The changes that make a tool use a service."""

    variables: Mapping[str, str | None] = field(default_factory=dict)  # None unsets a variable
    lines: Mapping[str, str] = field(default_factory=dict)  # a line put before a variable's value
    arguments: Sequence[str] = ()  # put before the user's arguments
    files: Mapping[str, str] = field(default_factory=dict)  # text by file name


@dataclass(frozen=True, slots=True)
class Tool:
    """A program that can use a gateway, and its setup."""

    command: str
    install: str
    set_up: Callable[[Service], Setup]
    key: str = "MLX_GATEWAY_KEY"
    least_context: int = AGENT_CONTEXT

    def environment(
        self, setup: Setup, key: str | None, around: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the environment that the tool runs in, without the gateway's own keys."""
        outer = {name: value for name, value in around.items() if name.upper() not in _OWN_KEYS}
        variables = {**outer, **setup.variables, self.key: key or NO_KEY}
        for name, line in setup.lines.items():
            variables[name] = "\n".join(filter(None, (line, outer.get(name))))
        return {name: value for name, value in variables.items() if value is not None}

    def shell_lines(self, setup: Setup, key: str) -> list[str]:
        """Return shell commands that set the tool up. `key` is the API key, or a word that the
        shell expands to it.
        """
        folder = f"MLX_GATEWAY_{self.command.upper()}"
        expanded = f"'\"${folder}\"'"  # FOLDER is inside single quotes
        lines = [f'{folder}="$(mktemp -d)"'] if setup.files else []
        for name, text in setup.files.items():
            lines.append(f"printf '%s\\n' {shlex.quote(text)} > \"${folder}/{name}\"")
        for name, value in setup.variables.items():
            if value is None:
                lines.append(f"unset {name}")
            else:
                lines.append(f"export {name}={shlex.quote(value).replace(FOLDER, expanded)}")
        for name, line in setup.lines.items():
            lines.append(f'export {name}={shlex.quote(line)}"${{{name}:+\n${name}}}"')
        lines.append(f"export {self.key}={key}")
        if setup.arguments:
            words = shlex.join(setup.arguments).replace(FOLDER, expanded)
            lines.append(f'{self.command}() {{ command {self.command} {words} "$@"; }}')
        return lines


def _claude(service: Service) -> Setup:
    return Setup(
        # Requests repeat a session's images, which a model that reads text, such as the small one,
        # would refuse. The header changes nothing for a model that reads images.
        lines={"ANTHROPIC_CUSTOM_HEADERS": "x-gateway-leave-out-images: true"},
        variables={
            "ANTHROPIC_BASE_URL": service.url,
            "ANTHROPIC_MODEL": service.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": service.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": service.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": service.small_model,
            "ANTHROPIC_SMALL_FAST_MODEL": service.small_model,
            # Claude Code compacts a conversation in time if it knows the context. It takes values
            # below 100,000 tokens as 100,000.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(service.context),
            "ANTHROPIC_API_KEY": None,
            "CLAUDE_CODE_USE_BEDROCK": None,
            "CLAUDE_CODE_USE_VERTEX": None,
        },
    )


def _codex(service: Service) -> Setup:
    options: dict[str, Any] = {
        "model": service.model,
        "model_provider": "mlx-gateway",
        "model_providers.mlx-gateway.name": "mlx-gateway",
        "model_providers.mlx-gateway.base_url": f"{service.url}/v1",
        "model_providers.mlx-gateway.wire_api": "responses",
        "model_providers.mlx-gateway.env_key": "MLX_GATEWAY_KEY",
        "review_model": service.model,
        "model_context_window": service.context,
        "model_catalog_json": f"{service.folder}/models.json",
    }
    arguments = []
    for name, value in options.items():  # a JSON string is a TOML string
        arguments += ["-c", f"{name}={json.dumps(value, ensure_ascii=False)}"]
    catalog = {"models": [_codex_model(service)]}
    return Setup(arguments=arguments, files={"models.json": json.dumps(catalog)})


_CODEX_INSTRUCTIONS: Final = """\
You are a coding agent in the terminal tool Codex. Work in the user's folder with your tools until \
the task is done and a command shows that it works. Follow AGENTS.md files. To edit files, run the \
command apply_patch with one argument, a patch (`*** Add File: path`, `*** Delete File: path` too):
*** Begin Patch
*** Update File: path
@@ a line above the change
-a line as it is
+a line as it will be
*** End Patch"""


def _codex_model(service: Service) -> dict[str, Any]:
    # Codex assumes that an unknown model reads images, warns of one, and requires all these fields.
    # The values are those that Codex 0.171 uses for unknown models.
    return {
        **dict.fromkeys(("slug", "display_name"), service.model),
        **dict.fromkeys(("supported_in_api", "supports_parallel_tool_calls"), True),
        **dict.fromkeys(("support_verbosity", "supports_reasoning_summaries"), False),
        **dict.fromkeys(("experimental_supported_tools", "supported_reasoning_levels"), ()),
        "base_instructions": _CODEX_INSTRUCTIONS,
        "context_window": service.context,
        "input_modalities": [*service.modalities],
        "priority": 0,
        "shell_type": "default",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "visibility": "list",
    }


def _opencode(service: Service) -> Setup:
    limit = {"context": service.context, "output": service.answer}
    model: dict[str, Any] = {"name": service.model, "limit": limit, "attachment": service.sees}
    model["modalities"] = {"input": [*service.modalities], "output": ["text"]}
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
    # OpenCode merges this JSON into the user's own configuration.
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _llm(service: Service) -> Setup:
    about = {
        "api_base": f"{service.url}/v1",
        "api_key_name": "mlx-gateway",
        "supports_tools": True,
        "supports_schema": True,
        "vision": service.sees,
    }
    names = (service.model, service.small_model)
    models = [{"model_id": name, "model_name": name, **about} for name in names]
    # llm reads models from its user folder, which also has the user's keys and logs.
    return Setup(
        {"LLM_MODEL": service.model, "LLM_USER_PATH": service.folder},
        files={"extra-openai-models.yaml": json.dumps(models)},  # JSON is YAML
    )


def _copilot(service: Service) -> Setup:
    # See `copilot help providers` of 1.0.102. The variables in `unset` would change the protocol,
    # the model or the key.
    names = ("TYPE", "WIRE_API", "TRANSPORT", "MODEL_ID", "WIRE_MODEL", "BEARER_TOKEN")
    unset = {f"COPILOT_PROVIDER_{name}": None for name in (*names, "API_KEY_COMMAND")}
    prompt = (service.context or AGENT_CONTEXT) - service.answer
    return Setup(
        {
            **unset,
            "COPILOT_PROVIDER_BASE_URL": f"{service.url}/v1",
            "COPILOT_MODEL": service.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(prompt),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(service.answer),
        }
    )


def _qwen(service: Service) -> Setup:
    # Qwen Code 0.24.4 lets system settings override those of the user and of the project.
    model = {"id": service.model, "baseUrl": f"{service.url}/v1", "envKey": "MLX_GATEWAY_KEY"}
    tokens = {"max_tokens": service.answer}
    limits = {"contextWindowSize": service.context, "samplingParams": tokens}
    limits["modalities"] = {"image": service.sees}
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": service.model},
        "modelProviders": {"openai": [{**model, "generationConfig": limits}]},
    }
    variables = {"QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{service.folder}/settings.json"}
    return Setup(variables, files={"settings.json": json.dumps(settings)})


def _pi(service: Service) -> Setup:
    # Pi reads models.json only beside the user's sessions, so an extension sets it up.
    model: dict[str, Any] = {"id": service.model, "name": service.model, "reasoning": False}
    model |= {"contextWindow": service.context, "maxTokens": service.answer}
    model["input"] = [*service.modalities]
    model["cost"] = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    about = {"baseUrl": f"{service.url}/v1", "api": "openai-completions", "models": [model]}
    about["apiKey"] = "$MLX_GATEWAY_KEY"  # Pi 0.77 and later expand the variable
    code = f"export default (pi) => pi.registerProvider('mlx-gateway', {json.dumps(about)});"
    arguments = ["-e", f"{service.folder}/mlx.mjs", "--provider", "mlx-gateway"]
    return Setup(arguments=[*arguments, "--model", service.model], files={"mlx.mjs": code})


def _continue(service: Service) -> Setup:
    model = {
        "name": service.model,
        "provider": "openai",
        "model": service.model,
        "apiBase": f"{service.url}/v1",
        "apiKey": "${{ secrets.MLX_GATEWAY_KEY }}",  # cn 1.5.47 finds this key in the environment
        "capabilities": ["tool_use", *(["image_input"] if service.sees else ())],
    }
    limits = {"contextLength": service.context, "maxTokens": service.answer}
    models = [{**model, "defaultCompletionOptions": limits}]
    config = {"name": "mlx-gateway", "version": "1.0.0", "schema": "v1", "models": models}
    arguments = ["--config", f"{service.folder}/config.yaml"]
    return Setup(arguments=arguments, files={"config.yaml": json.dumps(config)})


def _cline(service: Service) -> Setup:
    name = "openai-compatible"
    model = {"provider": name, "model": service.model, "baseUrl": f"{service.url}/v1"}
    limits: dict[str, Any] = {"contextWindow": service.context, "maxTokens": service.answer}
    # Cline 3.0.65 assumes that every model of a gateway reads images.
    limits["headers"] = {} if service.sees else {"x-gateway-leave-out-images": "true"}
    about = {"settings": {**model, **limits}, "updatedAt": "2026-11-26T00:00:00Z"}
    providers = {"version": 1, "lastUsedProvider": name, "providers": {name: about}}
    variables = {
        "CLINE_PROVIDER_SETTINGS_PATH": f"{service.folder}/providers.json",
        # Otherwise Cline 3.0.65 leaves a process running, and later sessions use this provider.
        "CLINE_SESSION_BACKEND_MODE": "local",
    }
    return Setup(variables, files={"providers.json": json.dumps(providers)})


def _aider(service: Service) -> Setup:
    # Aider 0.86.2 lets arguments and the key's variable override a project's .env.
    model, small = f"openai/{service.model}", f"openai/{service.small_model}"
    limits = {"max_input_tokens": service.context, "max_output_tokens": service.answer}
    about = {"litellm_provider": "openai", "mode": "chat", **limits}
    about["supports_vision"] = service.sees
    arguments = ["--openai-api-base", f"{service.url}/v1", "--model", model, "--weak-model", small]
    arguments += ["--model-metadata-file", f"{service.folder}/models.json"]
    return Setup(arguments=arguments, files={"models.json": json.dumps({model: about})})


_TABLE: Final = (
    # Claude Code asks the user to approve a key in the environment, but not a token.
    Tool("claude", "npm install -g @anthropic-ai/claude-code", _claude, "ANTHROPIC_AUTH_TOKEN"),
    Tool("codex", "npm install -g @openai/codex", _codex),
    Tool("opencode", "npm install -g opencode-ai", _opencode),
    Tool("copilot", "npm install -g @github/copilot", _copilot, "COPILOT_PROVIDER_API_KEY"),
    Tool("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    Tool("pi", "npm install -g @earendil-works/pi-coding-agent", _pi, least_context=SMALL_CONTEXT),
    Tool("cn", "npm install -g @continuedev/cli", _continue, least_context=SMALL_CONTEXT),
    Tool("cline", "npm install -g cline", _cline, "OPENAI_API_KEY", SMALL_CONTEXT),
    Tool("aider", "pip install aider-chat", _aider, "AIDER_OPENAI_API_KEY", SMALL_CONTEXT),
    Tool("llm", "pip install llm", _llm, "OPENAI_API_KEY", least_context=0),
)
TOOLS: Final[Mapping[str, Tool]] = {tool.command: tool for tool in _TABLE}


class NoModel(Exception):
    """Raised if no usable model is found. The message has commands to run next."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A name under which the model `id` is served."""

    name: str
    id: str
    kind: str
    context: int | None = None
    modalities: Sequence[str] = ("text",)
    lack: str = "it is not on disk, so its context is not known"  # why `context` is None
    can_pull: bool = True


def choose(
    offers: Sequence[Offer],
    wanted: str | None,
    tool: Tool,
    file: Path | None = None,
    known: Container[str] = (),
) -> Offer:
    """Return the offer named `wanted` or, without a name, the first one that suits the tool.

    Raises NoModel. `file` is the models file in the message's commands; `known` has the names that
    another gateway could serve.
    """
    chats = [offer for offer in offers if offer.kind == "chat"]
    candidates = [offer for offer in chats if wanted in (None, offer.name)]
    usable = [offer for offer in chats if _problem(offer, tool) is None]
    for offer in usable:
        if offer in candidates:
            return offer
    names = ", ".join(offer.name for offer in chats) or "none"
    lines = [f"{wanted}: there is no such chat model. The chat models are: {names}."]
    if candidates or wanted is None:
        lines = [f"{tool.command} cannot use {wanted or 'any of the chat models'}:"]
    shown = [offer for offer in candidates if offer.name in (offer.id, wanted)]
    lines += [f"  {_problem(offer, tool)}" for offer in shown]
    absent = [offer for offer in candidates if offer.context is None]
    if wanted in known and not candidates:
        launch = f"  GATEWAY_PORT=0 mlx-gateway launch {tool.command} --model {wanted}"
        lines += ["Run:", f"{launch}  # on a new gateway"]
    else:
        lines += _commands([*absent, *usable, *chats], tool, file)
    raise NoModel("\n".join(lines))


def _commands(offers: Sequence[Offer], tool: Tool, file: Path | None) -> list[str]:
    option = "" if file is None else f" --models {shlex.quote(str(file))}"
    for offer in offers:
        launch = f"  mlx-gateway launch {tool.command}{option} --model {shlex.quote(offer.name)}"
        if _problem(offer, tool) is None:
            return ["Run:", launch]
        if offer.context is None and offer.can_pull:
            return ["Run:", f"  mlx-gateway pull{option} {shlex.quote(offer.id)}", launch]
    launch = f"  mlx-gateway launch {tool.command} --model NAME"
    return ["Run, with a NAME that is listed:", "  mlx-gateway models recommend", launch]


def _problem(offer: Offer, tool: Tool) -> str | None:
    if not tool.least_context:
        return None
    if offer.context is None:
        return f"{offer.name}: {offer.lack}"
    if offer.context < tool.least_context:
        needed = f"{tool.command} needs {tool.least_context:,}"
        return f"{offer.name}: its context is {offer.context:,} tokens, and {needed}"
    return None
