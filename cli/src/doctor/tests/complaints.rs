//! Every check is seen to complain, with what mends it, and to be content.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use vnplug::Device;
use vnplug_os::interface::Link;

use super::*;

/// By group and check: whether it was seen to complain, and to be content.
#[derive(Default)]
struct Seen(BTreeMap<(&'static str, String), (bool, bool)>);

impl Seen {
    /// What a check found where something is wrong; `cure` is in what it says that mends it.
    fn complains(&mut self, of: &'static str, check: &str, found: &Finding, cure: &str) {
        let is_complaint = matches!(found.state, State::Warn | State::Fail);
        assert!(is_complaint, "{check}: {found:?}");
        let told = found.cure.as_deref().unwrap_or_default();
        assert!(told.contains(cure), "{check}: {cure}: {found:?}");
        self.0.entry((of, check.to_owned())).or_default().0 = true;
    }

    /// And where nothing is.
    fn is_content(&mut self, of: &'static str, check: &str, found: &Finding) {
        assert_eq!(found.state, State::Ok, "{check}: {found:?}");
        self.0.entry((of, check.to_owned())).or_default().1 = true;
    }

    /// Of a check that reads a machine's files: one file makes the difference, or its absence.
    fn file(&mut self, (of, check): (&'static str, &str), file: Differs<'_>, cure: &str) {
        let made = Made::new();
        if let Some(wrong) = file.wrong {
            made.file(file.path, wrong);
        }
        self.complains(of, check, &look(&made, of, check), cure);
        made.file(file.path, file.right);
        self.is_content(of, check, &look(&made, of, check));
    }
}

/// A file that is wrong, or not there, and right.
struct Differs<'a> {
    path: &'a str,
    wrong: Option<&'a str>,
    right: &'a str,
}

fn differs<'a>(path: &'a str, wrong: &'a str, right: &'a str) -> Differs<'a> {
    let wrong = Some(wrong);
    Differs { path, wrong, right }
}

fn missing<'a>(path: &'a str, right: &'a str) -> Differs<'a> {
    let wrong = None;
    Differs { path, wrong, right }
}

/// What a check finds, whatever it needs.
fn look(made: &Made, of: &str, check: &str) -> Finding {
    let all = match of {
        "host" => host::checks(),
        "qemu" => qemu::checks(),
        "guest" => guest::checks(),
        "both" => both::checks(),
        _ => interface::checks("eth1"),
    };
    let mut own: Vec<_> = all.into_iter().filter(|it| it.name == check).collect();
    own.iter_mut().for_each(|it| it.needs.clear());
    run(&made.machine(), own, LIMIT).remove(0).finding
}

/// What tells and never complains: each of both is no fault of a machine that needs none.
const TELL: [&str; 2] = ["vm-iommu", "vm-max-memory"];

#[test]
fn every_check_is_seen_to_complain_and_to_be_content() {
    let mut seen = Seen::default();
    of_the_host(&mut seen);
    of_machines(&mut seen);
    of_both(&mut seen);
    of_guests(&mut seen);
    of_links(&mut seen);
    of_packets_of_an_interface(&mut seen);
    of_who_answers(&mut seen);
    of_counters(&mut seen);

    let names = |of: &'static str, checks: Vec<Check>| {
        let own = checks
            .into_iter()
            .filter(|it| !TELL.contains(&it.name.as_str()));
        own.map(|it| (of, it.name)).collect::<Vec<_>>()
    };
    let here = Machine::this();
    let nobody = Path::new("/nonexistent/vnplug.sock");
    let all = [
        names("host", host::checks()),
        names("qemu", qemu::checks()),
        names("guest", guest::checks()),
        names("both", both::checks()),
        names("interface", interface::checks("eth1")),
        names(
            "live",
            live::ask(&here, nobody, "daemon").checks(Role::Host),
        ),
        names(
            "live",
            live::ask(&here, nobody, "agent").checks(Role::Guest),
        ),
    ];
    let is_unseen = |it: &(&'static str, String)| seen.0.get(it) != Some(&(true, true));
    let unseen: Vec<_> = all.concat().into_iter().filter(is_unseen).collect();
    assert!(unseen.is_empty(), "not seen in both ways: {unseen:?}");
}

