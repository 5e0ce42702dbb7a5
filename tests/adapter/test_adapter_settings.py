from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from openai_adapter import Settings


def test_lists_are_comma_separated_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ADAPTER_API_KEYS", "one, two,")
    monkeypatch.setenv("OPENAI_ADAPTER_MODELS", "a,b")
    monkeypatch.setenv("OPENAI_ADAPTER_TRUSTED_PROXIES", "10.0.0.0/8,::1")
    settings = Settings()
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert settings.models == ["a", "b"]
    assert [str(network) for network in settings.trusted_proxies] == ["10.0.0.0/8", "::1/128"]


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ADAPTER_PORT", "1000")
    monkeypatch.setenv("OPENAI_ADAPTER_TRITON_ADMIN_KEY", "from-environment")
    settings = CliApp.run(Settings, cli_args=["--port", "2000", "--cors-origins", "http://a,http://b"])
    assert settings.port == 2000
    assert settings.triton_admin_key is not None
    assert settings.triton_admin_key.get_secret_value() == "from-environment"
    assert settings.cors_origins == ["http://a", "http://b"]


def test_secrets_are_not_shown() -> None:
    assert "geheim" not in repr(Settings(api_keys="geheim", triton_admin_key="geheim"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert Settings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_other_hosts_need_keys_or_consent(host: str) -> None:
    with pytest.raises(ValidationError, match="refusing to listen"):
        Settings(host=host)
    assert Settings(host=host, api_keys="k").host == host
    assert Settings(host=host, allow_anonymous=True).host == host


@pytest.mark.parametrize(
    "bad",
    [
        {"public_url": "ftp://a"},
        {"public_url": "a.example"},
        {"public_url": "http://a/?x=1"},
        {"api_keys": ["a", ""]},
        {"api_keys": ["schlüssel"]},
        {"trusted_proxies": "proxy"},
        {"allowed_image_hosts": ["https://images.example"]},
        {"allowed_image_hosts": ["images.example/pictures"]},
        {"allowed_image_hosts": ["*"]},
        {"max_image_pixels": 10**9},
        {"media_ttl_seconds": 0},
        {"port": 65536},
        {"nonsense": 1},
    ],
)
def test_bad_values(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(bad)


def test_hosts_of_images() -> None:
    hosts = ["images.example", "127.0.0.1:8080", "[::1]:8080"]
    assert Settings(allowed_image_hosts=hosts).allowed_image_hosts == hosts
    assert Settings().allowed_image_hosts == []


def test_media_store_url(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).media_store_url == f"file://{tmp_path}/media"
    assert Settings(media_url="memory://m").media_store_url == "memory://m"


def test_secrets_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openai_adapter_api_keys").write_text("one,two\n")
    (tmp_path / "openai_adapter_triton_admin_key").write_text("from-file\n")
    (tmp_path / "anything-else").write_text("of others\n")
    monkeypatch.setenv("OPENAI_ADAPTER_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("OPENAI_ADAPTER_TRITON_ADMIN_KEY", "from-environment")
    settings = Settings(host="0.0.0.0")
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert settings.triton_admin_key is not None
    assert settings.triton_admin_key.get_secret_value() == "from-environment"
