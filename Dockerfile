# vitral serve on a CPU, as an unprivileged user.
#   docker build -t vitral .
#   docker run --rm -p 8000:8000 -v "$PWD/runs/mine:/model:ro" vitral
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV VENV=/opt/vitral
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv $VENV
RUN $VENV/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt --index-url $TORCH_INDEX torch
RUN $VENV/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[serve]'

FROM python:3.11-slim
ENV VENV=/opt/vitral PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/vitral /opt/vitral
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD $VENV/bin/python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"
ENTRYPOINT ["/opt/vitral/bin/vitral", "serve", "--host", "0.0.0.0", "--port", "8000", "--log", "json"]
CMD ["/model"]
