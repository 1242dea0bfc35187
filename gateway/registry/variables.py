"""GATEWAY_<ID>_<KEY>: environment variables that set any key of any model in the file.

A variable's name is GATEWAY_, the model's id and the keys that lead to the value, joined by _, in
capitals, with one _ for each run of characters that are neither letters nor digits:
GATEWAY_QWEN3_0_6B_SAMPLING_TOP_K sets `sampling.top_k` of qwen3-0.6b. No variable has two meanings:

1. The exact name of a setting is that setting.
2. A variable that the file expands, as ${…}, has no other effect.
3. Any other variable sets the key of the model whose id and key make up its name. Only one model
   fits: two ids are refused in one file if some variable could set a key of each, and an id is
   refused if a variable for one of its keys is also a setting.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from gateway.registry.fields import SHORT_FORMS
from gateway.registry.specs import SPECS
from gateway.registry.yaml_reader import read_plain_value
from gateway.settings import PREFIX, VARIABLES

# The keys that lead to a value of a model's entry.
Path = tuple[str, ...]


class ModelVariables:
    """The variables for the keys of one model. `entry` is the model's entry in the file."""

    def __init__(self, model: str, entry: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.model = model
        self._stem = f"{PREFIX}{_in_capitals(model)}_"
        self._entry = entry
        kind = str(variables.get(f"{self._stem}KIND") or entry.get("kind"))
        # An entry of an unknown kind may have the keys of all kinds.
        specs = [SPECS[kind]] if kind in SPECS else SPECS.values()
        self._types = {path: kind for spec in specs for path, kind in _types(spec)}
        # Each variable with the path that it sets, except for variables of a mapping with free
        # keys: these cannot be listed.
        self.paths = {self._stem + _in_capitals("_".join(path)): path for path in self._types}

    def path(self, variable: str) -> Path | None:
        """Return the path that a variable sets; None if it sets no key of this model."""
        if variable in self.paths or not variable.startswith(self._stem):
            return self.paths.get(variable)
        for key, names in self._free_keys():
            name = variable.removeprefix(f"{self._stem}{_in_capitals(key)}_")
            if name != variable and name and name == _in_capitals(name):
                # The key in the file that has this name in capitals, or else a new key.
                return key, names.get(name, [name.lower()])[0]
        return None

    def override(self, variables: Mapping[str, str]) -> tuple[dict[str, Any], dict[Path, str]]:
        """Return the entry with the values that variables set, and, for each path that was set, the
        name of the variable.
        """
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
        """Describe the variables of this model that have a second meaning: as a setting of the
        gateway, for an earlier model in the file, or for another key of this model.
        """
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
        """Describe the first variable that would set a key of this model and of another one."""
        # Names that begin differently cannot clash.
        if not (self._stem.startswith(model._stem) or model._stem.startswith(self._stem)):
            return ""
        for name in (*self.paths, *model.paths):
            here, there = self.path(name), model.path(name)
            if here and there:
                return f"{name} would be {_quote(here)} here and {_quote(there)} of {model.model}"
        return ""

    def _value(self, path: Path, text: str) -> Any:
        """Return a variable's text unchanged if the key takes text, else read it as plain YAML."""
        kind = self._types.get(path) or get_args(self._types[path[:1]])[1]
        value = read_plain_value(text)
        # For a key that takes text, even `1` and `true` stay text. `null` still means no value.
        takes_text = str in get_args(kind) or path == ("aliases",)
        if kind is str or (takes_text and value is not None):
            return text
        return value

    def _free_keys(self) -> Iterator[tuple[str, dict[str, list[str]]]]:
        """Yield each key whose value is a mapping with free keys. With it, yield the keys that this
        mapping has in the file, by their names in capitals.
        """
        for path, kind in self._types.items():
            if get_origin(kind) is dict:
                names: dict[str, list[str]] = {}
                mapping = self._entry.get(path[0])
                # If the value is not a mapping, that is reported later.
                for key in mapping if isinstance(mapping, dict) else ():
                    names.setdefault(_in_capitals(key), []).append(key)
                yield path[0], names


def kind_variable(model: str) -> str:
    """Return the name of the variable that sets a model's kind."""
    return f"{PREFIX}{_in_capitals(model)}_KIND"


def _types(spec: type[BaseModel]) -> Iterator[tuple[Path, Any]]:
    """Yield each key of a spec and of its sections, with the type of its value."""
    for key, field in spec.model_fields.items():
        if key != "id":
            yield (key,), field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (((key, *path), kind) for path, kind in _types(field.annotation))


def _replace_aliases(aliases: object, names: str | None) -> object:
    """Replace the aliases that are written as text with `names`, and keep the mappings."""
    if not isinstance(aliases, list):
        return names
    # Each mapping keeps its index in the list, by which the line of a problem is found.
    mappings = ["" if isinstance(alias, str) else alias for alias in aliases]
    return [*mappings, names or ""]


def _in_capitals(text: str) -> str:
    return re.sub(r"[\W_]+", "_", text).upper()


def _quote(path: Path) -> str:
    return f"`{'.'.join(path)}`"
