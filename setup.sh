#!/usr/bin/env bash
# Installs what the machine lacks for a job: Debian 12 or Ubuntu, with Rust. Quick when nothing is
# missing. Asks for root only to install packages.
#
#   ./setup.sh build   what compiles the programs, and what they load when they run
#   ./setup.sh demo    and what boots the demo's guests and shows their packets
#   ./setup.sh switch  and the programs of VDE, for the demo of the switch
#   ./setup.sh sandbox what `build` needs, and the network of the demo of the sandbox
#   ./setup.sh package what `build` needs, and what makes packages
#   ./setup.sh test    and the whole laboratory of tests and measurements
set -euo pipefail
cd "$(dirname "$0")"

# program, file or library that must be there -> package that has it
build=(
    cc:gcc ld:binutils make:make /usr/include/stdio.h:libc6-dev
    # the daemon's filter compiler and the recorder load it when they run
    libpcap.so.0.8:libpcap0.8
)
package=(
    "${build[@]}" dh_builddeb:debhelper rpmbuild:rpm xz:xz-utils xorrisofs:xorriso python3:python3
)
sandbox=(
    "${build[@]}" ip:iproute2 curl:curl /usr/bin/busybox:busybox-static
)
demo=(
    "${build[@]}"
    ip:iproute2 tcpdump:tcpdump tshark:tshark editcap:wireshark-common capinfos:wireshark-common
    qemu-system-x86_64:qemu-system-x86 linux.uml:user-mode-linux
    /usr/bin/busybox:busybox-static cpio:cpio modinfo:kmod setpriv:util-linux
)
switch=(
    "${demo[@]}"
    vde_switch:vde-switch vde_plug:vdeplug vde_plug2tap:vde2 ping:iputils-ping
)
# what runs the tests of the page, and perf; Ubuntu has other names for them
browser=chromium driver=chromium-driver perf=linux-perf bpftool=bpftool
if grep -qs '^ID=ubuntu' /etc/os-release; then
    browser=chromium-browser driver=chromium-chromedriver perf=linux-tools-generic bpftool=linux-tools-common
fi
test=(
    "${switch[@]}"
    # the tests of the drop-in compile programs
    /usr/include/pcap/pcap.h:libpcap-dev g++:g++
    dpdk-testpmd:dpdk-dev curl:curl python3:python3 dnsmasq:dnsmasq-base
    dig:bind9-dnsutils ethtool:ethtool rsync:rsync iperf3:iperf3
    tcpreplay:tcpreplay fio:fio netsniff-ng:netsniff-ng dmsetup:dmsetup mkfs.ext4:e2fsprogs
    # the page of recordings is tested in a browser
    "$browser:$browser" "chromedriver:$driver"
    # README's first commands are typed on a fresh machine, and packages are made and installed there
    debootstrap:debootstrap dh_builddeb:debhelper rpmbuild:rpm xorrisofs:xorriso
    # programs of VDE, on a switch
    wirefilter:vde-wirefilter vdens:vdens
    /var/lib/dpkg/info/libvdeplug-slirp.list:libvdeplug-slirp
    /var/lib/dpkg/info/libvdeplug-vlan.list:libvdeplug-vlan
    # installs our agent in a guest
    qemu-ga:qemu-guest-agent
    # has domains of its own in a test; without libvirt-daemon-system, so no service comes
    libvirtd:libvirt-daemon virsh:libvirt-clients
    /usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so:libvirt-daemon-driver-qemu
    # a C program calls libvdeplug
    /usr/include/libvdeplug.h:libvdeplug-dev
    zstd:zstd age:age openssl:openssl valgrind:valgrind
    # operators' programs are compiled to eBPF, and looked at
    pkg-config:pkg-config clang:clang /usr/include/bpf/bpf_helpers.h:libbpf-dev "bpftool:$bpftool"
    # the terminal in which `vnplug top` is tested
    tmux:tmux
    # others that run a program under watch, for the bench
    firejail:firejail strace:strace
    # counts system calls for the bench, and shows where the time goes
    "perf:$perf"
    # programs that capture with libpcap, for the tests of the drop-in; none starts a service
    ngrep:ngrep p0f:p0f tcpflow:tcpflow ssldump:ssldump dhcpdump:dhcpdump sngrep:sngrep
    /usr/lib/python3/dist-packages/scapy:python3-scapy
    /var/lib/dpkg/info/python3-pcapy.list:python3-pcapy
    # programs that ask in the sandbox
    git:git nmap:nmap nc.openbsd:netcat-openbsd
    # forges senders in a guest
    hping3:hping3
    /usr/sbin/dropbear:dropbear-bin scp:openssh-client redis-cli:redis-tools
    gtlsclient:ngtcp2-client gtlsserver:ngtcp2-server
    # and their questions as notifications
    notify-send:libnotify-bin dbus-run-session:dbus
    /usr/share/doc/python3-dbus:python3-dbus /usr/share/doc/python3-gi:python3-gi
    # collects flows in the long form of a test; its unit starts no collector by itself
    nfcapd:nfdump
    # gopacket as a package, so that no module has to be fetched
    go:golang-go
    /usr/share/gocode/src/github.com/google/gopacket/pcap:golang-github-google-gopacket-dev
)