fn of_the_host(seen: &mut Seen) {
    let old = host::kernel("5.8.0");
    seen.complains("host", "kernel", &old, "boot Linux 5.9 or newer");
    seen.is_content("host", "kernel", &host::kernel("6.12.1"));
    let modes = |mode: &str| "none integrity confidentiality\n".replace(mode, &format!("[{mode}]"));
    let (wrong, right) = (modes("confidentiality"), modes("integrity"));
    let file = differs("sys/kernel/security/lockdown", &wrong, &right);
    seen.file(("host", "lockdown"), file, "lockdown=integrity");
    let file = differs("etc/ld.so.cache", "libc.so.6", "libpcap.so.0.8");
    seen.file(("host", "libpcap"), file, "apt-get install libpcap0.8");
    let file = missing("proc/sys/kernel/unprivileged_bpf_disabled", "2\n");
    seen.file(("host", "bpf"), file, "CONFIG_BPF_SYSCALL");
    let rule = "proc/sys/kernel/unprivileged_bpf_disabled";
    let made = Made::new();
    made.file(rule, "2\n").file("proc/9/comm", "vnplugd\n");
    let threads = |uid: &str, caps: [&str; 2]| {
        for (thread, caps) in caps.iter().enumerate() {
            let text = format!("Uid:\t{uid}\t{uid}\nCapPrm:\t{caps}\n");
            made.file(&format!("proc/9/task/{thread}/status"), &text);
        }
        look(&made, "host", "bpf")
    };
    let (none, bpf) = ("0000000000002000", "0000008000002000");
    for (uid, caps, drops) in [
        ("1000", [none, none], false),
        ("1000", [none, bpf], true),
        ("0", [none, none], true),
    ] {
        let found = threads(uid, caps);
        seen.is_content("host", "bpf", &found);
        assert_eq!(
            !found.text.contains("nothing is dropped early"),
            drops,
            "{found:?}"
        );
    }
    let file = differs("proc/sys/net/core/bpf_jit_enable", "0\n", "1\n");
    let cure = "sysctl -w net.core.bpf_jit_enable=1";
    seen.file(("host", "bpf-jit"), file, cure);
    let [wrong, right] = ["sysfs", "bpf"].map(|it| format!("none /sys/fs/bpf {it} rw 0 0\n"));
    let file = differs("proc/mounts", &wrong, &right);
    let cure = "mount -t bpf bpf /sys/fs/bpf";
    seen.file(("host", "bpf-filesystem"), file, cure);

    let locked = |limit: &str| format!("Max locked memory  {limit}  {limit}  bytes\n");
    let (wrong, right) = (locked("65536"), locked("unlimited"));
    let file = differs("proc/self/limits", &wrong, &right);
    seen.file(("host", "memlock"), file, "LimitMEMLOCK=infinity");

    // There is none. A directory of this machine may have no room.
    let made = Made::new();
    let found = look(&made, "host", "shared-memory");
    let cure = "mount -t tmpfs tmpfs /dev/shm";
    seen.complains("host", "shared-memory", &found, cure);
    let cure = "mount -o remount,size=50% /dev/shm";
    let narrow = host::room((64 << 20) - 1);
    seen.complains("host", "shared-memory", &narrow, cure);
    seen.is_content("host", "shared-memory", &host::room(64 << 20));

    made.file("etc/vnplug.toml", "pool_dir = \"/mnt/huge\"\n");
    made.file("proc/mounts", "none /mnt/huge hugetlbfs rw 0 0\n");
    let huge = |all: u32, free: u32| {
        let text = format!("HugePages_Total: {all}\nHugePages_Free: {free}\n");
        made.file("proc/meminfo", &text);
        look(&made, "host", "huge-pages")
    };
    for (all, cure) in [(0, "vm.nr_hugepages=32"), (8, "vm.nr_hugepages=40")] {
        seen.complains("host", "huge-pages", &huge(all, 0), cure);
    }
    seen.is_content("host", "huge-pages", &huge(8, 8));
}

