#!/usr/bin/env bash
# Puts Docker's Engine into the dev container, from Debian's own packages, and what starts it.
set -euo pipefail
cd "$(dirname "$0")"

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends \
    ca-certificates docker-buildx docker-cli docker-compose docker.io iptables
rm -rf /var/lib/apt/lists/*

install -D -t /usr/local/share/docker-engine start nest-cgroups
