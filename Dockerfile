# For GPUs: docker build -t toolkit . && docker run --gpus all --ipc=host -v "$PWD:/data" -w /data toolkit pretrain --help
FROM python:3.12-slim
# a compiler and the interpreter's headers come with `--compiler torch`, which builds kernels at run time
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/toolkit
COPY pyproject.toml README.md LICENSE constraints.txt overrides.txt ./
COPY toolkit ./toolkit
COPY extensions ./extensions
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --compile-bytecode -c constraints.txt --override overrides.txt '.[plot,hf,peft,bnb,eval,remote]'
ENTRYPOINT ["toolkit"]
