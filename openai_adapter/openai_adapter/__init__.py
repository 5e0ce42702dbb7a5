"""The OpenAI API in front of Triton Diffusion: a FastAPI app that calls the ensembles over gRPC."""

from openai_adapter.app import create_app
from openai_adapter.settings import Settings

__all__ = ["Settings", "create_app"]
