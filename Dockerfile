# docker build -t ingestd .
# docker run --ulimit core=0 -v ./ingestd.toml:/etc/ingestd/ingestd.toml:ro -e SHOP_DSN -p 9464:9464 ingestd
# In the config, listen = "0.0.0.0:9464" makes the port reachable from outside the container; set
# token, tls_cert and tls_key with it (SECURITY.md; with TLS the health check needs https).

# not slim: it has a C compiler, for ingestd/decode/_native.c
FROM python:3.13 AS build
WORKDIR /src
RUN python -m venv /opt/ingestd
# the dependencies first: their layer is built anew only when the versions change
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY ingestd/__init__.py ingestd/
RUN /opt/ingestd/bin/pip install --no-cache-dir --no-compile -c constraints.txt .
COPY ingestd ingestd
RUN /opt/ingestd/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
    && /opt/ingestd/bin/pip uninstall --yes pip

FROM python:3.13-slim
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ingestd ingestd
COPY --from=build /opt/ingestd /opt/ingestd
# PYTHONSAFEPATH: nothing is imported from the working directory, where the lake is
ENV PATH=/opt/ingestd/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
USER 10001
WORKDIR /var/lib/ingestd
EXPOSE 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9464, timeout=2); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["ingestd"]
CMD ["run", "--config", "/etc/ingestd/ingestd.toml"]
