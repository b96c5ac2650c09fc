//! Readers in a QEMU guest woken by interrupts: `ivshmem-doorbell` through VFIO.

use serde_json::json;
use vnplug_e2e::attached::summary;
use vnplug_e2e::daemon::{Daemon, counted, guest_program, value};
use vnplug_e2e::{Guest, Image, Job, Lab, Machine, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, until};

/// A daemon with one source, and a guest that runs an agent, with a doorbell of 8 vectors.
struct Attached {
    daemon: Daemon,
    guest: Guest,
    agent: Job,
    _lab: Lab,
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
impl Attached {
    fn boot(iommu: bool) -> Self {
        let lab = Lab::new().unwrap();
        let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000,run=5"]).unwrap();
        let config = QemuConfig {
            machine: Machine::Q35 { root_ports: 3 },
            iommu,
            image: Image::default().file(guest_program().unwrap(), "/bin/vnplug", 0o755),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
        cli(&daemon, &guest, "attach", ATTACH);
        let agent = guest
            .spawn("VNPLUG_LOG=debug exec vnplug agent 2>&1")
            .unwrap();
        let attached = Self {
            daemon,
            guest,
            agent,
            _lab: lab,
        };
        attached.meets_the_host();
        attached
    }

    fn meets_the_host(&self) {
        self.eventually("the agent serves applications", || {
            self.guest.run("vnplug list", PATIENCE).unwrap().success()
        });
    }

    fn log(&self) -> String {
        self.agent.peek(1 << 16).unwrap_or_default()
    }

    /// The VM's counter of this name.
    fn counter(&self, name: &str) -> u64 {
        value(counted(&self.daemon.audit(), "vm"), name)
    }

    fn ports(&self) -> usize {
        let counters = self.daemon.audit();
        counters.iter().filter(|it| it.kind == "port").count()
    }

    fn eventually(&self, what: &str, mut done: impl FnMut() -> bool) {
        let look = || (done(), self.log(), self.guest.console_tail(20));
        until(what, look, |(is_done, ..)| *is_done);
    }

    /// Counts packets in the guest; all must arrive, once, in order, intact.
    fn counts_perfectly(&self, packets: u32) {
        let command = format!("vnplug count host:lab --packets {packets} --witness --json 2>&1");
        let text = self.guest.run(&command, PATIENCE).unwrap().text();
        let (summary, log) = (summary(&text).unwrap(), self.log());
        let witness = &summary["witness"];
        assert_eq!(summary["lost"], 0, "{text}\n{log}");
        assert_eq!(witness["perfect"], true, "{text}\n{log}");
        assert_eq!(witness["received"], packets, "{text}\n{log}");
    }
}

const ATTACH: &[&str] = &["--allow", "*", "--doorbell", "8"];

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn cli(daemon: &Daemon, guest: &Guest, verb: &str, more: &[&str]) {
    let qmp = guest.qmp_path().unwrap();
    let args = [verb, "qemu", "--name", "vm", "--qmp", qmp.to_str().unwrap()];
    let (code, text) = daemon.vnplug(&[&args[..], more].concat());
    let console = guest.console_tail(20);
    let qemu = std::fs::read_to_string(guest.dir().join("qemu.log")).unwrap_or_default();
    assert_eq!(code, Some(0), "{verb}: {text}\n{qemu}\n{console}");
}

#[test]
fn each_reader_has_a_vector_of_its_own() {
    let vm = Attached::boot(true);
    let log = vm.log();
    assert!(log.contains("8 vectors, the host answers in"), "{log}");
    assert_eq!(vm.counter("doorbell_vectors_heard"), 8);
    assert!(vm.counter("doorbell_from_guest") >= 9);

    let before = vm.counter("doorbell_to_guest");
    vm.counts_perfectly(3_000);
    let raised = vm.counter("doorbell_to_guest") - before;
    assert!(raised > 10, "{raised} interrupts");
    assert!(vm.log().contains("vector 0 wakes port"), "{}", vm.log());

    // Two at once: each wakes by interrupts of its own.
    let read = "exec vnplug count host:lab --ring 16M --json 2>&1";
    let readers = [vm.guest.spawn(read).unwrap(), vm.guest.spawn(read).unwrap()];
    vm.eventually("both ports are there", || vm.ports() == 2);
    vm.eventually("both vectors were raised", || {
        let list = vm.guest.run("grep vfio-msix /proc/interrupts", PATIENCE);
        let text = list.unwrap().text();
        let counts = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
        let counts: Vec<_> = text.lines().filter_map(counts).collect();
        counts.len() == 2 && counts.iter().all(|count| count != "0")
    });
    for reader in readers {
        reader.signal("INT").unwrap();
        let text = reader.wait(PATIENCE).unwrap().text();
        assert_eq!(summary(&text).unwrap()["lost"], 0, "{text}");
    }
}

#[test]
#[ignore = "QEMU 7.2 without KVM may crash when a doorbell in use is unplugged (it frees eventfds \
            that it still watches): run this where KVM works"]
fn readers_go_on_when_the_doorbell_is_unplugged() {
    let vm = Attached::boot(true);
    let read = "exec vnplug count host:lab --ring 16M --json 2>&1";
    let readers = [vm.guest.spawn(read).unwrap(), vm.guest.spawn(read).unwrap()];
    vm.eventually("both ports are there", || vm.ports() == 2);

    // The doorbell alone is unplugged: the guest lets go of it, the readers open again.
    let mut qmp = vm.guest.qmp().unwrap();
    qmp.execute("device_del", json!({ "id": "vnplug-vm-bell" }))
        .unwrap();
    qmp.wait_event("DEVICE_DELETED", PATIENCE).unwrap();
    assert_eq!(vm.counter("doorbell_vectors_heard"), 0);
    vm.eventually("both ports are back", || vm.ports() == 2);
    for reader in readers {
        reader.signal("INT").unwrap();
        let text = reader.wait(PATIENCE).unwrap().text();
        assert_eq!(summary(&text).unwrap()["reopened"], 1, "{text}");
    }
    vm.counts_perfectly(1_000);
    cli(&vm.daemon, &vm.guest, "detach", &[]);
}

#[test]
fn a_restarted_daemon_wakes_over_the_channel() {
    let mut vm = Attached::boot(true);
    vm.daemon.kill();
    vm.daemon.launch().unwrap();
    vm.eventually("the agent tries the doorbell", || {
        vm.log().contains("the host does not answer it")
    });
    vm.meets_the_host();
    assert_eq!(vm.counter("doorbell_vectors_heard"), 0);
    vm.counts_perfectly(1_000);
}

#[test]
fn without_an_iommu_the_agent_says_why_and_uses_the_channel() {
    let vm = Attached::boot(false);
    let log = vm.log();
    assert!(
        log.contains("the VM has no IOMMU in use") && log.contains("intremap=on"),
        "{log}"
    );
    assert_eq!(vm.counter("doorbell_vectors_heard"), 0);
    vm.counts_perfectly(2_000);
    assert_eq!(vm.counter("doorbell_to_guest"), 0);
    cli(&vm.daemon, &vm.guest, "detach", &[]);
}
