"""All families, and the tasks of those that take images, in the order of the tables."""

from __future__ import annotations

from diffusion_backend.tasks import IMAGE_EDIT, IMAGE_TO_IMAGE, INPAINTING

from tests.families import dit, flux, stable_diffusion, video, wan
from tests.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *stable_diffusion.FAMILIES,
    *flux.FAMILIES,
    *dit.FAMILIES,
    *wan.FAMILIES,
    *video.FAMILIES,
)

STEPS = 5  # of which a strength of 0.6 leaves three


def _from_an_image(family: Family, image_to_image: str, inpainting: str) -> tuple[Family, Family]:
    """The two tasks that begin from an image with noise on it, and the classes of diffusers that do them."""
    return (
        family.doing(IMAGE_TO_IMAGE, image_to_image, num_inference_steps=STEPS),
        family.doing(INPAINTING, inpainting, num_inference_steps=STEPS),
    )


IMAGE_TASKS: tuple[Family, ...] = (
    *_from_an_image(
        stable_diffusion.sd15, "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"
    ),
    *_from_an_image(
        stable_diffusion.sdxl, "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"
    ),
    *_from_an_image(
        stable_diffusion.sd3, "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"
    ),
    *_from_an_image(flux.flux_dev, "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    *_from_an_image(flux.flux_true_guidance, "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    flux.fill.doing(INPAINTING),
    flux.kontext.doing(IMAGE_EDIT),
    flux.klein.doing(IMAGE_EDIT),
    flux.klein.doing(IMAGE_EDIT, images=2),
    flux.flux2_dev.doing(IMAGE_EDIT),
    flux.flux2_dev.doing(IMAGE_EDIT, images=2),
    *_from_an_image(dit.z_image, "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    *_from_an_image(dit.qwen_image, "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
    dit.qwen_edit.doing(IMAGE_EDIT),
    dit.qwen_edit_plus.doing(IMAGE_EDIT),
    dit.qwen_edit_plus.doing(IMAGE_EDIT, images=2),
)