fn of_machines(seen: &mut Seen) {
    let made = Made::new();
    made.file("proc/17/comm", "qemu-system-x86\n");
    let ports = |count: usize| {
        let each = "-device\0pcie-root-port,id=p\0".repeat(count);
        let line = format!("qemu-system-x86_64\0-M\0q35\0{each}");
        made.file("proc/17/cmdline", &line);
        look(&made, "qemu", "vm-root-ports")
    };
    let cure = "-device pcie-root-port";
    seen.complains("qemu", "vm-root-ports", &ports(1), cure);
    seen.is_content("qemu", "vm-root-ports", &ports(2));
}

fn of_both(seen: &mut Seen) {
    let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let file = differs(clock, "acpi_pm\n", "tsc\n");
    seen.file(("both", "clock"), file, "echo tsc >/sys/devices/system");
    let file = missing("dev/net/tun", "");
    seen.file(("both", "tun"), file, "modprobe tun");

    let made = Made::new();
    let cpu = |cpu: u32, shared: &str| {
        let dir = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3");
        made.file(&format!("{dir}/shared_cpu_list"), shared);
        look(&made, "both", "cpus")
    };
    seen.is_content("both", "cpus", &cpu(0, "0-1\n"));
    seen.complains("both", "cpus", &cpu(2, "2-3\n"), "cpus=");

    let isolated = |allowed: &str| {
        let made = Made::new();
        made.file(
            "sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
            "0-7\n",
        );
        made.file("sys/devices/system/cpu/isolated", "2-3,6\n");
        made.file("proc/9/comm", "vnplugd\n");
        let text = format!("Cpus_allowed_list:\t{allowed}\n");
        made.file("proc/9/task/10/status", &text);
        look(&made, "both", "cpus").text
    };
    for elsewhere in ["0-7", "4"] {
        let said = isolated(elsewhere);
        assert!(said.contains("isolated: 2-3,6, without"), "{said}");
    }
    let said = isolated("3");
    assert!(said.contains("isolated: 2-3,6, with 1 threads"), "{said}");

    let made = Made::new();
    let local = "etc/apparmor.d/local/abstractions/libvirt-qemu";
    made.file("sys/module/apparmor/parameters/enabled", "Y\n");
    made.file("usr/sbin/apparmor_parser", "");
    made.file("etc/apparmor.d/abstractions/libvirt-qemu", "");
    let apparmor = |text: &str| {
        made.file(local, text);
        look(&made, "both", "apparmor")
    };
    let cure = format!("cat /usr/share/vnplug/apparmor/libvirt-qemu >>/{local}");
    seen.complains("both", "apparmor", &apparmor(""), &cure);
    seen.is_content("both", "apparmor", &apparmor("/dev/shm/vnplug-* rw,\n"));
}

fn of_guests(seen: &mut Seen) {
    let attach = "vnplug attach qemu --name NAME";
    let file = missing("dev/mmapper", "");
    seen.file(("guest", "memory"), file, attach);
    let port = "sys/class/virtio-ports/vport1p1/name";
    let file = missing(port, "org.vnplug.control\n");
    seen.file(("guest", "channel"), file, attach);

    let made = Made::new();
    let pci = |device: &str| {
        let slot = "sys/bus/pci/devices/0000:00:05.0";
        made.file(&format!("{slot}/vendor"), "0x1af4\n");
        made.file(&format!("{slot}/device"), device);
    };
    pci("0x105b\n");
    let unbound = look(&made, "guest", "memory");
    seen.complains("guest", "memory", &unbound, "modprobe -a virtio_pmem");
    pci("0x1110\n");
    seen.is_content("guest", "memory", &look(&made, "guest", "memory"));

    let lockdown = |modes: &str| {
        made.file("sys/kernel/security/lockdown", modes);
        look(&made, "guest", "lockdown")
    };
    let locked = lockdown("none [integrity] confidentiality\n");
    let cure = "on the host run `vnplug attach qemu` for it again";
    seen.complains("guest", "lockdown", &locked, cure);
    let open = lockdown("[none] integrity confidentiality\n");
    seen.is_content("guest", "lockdown", &open);

    let doorbell = || look(&made, "guest", "doorbell");
    seen.is_content("guest", "doorbell", &doorbell());
    made.file("sys/class/iommu/dmar0/x", "");
    seen.complains("guest", "doorbell", &doorbell(), "modprobe vfio-pci");
    made.file("sys/bus/pci/drivers/vfio-pci/x", "");
    seen.is_content("guest", "doorbell", &doorbell());
}

