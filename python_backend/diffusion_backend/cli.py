"""The command ``triton-diffusion``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diffusion_backend.errors import DiffusionError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    from diffusion_backend import container, launcher

    parser = argparse.ArgumentParser(prog="triton-diffusion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run tritonserver and the OpenAI adapter")
    launcher.add_serve_arguments(serve)
    serve.set_defaults(run=launcher.serve)

    triton = commands.add_parser("triton", help="run tritonserver alone, in place of this process")
    container.add_triton_arguments(triton)
    triton.set_defaults(run=container.triton)

    add = commands.add_parser("add", help="add a diffusers pipeline to a model repository")
    add.add_argument("source", help="a diffusers folder, or a hub id (org/name)")
    add.add_argument("--name", required=True, help="the model's name in Triton and in the OpenAI API")
    add.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: %(default)s")
    add.set_defaults(run=_add)

    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except DiffusionError as error:
        print(f"triton-diffusion: {error.message}", file=sys.stderr)
        return 1


def _add(args: argparse.Namespace) -> int:
    from diffusion_backend.loading import quiet_libraries
    from diffusion_backend.repository import add

    quiet_libraries()
    changes = add(args.source, args.name, args.repository)
    for change in changes:
        print(f"{change.what:<9} {args.repository / change.path}")
    if all(change.what == "unchanged" for change in changes):
        print(f"{args.name} was up to date")
    return 0
