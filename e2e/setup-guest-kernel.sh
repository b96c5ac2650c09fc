#!/bin/sh
# Fetches the kernel that QEMU guests boot and unpacks it into target/guest/kernel.
# Nothing is installed on the host; needs no root. Quick when already done, safe when
# two run at once. VNPLUG_GUEST_KERNEL names another place.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
kernel=${VNPLUG_GUEST_KERNEL:-$here/../target/guest/kernel}
meta=linux-image-cloud-amd64

fail() {
    echo "setup-guest-kernel: $*" >&2
    exit 1
}

# `.complete` is written last, and the whole tree moves into place at once.
[ -e "$kernel/.complete" ] && exit 0

for tool in apt-get apt-cache dpkg-deb flock; do
    command -v $tool >/dev/null || fail "$tool is missing; this script needs Debian or a relative"
done
parent=$(dirname "$kernel")
mkdir -p "$parent"
exec 9>"$parent/.kernel.lock"
flock -w 600 9 || fail "another run has held $parent/.kernel.lock for ten minutes"
[ -e "$kernel/.complete" ] && exit 0

package=$(apt-cache depends "$meta" | sed -n 's/^ *Depends: \(linux-image-[0-9].*-cloud-amd64\)$/\1/p' | head -n 1)
[ -n "$package" ] || fail "apt knows no $meta; run 'apt-get update' first"

work=$(mktemp -d "$parent/.kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
# Root's apt would drop to user _apt, who may not write here.
(cd "$work" && apt-get -q -o APT::Sandbox::User="$(id -un)" download "$package" >&2) ||
    fail "apt-get could not download $package; run 'apt-get update' and try again"
dpkg-deb -x "$work"/*.deb "$work/tree" || fail "$package does not unpack"
ls "$work"/tree/boot/vmlinuz-* >/dev/null 2>&1 || fail "$package holds no boot/vmlinuz-*"
touch "$work/tree/.complete"
chmod 755 "$work/tree"
rm -rf "$kernel"
mv "$work/tree" "$kernel"
echo "setup-guest-kernel: $package is in $kernel" >&2
