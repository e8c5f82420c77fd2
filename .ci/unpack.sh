#!/bin/sh
# Unpack Debian packages below a folder without installing them: no services, no users, no dependencies. unpack.sh FOLDER path:package ...
# A package whose path is there already is left alone.
set -eu
folder=$1
shift
missing=""
for pair in "$@"; do
    [ -e "$folder/${pair%%:*}" ] || missing="$missing ${pair#*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "please unpack below $folder:$missing   (as root on Debian: apt-get download$missing; dpkg-deb -x FILE $folder)" >&2
    exit 2
fi
echo "unpacking Debian packages:$missing"
mkdir -p "$folder"
part=$(mktemp -d "$folder/part.XXXXXX")
trap 'rm -rf "$part"' EXIT
# shellcheck disable=SC2086  # a list of names
(cd "$part" && { apt-get -q download $missing >/dev/null 2>&1 || { apt-get update -qq && apt-get -q download $missing >/dev/null; }; })
for file in "$part"/*.deb; do
    dpkg-deb -x "$file" "$folder"
done
