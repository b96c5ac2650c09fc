#!/bin/sh
# Fetches the kernel that QEMU guests boot and unpacks it into target/guest/kernel.
# Nothing is installed on the host; needs no root. Quick when already done, safe when
# two run at once. VNPLUG_GUEST_KERNEL names another place.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
kernel=${VNPLUG_GUEST_KERNEL:-$here/../target/guest/kernel}
# Debian's small kernel for virtual machines, else Ubuntu's, else Ubuntu's for all machines.
metas='linux-image-cloud-amd64 linux-image-virtual linux-image-generic'

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

# The kernel package that the first meta package known to apt stands for.
find_package() {
    for meta in $metas; do
        package=$(apt-cache depends "$meta" 2>/dev/null |
            sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
        [ -z "$package" ] || return 0
    done
    return 1
}

# Root's apt would drop to user _apt, who may not write here.
download() {
    (cd "$work" && apt-get -q -o APT::Sandbox::User="$(id -un)" download "$package" >&2)
}

update() {
    if [ "$(id -u)" -eq 0 ]; then apt-get -qq update >&2; else sudo apt-get -qq update >&2; fi
}

work=$(mktemp -d "$parent/.kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
# No lists, or lists so old that the package is gone: update, and try once more.
if ! find_package || ! download; then
    update || fail "'apt-get update' failed"
    find_package || fail "apt knows none of $metas"
    download || fail "apt-get could not download $package"
fi
modules=linux-modules-${package#linux-image-}
# Ubuntu has the modules in a package of their own.
if apt-cache depends "$package" | grep "Depends: $modules\$" >/dev/null; then
    package=$modules download || fail "apt-get could not download $modules"
fi
for file in "$work"/*.deb; do
    dpkg-deb -x "$file" "$work/tree" || fail "$file does not unpack"
done
ls "$work"/tree/boot/vmlinuz-* >/dev/null 2>&1 || fail "$package holds no boot/vmlinuz-*"
touch "$work/tree/.complete"
chmod 755 "$work/tree"
rm -rf "$kernel"
mv "$work/tree" "$kernel"
echo "setup-guest-kernel: $package is in $kernel" >&2