job=${1:-test}
case $job in
build | demo | package | sandbox | switch | test) declare -n needs=$job ;;
*)
    echo "setup: '$job' is none of build, demo, package, sandbox, switch, test" >&2
    exit 2
    ;;
esac

if ! command -v cargo >/dev/null; then
    echo "setup: no cargo. Install Rust 1.95 or newer (https://rustup.rs), then try again." >&2
    exit 1
fi

# format and lints; an installation of rustup may have neither
if [[ $job == test ]]; then
    for component in fmt:rustfmt clippy:clippy; do
        cargo "${component%%:*}" --version >/dev/null 2>&1 && continue
        if ! command -v rustup >/dev/null; then
            echo "setup: no cargo ${component%%:*}, and no rustup to add it: install ${component#*:}" >&2
            exit 1
        fi
        rustup component add "${component#*:}"
    done
    # a program in Rust is compiled to eBPF, for which `core` comes by its source
    source=$(rustc --print sysroot)/lib/rustlib/src/rust/library/core
    if [[ ! -e $source ]]; then
        if ! command -v rustup >/dev/null; then
            echo "setup: no $source, and no rustup to add it: install rust-src" >&2
            exit 1
        fi
        rustup component add rust-src
    fi
fi

missing=()
for need in "${needs[@]}"; do
    what=${need%%:*} package=${need#*:}
    if [[ $what == /* ]]; then
        [[ -e $what ]] || missing+=("$package")
    elif [[ $what == *.so.* ]]; then
        # No pipe into `grep -q`: it ends early, and pipefail would call that a failure.
        [[ $(/sbin/ldconfig -p) == *"$what "* ]] || missing+=("$package")
    else
        PATH=$PATH:/usr/sbin:/sbin command -v "$what" >/dev/null || missing+=("$package")
    fi
done
# The tests of the Python package make a virtual environment, and its wheel is compiled in one.
if [[ $job == test || $job == package ]]; then
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
fi
[[ ${#missing[@]} -eq 0 ]] && exit 0

if ! command -v apt-get >/dev/null; then
    echo "setup: please install: ${missing[*]} (this script knows only apt-get)" >&2
    exit 1
fi
echo "setup: installing ${missing[*]}"
root=()
[[ $(id -u) -eq 0 ]] || root=(sudo)
# It brings a service, and the tests want the program alone.
if [[ " ${missing[*]} " == *" ngtcp2-server "* ]]; then
    "${root[@]}" mkdir -p /etc/systemd/system
    "${root[@]}" ln -sfn /dev/null /etc/systemd/system/ngtcp2d.service
fi
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
