"""Bodies that no schema describes: bytes, and values that JSON or Unicode only just allow."""

from pathlib import Path

import pytest

from tests.fuzz.asking import POSTS, asking, scripted
from tests.fuzz.harness import send_bodies

pytestmark = pytest.mark.generator


@pytest.mark.parametrize("path", POSTS)
def test_whatever_is_sent_is_answered(path: str, tmp_path: Path) -> None:
    """The answer is a 200 or names the fault of the request, and is never a 500."""
    models, engines = scripted(tmp_path)
    with asking(models, engines) as ask:
        send_bodies(ask, path, 50, is_repeated=True)
