#!/bin/sh
# Makes a container out of the namespaces that it is started in, and of a directory: `container.sh ROOT SOCKET`.
# Of the host it has the daemon's socket and /dev/null. Its first process serves the lab's commands.
set -e
root=$1 socket=$2
mount --bind "$root" "$root"
mount -t tmpfs none "$root/run"
mount -t tmpfs none "$root/tmp"
mkdir -p "$root/run/lab" "$root/run/vnplug" "$root/run/old"
touch "$root/run/vnplug/vnplug.sock"
mount --bind "$socket" "$root/run/vnplug/vnplug.sock"
mount --bind /dev/null "$root/dev/null"
mount -t proc none "$root/proc"
cd "$root"
pivot_root . run/old
cd /
export PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root TERM=dumb
# By its name: the shell may still know where the host has it.
/bin/umount -l /run/old
/bin/rmdir /run/old
exec /bin/sh -c '. /lab/serve.sh' 3<&0 </dev/null
