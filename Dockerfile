# The environment of this project with the versions of constraints.txt, and the project in it.
#
#   docker build -t qwen3-pipeline .
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" qwen3-pipeline qwen3 run my.yaml
#   apptainer build qwen3-pipeline.sif docker-daemon://qwen3-pipeline:latest
FROM python:3.12-slim

# Triton compiles kernels when a training begins.
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/qwen3-pipeline
WORKDIR /opt/qwen3-pipeline
RUN python -m pip install -q --no-cache-dir --constraint constraints.txt setuptools packaging ninja
RUN python -m pip install -q --no-cache-dir --constraint constraints.txt torch==2.13.0
RUN DS_BUILD_OPS=0 python -m pip install -q --no-cache-dir --no-build-isolation --constraint constraints.txt '.[deepspeed,nf4]'

WORKDIR /work
