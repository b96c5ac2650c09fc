#!/usr/bin/env bash
# Unpacks Debian's Prometheus into target/prometheus, for the tests of the metrics. It is not installed: it would be
# started as a service. 19 MB; needs no root; quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

into=target/prometheus
[[ -x $into/usr/bin/promtool ]] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "get-prometheus: no apt-get here; unpack prometheus and promtool into $into/usr/bin" >&2
    exit 1
fi
rm -rf "$into.new"
mkdir -p "$into.new/packages"
download() { (cd "$into.new/packages" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download prometheus); }
# Lists so old that the package is gone: update, and try once more.
download || { if [[ $(id -u) -eq 0 ]]; then apt-get -qq update; else sudo apt-get -qq update; fi && download; }
for package in "$into".new/packages/*.deb; do
    dpkg-deb -x "$package" "$into.new"
done
rm -rf "$into.new/packages" "$into"
mv "$into.new" "$into"
