# The study in a container: `docker build -t kvlib .`, then
#   docker run --gpus all -v "$PWD/results:/study/results" -v kvlib-cache:/study/.cache kvlib run --profile paper
# Without --gpus and with another profile it runs on the processor. On Linux, torch's pinned wheel brings CUDA along;
# the host needs the driver and the NVIDIA container toolkit alone.
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A C compiler for the compiled in-place pass; Chromium prints the PDF and runs the browser tests.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends chromium g++ git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /study

# The environment first: it is made anew only when the pins change.
COPY Makefile requirements.txt requirements.lock pyproject.toml README.md LICENSE ./
COPY tools ./tools
COPY kvlib/__init__.py ./kvlib/__init__.py
ARG PIP_EXTRA_INDEX_URL=""
RUN make setup

COPY . .

# Models of the hub and assets are kept here: mount a volume, or they are downloaded for every container.
ENV HF_HOME=/study/.cache/huggingface

ENTRYPOINT ["/study/.venv/bin/python", "-m", "kvlib"]
CMD ["--help"]
