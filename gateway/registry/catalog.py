"""The catalog: the models of models.yaml, found by id or alias."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gateway.errors import ModelNotFound
from gateway.registry.names import similar_models
from gateway.registry.specs import Alias, ChatSpec, ModelSpec

MOST_SUGGESTED: Final = 3


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model, and the alias that it was found by; None if it was found by its id."""

    spec: ModelSpec
    alias: Alias | None = None

    @property
    def name(self) -> str:
        return self.spec.id if self.alias is None else self.alias.name


@dataclass(frozen=True, slots=True)
class Changes:
    """The ids of models that a new catalog adds, loads differently, and removes."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def by_kind(self) -> dict[str, list[str]]:
        return {key: list(getattr(self, key)) for key in ("added", "changed", "removed")}


class Catalog:
    """The models of models.yaml, found by id or alias. Immutable."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self.specs = tuple(specs)
        by_name: dict[str, Resolved] = {}
        for spec in self.specs:
            for resolved in (Resolved(spec), *(Resolved(spec, alias) for alias in spec.aliases)):
                assert resolved.name not in by_name, f"{resolved.name} names two models"
                by_name[resolved.name] = resolved
        self._by_name = MappingProxyType(by_name)

    def resolve(self, name: str, *kinds: type[ModelSpec]) -> Resolved:
        """Find a model by id or alias.

        Raises ModelNotFound, which suggests models of these kinds.
        """
        resolved = self._by_name.get(name)
        if resolved is None:
            raise ModelNotFound(name, why=self._suggestion(name, kinds))
        return resolved

    def _suggestion(self, name: str, kinds: tuple[type[ModelSpec], ...]) -> str:
        usable = [
            each for kind in kinds or (object,) for each in self if isinstance(each.spec, kind)
        ]
        near = similar_models(name, [each.name for each in usable], MOST_SUGGESTED)
        if near:
            return f"Did you mean `{'` or `'.join(near)}`?"
        ids = [each.name for each in usable if each.alias is None]
        more = f" and {len(ids) - MOST_SUGGESTED} more" if len(ids) > MOST_SUGGESTED else ""
        return f"Served here: `{'`, `'.join(ids[:MOST_SUGGESTED])}`{more}." if ids else ""

    def by_id(self, model: str) -> ModelSpec | None:
        return next((spec for spec in self.specs if spec.id == model), None)

    def current(self, spec: ModelSpec) -> ModelSpec | None:
        """Return the spec of a loaded model; None if the model must be reloaded or is gone."""
        return next((candidate for candidate in self.specs if load_alike(candidate, spec)), None)

    def changes_since(self, older: "Catalog") -> Changes:
        now, before = ({spec.id: spec for spec in catalog.specs} for catalog in (self, older))
        in_both = [name for name in now if name in before]
        return Changes(
            added=tuple(name for name in now if name not in before),
            changed=tuple(name for name in in_both if not load_alike(now[name], before[name])),
            removed=tuple(name for name in before if name not in now),
        )

    def preloaded(self) -> tuple[str, ...]:
        """Return the ids of the models to load at start; for an adapter, its base's id."""
        loaded = (getattr(spec, "base", None) or spec.id for spec in self.specs if spec.preload)
        return tuple(dict.fromkeys(loaded))

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def __iter__(self) -> Iterator[Resolved]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self.specs)


def load_alike(one: ModelSpec, other: ModelSpec) -> bool:
    """Return True if a model that was loaded for one spec can serve the other."""
    return one is other or (one.id == other.id and _loaded_with(one) == _loaded_with(other))


def _loaded_with(spec: ModelSpec) -> tuple[object, ...]:
    keys = (spec.source, spec.loaded_with())
    if not isinstance(spec, ChatSpec):
        return keys
    base, draft = spec.base_spec, spec.draft_spec
    return (*keys, base and _loaded_with(base), draft and draft.drafts_with())
