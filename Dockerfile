# Redis 7.0 of Debian 12 with Turnstile:
#   docker build -t turnstile .
#   docker run --name locks turnstile --requirepass secret     options go to the server
# Protected mode stays on: without a password only clients inside the container are served.
#
# Redis 8.0 or Valkey 8.1 of Debian 13 instead:
#   docker build -t turnstile --build-arg SERVER_IMAGE=debian:trixie-slim .
#   docker build -t turnstile --build-arg SERVER_IMAGE=debian:trixie-slim --build-arg SERVER=valkey .
#
# Nothing but the module, for a container that copies it to a volume before the server starts:
#   docker build -t turnstile-module --target module .
#   docker run --rm -v modules:/modules turnstile-module /modules/

# The base images, named here only. To pin one, pass it with its digest: debian:bookworm-slim@sha256:…
# The build image stays Debian 12 for every server: with the same version of GCC the module is that of
# the release, byte by byte.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG SERVER_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY script/bootstrap script/
RUN script/bootstrap \
    && apt-get install -y --no-install-recommends busybox-static
COPY . .
RUN cmake --preset release -DBUILD_TESTING=OFF -DCMAKE_MODULE_LINKER_FLAGS=-s \
    && cmake --build build \
    && cmake --install build --prefix /out \
    && mkdir /modules

# busybox is there for cp. It keeps the execute bit, without which servers refuse a module.
FROM scratch AS module
COPY --from=build /out/lib/redis/modules/turnstile.so /turnstile.so
COPY --from=build /src/LICENSE /src/packaging/NOTICE /licenses/
COPY --from=build /usr/share/doc/busybox-static/copyright /licenses/busybox
COPY --from=build /bin/busybox /bin/cp
# A new volume gets the owner of the folder on which it is mounted.
COPY --from=build --chown=65534:65534 /modules /modules
USER 65534:65534
ENTRYPOINT ["/bin/cp", "/turnstile.so"]
CMD ["/modules/"]

FROM ${SERVER_IMAGE} AS server
ARG SERVER=redis
RUN apt-get update \
    && apt-get install -y --no-install-recommends ${SERVER}-server \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o ${SERVER} -g ${SERVER} /data \
    && ln -s /usr/bin/${SERVER}-server /usr/local/bin/server \
    && ln -s /usr/bin/${SERVER}-cli /usr/local/bin/cli
COPY --from=build /out /usr
COPY --from=build /src/LICENSE /src/packaging/NOTICE /usr/share/doc/turnstile-module/
USER ${SERVER}
WORKDIR /data
VOLUME /data
EXPOSE 6379
# Any reply means that the server is alive, even an error that asks for a password.
HEALTHCHECK CMD ["cli", "ping"]
ENTRYPOINT ["server", "--loadmodule", "/usr/lib/redis/modules/turnstile.so"]
