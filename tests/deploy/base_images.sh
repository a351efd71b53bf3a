#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where no image registry is reached: stand-ins for the base images, made of Debian's packages.
# Package sources, certificates and pip's settings are this machine's. For tests only.
# Needs root, debootstrap and a running daemon. Usage: base_images.sh PYTHON_IMAGE DEBIAN_IMAGE
set -euo pipefail
python_image=$1 debian_image=$2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

sources=/etc/apt/sources.list.d/debian.sources
mirror=$(awk '/^URIs:/ { print $2; exit }' "$sources" 2>/dev/null || true)
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" ${mirror:+"$mirror"} > /dev/null
[ ! -e "$sources" ] || { rm -f "$root/etc/apt/sources.list"; cp "$sources" "$root/etc/apt/sources.list.d/"; }
cp /etc/apt/apt.conf.d/{99,docker-}* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
chroot "$root" update-ca-certificates > /dev/null 2>&1
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/pip.conf"
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d" # packages start no services
chmod +x "$root/usr/sbin/policy-rc.d"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - "$debian_image" > /dev/null
docker build --quiet --tag "$python_image" - > /dev/null << END
FROM $debian_image
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
END
