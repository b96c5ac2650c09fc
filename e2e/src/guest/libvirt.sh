#!/bin/sh
# Makes a host out of the namespaces that it is started in, on which libvirtd runs: `libvirt.sh DIR`, which has etc/.
# What libvirt leaves in /etc, /run, /var and /dev/shm is gone when this ends, and so is every QEMU.
set -e
dir=$1
# The network devices of this namespace.
mount -t sysfs none /sys
for place in /run /var/lib /var/log /var/cache /dev/shm; do
    mount -t tmpfs none "$place"
done
# Root's files, as on a host: QEMU's user enters these.
mkdir -p /run/lab /run/vnplug /run/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt
chmod 1777 /run/lab /dev/shm
mount --bind "$dir/etc" /etc
# Where virsh looks, for what others find in the lab's directory.
for socket in libvirt-sock libvirt-sock-ro; do
    ln -s "$dir/$socket" /run/libvirt/
done
hostname "$(basename "$dir")"
# It is started again when it ends, as a service is. `wait` also buries what it leaves behind.
while :; do
    libvirtd &
    wait $! || true
    sleep 0.2
done
