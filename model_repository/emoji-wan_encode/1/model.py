from diffusion_backend.stages.encode import TritonPythonModel  # noqa: F401
