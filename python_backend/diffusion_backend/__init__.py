"""The Triton side of Triton Diffusion: three stage models, the seams between them, and the repository builder.

Start reading at ``stages/encode.py``, then ``stages/denoise.py`` and ``stages/vae_decode.py``; ``seams.py`` is how
one unmodified diffusers pipeline runs in three processes.
"""
