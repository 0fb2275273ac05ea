# Images: `operator` (the controller), `runtime` (Ray head, driver and workers of a job), and `runtime-sglang` (that with SGLang beside it).
# All run as a user without rights and with a read-only root file system.
#
#   docker build --target operator -t rljob-operator:0.1.0 .
#   docker build --target runtime  -t rljob-runtime:0.1.0 .      # --build-arg ENGINE=gpu for CUDA machines
#   docker build --target runtime-sglang -t rljob-runtime-sglang:0.1.0 .                                   # CPU machines; CI does not build it
#
# Stages:  base -> tools (uv) -> operator-code ──────────────────────────> operator
#                             -> wheels -> runtime-base -> tiny-model ───> runtime        a change of code keeps all but *-code
#                                                      -> model-infos ──> runtime
#                             -> runtime-code ───────────────────────────> runtime
#          base -> sbom -> *-sbom (lists what is in <image>-files) ──────> operator, runtime
#
# BASE_IMAGE is any Debian 12 with Python 3.11 and its venv module; what is missing in it comes from its package manager.
# The digest is that of the multi-platform image, as public projects recorded it in September 2026. It stays until somebody changes it, security
# updates of Debian included; the present one: docker buildx imagetools inspect python:3.11-slim-bookworm
ARG BASE_IMAGE=docker.io/library/python:3.11.16-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${BASE_IMAGE} AS base
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8
RUN set -eu; \
    python3 -c 'import sys; assert sys.version_info[:2] == (3, 11), f"the pins need Python 3.11, BASE_IMAGE has {sys.version}"'; \
    if ! [ -e /etc/ssl/certs/ca-certificates.crt ]; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates; \
        rm -rf /var/lib/apt/lists/*; \
    fi

FROM base AS tools
# An index other than the default one: --build-arg PIP_INDEX_URL=... (no password in it: build arguments stay in the image history).
ARG PIP_INDEX_URL
COPY constraints/uv.txt /build/
RUN python3 -m venv /opt/uv && /opt/uv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check -r /build/uv.txt

FROM tools AS wheels
# pycosat, a dependency of reasoning-gym, has no wheels; the compiler stays in this stage.
COPY constraints/dev.txt /build/
RUN set -eu; \
    apt-get update; \
    packages="gcc libc6-dev"; \
    [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] || packages="$packages python3-dev"; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/*; \
    /opt/uv/bin/python -m pip wheel --quiet --no-cache-dir --disable-pip-version-check --no-deps --use-pep517 \
        --constraint /build/dev.txt --wheel-dir /wheels pycosat

# Own code as installed files, bytecode included. Hashes instead of times in the bytecode: it stays valid however the layers are copied.
FROM tools AS operator-code
ARG PIP_INDEX_URL
ENV UV_SYSTEM_CERTS=1
RUN python3 -m venv --without-pip /opt/rljob
COPY crds /build/crds
COPY operator /build/operator
RUN set -eu; \
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi; \
    /opt/uv/bin/uv pip install --no-cache --no-deps --no-sources --python /opt/rljob/bin/python --prefix /own /build/crds /build/operator; \
    /opt/rljob/bin/python -m compileall -q --invalidation-mode unchecked-hash /own

FROM tools AS runtime-code
ARG PIP_INDEX_URL
ENV UV_SYSTEM_CERTS=1
RUN python3 -m venv --without-pip /opt/rljob
COPY crds /build/crds
COPY runtime /build/runtime
RUN set -eu; \
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi; \
    /opt/uv/bin/uv pip install --no-cache --no-deps --no-sources --python /opt/rljob/bin/python --prefix /own \
        /build/crds /build/crds/convert /build/runtime; \
    /opt/rljob/bin/python -m compileall -q --invalidation-mode unchecked-hash /own

# What lists the contents of an image; it does not stay in it.
FROM base AS sbom
ARG PIP_INDEX_URL
COPY constraints/sbom.txt tools/debian_packages.py /opt/sbom/
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps -r /opt/sbom/sbom.txt

FROM base AS operator-files
ARG PIP_INDEX_URL
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rljob-operator
# The lists stay in the image: they say what is in it. uv comes and goes within one layer (to mount it from another stage fails
# with Debian 12's buildah when that stage is cached). An override that never applies keeps own packages out of the dependencies.
COPY constraints /usr/share/rljob/
COPY crds/pyproject.toml /usr/share/rljob/crds/
COPY operator/pyproject.toml /usr/share/rljob/operator/
RUN --mount=type=cache,target=/var/cache/uv \
    set -eu; \
    uv_cache=/var/cache/host-uv; [ -d $uv_cache ] || uv_cache=/var/cache/uv; \
    export UV_CACHE_DIR=$uv_cache UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=180 PYC_INVALIDATION_MODE=UNCHECKED_HASH; \
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi; \
    python3 -m venv /tmp/uv; \
    /tmp/uv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check -r /usr/share/rljob/uv.txt; \
    python3 -m venv --without-pip /opt/rljob; \
    cd /usr/share/rljob; \
    echo 'rljob-api; sys_platform == "none"' > own.txt; \
    /tmp/uv/bin/uv pip install --no-sources --python /opt/rljob/bin/python --compile-bytecode \
        --constraints dev.txt --overrides overrides.txt --overrides own.txt -r crds/pyproject.toml -r operator/pyproject.toml; \
    rm -rf /tmp/*
COPY --from=operator-code /own /opt/rljob

FROM operator-files AS operator-sbom
COPY --from=sbom /opt/sbom /opt/sbom
RUN set -eu; \
    mkdir /sbom; \
    /opt/sbom/bin/cyclonedx-py environment /opt/rljob/bin/python --output-reproducible --no-validate --output-file /sbom/python.cdx.json; \
    /opt/sbom/bin/python /opt/sbom/debian_packages.py /sbom/debian.cdx.json

FROM operator-files AS operator
COPY --from=operator-sbom /sbom /usr/share/rljob/sbom
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rljob-operator" \
      org.opencontainers.image.description="Kubernetes operator that turns each RLJob into KubeRay RayJobs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/rljob/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    USER=rljob-operator \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["python", "-m", "rljob_operator"]

FROM base AS runtime-base
ARG PIP_INDEX_URL
# cpu or gpu: which build of vLLM.
ARG ENGINE=cpu
# libnuma1: vLLM's CPU kernels link it and no wheel carries it. Compilers only for gpu: Triton compiles launchers while a
# job runs, and torch C++ code beside the compiled layers of adapters.
RUN set -eu; \
    packages=""; \
    python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || packages="$packages libnuma1"; \
    if [ "$ENGINE" = gpu ]; then \
        packages="$packages g++ libc6-dev"; \
        [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] || packages="$packages python3-dev"; \
    fi; \
    if [ -n "$packages" ]; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    useradd --uid 1000 --user-group --create-home --home-dir /home/rljob --shell /bin/bash rljob; \
    install -d -o rljob -g rljob /workspace
COPY constraints /usr/share/rljob/
COPY crds/pyproject.toml /usr/share/rljob/crds/
COPY crds/convert/pyproject.toml /usr/share/rljob/crds/convert/
COPY runtime/pyproject.toml /usr/share/rljob/runtime/
COPY --from=wheels /wheels /usr/share/rljob/wheels
RUN --mount=type=cache,target=/var/cache/uv \
    set -eu; \
    uv_cache=/var/cache/host-uv; [ -d $uv_cache ] || uv_cache=/var/cache/uv; \
    export UV_CACHE_DIR=$uv_cache UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=180 PYC_INVALIDATION_MODE=UNCHECKED_HASH; \
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi; \
    python3 -m venv /tmp/uv; \
    /tmp/uv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check -r /usr/share/rljob/uv.txt; \
    python3 -m venv --without-pip /opt/rljob; \
    cd /usr/share/rljob; \
    printf '%s; sys_platform == "none"\n' rljob-api rljob-convert > own.txt; \
    if [ "$ENGINE" = gpu ]; then \
        sed -n 's/^\([a-z0-9].*==\).*/^\1/p' gpu.txt > gpu-names.txt; \
        { grep -v -f gpu-names.txt dev.txt; cat gpu.txt; } > pins.txt; \
    else \
        cp dev.txt pins.txt; \
    fi; \
    /tmp/uv/bin/uv pip install --no-sources --python /opt/rljob/bin/python --compile-bytecode \
        --find-links wheels --only-binary pycosat --extra "$ENGINE" \
        --constraints pins.txt --overrides overrides.txt --overrides own.txt \
        -r crds/pyproject.toml -r crds/convert/pyproject.toml -r runtime/pyproject.toml; \
    rm -rf /tmp/*

