#!/bin/sh
# Unpack NVIDIA's Nsight Systems CLI (Debian non-free, trixie: 2023.4) below a folder, so that tests can capture, export and ask its
# own reports: nsys.sh FOLDER -> FOLDER/target-linux-x64/nsys. Nothing is installed: no driver, no configuration of apt is changed.
# It is proprietary (NVIDIA's licence, redistributed by Debian): fetched here, never committed. Exit 3, with the reason: not to be had.
set -eu
folder=$(realpath -m "$1")
nsys=target-linux-x64/nsys
[ -x "$folder/$nsys" ] && exit 0
none() { echo "no Nsight Systems for the tests: $1" >&2; exit 3; }
[ "$(uname -m)" = x86_64 ] || none "Debian has it for x86_64"
command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 || none "it is taken from Debian's packages, and this is no Debian"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || none "$keys is missing (package debian-archive-keyring)"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 2>/dev/null | head -1)
if [ -z "$mirror" ]; then # a fresh machine has no lists yet
    apt-get update -qq >/dev/null 2>&1 || true
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -1)
fi
[ -n "$mirror" ] || none "apt has no source of Debian's own packages"

mkdir -p "$(dirname "$folder")"
part=$(mktemp -d "$(dirname "$folder")/nsys.XXXXXX") # beside its place: the last step is one rename
trap 'rm -rf "$part"' EXIT
mkdir -p "$part/lists/partial" "$part/cache/archives/partial" "$part/debs" "$part/out"
echo "deb [signed-by=$keys] $mirror ${NSYS_SUITE:-trixie} non-free" >"$part/sources.list"
apart() { # apt with lists and cache of its own
    apt-get -qq -o Dir::Etc::sourcelist="$part/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$part/lists" \
        -o Dir::Cache="$part/cache" -o APT::Sandbox::User=root -o Acquire::Retries=2 "$@"
}
echo "unpacking Nsight Systems (190 MB)"
apart update >/dev/null 2>&1 || none "$mirror has no ${NSYS_SUITE:-trixie} non-free"
(cd "$part/debs" && apart download nsight-systems nsight-systems-target >/dev/null 2>&1) || none "the packages cannot be downloaded"
(cd "$part/debs" && { apt-get -qq download libssh-4 >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null 2>&1 && apt-get -qq download libssh-4 >/dev/null 2>&1; }; }) || none "libssh-4 cannot be downloaded"
for deb in "$part"/debs/*.deb; do
    dpkg-deb -x "$deb" "$part/out"
    rm "$deb"
done

lib=$part/out/usr/lib
mkdir "$part/made"
mv "$lib/x86_64-linux-gnu/nsight-systems/target-linux-x64" "$lib/nsight-systems/host-linux-x64" "$part/made/"
host=$part/made/host-linux-x64
rm -f "$host/libssh.so.4" "$host/libssh.so" # Debian's are links that end outside this folder
cp -L "$lib/x86_64-linux-gnu/libssh.so.4" "$host/"
ln -sf libssh.so.4 "$host/libssh.so"
mkdir -p "$host/python/lib" # where the reports look for their module
cp "$part/made/target-linux-x64/python/lib/nsysstats.py" "$host/python/lib/"
# The window, and what reads a GPU: not needed to capture NVTX on a CPU, to export, or for reports.
(cd "$host" && rm -rf libQt6* translations resources Plugins nsys-ui* libNvQtGui.so CrashReporter libEventsView.so libTimelineUIUtils.so libTimelineWidget.so libicudata* libicui18n* libicuuc*)
(cd "$part/made/target-linux-x64" && rm -rf libcupti.so* libnvperf* CollectX GpuMetrics)
"$host/QdstrmImporter" --version >/dev/null && "$part/made/$nsys" --version || none "it does not run here"
rm -rf "$folder"
mv "$part/made" "$folder"
