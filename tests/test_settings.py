"""Settings: the values that the environment may have, and the messages on wrong ones."""

import os
from pathlib import Path

import pytest

from gateway.settings import (
    SettingsInvalid,
    default_models_file,
    explain,
    is_local,
    load_settings,
    strays,
    variables,
)


@pytest.fixture(autouse=True)
def _empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder with no GATEWAY_ variable set."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("GATEWAY_"):
            monkeypatch.delenv(name)


def problems(**flags: object) -> list[str]:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(flags)
    return caught.value.problems


def test_defaults_listen_on_loopback_without_keys() -> None:
    settings = load_settings()
    assert (settings.binds, settings.api_keys) == (("127.0.0.1:8000",), ())


def test_a_flag_beats_the_environment_which_beats_dotenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("GATEWAY_PORT=1\nGATEWAY_HOST=::1\nGATEWAY_DRAIN_S=5\n")
    monkeypatch.setenv("GATEWAY_PORT", "2")
    monkeypatch.setenv("GATEWAY_HOST", "localhost")
    flags = {"port": 3, "host": None}
    settings = load_settings(flags)
    assert (settings.port, settings.host, settings.drain_s) == (3, "localhost", 5)
    sources = {knob.name: knob.source for knob in explain(settings, flags)}
    assert sources["port"] == "flag"
    assert sources["host"] == "environment"
    assert sources["drain_s"] == ".env"
    assert sources["queue_limit"] == "default"


def test_an_empty_variable_is_an_unset_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("GATEWAY_PORT=81\n")
    monkeypatch.setenv("GATEWAY_PORT", "")
    settings = load_settings()
    assert settings.port == 81
    assert {knob.name: knob.source for knob in explain(settings)}["port"] == ".env"
    assert variables()["GATEWAY_PORT"] == "81"


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", "hunter2")
    settings = load_settings()
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(explain(settings))


def test_a_urls_password_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_HUB_ENDPOINT", "https://me:hunter2@hub.example/path")
    [endpoint] = [k.value for k in explain(load_settings()) if k.name == "hub_endpoint"]
    assert endpoint == "https://**********@hub.example/path"


def test_every_wrong_variable_gets_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("GATEWAY_QUEUE_LIMIT=0\n")
    monkeypatch.setenv("GATEWAY_PORT", "99999")
    monkeypatch.setenv("GATEWAY_LOG_LEVEL", "loud")
    monkeypatch.setenv("GATEWAY_REQUEST_TIMEOUT_S", "nan")
    monkeypatch.setenv("GATEWAY_TLS_CERT", "missing.pem")
    found = problems(host="")
    assert "GATEWAY_PORT=99999: should be less than or equal to 65535" in found
    assert "GATEWAY_LOG_LEVEL=loud: should be 'debug', 'info', 'warning' or 'error'" in found
    assert "GATEWAY_QUEUE_LIMIT=0 (.env): should be greater than or equal to 1" in found
    assert any(line.startswith("GATEWAY_REQUEST_TIMEOUT_S=nan: ") for line in found)
    assert any(line.startswith("GATEWAY_TLS_CERT=missing.pem: ") for line in found)
    assert any(line.startswith("--host : ") for line in found)


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("x")
    assert problems(tls_cert=cert) == [
        "GATEWAY_TLS_CERT and GATEWAY_TLS_KEY go together: set both or none"
    ]


