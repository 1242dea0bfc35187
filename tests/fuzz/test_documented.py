"""All requests that /openapi.json allows or forbids are answered."""

from pathlib import Path

import pytest
from schemathesis import GenerationMode

from tests.fuzz.asking import POSTS, asking, scripted
from tests.fuzz.harness import send_documented

pytestmark = [pytest.mark.slow, pytest.mark.generator(weight=2)]


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_whatever_the_document_says_is_answered(
    path: str, mode: GenerationMode, tmp_path: Path
) -> None:
    """The status is a documented one, never a 500, and never a 200 for a forbidden request."""
    models, engines = scripted(tmp_path)
    with asking(models, engines) as ask:
        send_documented(ask, models, path, mode, 25, is_repeated=True)
