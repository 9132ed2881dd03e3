# For GPUs: docker build -t toolkit . && docker run --gpus all --ipc=host -v "$PWD:/data" -w /data toolkit pretrain --help
# For CPUs: docker build -t toolkit-cpu --build-arg BASE=ubuntu:24.04 --build-arg TORCH=cpu .
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE}
# of PyTorch's own packages, those for this CUDA, or cpu
ARG TORCH=cu130
# a compiler and the interpreter's headers come with `--compiler torch`, which builds kernels at run time
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ git python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir uv
ENV PATH="/opt/venv/bin:$PATH"
WORKDIR /opt/toolkit
COPY pyproject.toml README.md LICENSE constraints.txt overrides.txt ./
COPY toolkit ./toolkit
COPY extensions ./extensions
RUN uv pip install --python /opt/venv/bin/python --no-cache --compile-bytecode --torch-backend ${TORCH} \
    -c constraints.txt --override overrides.txt '.[plot,hf,peft,bnb,eval,remote]'
ENTRYPOINT ["toolkit"]
