from diffusion_backend.stages.clip_decode import TritonPythonModel  # noqa: F401
