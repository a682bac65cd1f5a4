# redis-server with Turnstile:
#   docker build -t turnstile .
#   docker run --name locks turnstile --requirepass secret     options go to redis-server
# Protected mode stays on: without a password only clients inside the container are served.

FROM debian:bookworm-slim AS build
WORKDIR /src
COPY script/bootstrap script/
RUN script/bootstrap
COPY . .
RUN cmake --preset release -DBUILD_TESTING=OFF \
    && cmake --build build \
    && cmake --install build --prefix /out

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o redis -g redis /data
COPY --from=build /out /usr
USER redis
WORKDIR /data
VOLUME /data
EXPOSE 6379
# Any answer is a sign of life, also that a password is needed.
HEALTHCHECK CMD ["redis-cli", "ping"]
ENTRYPOINT ["redis-server", "--loadmodule", "/usr/lib/redis/modules/turnstile.so"]
