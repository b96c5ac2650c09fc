use std::fs;
use std::sync::{Arc, Barrier};

use serde_json::Value;
use vnplug::Counted;
use vnplug_testing::TestDir;

use super::check::{Check, Checked, Finding, State, run};
use super::machine::Machine;
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
        let all = run(&self.machine(), checks);
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
    made.file(lockdown, "[none] integrity confidentiality\n");
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
    let found = run(&machine, host::checks());
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
    let limits = |locked: &str| {
        format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {locked}  {locked}  bytes\n"
        )
    };
    for (locked, state) in [
        ("65536", State::Warn),
        ("unlimited", State::Ok),
        ("8589934592", State::Ok),
    ] {
        made.file("proc/self/limits", &limits(locked));
        assert_eq!(made.state(both::checks(), "memlock"), state, "{locked}");
    }
    // The daemon's limit counts, not the shell's.
    made.file("proc/17/comm", "vnplugd\n")
        .file("proc/17/limits", &limits("65536"));
    assert_eq!(made.state(both::checks(), "memlock"), State::Warn);
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

#[test]
fn where_packets_stop_is_told_from_the_wire_to_the_application() {
    let source = |seen| counted("source", "eth1", &[("seen", seen)]);
    let port = |offered, delivered, lost| {
        let values = [
            ("offered", offered),
            ("delivered", delivered),
            ("dropped_full", lost),
        ];
        counted("port", "3", &values)
    };
    let wire = |count| [("eth1".to_owned(), count)];
    let before = [source(100), port(50, 50, 0)];
    let tell = |arrived: u64, later: [Counted; 2]| {
        let found = live::traffic(&wire(arrived), &before, &later);
        (found.state, found.text)
    };
    let (state, text) = tell(10, [source(110), port(60, 60, 0)]);
    assert_eq!(state, State::Ok, "{text}");
    let (state, text) = tell(0, [source(100), port(50, 50, 0)]);
    assert!(
        state == State::Warn && text.contains("nothing comes"),
        "{text}"
    );
    let (state, text) = tell(10, [source(100), port(50, 50, 0)]);
    assert!(
        state == State::Fail && text.contains("do not reach"),
        "{text}"
    );
    let (state, text) = tell(10, [source(110), port(60, 50, 0)]);
    assert!(
        state == State::Warn && text.contains("takes none"),
        "{text}"
    );
    let (state, text) = tell(10, [source(110), port(60, 50, 10)]);
    assert!(
        state == State::Warn && text.contains("does not read"),
        "{text}"
    );
}
