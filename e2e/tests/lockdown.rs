//! A guest whose kernel is locked down, as with Secure Boot, may not map a PCI memory. It gets the host's packets
//! through a virtio-pmem device.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use vnplug_e2e::attached::{image, plug, summary};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::{Guest, Lab, Machine, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, eventually, until};

/// What `attach` says of a guest that is locked down.
const CHOSEN: &str = "memory: virtio-pmem, for the guest's kernel is locked down";
/// What the guest's kernel makes a /dev/dax with.
const MODULES: [&str; 4] = ["virtio_pmem", "nd_pmem", "dax_pmem", "device_dax"];

fn boot(lab: &Lab, kernel_args: &[&str]) -> Guest {
    let config = QemuConfig {
        image: MODULES
            .into_iter()
            .fold(image().unwrap(), vnplug_e2e::Image::module),
        kernel_args: kernel_args.iter().map(|&it| it.to_owned()).collect(),
        qemu_args: ["-m", "256M,maxmem=2G"].map(str::to_owned).to_vec(),
        ..QemuConfig::default()
    };
    Qemu::boot(lab, config).unwrap_or_else(|error| panic!("{error}"))
}

fn say(guest: &Guest, command: &str) -> (i32, String) {
    let said = guest.run(command, PATIENCE).unwrap();
    (said.status, said.text())
}

/// An application that is not root reads `packets`: all are there, and whole.
fn count(guest: &Guest, packets: u32) {
    let command = format!(
        "su -s /bin/sh nobody -c 'vnplug count host:lab --packets {packets} --ring 2M --witness --json' 2>&1"
    );
    let (status, text) = say(guest, &command);
    assert_eq!(status, 0, "{text}");
    let summary = summary(&text).unwrap();
    assert_eq!(summary["lost"], 0, "{text}");
    assert_eq!(summary["witness"]["perfect"], true, "{text}");
}

fn delivered(daemon: &Daemon) -> u64 {
    let counters = daemon.audit();
    let ports = counters.iter().filter(|it| it.kind == "port");
    ports.map(|it| value(it, "delivered")).sum()
}

fn is_reached(guest: &Guest) {
    let list = || say(guest, "vnplug list 2>&1");
    until("the agent reaches the host", list, |(status, _)| {
        *status == 0
    });
}

#[test]
fn a_locked_down_guest_reads_through_virtio_pmem_and_not_through_ivshmem() {
    let lab = Lab::new().unwrap();
    let source = ["--source", "lab=gen,pps=2000,size=200"];
    let mut daemon = Daemon::start(&lab, None, &source).unwrap();
    let guest = boot(&lab, &["lockdown=integrity"]);
    say(
        &guest,
        "echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd; mount -t securityfs none /sys/kernel/security",
    );
    let (_, mode) = say(&guest, "cat /sys/kernel/security/lockdown");
    assert!(mode.contains("[integrity]"), "{mode}");
    let qmp = guest.qmp_path().unwrap();
    let detach = [
        "detach",
        "qemu",
        "--name",
        "vm",
        "--qmp",
        qmp.to_str().unwrap(),
    ];

    // The control: memory of the other kind is refused by this kernel, and it is said what helps.
    plug(&daemon, &guest, "vm", &["--pool", "4M"]).unwrap();
    let agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    until(
        "the agent says why it maps nothing",
        || agent.peek(4096).unwrap_or_default(),
        |said| said.contains("locked down") && said.contains("--memory pmem"),
    );
    let (status, text) = say(&guest, "vnplug list 2>&1");
    assert!(status != 0 && text.contains("--memory pmem"), "{text}");
    let (_, text) = say(&guest, "vnplug doctor --role guest 2>&1");
    assert!(
        text.contains("--memory pmem") && text.contains("maxmem"),
        "{text}"
    );
    eventually("the host knows", || {
        label(counted(&daemon.audit(), "vm"), "state") == "locked-down"
    });
    let doctor = daemon.vnplug(&["doctor"]).1;
    assert!(
        doctor.contains("the kernel of vm is locked down"),
        "{doctor}"
    );

    // Asked again, it takes out what the guest cannot map, and plugs what it can: also if the agent has fallen silent.
    agent.signal("KILL").unwrap();
    drop(agent);
    let auto = ["--pool", "4M", "--wait", "0s"];
    let said = plug(&daemon, &guest, "vm", &auto).unwrap();
    assert!(said.contains(CHOSEN), "{said}");
    let _agent = guest.spawn("exec vnplug agent 2>&1").unwrap();

    // The agent and the guest are the same.
    assert!(said.contains("pool of 4 MiB"), "{said}");
    is_reached(&guest);
    count(&guest, 4_000);
    let (_, text) = say(&guest, "vnplug doctor --role guest 2>&1");
    assert!(
        text.contains("/dev/dax0.0 is this guest's shared memory"),
        "{text}"
    );

    // Another daemon finds the pool again, and a reader goes on.
    let reader = guest
        .spawn("exec vnplug count host:lab --ring 1M --json 2>&1")
        .unwrap();
    eventually("it reads", || delivered(&daemon) > 100);
    daemon.kill();
    daemon.launch().unwrap();
    eventually("it reads again", || delivered(&daemon) > 100);

    // It is let go, not unplugged: the daemon forgets it, its memory is free, and nobody is reached by it.
    let pool = said.split(['(', ')']).nth(1).unwrap();
    assert!(Path::new(pool).exists(), "{said}");
    let (code, text) = daemon.vnplug(&detach);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("vnplug-vm-pmemdev0 stays"), "{text}");
    assert!(daemon.audit().iter().all(|it| it.kind != "vm"));
    assert!(!Path::new(pool).exists());
    let list = || say(&guest, "vnplug list 2>&1").0;
    until("the guest has let go", list, |status| *status != 0);

    // Again, beside the one that stayed, in one go. The reader opens its port again.
    let said = plug(&daemon, &guest, "vm", &auto).unwrap();
    let as_before = "memory: virtio-pmem, which this machine had before";
    assert!(said.contains(as_before), "{said}");
    is_reached(&guest);
    count(&guest, 1_000);
    let ports = || {
        let counters = daemon.audit();
        value(counted(&counters, "vm"), "pool_free")
    };
    eventually("the reader is back", || ports() < (4 << 20) - 4096);
    reader.signal("INT").unwrap();
    let output = reader.wait(PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{}", output.text());
    assert_eq!(
        summary(&output.text()).unwrap()["reopened"],
        2,
        "{}",
        output.text()
    );
    daemon.audit();
}

