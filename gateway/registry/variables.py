"""GATEWAY_<ID>_<KEY>: environment variables that set any key of any model in the file.

A name has the id and the keys in capitals, joined by _. Each run of other characters becomes one _:
GATEWAY_QWEN3_0_6B_SAMPLING_TOP_K sets `sampling.top_k` of qwen3-0.6b.

Each variable has one meaning:

1. A variable that is a setting sets no key of a model.
2. A variable that the file expands, as ${…}, has no other effect.
3. An id is refused if its variables could also be settings, or keys of another model.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from gateway.registry.fields import SHORT_FORMS
from gateway.registry.specs import SPECS
from gateway.registry.yaml_reader import read_plain_value
from gateway.settings import PREFIX, VARIABLES

Path = tuple[str, ...]


class ModelVariables:
    """The variables for the keys of one model, whose entry in the file is `entry`."""

    def __init__(self, model: str, entry: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.model = model
        self._stem = f"{PREFIX}{_in_capitals(model)}_"
        self._entry = entry
        kind = str(variables.get(f"{self._stem}KIND") or entry.get("kind"))
        # An entry of an unknown kind may have the keys of all kinds.
        specs = [SPECS[kind]] if kind in SPECS else SPECS.values()
        self._types = {path: kind for spec in specs for path, kind in _types(spec)}
        # Each variable with the path that it sets, except for keys with free names.
        self.paths = {self._stem + _in_capitals("_".join(path)): path for path in self._types}

    def path(self, variable: str) -> Path | None:
        if variable in self.paths or not variable.startswith(self._stem):
            return self.paths.get(variable)
        for key, names in self._free_keys():
            name = variable.removeprefix(f"{self._stem}{_in_capitals(key)}_")
            if name != variable and name and name == _in_capitals(name):
                # The file's key with this name in capitals, or else a new key.
                return key, names.get(name, [name.lower()])[0]
        return None

    def override(self, variables: Mapping[str, str]) -> tuple[dict[str, Any], dict[Path, str]]:
        """Return the entry with the values that variables set, and the variables' names by path."""
        entry = dict(self._entry)
        paths = {name: self.path(name) for name in variables}
        names = {path: name for name, path in paths.items() if path}
        for path in sorted(names, key=len):  # a section before its keys
            value = self._value(path, variables[names[path]])
            key, *inside = path
            section = entry.get(key)
            if key in SHORT_FORMS:
                section = SHORT_FORMS[key](section)
            if key == "aliases":
                entry[key] = _replace_aliases(section, value)
            elif not inside:
                entry[key] = value
            elif section is None or isinstance(section, dict):  # anything else is reported later
                entry[key] = {**(section or {}), inside[0]: value}
        return entry, names

    def clashes(self, earlier: Iterable["ModelVariables"]) -> Iterator[str]:
        for name in sorted(VARIABLES):
            path = self.path(name)
            if path:
                clash = f"{name} is a setting of the gateway and would be {_quote(path)} here too"
                yield f"{clash}; choose another id"
        for model in earlier:
            clash = self._clash(model)
            if clash:
                yield f"{clash}; choose another id for one of them"
        for mapping, names in self._free_keys():
            for name, keys in names.items():
                if len(keys) > 1:
                    both = " and ".join(_quote((mapping, key)) for key in keys)
                    clash = f"{self._stem}{_in_capitals(mapping)}_{name} would be {both}"
                    yield f"{clash}; choose another name for one of them"

    def _clash(self, model: "ModelVariables") -> str:
        if not (self._stem.startswith(model._stem) or model._stem.startswith(self._stem)):
            return ""
        for name in (*self.paths, *model.paths):
            here, there = self.path(name), model.path(name)
            if here and there:
                return f"{name} would be {_quote(here)} here and {_quote(there)} of {model.model}"
        return ""

    def _value(self, path: Path, text: str) -> Any:
        """Return the text if the key takes text, else the text read as plain YAML."""
        kind = self._types.get(path) or get_args(self._types[path[:1]])[1]
        value = read_plain_value(text)
        # Text keys keep even `1` and `true` as text, but `null` means no value.
        takes_text = str in get_args(kind) or path == ("aliases",)
        if kind is str or (takes_text and value is not None):
            return text
        return value

    def _free_keys(self) -> Iterator[tuple[str, dict[str, list[str]]]]:
        """Yield each key whose value is a mapping with free keys, and these keys in capitals."""
        for path, kind in self._types.items():
            if get_origin(kind) is dict:
                names: dict[str, list[str]] = {}
                mapping = self._entry.get(path[0])
                for key in mapping if isinstance(mapping, dict) else ():
                    names.setdefault(_in_capitals(key), []).append(key)
                yield path[0], names


def kind_variable(model: str) -> str:
    return f"{PREFIX}{_in_capitals(model)}_KIND"


def _types(spec: type[BaseModel]) -> Iterator[tuple[Path, Any]]:
    for key, field in spec.model_fields.items():
        if key != "id":
            yield (key,), field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (((key, *path), kind) for path, kind in _types(field.annotation))


def _replace_aliases(aliases: object, names: str | None) -> object:
    if not isinstance(aliases, list):
        return names
    # Each mapping keeps its index in the list, which gives the line of a problem.
    mappings = ["" if isinstance(alias, str) else alias for alias in aliases]
    return [*mappings, names or ""]


def _in_capitals(text: str) -> str:
    return re.sub(r"[\W_]+", "_", text).upper()


def _quote(path: Path) -> str:
    return f"`{'.'.join(path)}`"
