#!/bin/sh
# The guest's first process: mounts, loads modules, serves the lab's commands.
#
# When this shell ends the kernel panics; its own message is then above the trace.
trap 'echo "lab: init ends with status $?"' EXIT
export PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root TERM=dumb
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
ln -sf /proc/self/fd /dev/fd
ip link set lo up
while read -r module; do
    insmod "$module" || echo "lab: insmod $module failed"
done </lab/modules.list

. /lab/settings
[ -n "$LAB_HOST_DIR" ] && mount -t hostfs none /host -o "$LAB_HOST_DIR"
if [ -d /world ]; then
    # The host's root, with what is the guest's own on top.
    mount -t hostfs -o ro,/ none /world
    for own in /proc /sys /dev /dev/pts /dev/shm /run /tmp; do
        mount --bind $own /world$own
    done
    mount -t tmpfs none /world/root
    mount -t tmpfs none /world/var/log
    mount -t tmpfs none /world/var/lib
fi
channel=$LAB_TTY
if [ -z "$channel" ]; then
    until channel=$(vport "$LAB_PORT"); do sleep 0.1; done
fi

# An `exec` of its own ends the shell when it cannot open; `command` only makes it fail.
until command exec 3<>"$channel"; do sleep 0.1; done
# On what is open: opened and closed once more before, a tty line may still be hanging up.
[ -n "$LAB_TTY" ] && stty raw -echo <&3
. /lab/serve.sh
