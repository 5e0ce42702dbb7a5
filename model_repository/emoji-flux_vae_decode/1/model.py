from diffusion_backend.stages.vae_decode import TritonPythonModel  # noqa: F401
