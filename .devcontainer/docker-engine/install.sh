#!/usr/bin/env bash
# Puts Docker's Engine into the dev container, from Debian's own packages, and writes what starts it.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends \
    ca-certificates docker-buildx docker-cli docker-compose docker.io iptables
rm -rf /var/lib/apt/lists/*

cat >/usr/local/share/docker-engine <<'START'
#!/usr/bin/env bash
# Starts the engine with the container, then does what the container was started for.
rm -f /run/docker.pid /run/docker/containerd/containerd.pid
dockerd >/var/log/dockerd.log 2>&1 &
exec "$@"
START
chmod 755 /usr/local/share/docker-engine
