//! What is there again, without a hand, when a guest or its host has booted.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vnplug_e2e::attached::{agent, image, plug, summary};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_e2e::{Guest, Lab, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, eventually, until};

/// How long a guest may take to boot where it is emulated.
const BOOT: Duration = Duration::from_secs(120);

/// Reads numbered packets in the guest, none of which is lost.
fn reads(guest: &Guest) {
    let count = "vnplug count host:lab --packets 2000 --witness --json 2>&1";
    let said = guest.run(count, PATIENCE).unwrap();
    assert!(said.success(), "{}", said.text());
    let summary = summary(&said.text()).unwrap();
    assert!(summary["packets"].as_u64() >= Some(2000), "{summary}");
    assert_eq!(summary["lost"].as_u64(), Some(0), "{summary}");
}

#[test]
fn a_guest_that_boots_again_reads_again_and_nothing_is_done_on_the_host() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=2000"]).unwrap();
    let config = QemuConfig {
        image: image().unwrap(),
        reboots: true,
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    plug(&daemon, &guest, "probe", &[]).unwrap();
    // As init starts it, before and after.
    let _job = agent(&guest).unwrap();
    reads(&guest);
    let held = guest.spawn("exec vnplug count host:lab").unwrap();
    until("its port is there", || ports(&daemon), |count| *count == 1);
    guest.reboot(BOOT).unwrap_or_else(|error| panic!("{error}"));
    // What ran in it has no port any more once its agent says Hello again.
    let _job = agent(&guest).unwrap();
    until("its port is gone", || ports(&daemon), |count| *count == 0);
    reads(&guest);
    drop(held);
    // And with another daemon meanwhile.
    daemon.kill();
    guest.reboot(BOOT).unwrap_or_else(|error| panic!("{error}"));
    daemon.launch().unwrap();
    let _job = agent(&guest).unwrap();
    reads(&guest);
    let vms: Vec<_> = daemon
        .audit()
        .into_iter()
        .filter(|it| it.kind == "vm")
        .collect();
    assert_eq!(vms.len(), 1);
}

fn ports(daemon: &Daemon) -> usize {
    let all = daemon.audit();
    all.iter().filter(|it| it.kind == "port").count()
}

#[test]
fn after_a_boot_of_the_host_everything_is_there_again_from_its_files() {
    let lab = Lab::new().unwrap();
    let run = lab.dir().join("run");
    fs::create_dir(&run).unwrap();
    let [first, second] = ["a", "b"].map(|name| run.join(name));
    let state = lab.dir().join("state");
    let config = format!(
        "state_dir = \"{}\"\n[[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 1000\n\
         [[switch]]\nname = \"lan0\"\nstream = \"{}\"\n[[allow]]\nuid = {USER}\nsource = \"lab\"\n",
        state.display(),
        first.display()
    );
    let config = open_to_all(&lab, &config);
    let mut daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let ok = |daemon: &Daemon, words: &[&str]| {
        let (code, said) = daemon.vnplug(words);
        assert_eq!(code, Some(0), "{words:?}: {said}");
        said
    };
    let entrance = format!("bess={}", second.display());
    ok(&daemon, &["switch", "set", "lan0", &entrance]);
    ok(&daemon, &["switch", "set", "lan0", "age=60"]);
    ok(&daemon, &["switch", "add", "--keep", "lan1,hub=yes"]);
    ok(&daemon, &["source", "add", "--keep", "late=gen,pps=10"]);
    ok(&daemon, &["grant", "add", &format!("uid:{USER}=late")]);
    let guest = Qemu::boot(&lab, QemuConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    plug(&daemon, &guest, "probe", &[]).unwrap();
    // The power fails: nothing ends in order, and what lay in memory is gone.
    daemon.kill();
    guest.kill();
    let socket = daemon.socket();
    let empty = |dir: &std::path::Path| {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let removed = fs::remove_file(&path);
            removed.or_else(|_| fs::remove_dir_all(&path)).unwrap();
        }
    };
    empty(&run);
    fs::remove_file(&socket).unwrap();
    empty(daemon.pools());
    let record = state.join("vms/probe.toml");
    let text = fs::read_to_string(&record).unwrap();
    let boot = text.lines().find(|line| line.starts_with("boot = "));
    let other = text.replace(boot.unwrap(), "boot = \"another\"");
    fs::write(&record, other).unwrap();
    daemon.launch().unwrap();
    let all = daemon.audit();
    let mut names: Vec<_> = all.iter().filter(|it| it.kind == "source").collect();
    names.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<_> = names.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["lab", "lan0", "lan1", "late"]);
    UnixStream::connect(&first).unwrap();
    eventually("its client has had a port", || {
        daemon.log().contains("lan0: port 1: a stream client")
    });
    assert!(second.exists());
    let shown = ok(&daemon, &["switch", "show", "lan0"]);
    assert!(shown.contains("60  (run time)"), "{shown}");
    for name in ["lab", "late"] {
        let options = daemon.port(name);
        drop(as_user(move || options.open().unwrap()));
    }
    // Its machine is not there; when it starts, it is attached as each time (`dist/vm`).
    assert!(all.iter().all(|it| it.kind != "vm") && !record.exists());
    let guest = Qemu::boot(&lab, QemuConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    plug(&daemon, &guest, "probe", &[]).unwrap();
    let vm = counted(&daemon.audit(), "vm").clone();
    assert!(label(&vm, "state") != "broken" && value(&vm, "pool_bytes") > 0);
}
