# SPDX-License-Identifier: Apache-2.0
# Where prom/prometheus cannot be pulled: Debian's Prometheus, started as the official image is.
ARG DEBIAN_IMAGE
FROM ${DEBIAN_IMAGE}
RUN apt-get update -q && apt-get install -qy --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /prometheus && chown 65534:65534 /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
