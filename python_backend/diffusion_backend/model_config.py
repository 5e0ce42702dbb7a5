"""Reading Triton's ``config.pbtxt``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True)
class TritonModelConfig:
    """A parsed configuration; ``parameters`` are its string parameters."""

    message: Any
    parameters: dict[str, str]

    @property
    def is_ensemble(self) -> bool:
        return bool(self.message.platform == "ensemble")


def read_model_config(folder: Path) -> TritonModelConfig:
    """Parse ``folder/config.pbtxt``.

    Raises:
        OSError: there is none. ValueError: it is not valid.
    """
    path = folder / CONFIG_FILE
    try:
        message = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return TritonModelConfig(message, {key: value.string_value for key, value in message.parameters.items()})


def list_ensembles(repository: Path) -> list[str]:
    """The names of the ensembles in a model repository, sorted."""
    configs = (path.parent for path in sorted(repository.glob(f"*/{CONFIG_FILE}")))
    return [folder.name for folder in configs if read_model_config(folder).is_ensemble]


def resolve_source(source: str, ensemble: Path) -> str:
    """The pipeline that ``source`` names: ``./...`` is a folder inside the ensemble's own, the rest is as it stands."""
    return str(ensemble / source) if source.startswith("./") else source
