#!/bin/sh
# Prints the device of the virtio-serial port with the given name; fails if there is none.
for name in /sys/class/virtio-ports/*/name; do
    if [ "$(cat "$name" 2>/dev/null)" = "$1" ]; then
        port=${name%/name}
        echo "/dev/${port##*/}"
        exit 0
    fi
done
exit 1