/// The control: a kernel that is not locked down keeps what can be unplugged, room for the other kind or not.
#[test]
fn a_guest_that_is_not_locked_down_gets_ivshmem() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=2000,size=200"]).unwrap();
    let guest = boot(&lab, &[]);
    let _agent = guest.spawn("exec vnplug agent").unwrap();
    let said = plug(&daemon, &guest, "vm", &["--pool", "4M", "--wait", "60s"]).unwrap();
    assert!(
        said.contains("memory: ivshmem, which the guest has mapped"),
        "{said}"
    );
    assert!(!said.contains("virtio-pmem"), "{said}");
    let (status, text) = say(&guest, "vnplug count host:lab --packets 100 --ring 1M");
    assert_eq!(status, 0, "{text}");
}

/// Without room for virtio-pmem, and with an IOMMU: the same memory as ever, mapped by VFIO.
#[test]
fn a_locked_down_guest_with_an_iommu_reads_through_vfio() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=2000,size=200"]).unwrap();
    let config = QemuConfig {
        machine: Machine::Q35 { root_ports: 3 },
        iommu: true,
        image: image().unwrap(),
        kernel_args: vec!["lockdown=integrity".to_owned()],
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    say(
        &guest,
        "echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd; mount -t securityfs none /sys/kernel/security",
    );
    let (_, mode) = say(&guest, "cat /sys/kernel/security/lockdown");
    assert!(mode.contains("[integrity]"), "{mode}");
    let agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    let auto = ["--pool", "4M", "--wait", "60s"];
    let said = plug(&daemon, &guest, "vm", &auto).unwrap();
    assert!(said.contains("ivshmem through the guest's VFIO"), "{said}");
    let mapped = "memory: ivshmem, which the guest has mapped through VFIO";
    assert!(said.contains(mapped), "{said}");
    count(&guest, 4_000);
    let (_, text) = say(&guest, "vnplug doctor --role guest 2>&1");
    assert!(text.contains("vfio-pci has the memory"), "{text}");

    // Another agent finds it while an application has it, and so does another daemon's pool after a detach, for which the
    // kernel waits until nobody has it.
    let reader = guest
        .spawn("exec vnplug count host:lab --ring 1M --json 2>&1")
        .unwrap();
    eventually("it reads", || delivered(&daemon) > 100);
    agent.signal("KILL").unwrap();
    let _agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    is_reached(&guest);
    let before = delivered(&daemon);
    eventually("it reads again", || delivered(&daemon) > before + 100);
    let qmp = guest.qmp_path().unwrap();
    let vm = ["--name", "vm", "--qmp", qmp.to_str().unwrap()];
    let (code, text) = daemon.vnplug(&[&["detach", "qemu"][..], &vm].concat());
    assert_eq!(code, Some(0), "{text}");
    plug(&daemon, &guest, "vm", &auto).unwrap();
    is_reached(&guest);
    eventually("it reads once more", || delivered(&daemon) > 100);
    reader.signal("INT").unwrap();
    let output = reader.wait(PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{}", output.text());
    daemon.audit();
}

/// With `VNPLUG_LONG=1`: what one reader gets of a sender that does its utmost, by both kinds in turn.
#[test]
fn both_kinds_are_read_in_turn() {
    if std::env::var_os("VNPLUG_LONG").is_none() {
        return;
    }
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=1000"]).unwrap();
    let guest = boot(&lab, &[]);
    let qmp = guest.qmp_path().unwrap();
    let detach = [
        "detach",
        "qemu",
        "--name",
        "vm",
        "--qmp",
        qmp.to_str().unwrap(),
    ];
    let _agent = guest.spawn("exec vnplug agent").unwrap();
    for _ in 0..5 {
        for kind in ["ivshmem", "pmem"] {
            plug(&daemon, &guest, "vm", &["--memory", kind, "--pool", "32M"]).unwrap();
            is_reached(&guest);
            // A witness reads every byte, and says by 3 that some were lost.
            let count = "vnplug count host:lab --seconds 3 --ring 16M --witness --json 2>&1";
            let (status, text) = say(&guest, count);
            assert_eq!(status, 3, "{text}");
            let rate = &summary(&text).unwrap()["packets_per_second"];
            eprintln!("{kind}: {rate} packets of 1,000 bytes per second");
            let (code, text) = daemon.vnplug(&detach);
            assert_eq!(code, Some(0), "{text}");
            let list = || say(&guest, "vnplug list 2>&1").0;
            until("the guest has let go", list, |status| *status != 0);
        }
    }
}