# The quickstart's model, so that examples/quickstart.yaml runs as it is. Made from the few modules that make it: other changes of code
# do not make it again, and an import that is missing here fails this stage by its name.
FROM runtime-base AS tiny-model
COPY crds/src/rljob_api/__init__.py crds/src/rljob_api/vocabulary.py /build/rljob_api/
COPY runtime/src/rljob_runtime/__init__.py runtime/src/rljob_runtime/errors.py /build/rljob_runtime/
COPY runtime/src/rljob_runtime/records.py runtime/src/rljob_runtime/routes.py runtime/src/rljob_runtime/sampling_mask.py /build/rljob_runtime/
COPY runtime/src/rljob_runtime/data /build/rljob_runtime/data
COPY runtime/src/rljob_runtime/tiny /build/rljob_runtime/tiny
RUN PYTHONPATH=/build OMP_WAIT_POLICY=passive /opt/rljob/bin/python -c \
    'from pathlib import Path; from rljob_runtime.tiny import make_tiny_model; print(make_tiny_model(Path("/models/tiny")))' \
    && chmod -R a+rX /models

# What vLLM otherwise finds out about a model's class at every start of an engine, in a process of its own.
FROM runtime-base AS model-infos
COPY runtime/src/rljob_runtime/engine/vllm/model_infos.py /build/
RUN /opt/rljob/bin/python /build/model_infos.py /model-infos && chmod -R a+rX /model-infos

