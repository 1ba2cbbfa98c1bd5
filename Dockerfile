# Two images of one recipe: `service` (broker, workers, watchers; no torch) and `trainer` (the same and torch for the CPU).
#
#   docker build --target service -t ods-async .
#   docker build --target trainer -t ods-async-trainer .

# The compiled copy needs a compiler, which the images that run do not.
FROM python:3.11 AS build
COPY pyproject.toml setup.py README.md LICENSE /build/
COPY ods_async /build/ods_async
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /build


FROM python:3.11-slim AS service

# Keys and /dev/shm belong to this user; all containers that share them must run as the same one.
RUN useradd --uid 10001 --create-home ods && install --directory --owner=ods --mode=0700 /keys

COPY requirements/constraints.txt /build/constraints.txt
# The needs of pyproject.toml but for torch and tensordict, which only consumers import; a test keeps the two lists one.
RUN pip install --no-cache-dir --constraint /build/constraints.txt \
    gymnasium msgpack numpy pyzmq pyyaml metaworld packaging aiohttp prometheus-client

COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl

USER ods
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Exec form: no shell in between, so that the program is process 1 and `docker stop` reaches it.
ENTRYPOINT ["ods-async"]
CMD ["--help"]


FROM service AS trainer
USER root
RUN pip install --no-cache-dir --constraint /build/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch tensordict
USER ods
