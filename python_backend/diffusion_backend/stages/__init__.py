"""The Triton Python-backend models. A model's ``1/model.py`` imports ``TritonPythonModel`` from one of these.

Torch and diffusers are imported in ``initialize``: Triton imports a model's module twice when it auto-completes
configurations.
"""
