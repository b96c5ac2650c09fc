#!/usr/bin/env bash
# Unpacks Debian's nginx and httperf into target/web, for a row of the bench. They are not installed: nginx would
# be started as a service. Needs no root; quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

into=target/web
[[ -x $into/usr/bin/httperf ]] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "get-web: no apt-get here; unpack nginx and httperf into $into" >&2
    exit 1
fi
rm -rf "$into.new"
mkdir -p "$into.new/packages"
(cd "$into.new/packages" && apt-get download -qq nginx httperf)
for package in "$into".new/packages/*.deb; do
    dpkg-deb -x "$package" "$into.new"
done
rm -rf "$into"
mv "$into.new" "$into"
