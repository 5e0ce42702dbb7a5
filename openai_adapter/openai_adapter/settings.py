"""Every setting of the adapter: a flag ``--name``, a variable ``OPENAI_ADAPTER_NAME``, or a secret file."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from diffusion_backend import input_image
from pydantic import BeforeValidator, Field, IPvAnyNetwork, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

# Names a folder of files called ``openai_adapter_name``, each with a setting's value: how containers get secrets.
SECRETS_DIR = "OPENAI_ADAPTER_SECRETS_DIR"


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# A name (internationalized ones in ASCII), an IPv4 address or an IPv6 address in brackets; perhaps a port.
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

CommaSeparated = (NoDecode, BeforeValidator(_split))


class Settings(BaseSettings):
    """Flags win over environment variables, and these over secret files. Lists are comma separated."""

    model_config = SettingsConfigDict(
        env_prefix="OPENAI_ADAPTER_",
        cli_prog_name="python -m openai_adapter",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    triton_url: str = Field("127.0.0.1:8001", description="host:port of Triton's gRPC endpoint")
    triton_admin_key: SecretStr | None = Field(
        None, description="key of Triton's restricted model-repository API, for finding the models"
    )
    models: Annotated[list[str], *CommaSeparated] = Field(
        default_factory=list, description="the ensembles to serve; empty: every one that Triton has"
    )
    default_model: str | None = Field(None, description="the model of requests that name none")
    healing_report: Path | None = Field(
        None, description="the file in which the launcher of Triton says what it is healing"
    )
    data_dir: Path = Field(Path(".data"), description="folder for files")
    media_url: str | None = Field(
        None, description="fsspec URL of the store of generated files; default: the folder media in data_dir"
    )
    media_ttl_seconds: float = Field(
        3600, gt=0, le=10 * 365 * 86400, description="how long a generated file can be fetched"
    )
    database_url: SecretStr | None = Field(
        None,
        description="database of jobs, sqlite:///FILE or postgresql://...; default: jobs.sqlite3 in data_dir",
    )
    job_files_url: str | None = Field(
        None, description="fsspec URL of the store of jobs' files; default: the folder jobs in data_dir"
    )
    job_ttl_seconds: float = Field(
        86400, gt=0, le=10 * 365 * 86400, description="how long a finished job and its files are kept"
    )
    job_max_bytes: int | None = Field(
        None, gt=0, description="most bytes of all jobs' files; beyond that, the oldest jobs are removed"
    )
    max_videos_in_flight: int = Field(
        2, gt=0, description="videos that this adapter has made at the same time; the others wait"
    )
    max_unfinished_videos: int = Field(
        1000, gt=0, description="videos that wait or are made, in all adapters; beyond that, none is accepted"
    )
    video_timeout_seconds: float = Field(3600, gt=0, description="longest work on one video")
    public_url: str | None = Field(
        None, description="what this server is called from outside, for the URLs of files"
    )
    trusted_proxies: Annotated[list[IPvAnyNetwork], *CommaSeparated] = Field(
        default_factory=list, description="addresses or networks whose X-Forwarded-* headers are believed"
    )
    api_keys: Annotated[list[SecretStr], *CommaSeparated] = Field(
        default_factory=list, description="bearer keys, one of which each request must bring"
    )
    allow_anonymous: bool = Field(False, description="listen beyond loopback without API keys")
    cors_origins: Annotated[list[str], *CommaSeparated] = Field(
        default_factory=list, description="origins of web pages that may call; * for any"
    )
    allowed_image_hosts: Annotated[list[str], *CommaSeparated] = Field(
        default_factory=list,
        description="hosts, or hosts:ports, whose http(s) URLs of images are fetched; empty: no URL is",
    )
    image_fetch_seconds: float = Field(10, gt=0, description="how long fetching an image may take")
    max_image_bytes: int = Field(
        20 * 2**20, gt=0, description="largest file of an image that is sent or fetched"
    )
    max_images_bytes: int = Field(
        64 * 2**20,
        gt=0,
        description="most bytes of all images of one edit together; JSON needs four times that",
    )
    max_image_pixels: int = Field(
        input_image.MAX_PIXELS,
        gt=0,
        le=input_image.MAX_PIXELS,
        description="most pixels of an image that is sent or fetched; decoding needs 12 to 16 bytes for each",
    )
    max_body_bytes: int = Field(2 * 2**20, gt=0, description="largest request body; images may come with it")
    request_timeout_seconds: float = Field(600, gt=0, description="longest wait for Triton per request")
    max_images_in_flight: int = Field(
        64,
        ge=10,
        description="images that are made or wait at the same time, by model; 10 are those of one request",
    )
    shutdown_seconds: int = Field(30, ge=0, description="how long running requests may finish on shutdown")
    keep_alive_seconds: int = Field(75, gt=0, description="how long an idle connection stays open")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The folder of secrets is looked up when settings are read, not when this module is imported."""
        if folder := os.environ.get(SECRETS_DIR):
            file_secret_settings = SecretsSettingsSource(settings_cls, secrets_dir=folder)
        return init_settings, env_settings, dotenv_settings, file_secret_settings

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an http(s) URL without query and fragment")
        return url.rstrip("/")

    @field_validator("allowed_image_hosts")
    @classmethod
    def _check_allowed_image_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is not a HOST or HOST:PORT, as in a URL")
        return hosts

    @field_validator("api_keys")
    @classmethod
    def _check_api_keys(cls, keys: list[SecretStr]) -> list[SecretStr]:
        # A bearer token is visible ASCII; anything else could never be sent, and an empty one would open the
        # door.
        if not all(re.fullmatch(r"[!-~]+", key.get_secret_value()) for key in keys):
            raise ValueError("a key must be one or more visible ASCII characters")
        return keys

    @model_validator(mode="after")
    def _refuse_an_open_gateway(self) -> Self:
        if not (self.api_keys or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"refusing to listen on {self.host!r} without API keys: set OPENAI_ADAPTER_API_KEYS, or "
                "OPENAI_ADAPTER_ALLOW_ANONYMOUS=true if everyone who can reach this address may use it"
            )
        return self

    @property
    def max_field_bytes(self) -> int:
        """Of a field that may be an image, as base64."""
        return self.max_body_bytes + _base64_bytes(self.max_image_bytes)

    @property
    def max_edit_bytes(self) -> int:
        """Of a body with all images of an edit, as base64."""
        return self.max_body_bytes + _base64_bytes(self.max_images_bytes)

    @property
    def job_database_url(self) -> str:
        """The URL of the database of jobs, with its password."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir.absolute() / 'jobs.sqlite3'}"

    @property
    def job_store_url(self) -> str:
        """The fsspec URL of the store of jobs' files."""
        return self.job_files_url or f"file://{self.data_dir.absolute() / 'jobs'}"

    @property
    def media_store_url(self) -> str:
        """The fsspec URL of the media store."""
        # Not as_uri(): fsspec takes the path as it stands, and would not undo the quoting.
        return self.media_url or f"file://{self.data_dir.absolute() / 'media'}"


def _base64_bytes(count: int) -> int:
    return -(-count // 3) * 4


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine; names other than localhost count as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
