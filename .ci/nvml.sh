#!/bin/sh
# The real libnvidia-ml.so.1 of Debian's non-free section, unpacked into FOLDER without a driver. usage: nvml.sh FOLDER
set -eu
folder=$1
[ -e "$folder/libnvidia-ml.so.1" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
where=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | head -1)
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$folder"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $where $suite non-free" > "$work/sources.list"
set -- -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$work/lists" \
    -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -qq
apt-get "$@" update
(cd "$work" && apt-get "$@" download libnvidia-ml1)
dpkg-deb -x "$work"/libnvidia-ml1_*.deb "$work/x"
found=$(find "$work/x" -name 'libnvidia-ml.so.[0-9]*.[0-9]*' -type f | head -1)
cp "$found" "$folder/libnvidia-ml.so.1"