FROM runtime-base AS runtime-files
COPY --from=runtime-code /own /opt/rljob

FROM runtime-files AS runtime-sbom
COPY --from=sbom /opt/sbom /opt/sbom
RUN set -eu; \
    mkdir /sbom; \
    /opt/sbom/bin/cyclonedx-py environment /opt/rljob/bin/python --output-reproducible --no-validate --output-file /sbom/python.cdx.json; \
    /opt/sbom/bin/python /opt/sbom/debian_packages.py /sbom/debian.cdx.json

FROM runtime-files AS runtime
COPY --from=runtime-sbom /sbom /usr/share/rljob/sbom
COPY --chown=1000:1000 examples /workspace/examples
COPY --chown=1000:1000 --from=tiny-model /models /workspace/models
COPY --from=model-infos /model-infos /opt/rljob/share/vllm-model-infos
COPY runtime/image/ray /opt/rljob/first/ray
COPY runtime/image/bash_env /opt/rljob/share/bash_env
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rljob-runtime" \
      org.opencontainers.image.description="Ray, vLLM, PyTorch and the RLJob driver: what runs inside a job" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# GKE's device plugin mounts the driver at /usr/local/nvidia; elsewhere the container toolkit brings it, if these capabilities are asked for.
# The same lines as in NVIDIA's own CUDA images.
ENV PATH=/opt/rljob/first:/opt/rljob/bin:/usr/local/nvidia/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    BASH_ENV=/opt/rljob/share/bash_env \
    HOME=/home/rljob \
    USER=rljob \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RLJOB_VLLM_MODEL_INFOS=/opt/rljob/share/vllm-model-infos \
    VLLM_NO_USAGE_STATS=1
USER 1000:1000
WORKDIR /workspace
CMD ["rljob", "--help"]

# SGLang's packages conflict with vLLM's: an environment of its own, torch included, for machines without accelerators.
FROM runtime AS runtime-sglang-files
ARG PIP_INDEX_URL
USER 0:0
RUN --mount=type=cache,target=/var/cache/uv \
    set -eu; \
    uv_cache=/var/cache/host-uv; [ -d $uv_cache ] || uv_cache=/var/cache/uv; \
    export UV_CACHE_DIR=$uv_cache UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=180 PYC_INVALIDATION_MODE=UNCHECKED_HASH; \
    if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi; \
    python3 -m venv /tmp/uv; \
    /tmp/uv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check -r /usr/share/rljob/uv.txt; \
    python3 -m venv --without-pip /opt/sglang; \
    /tmp/uv/bin/uv pip sync --python /opt/sglang/bin/python --compile-bytecode /usr/share/rljob/sglang.txt; \
    rm -rf /tmp/*

FROM runtime-sglang-files AS runtime-sglang-sbom
COPY --from=sbom /opt/sbom /opt/sbom
RUN /opt/sbom/bin/cyclonedx-py environment /opt/sglang/bin/python --output-reproducible --no-validate --output-file /sglang.cdx.json

FROM runtime-sglang-files AS runtime-sglang
COPY --from=runtime-sglang-sbom /sglang.cdx.json /usr/share/rljob/sbom/
ENV RLJOB_SGLANG_PYTHON=/opt/sglang/bin/python
LABEL org.opencontainers.image.title="rljob-runtime-sglang" \
      org.opencontainers.image.description="What runs inside a job, with SGLang's server for CPU machines beside vLLM"
USER 1000:1000
