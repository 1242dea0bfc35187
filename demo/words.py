"""Words that exist only here: invented names, cities and nonsense, each on one side of the split.

A word belongs to the held-out side when its checksum says so, never by chance of a draw, so no
word can be seen in training and asked for in the test.
"""

import random
import zlib


def _list(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


_CONSONANTS = _list("b c d f g h j k l m n p r s t v w x y z")
_ONSETS = _CONSONANTS + _list(
    """bl br ch cl cr dr fl fr gl gr kl kr ph pl pr qu sc sh sk sl sm sn sp st sv sw th tr tw
    vl wr zh kn gn str shr spl"""
)
_VOWELS = _list("a e i o u")
_NUCLEI = _VOWELS + _list("a e i o u y ai au ea ee ei eo ia ie io oa oe oi oo ou ui")
_ENDS = _list(
    """b d f g k l m n p r s t x z
    ch ck ft ld lk ll lm lt mb mp nd ng nk nt rd rk rl rm rn rp rt sh sk sp ss st th tz"""
)
_CODAS = ("", "", "", "", *_ENDS)
_TOWN_ENDS = _list("ville ton burg ford ham stad pol grad mouth port field by holm dale wick")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

FIRST_NAMES = _list(
    """Ada Adam Aisha Alan Alice Amir Ana Anna Anton Aria Ben Bob Carla Carlos Chen Clara Daniel
    David Diana Elena Ella Emil Emma Eric Eva Felix Fiona Frank Grace Greta Hana Hans Hugo Ida Ines
    Ivan Jack Jakob James Jane Jin John Jonas Julia Karim Kate Kenji Laura Leo Lena Lucas Lucy Luis
    Maria Mark Marta Mary Max Maya Mei Mia Mina Mohamed Nadia Nina Noah Nora Olga Oliver Omar Oscar
    Otto Paul Peter Petra Priya Raj Rita Robert Rosa Sam Sara Sofia Sven Tara Thomas Tim Tom Uma
    Vera Victor Wei Yara Yuki Zara Zoe"""
)
SURNAMES = _list(
    """Adams Baker Berg Brown Carter Clark Costa Davis Diaz Evans Fischer Garcia Green Hall Hansen
    Ito Jones Khan Kim King Klein Lee Lopez Martin Meyer Miller Moore Novak Olsen Park Patel Perez
    Reed Rossi Sato Schmidt Silva Singh Smith Stone Tanaka Taylor Turner Walker Wang Weber White
    Wilson Wong Wright Young Lovelace Turing Hopper"""
)
CITIES = _list(
    """Amsterdam Athens Atlanta Austin Bangkok Barcelona Basel Beijing Bergen Berlin Bogota Boston
    Bristol Brussels Budapest Cairo Chicago Cologne Copenhagen Dallas Delhi Denver Dubai Dublin
    Florence Geneva Glasgow Hamburg Hanoi Helsinki Houston Istanbul Jakarta Kyiv Kyoto Lagos Leeds
    Lima Lisbon London Lyon Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich
    Nairobi Naples Nice Osaka Oslo Ottawa Oxford Paris Porto Prague Quito Riga Rome Santiago Seattle
    Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto Turin Valencia
    Vancouver Venice Vienna Vilnius Warsaw Zurich"""
)
TWO_WORD_CITIES = (
    "New York", "San Francisco", "Los Angeles", "Cape Town", "Buenos Aires", "Hong Kong",
    "New Delhi", "Las Vegas", "San Diego", "Kuala Lumpur", "Tel Aviv", "Rio de Janeiro",
)  # fmt: skip

PLACE_STARTS = _list("New San Port Saint Old")


def is_held_out(text: str) -> bool:
    """Say which side of the split a word or a pair of numbers is on: one in eight is held out."""
    return zlib.crc32(text.lower().encode()) % 8 == 0


def _syllables(rng: random.Random) -> str:
    """Two or three pronounceable syllables."""
    count = rng.choice((1, 2, 2, 2, 3))
    parts = []
    for _ in range(count):
        onset = rng.choice(_CONSONANTS if rng.random() < 0.7 else _ONSETS)
        nucleus = rng.choice(_VOWELS if rng.random() < 0.7 else _NUCLEI)
        parts.append(onset + nucleus)
    return "".join(parts) + rng.choice(_CODAS)


def _letters(rng: random.Random) -> str:
    """Three to eight letters that nobody can pronounce."""
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 8)))


def _accented(rng: random.Random, word: str) -> str:
    """The word with one of its letters replaced by one that English has not."""
    place = rng.randrange(len(word))
    return word[:place] + rng.choice("áàâäãåæçéèêëíïñóöôøúüßłş") + word[place + 1 :]


def invented_word(rng: random.Random, held_out: bool) -> str:
    """Make a lower-case word on the asked side of the split."""
    while True:
        word = _letters(rng) if rng.random() < 0.2 else _syllables(rng)
        if rng.random() < 0.04:
            word = _accented(rng, word)
        if len(word) > 2 and is_held_out(word) == held_out:
            return word


def invented_city(rng: random.Random, held_out: bool) -> str:
    """Make a capitalised place name on the asked side, one in five of them in two words."""
    while True:
        name = _syllables(rng)
        if rng.random() < 0.3:
            name += rng.choice(_TOWN_ENDS)
        if rng.random() < 0.04:
            name = _accented(rng, name)
        if len(name) > 3 and is_held_out(name) == held_out:
            break
    name = name.capitalize()
    draw = rng.random()
    if draw < 0.12:
        name = f"{rng.choice(PLACE_STARTS)} {name}"
    elif draw < 0.2:
        name = f"{name} {invented_word(rng, held_out).capitalize()}"
    return name


def _side(words: tuple[str, ...], held_out: bool) -> list[str]:
    return [word for word in words if is_held_out(word) == held_out]


def city(rng: random.Random, held_out: bool) -> str:
    """A real or, more often, an invented city."""
    if rng.random() < 0.25:
        return rng.choice(_side(CITIES + TWO_WORD_CITIES, held_out))
    return invented_city(rng, held_out)


def person(rng: random.Random, held_out: bool) -> str:
    """A real or, more often, an invented name; two in five with a surname."""
    first = (
        rng.choice(_side(FIRST_NAMES, held_out))
        if rng.random() < 0.25
        else invented_word(rng, held_out).capitalize()
    )
    if rng.random() < 0.6:
        return first
    last = (
        rng.choice(_side(SURNAMES, held_out))
        if rng.random() < 0.4
        else invented_word(rng, held_out).capitalize()
    )
    return f"{first} {last}"