fn of_links(seen: &mut Seen) {
    let of = "interface";
    let link = |up, running| Link {
        index: 2,
        hardware: 1,
        mac: [2; 6],
        mtu: 1500,
        up,
        running,
    };
    let absent = io::Error::from(io::ErrorKind::NotFound);
    for (told, cure) in [
        (Err(absent), "ip netns"),
        (Ok(link(false, false)), "ip link set eth1 up"),
        (Ok(link(true, false)), "look at the cable"),
    ] {
        let found = interface::link("eth1", told, None);
        seen.complains(of, "link-eth1", &found, cure);
    }
    let well = interface::link("eth1", Ok(link(true, true)), Some(1000));
    assert!(well.text.contains("1000 Mb/s"), "{well:?}");
    seen.is_content(of, "link-eth1", &well);

    let statistics = "sys/class/net/eth1/statistics";
    for figure in ["rx_missed_errors", "rx_fifo_errors"] {
        let path = format!("{statistics}/{figure}");
        let file = differs(&path, "3\n", "0\n");
        seen.file((of, "missed-eth1"), file, "ethtool -S eth1");
    }
    let file = differs("sys/class/net/eth1/mtu", "1280\n", "1500\n");
    seen.file((of, "mtu-eth1"), file, "ip link set eth1 mtu 1500");
    let made = Made::new();
    made.file("sys/class/net/eth1/mtu", "1500\n");
    made.file(&format!("{statistics}/rx_length_errors"), "3\n");
    let cut = look(&made, of, "mtu-eth1");
    seen.complains(of, "mtu-eth1", &cut, "ip link set eth1 mtu 9000");
}

fn of_packets_of_an_interface(seen: &mut Seen) {
    let of = "interface";
    for (gro, lro, cure) in [
        (Some(true), false, "ethtool -K eth1 gro off"),
        (Some(true), true, "ethtool -K eth1 lro off"),
        (None, true, "ethtool -K eth1 lro off"),
    ] {
        let found = interface::merging("eth1", gro, lro);
        seen.complains(of, "merging-eth1", &found, cure);
    }
    let merging = |gro| interface::merging("eth1", gro, false);
    seen.is_content(of, "merging-eth1", &merging(Some(false)));
    assert_eq!(merging(None).state, State::Skipped);

    let tags = |are_stripped| interface::vlan_tags("eth1", are_stripped);
    let cure = "ethtool -K eth1 rxvlan off";
    seen.complains(of, "vlan-tags-eth1", &tags(true), cure);
    seen.is_content(of, "vlan-tags-eth1", &tags(false));

    let ring = |slots| interface::ring_size("eth1", slots);
    let cure = "ethtool -G eth1 rx 4096";
    seen.complains(of, "ring-size-eth1", &ring(Some((256, 4096))), cure);
    seen.is_content(of, "ring-size-eth1", &ring(Some((4096, 4096))));
    assert_eq!(ring(None).state, State::Skipped);

    let rss = |key: [u8; 4], fields| {
        let how = Spreading {
            key: key.to_vec(),
            function: 1,
            transform: 0,
        };
        interface::symmetry("eth1", &how, fields)
    };
    let cure = "ethtool -X eth1 hkey";
    seen.complains(of, "rss-eth1", &rss([1, 2, 3, 4], None), cure);
    let cure = "ethtool -N eth1 rx-flow-hash";
    seen.complains(of, "rss-eth1", &rss([1, 2, 1, 2], Some(0x10)), cure);
    seen.is_content(of, "rss-eth1", &rss([1, 2, 1, 2], None));

    let shown = |more: &str| {
        let links = format!("[{{\"ifname\":\"eth1\"{more}}}]");
        interface::programs("eth1", links.as_bytes())
    };
    let taken = shown(",\"xdp\":{\"prog\":{\"id\":7}}");
    seen.complains(of, "xdp-eth1", &taken, "ip link set eth1 xdp off");
    seen.is_content(of, "xdp-eth1", &shown(""));
}

