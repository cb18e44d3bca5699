#!/usr/bin/env bash
# Puts Docker's Engine into the dev container, from Debian's own packages, and what starts it; and sudo,
# which the image lacks and documented commands begin with.
set -euo pipefail
cd "$(dirname "$0")"

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends \
    ca-certificates docker-buildx docker-cli docker-compose docker.io iptables sudo
rm -rf /var/lib/apt/lists/*

install -D -t /usr/local/share/docker-engine start nest-cgroups
