"""gateway.env.example: every key is a real one, and commented-out values are the defaults."""

import re
from pathlib import Path

from gateway.registry import read_models
from gateway.settings import Settings, explain, variable

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "deploy" / "gateway.env.example").read_text(encoding="utf-8")
LINES = re.findall(r"^(#?)([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.MULTILINE)
OWN = {variable(name) for name in Settings.model_fields}
OF_MODELS = read_models(ROOT / "models.yaml", {}).variables
OF_THE_HUB = {"HF_TOKEN"}


def test_every_key_is_a_setting_or_a_variable_of_models_yaml() -> None:
    keys = [key for _, key, _ in LINES]
    assert set(keys) <= OWN | OF_MODELS | OF_THE_HUB
    assert len(keys) == len(set(keys)) > 20


def test_what_is_commented_out_is_the_default() -> None:
    """A reader who takes the mark away changes nothing yet."""
    defaults = {knob.env: knob.value for knob in explain(Settings(_env_file=None), env_file=None)}  # type: ignore[call-arg]
    for mark, key, value in LINES:
        if mark and key in OWN:
            assert value == defaults[key], key


def test_all_of_it_together_is_valid() -> None:
    """It is valid as a file of settings, and as variables of models.yaml."""
    values = {key: value for _, key, value in LINES if value}
    own = {key.removeprefix("GATEWAY_").lower(): values[key] for key in values.keys() & OWN}
    settings = Settings(_env_file=None, **own)  # type: ignore[call-arg]
    assert settings.api_keys == ()
    assert not read_models(ROOT / "models.yaml", values).problems


def test_each_reader_understands_it() -> None:
    """systemd and docker take everything after = for the value: quotes and comments too. Copied as
    it is, it sets nothing: least of all a key that everybody knows.
    """
    for _, _, value in LINES:
        assert not re.search(r"""["'#\s]""", value)
    others = [line for line in EXAMPLE.splitlines() if not line.startswith("#") and line]
    assert others == []
