#!/bin/sh
# Install Debian packages whose command is missing. Each argument is command:package (an empty command: always install).
set -eu
missing=""
for pair in "$@"; do
    command=${pair%%:*}
    package=${pair#*:}
    if [ -z "$command" ] || ! command -v "$command" >/dev/null 2>&1; then missing="$missing $package"; fi
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "please install:$missing   (as root on Debian: apt-get install$missing)" >&2
    exit 2
fi
echo "installing Debian packages:$missing"
apt-get update -qq
# shellcheck disable=SC2086  # a list of names
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
