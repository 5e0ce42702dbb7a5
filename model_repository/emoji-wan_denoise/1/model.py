from diffusion_backend.stages.denoise import TritonPythonModel  # noqa: F401