fn of_who_answers(seen: &mut Seen) {
    for server in ["daemon", "agent"] {
        let refused = |is_permission| {
            let text = "nobody listens".to_owned();
            let refusal = live::Refusal {
                text,
                is_permission,
            };
            live::unanswered(server, "/run/x.sock", &refusal)
        };
        let start = match server {
            "daemon" => "systemctl start vnplugd",
            _ => "systemctl start vnplug-agent",
        };
        let found = refused(false);
        assert!(found.text.contains("nobody listens"), "{found:?}");
        seen.complains("live", server, &found, start);
        let found = refused(true);
        assert!(found.text.contains("may not open /run/x.sock"), "{found:?}");
        seen.complains("live", server, &found, "usermod -aG vnplug");
        seen.is_content("live", server, &live::answered("vnplugd 1", "/run/x.sock"));
    }
    let device = |name: &str, state: &str| Device {
        name: name.into(),
        state: state.into(),
        ..Device::default()
    };
    let devices = [device("host:a", "up"), device("host:b", "failed")];
    for (role, cure) in [
        (Role::Host, "vnplug source add eth1"),
        (Role::Guest, "vnplug grant add vm:NAME=SOURCE"),
    ] {
        seen.complains("live", "sources", &live::sources(role, &[]), cure);
        let found = live::sources(role, &devices);
        assert!(found.text.contains("host:b is failed"), "{found:?}");
        seen.complains("live", "sources", &found, "vnplug stats");
        seen.is_content("live", "sources", &live::sources(role, &devices[..1]));
    }
    let vm = |state: &str| labelled(counted("vm", "probe", &[]), &[("state", state)]);
    for (state, cure) in [
        ("waiting", "systemctl start vnplug-agent"),
        ("locked-down", "vnplug attach qemu"),
    ] {
        let found = live::guests(&[vm(state)]);
        assert!(found.text.contains("probe"), "{found:?}");
        seen.complains("live", "guests", &found, cure);
    }
    seen.is_content("live", "guests", &live::guests(&[vm("ready")]));
}

fn of_counters(seen: &mut Seen) {
    let source = |dropped: u64| counted("source", "eth1", &[("kernel_dropped", dropped)]);
    seen.complains("live", "loss", &live::loss(&[source(2)]), "cpus=");
    let slow = counted("port", "3", &[("dropped_full", 1)]);
    let found = live::loss(&[source(0), slow]);
    assert!(found.text.contains("too slow"), "{found:?}");
    seen.complains("live", "loss", &found, "--ring");
    let liar = counted("port", "4", &[("dropped_quarantine", 7)]);
    let found = live::loss(&[source(0), liar]);
    assert!(
        found.text.contains("port 4 lost 7 in quarantine"),
        "{found:?}"
    );
    seen.complains("live", "loss", &found, "start it again");
    seen.is_content("live", "loss", &live::loss(&[source(0)]));

    // What a source had to hand over, and what became of it.
    let books = |duties: u64| {
        let values = [
            ("duties", duties),
            ("departed_offered", 4),
            ("departed_accounted", 4),
        ];
        let source = counted("source", "eth1", &values);
        let port = counted("port", "3", &[("offered", 6)]);
        [source, labelled(port, &[("device", "host:eth1")])]
    };
    let open = live::closing(&books(11));
    assert!(open.text.contains("eth1 differs by 1"), "{open:?}");
    seen.complains("live", "accounts", &open, "vnplug stats");
    let closed = live::closing(&books(10));
    assert!(closed.text.contains("all 2 close"), "{closed:?}");
    seen.is_content("live", "accounts", &closed);
    // Who sees none is told nothing of them.
    assert_eq!(live::closing(&[]).state, State::Skipped);

    let before = wire(100, 0, &[("offered", 50), ("delivered", 50)], "");
    let traffic = |later: &[Counted]| traffic::counted(&[(eth1(), 10)], &before, later);
    let healthy = [("offered", 60), ("delivered", 60)];
    let stops = traffic(&wire(100, 0, &healthy, ""));
    seen.complains("live", "traffic", &stops, "journalctl -u vnplugd");
    seen.is_content("live", "traffic", &traffic(&wire(110, 0, &healthy, "")));
}