def test_a_dotenv_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"GATEWAY_PORT=\xff\xfe\n")
    assert problems() == [".env: not UTF-8 text"]


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "gateway.example", "192.168.1.2"])
def test_listening_beyond_loopback_needs_keys(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open address is refused, unless keys are set or a setting says so."""
    (said,) = problems(host=bind)
    assert "GATEWAY_API_KEYS" in said
    assert "GATEWAY_ALLOW_UNAUTHENTICATED" in said
    assert load_settings({"host": bind, "allow_unauthenticated": True}).host == bind
    monkeypatch.setenv("GATEWAY_API_KEYS", "k")
    assert load_settings({"host": bind}).host == bind


@pytest.mark.parametrize("bind", ["0.0.0.0", "127.0.0.1,192.168.1.2"])
def test_any_model_needs_keys_or_loopback(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The permission to serve without keys does not suffice."""
    given = {"any_model": "org/*,other/one-*", "bind": bind, "allow_unauthenticated": True}
    (said,) = problems(**given)
    assert "GATEWAY_ANY_MODEL" in said
    assert load_settings({**given, "bind": "localhost"}).any_model == ("org/*", "other/one-*")
    monkeypatch.setenv("GATEWAY_API_KEYS", "k")
    assert load_settings(given).any_model


@pytest.mark.parametrize("pattern", ["org", "org/", "/*", "a/b/c", "../*/x", "https://hub/org"])
def test_a_pattern_that_no_repository_fits_is_refused(pattern: str) -> None:
    assert problems(any_model=pattern)


def test_what_is_not_known_to_be_local_is_open() -> None:
    """Names and inherited sockets may lead anywhere."""
    local = ["127.0.0.1:80", "127.8.8.8", "localhost:1", "[::1]:80", "::1", "unix:/run/x.sock"]
    elsewhere = ["", ":80", "0.0.0.0:80", "[::]:80", "fd://3", "localhost.evil"]
    assert [bind for bind in (*local, *elsewhere) if is_local(bind)] == local


def test_a_bind_without_a_port_has_the_port() -> None:
    binds = "127.0.0.1,::1,[::1],localhost:0,unix:/x,fd://3"
    expected = "127.0.0.1:9,[::1]:9,[::1]:9,localhost:0,unix:/x,fd://3"
    settings = load_settings({"bind": binds, "port": 9, "allow_unauthenticated": True})
    assert ",".join(settings.binds) == expected


@pytest.mark.parametrize("bind", ["localhost:http", "localhost:", "[::1]:70000"])
def test_a_port_is_a_number(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_BIND", bind)
    assert problems() == [f"GATEWAY_BIND={bind}: {bind!r} should end in a port between 0 and 65535"]


def test_paths_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file .env has no shell that would replace `~`."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("GATEWAY_HUB_CACHE", "~/hub")
    monkeypatch.setenv("GATEWAY_MODELS", "~nobody-here/m.yaml")
    settings = load_settings()
    assert settings.hub_cache == Path("/home/me/hub")
    assert settings.models == Path("~nobody-here/m.yaml")


def test_models_yaml_here_is_the_default(tmp_path: Path) -> None:
    shipped = default_models_file()
    assert shipped.is_absolute()
    assert shipped.is_file()
    (tmp_path / "models.yaml").write_text("version: 1\nmodels: {}\n")
    assert load_settings().models == Path("models.yaml")


def test_a_letter_left_out_is_nearer_than_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway with GATEWAY_API_KEY is open to all."""
    monkeypatch.setenv("GATEWAY_API_KEY", "secret")
    assert strays() == [
        "GATEWAY_API_KEY is set, and nothing reads it; did you mean GATEWAY_API_KEYS?"
    ]


@pytest.mark.parametrize(
    "origin",
    [
        *("localhost:3000", "http://localhost:3000/", "https://app.example/path", "http://"),
        *("http://localhost*", "http://*:*:1", "http://a*b.example"),
        *("http://app.example:80", "https://app.example:443"),
    ],
)
def test_an_origin_that_can_never_match_is_refused(
    monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    """The error names the variable; otherwise only a refused browser would find out."""
    monkeypatch.setenv("GATEWAY_CORS_ORIGINS", f"https://app.example,{origin}")
    [problem] = problems()
    assert "GATEWAY_CORS_ORIGINS" in problem
    assert origin in problem


def test_origins_are_patterns() -> None:
    given = "http://LOCALHOST:*, chrome-extension://*, https://*.ours.example:8443, http://[::1]:*"
    assert load_settings({"cors_origins": given}).cors_origins == (
        *("http://localhost:*", "chrome-extension://*", "https://*.ours.example:8443"),
        "http://[::1]:*",
    )
    assert load_settings({"cors_origins": "*,null"}).cors_origins == ("*", "null")
