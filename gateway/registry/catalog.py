"""The catalog that finds a model by id or alias."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from gateway.errors import ModelNotFound
from gateway.registry.names import nearest
from gateway.registry.specs import Alias, ModelSpec


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model as it was asked for: `alias` is None when its id was used."""

    spec: ModelSpec
    alias: Alias | None = None

    @property
    def name(self) -> str:
        """The name that was asked for."""
        return self.alias.name if self.alias else self.spec.id


class Catalog:
    """Every model by every name: an immutable snapshot of one reading of the file."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self.specs = tuple(specs)
        by_name: dict[str, Resolved] = {}
        for spec in self.specs:
            for resolved in (Resolved(spec), *(Resolved(spec, alias) for alias in spec.aliases)):
                assert resolved.name not in by_name, f"{resolved.name} names two models"
                by_name[resolved.name] = resolved
        self._by_name = MappingProxyType(by_name)

    def resolve(self, name: str) -> Resolved:
        """Find a model by id or alias; raises ModelNotFound, naming the nearest."""
        if resolved := self._by_name.get(name):
            return resolved
        raise ModelNotFound(name, nearest=nearest(name, self._by_name))

    def names(self) -> tuple[str, ...]:
        """List ids and aliases: each id is followed by its aliases, in the file's order."""
        return tuple(self._by_name)

    def __iter__(self) -> Iterator[Resolved]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self.specs)
