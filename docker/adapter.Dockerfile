# The OpenAI adapter. In the root of the repository:
#   docker build --file docker/adapter.Dockerfile --tag triton-diffusion-adapter .
FROM python:3.12-slim

ENV PIP_CONSTRAINT=/opt/triton-diffusion/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
RUN install --directory --owner=1000 --group=1000 /data

# Without the dependencies of the stage models: no torch.
WORKDIR /opt/triton-diffusion
COPY docker/constraints.txt pyproject.toml ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *p['optional-dependencies']['adapter'], 'setuptools', sep='\n')" > requirements.txt \
    && python3 -m pip install --requirement requirements.txt

COPY LICENSE README.md ./
COPY kernels kernels
COPY openai_adapter openai_adapter
COPY python_backend python_backend
RUN python3 -m pip install --no-deps --no-build-isolation .

# It refuses to start without OPENAI_ADAPTER_API_KEYS, as everyone can reach it.
ENV OPENAI_ADAPTER_HOST=0.0.0.0 \
    OPENAI_ADAPTER_PORT=9000 \
    OPENAI_ADAPTER_DATA_DIR=/data
WORKDIR /data
USER 1000:1000
EXPOSE 9000
STOPSIGNAL SIGTERM

HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9000/health/live', timeout=5)"]

CMD ["python3", "-P", "-m", "openai_adapter"]
