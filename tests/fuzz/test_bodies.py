"""Bodies that no schema describes: bytes, and what JSON or Unicode allow only just."""

from pathlib import Path

import pytest

from tests.fuzz.asking import POSTS, asking, scripted
from tests.fuzz.harness import send_bodies

pytestmark = pytest.mark.generator


@pytest.mark.parametrize("path", POSTS)
def test_whatever_is_sent_is_answered(path: str, tmp_path: Path) -> None:
    """With a 200 or with what is wrong with it, and never a 500."""
    models, engines = scripted(tmp_path)
    with asking(models, engines) as ask:
        send_bodies(ask, path, 50, is_repeated=True)
