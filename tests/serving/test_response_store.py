"""Kept responses: bounded, each owner's apart, forgotten in time."""

from gateway.serving.response_store import ResponseStore, StoredImage, StoredItem, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, **bounds: int) -> ResponseStore:
    given = {"max_responses": 3, "max_bytes": 1000, "ttl_s": 60, **bounds}
    return ResponseStore(**given, now=clock or Clock())


def response(name: str, *context: str, size: int = 10) -> StoredResponse:
    items = [StoredItem(each, b"c" * 10) for each in context]
    return StoredResponse(name, b"x" * size, items, [StoredItem(f"{name}-out", b"o" * 10)])


def test_what_is_kept_is_found_by_its_owner_alone() -> None:
    kept = store()
    kept.keep("a", response("r", "question"))
    found = kept.find("a", "r")
    assert found is not None
    assert [item.id for item in found.items] == ["question", "r-out"]
    assert kept.item("a", "question") == StoredItem("question", b"c" * 10)
    for owner in ("b", None):
        assert kept.find(owner, "r") is None
        assert kept.item(owner, "r-out") is None
        assert not kept.delete(owner, "r")
    assert kept.find("a", "r") is found


def test_an_owners_oldest_leaves_for_its_newest() -> None:
    kept = store()
    kept.keep("b", response("other"))
    for name in "1234":
        kept.keep("a", response(name))
    assert kept.find("a", "1") is None
    assert kept.item("a", "1-out") is None
    assert all(kept.find("a", name) for name in "234")
    assert kept.find("b", "other")


def test_bytes_are_bounded_with_everything_counted() -> None:
    """Body, context and output count; a response larger than the bound is not kept."""
    kept = store(max_bytes=100)
    assert kept.keep("a", response("1", "c1", size=30))
    assert kept.nbytes == 50
    assert kept.keep("a", response("2", size=40))
    assert kept.nbytes == 100
    assert kept.keep("a", response("3", size=1))
    assert (kept.find("a", "1"), kept.nbytes) == (None, 61)
    assert not kept.keep("a", response("4", size=91))
    assert len(kept) == 2


def test_an_item_is_found_while_any_response_holds_it() -> None:
    kept = store()
    kept.keep("a", response("1", "hello"))
    kept.keep("a", response("2", "hello", "1-out", "again"))
    assert kept.delete("a", "1")
    assert kept.item("a", "1-out") is not None
    assert kept.delete("a", "2")
    assert [kept.item("a", name) for name in ("hello", "1-out", "again", "2-out")] == [None] * 4
    assert kept.nbytes == 0


def test_an_item_of_two_responses_is_that_of_the_one_that_is_left() -> None:
    """A caller may give one id to two texts; the text of a deleted response is gone with it."""
    kept = store()
    for name, text in (("1", b"harmless"), ("2", b"secret")):
        kept.keep("a", StoredResponse(name, b"{}", [StoredItem("mine", text)], []))
    assert kept.item("a", "mine") == StoredItem("mine", b"secret")
    kept.delete("a", "2")
    assert kept.item("a", "mine") == StoredItem("mine", b"harmless")


def test_an_item_that_stands_twice_in_one_response_is_forgotten_with_it() -> None:
    kept = store()
    kept.keep("a", response("1", "same", "same"))
    assert kept.item("a", "same") is not None
    kept.delete("a", "1")
    assert kept.item("a", "same") is None


def test_what_is_old_is_forgotten() -> None:
    clock = Clock()
    kept = store(clock)
    kept.keep("a", response("1"))
    clock.now = 30
    kept.keep("b", response("2"))
    clock.now = 60
    assert kept.find("a", "1") is None
    assert kept.find("b", "2") is not None
    clock.now = 90
    kept.expire()
    assert (len(kept), kept.nbytes) == (0, 0)


def test_none_is_kept_where_none_may_be() -> None:
    kept = store(max_responses=0)
    assert not kept.is_on
    assert not kept.keep("a", response("1"))
    assert kept.find("a", "1") is None


def seen(name: str, *texts: str) -> StoredResponse:
    """Give a response of 10 bytes and an item of 10 with each image."""
    items = [
        StoredItem(f"{name}-{i}", b"c" * 10, [StoredImage.of(text)]) for i, text in enumerate(texts)
    ]
    return StoredResponse(name, b"x" * 10, items, [])


def copied(text: str) -> str:
    """Give an equal text that is another object."""
    return text[:1] + text[1:]


def test_an_image_is_held_once_and_goes_with_the_last_that_has_it() -> None:
    kept, text = store(), "i" * 200
    assert kept.keep("a", seen("1", copied(text)))
    assert kept.nbytes == 220
    assert kept.keep("a", seen("2", copied(text), copied(text), "other"))
    assert kept.nbytes == 220 + 40 + 5
    held = [kept.find("a", name) for name in "12"]
    texts = [image.text for each in held if each for item in each.items for image in item.images]
    assert texts == [text, text, text, "other"]
    assert len({id(each) for each in texts}) == 2
    assert kept.keep("b", seen("3", copied(text)))
    assert kept.nbytes == 265 + 220  # an owner pays for itself
    assert kept.delete("a", "1")
    assert kept.nbytes == 245 + 220
    item = kept.item("a", "2-1")
    assert item is not None
    assert item.images[0].text == text
    assert kept.delete("a", "2")
    assert kept.delete("b", "3")
    assert kept.nbytes == 0
    assert not any(owned.images or owned.uses for owned in kept._by_owner.values())


def test_a_shared_image_makes_room_for_itself() -> None:
    """What evicts the last response with an image brings the image itself."""
    kept = store(max_bytes=300)
    assert kept.keep("a", seen("1", "i" * 200))
    assert kept.keep("a", seen("2", "i" * 200))  # 240 bytes
    assert kept.keep("a", seen("3", "j" * 200))
    assert (kept.nbytes, len(kept)) == (220, 1)
    assert not kept.keep("a", seen("4", "i" * 200, "j" * 200))
    assert kept.keep("a", seen("5", *["k" * 200] * 8))  # 90 bytes, and the image once
    assert (kept.nbytes, len(kept)) == (290, 1)


def test_images_expire_with_their_response() -> None:
    clock = Clock()
    kept = store(clock)
    kept.keep("a", seen("1", "i" * 200))
    clock.now = 30
    kept.keep("a", seen("2", "i" * 200))
    clock.now = 60
    kept.expire()
    assert kept.nbytes == 220
    clock.now = 90
    kept.expire()
    assert kept.nbytes == 0
