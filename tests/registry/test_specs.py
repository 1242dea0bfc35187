"""Keys that override settings: declared once, by the setting."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.registry.specs import ADOPTABLE, SPECS, Section
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
        bounds = [each for each in field.metadata if not hasattr(each, "setting")]
        assert [each for each in bounds if each != ADOPTABLE] == declared.metadata
        assert field.default is None


def keys_of(kind: type[Section]) -> Iterator[tuple[str, bool]]:
    """Yield each key, and if a loaded model adopts it: of a section its own, unless all are."""
    for key, field in kind.model_fields.items():
        is_adopted, inside = ADOPTABLE in field.metadata, field.annotation
        if not is_adopted and isinstance(inside, type) and issubclass(inside, Section):
            yield from ((f"{key}.{each}", adopted) for each, adopted in keys_of(inside))
        else:
            yield key, is_adopted


ADOPTED = """
    aliases preload pinned ttl_s queue_limit queue_max_tokens
    sampling thinking thinking_budget overflow matryoshka token_ids default_prompt_name
    max_tokens_per_doc structured.rows structured.schema_in_prompt
    batching.max_batch_size batching.max_batch_tokens batching.batch_window_ms
    batching.adaptive_window batching.min_batch_size batching.batch_deadline_ms
    batching.cache_size batching.prefill_chunk_tokens
"""
LOADED_WITH = """
    id kind source dtype max_context pooling normalize prompts
    scoring template labels instruction
    chat_template chat_template_kwargs tool_parser reasoning_parser split_special_tokens
    draft mtp_head base adapter fuse_projections kv_bits images parallel
    structured.max_string_chars structured.max_array_items
    batching.prefix_cache_bytes batching.speculate_rows batching.mode
"""


def test_each_key_is_adopted_by_a_loaded_model_or_loads_it_anew() -> None:
    """A new key has to be in one of the two lists: nobody forgets to say which."""
    adopted = {key: is_it for kind in SPECS.values() for key, is_it in keys_of(kind)}
    assert {key for key, is_it in adopted.items() if is_it} == {*ADOPTED.split()}
    assert {key for key, is_it in adopted.items() if not is_it} == {*LOADED_WITH.split()}


@pytest.mark.parametrize("kind", SPECS)
def test_no_key_that_a_load_depends_on_is_adopted(kind: str) -> None:
    given = {"id": "a", "kind": kind, "source": "path:."}
    spec = SPECS[kind].model_validate(given, context={"folder": Path()})
    written = spec.loaded_with()
    inside = {
        f"{key}.{each}" for key in ("structured", "batching") for each in written.get(key, ())
    }
    assert not {*written, *inside} & {*ADOPTED.split(), "source", "adapter"}
    assert inside <= {*LOADED_WITH.split()}


def _types(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)
