"""The command ``triton-diffusion``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_backend.errors import DiffusionError, show, unusable

if TYPE_CHECKING:
    from diffusion_backend.file_changes import Change
    from diffusion_backend.loading import PipelineFolder
    from diffusion_backend.settings import ModelLimits


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns while it is imported
    from diffusion_backend import container, launcher

    parser = argparse.ArgumentParser(
        prog="triton-diffusion", description="Diffusers pipelines on Triton: serve them, manage a repository."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run tritonserver and the OpenAI adapter")
    launcher.add_serve_arguments(serve)
    serve.set_defaults(run=launcher.serve)

    triton = commands.add_parser("triton", help="run tritonserver alone, in place of this process")
    container.add_triton_arguments(triton)
    triton.set_defaults(run=container.triton)

    _add_builder_commands(commands)

    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (DiffusionError, OSError, ValueError) as error:
        print(f"triton-diffusion: {error}", file=sys.stderr)
        return 1


def _add_builder_commands(commands: Any) -> None:
    from diffusion_backend import launcher

    add = commands.add_parser("add", help="add a diffusers pipeline to a model repository")
    add.add_argument("source", help="a diffusers folder, or a hub id (org/name)")
    add.add_argument("--name", required=True, help="the model's name in Triton and in the OpenAI API")
    add.add_argument(
        "--dtype",
        default="auto",
        help="auto (as stored on a GPU, float32 on a CPU), float32, float16, bfloat16",
    )
    add.add_argument("--device", default="auto", help="auto, cpu, gpu")
    add.add_argument("--instances", type=int, default=1, help="of encode and denoise, on each device")
    add.add_argument("--unary", action="store_true", help="serve plain infer() too; no streaming then")
    add.add_argument("--warmup-size", nargs="+", default=[], metavar="WxH", help="besides the default size")
    add.add_argument(
        "--warmup-batch", nargs="+", type=int, default=[], metavar="N", help="numbers of requests, besides 1"
    )
    add.add_argument("--no-warmup", action="store_true", help="faster to start, slower first requests")
    add.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA that requests can ask for; may be given several times",
    )
    add.add_argument("--default-quality", default="lossless", choices=("lossless", "fast"), help="of 'auto'")
    add.add_argument("--replace", action="store_true", help="even if NAME is a model of another source")
    add.set_defaults(run=_add)

    check = commands.add_parser("check", help="say what a pipeline holds and what stands in its way")
    check.add_argument("source", help="a diffusers folder, or a hub id (org/name)")
    check.set_defaults(run=_check)

    listing = commands.add_parser("list", help="list the models of a repository")
    listing.set_defaults(run=_list)

    remove = commands.add_parser("remove", help="remove a model from a repository")
    remove.add_argument("name")
    remove.set_defaults(run=_remove)

    for command in (add, listing, remove):
        command.add_argument(
            "--repository", type=Path, default=launcher.default_repository(), help="default: %(default)s"
        )


def _add(args: argparse.Namespace) -> int:
    from diffusion_backend.loading import open_pipeline, quiet_libraries
    from diffusion_backend.model_config import resolve_source
    from diffusion_backend.quality import Tier
    from diffusion_backend.repository import BuildOptions, add, read_model

    quiet_libraries()
    options = BuildOptions(
        dtype=args.dtype,
        device=args.device,
        instances=args.instances,
        unary=args.unary,
        warmup=not args.no_warmup,
        warmup_sizes=tuple(args.warmup_size),
        warmup_batches=tuple(args.warmup_batch),
        default_quality=Tier(args.default_quality),
        loras=_parse_loras(args.lora),
        replace=args.replace,
    )
    changes = add(args.source, args.name, args.repository, options)
    _print_changes(args.repository, changes)
    if args.dtype == "auto" and args.device != "cpu":
        ensemble = args.repository / args.name
        limits = read_model(ensemble)
        source = resolve_source(limits.source, ensemble)
        _warn_of_mixed_dtypes(open_pipeline(source, limits.source_revision))
    if all(change.what == "unchanged" for change in changes):
        print(f"{args.name} was up to date")
    else:
        print(
            f"{args.name} is served from the next start on; a server that runs can load it: docs/operations.md"
        )
    return 0


def _parse_loras(given: Sequence[str]) -> dict[str, str]:
    """Folders by name, of options ``NAME=FOLDER``."""
    folders: dict[str, str] = {}
    for option in given:
        name, _, folder = option.partition("=")
        if not folder:
            raise unusable(f"'lora' is {show(option)}; allowed: NAME=FOLDER", "lora")
        if name in folders:
            raise unusable(f"'lora' has {show(name)} twice; allowed: each name once", "lora")
        folders[name] = folder
    return folders


def _check(args: argparse.Namespace) -> int:
    from diffusion_backend.inspection import inspect_pipeline, stage_bytes
    from diffusion_backend.loading import open_pipeline, quiet_libraries
    from diffusion_backend.repository import examine

    quiet_libraries()
    pipeline = open_pipeline(args.source)
    components = inspect_pipeline(pipeline)
    print(f"{pipeline.pipeline_class.__name__} in {pipeline.folder}")
    for found in components:
        print(
            f"  {found.component.name:<18} {found.component.cls.__name__:<30} "
            f"{len(found.files)} files {found.bytes:>16,} bytes"
        )
    limits = examine(args.source)
    if isinstance(limits, list):
        for problem in limits:
            print(f"refused: {problem}")
        return 1
    for stage, size in stage_bytes(components, takes_image=limits.takes_image).items():
        print(f"{stage.value:<20} loads {size:>16,} bytes")
    print(f"serves {', '.join(limits.tasks)}, by default {_defaults(limits)}{_frame_limits(limits)}")
    _warn_of_mixed_dtypes(pipeline)
    return 0


def _warn_of_mixed_dtypes(pipeline: PipelineFolder) -> None:
    from diffusion_backend.inspection import mixed_dtypes

    if warning := mixed_dtypes(pipeline):
        print(f"warning: {warning}", file=sys.stderr)


def _list(args: argparse.Namespace) -> int:
    from diffusion_backend.repository import list_models

    models = list_models(args.repository)
    for name, limits in models.items():
        if isinstance(limits, str):
            print(f"{name:<24} broken: {limits}")
            continue
        revision = f" at {limits.source_revision}" if limits.source_revision else ""
        print(
            f"{name:<24} {limits.pipeline_class:<28} {', '.join(limits.tasks)}, "
            f"{_defaults(limits)}, from {limits.source}{revision}{_loras(limits)}"
        )
    return 1 if any(isinstance(limits, str) for limits in models.values()) else 0


def _defaults(limits: ModelLimits) -> str:
    frames = f"{limits.default_num_frames} frames at {limits.default_fps} fps, " if limits.makes_video else ""
    return (
        f"{limits.default_width}x{limits.default_height}, {frames}{limits.default_num_inference_steps} steps"
    )


def _frame_limits(limits: ModelLimits) -> str:
    if not limits.makes_video:
        return ""
    return (
        f"; {limits.min_num_frames} to {limits.max_num_frames} frames, in steps of {limits.num_frames_step}"
    )


def _loras(limits: ModelLimits) -> str:
    return f", LoRAs: {', '.join(limits.loras)}" if limits.loras else ""


def _remove(args: argparse.Namespace) -> int:
    from diffusion_backend.repository import remove

    _print_changes(args.repository, remove(args.name, args.repository))
    return 0


def _print_changes(repository: Path, changes: Sequence[Change]) -> None:
    for change in changes:
        print(f"{change.what:<9} {repository / change.path}")
