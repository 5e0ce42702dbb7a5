"""What each stage's process holds, against the weights of its own components.

A pipeline of FLUX's architecture with hundreds of MiB of random weights is served beside the small default model. What
a stage holds more than the default model's same stage should be its own weights more, and no other stage's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import measure
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusion_backend import repository
from diffusion_backend.launcher import Server
from diffusion_backend.stub_watcher import find_stubs
from diffusion_backend.tritonserver import CHECKOUT
from transformers import T5Config, T5EncoderModel

LARGE = "large-flux"
STAGES = ("encode", "denoise", "vae_decode")
MIB = 2**20
# What is larger than in the default model; the rest of its configuration stays, so that its parts fit together.
LARGER = {
    "text_encoder_2": {"d_ff": 8192, "num_layers": 24},
    "transformer": {"num_attention_heads": 24},
    "vae": {"block_out_channels": [192, 384, 768]},
}
QUICK = {
    "text_encoder_2": {"num_layers": 4},
    "transformer": {"num_attention_heads": 8},
    "vae": {"block_out_channels": [48, 96, 192]},
}


def make_pipeline(folder: Path, *, is_quick: bool) -> None:
    """The default model's folder with larger, random weights."""
    shutil.copytree(CHECKOUT / "model_repository" / measure.MODEL / "pipeline", folder)
    for name, changes in (QUICK if is_quick else LARGER).items():
        part = folder / name
        if name == "text_encoder_2":
            config = T5Config.from_pretrained(part)
            config.update(changes)
            module = T5EncoderModel(config)
        else:
            cls = FluxTransformer2DModel if name == "transformer" else AutoencoderKL
            module = cls.from_config({**cls.load_config(part), **changes})
        shutil.rmtree(part)
        module.save_pretrained(part)


@contextmanager
def repository_of_both(*, is_quick: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pipeline, models = Path(folder) / "pipeline", Path(folder) / "models"
        models.mkdir()
        make_pipeline(pipeline, is_quick=is_quick)
        for model in (CHECKOUT / "model_repository").glob(f"{measure.MODEL}*"):
            shutil.copytree(model, models / model.name, ignore=shutil.ignore_patterns("training"))
        repository.add(str(pipeline), LARGE, models)
        yield models


def private_bytes(pid: int) -> int:
    """What only this process holds."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def weights(server: Server, model: str) -> dict[str, float]:
    """Bytes of each stage's own components, and of the fast VAE decoder, as the model's card says.

    The VAE is vae_decode's: encode, which needs it for images, maps the same file, and reads its half of it.
    """
    card = httpx.get(f"{server.adapter.url}/v1/models/{model}", timeout=60).raise_for_status().json()
    components = {stage: card["stages"][f"{model}_{stage}"]["components"] for stage in STAGES}
    components["encode"] = {
        name: part for name, part in components["encode"].items() if name not in components["vae_decode"]
    }
    held = {stage: sum(part["bytes"] for part in parts.values()) for stage, parts in components.items()}
    return held | {"vae_decode": held["vae_decode"] + card["fast_path"]["bytes"]}


def measure_all(server: Server) -> dict[str, float]:
    """After a few pictures of both models: the figures, in MiB."""
    for model in (measure.MODEL, LARGE):
        for seed in range(3):
            body = measure.request_body(seed, num_inference_steps=4) | {"model": model}
            url = f"{server.adapter.url}/v1/images/generations"
            httpx.post(url, json=body, timeout=120).raise_for_status()
    small, large = weights(server, measure.MODEL), weights(server, LARGE)
    processes = {stub.model: pid for pid, stub in find_stubs(server.triton.process.pid).items()}
    figures = {"weights_mib": sum(large.values()) / MIB}
    for stage in STAGES:
        base, all_of_it = (private_bytes(processes[f"{model}_{stage}"]) for model in (measure.MODEL, LARGE))
        figures |= {
            f"{stage}_weights_mib": large[stage] / MIB,
            f"{stage}_private_mib": all_of_it / MIB,
            f"{stage}_more_weights_mib": (large[stage] - small[stage]) / MIB,
            f"{stage}_more_private_mib": (all_of_it - base) / MIB,
            f"{stage}_more_over_weights": (all_of_it - base) / (large[stage] - small[stage]),
        }
    return figures


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("Memory of each stage against its own weights.")
    with repository_of_both(is_quick=options.quick) as models, measure.unstarted_server(models) as server:
        server.wait_ready(measure.START_SECONDS)
        figures = measure_all(server)
    columns = ("weights_mib", "private_mib", "more_weights_mib", "more_private_mib", "more_over_weights")
    measure.report(
        f"{LARGE}, {figures['weights_mib']:.0f} MiB of weights in all, float32; "
        f"'more' is against {measure.MODEL}'s same stage",
        ["stage", "weights MiB", "private MiB", "weights more", "private more", "ratio"],
        [[stage, *(figures[f"{stage}_{column}"] for column in columns)] for stage in STAGES],
    )
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
