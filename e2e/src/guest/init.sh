#!/bin/sh
# The guest's first process: mounts, loads modules, serves the lab's commands.
#
# A request is a line `ID BASE64`, the command in base64, with `+ BASE64` lines before it if it is
# long; each line is acknowledged by a `!`. Every command runs at once, in a session of its own, its
# output in /run/lab/ID.out. When it has ended a line `ID STATUS LENGTH BASE64` goes back; of an
# output above 1 MiB the text is left out and only the length told.
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

serve() {
    job=/run/lab/$1
    printf %s "$2" | base64 -d >"$job.sh"
    setsid sh "$job.sh" </dev/null >"$job.out" 2>&1 3>&- 4>&- &
    echo $! >"$job.pid"
    wait $!
    echo "$1 $?" >&4
}

# One process writes all replies, so they do not mix.
reply() {
    while read -r id status <&4; do
        job=/run/lab/$id
        len=$(wc -c <"$job.out")
        printf '%s %s %s ' "$id" "$status" "$len" >&3
        [ "$len" -le 1048576 ] && base64 -w 0 "$job.out" >&3
        echo >&3
        rm -f "$job.sh" "$job.out" "$job.pid"
    done
}

mkfifo /run/lab/done
exec 4<>/run/lab/done
# An `exec` of its own ends the shell when it cannot open; `command` only makes it fail.
until command exec 3<>"$channel"; do sleep 0.1; done
# On what is open: opened and closed once more before, a tty line may still be hanging up.
[ -n "$LAB_TTY" ] && stty raw -echo <&3
echo "0 0 0 " >&3
reply &
text=
while :; do
    while read -r id code <&3; do
        printf '!' >&3
        if [ "$id" = + ]; then
            text=$text$code
        else
            serve "$id" "$text$code" &
            text=
        fi
    done
    # The host's end is not there (yet).
    sleep 0.1
done
