#!/usr/bin/env bash
# Unpacks Debian's Open vSwitch with DPDK into target/ovs, for a row of the bench. It is not installed:
# its packages would start a service and load a kernel module. Needs no root; quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

into=target/ovs
[[ -x $into/usr/sbin/ovsdb-server ]] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "get-ovs: no apt-get here; unpack Open vSwitch with DPDK into $into" >&2
    exit 1
fi
rm -rf "$into.new"
mkdir -p "$into.new/packages"
(cd "$into.new/packages" &&
    apt-get download -qq openvswitch-common openvswitch-switch openvswitch-switch-dpdk)
for package in "$into".new/packages/*.deb; do
    dpkg-deb -x "$package" "$into.new"
done
rm -rf "$into"
mv "$into.new" "$into"
