"""Keys that override settings: declared once, by the setting."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.registry.specs import SPECS
from gateway.settings import Settings


def overriding(model: type[BaseModel]) -> Iterator[tuple[FieldInfo, str]]:
    """Yield each key that overrides a setting, and that setting's name."""
    for field in model.model_fields.values():
        yield from ((field, each.setting) for each in field.metadata if hasattr(each, "setting"))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from overriding(field.annotation)


@pytest.mark.parametrize("kind", SPECS)
def test_a_key_that_overrides_a_setting_has_its_type_bounds_and_words(kind: str) -> None:
    keys = list(overriding(SPECS[kind]))
    assert len(keys) == {"embedding": 10, "rerank": 10, "chat": 8}[kind]
    for field, setting in keys:
        declared = Settings.model_fields[setting]
        assert set(_types(field.annotation)) == {*_types(declared.annotation), NoneType}
        assert [each for each in field.metadata if not hasattr(each, "setting")] == (
            declared.metadata
        )
        assert field.default is None


def _types(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)
