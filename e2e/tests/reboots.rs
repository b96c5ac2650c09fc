//! What is there again, without a hand, when a guest or its host has booted.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vnplug::Client;
use vnplug_e2e::attached::{agent, everything, image, plug, summary};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_e2e::{Guest, Lab, Qemu, QemuConfig};
use vnplug_ring::control::{VIRTIO_PORT_NAME, VmKind, VmReady, VmSpec};
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

fn empty(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let removed = fs::remove_file(&path);
        removed.or_else(|_| fs::remove_dir_all(&path)).unwrap();
    }
}

/// The host boots: nothing of a daemon that was killed is left in memory, and the record of a VM is of another boot.
fn boot(daemon: &Daemon, record: &Path) {
    fs::remove_file(daemon.socket()).unwrap();
    empty(daemon.pools());
    let text = fs::read_to_string(record).unwrap();
    let boot = text.lines().find(|line| line.starts_with("boot = "));
    let other = text.replace(boot.unwrap(), "boot = \"another\"");
    fs::write(record, other).unwrap();
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
    empty(&run);
    let record = state.join("vms/probe.toml");
    boot(&daemon, &record);
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

/// What libvirt tells QEMU of a domain's definition with these devices in it.
fn defined(ready: &VmReady) -> Vec<String> {
    let VmReady {
        pool_path,
        pool_len,
        control_path,
        ..
    } = ready;
    let words = [
        "-object".to_owned(),
        format!("memory-backend-file,id=shm,share=on,mem-path={pool_path},size={pool_len}"),
        "-device".to_owned(),
        "ivshmem-plain,memdev=shm".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=control,path={control_path},reconnect=1"),
        "-device".to_owned(),
        "virtio-serial-pci,id=serial".to_owned(),
        "-device".to_owned(),
        format!("virtserialport,bus=serial.0,chardev=control,name={VIRTIO_PORT_NAME}"),
    ];
    words.to_vec()
}

#[test]
fn a_machine_with_the_devices_in_its_definition_reads_after_a_boot_of_the_host() {
    let lab = Lab::new().unwrap();
    let state = lab.dir().join("state");
    let config = format!(
        "state_dir = \"{}\"\n[[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 2000\n",
        state.display()
    );
    let config = open_to_all(&lab, &config);
    let mut daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Qemu,
        pool_bytes: 16 << 20,
        vectors: 0,
        allow: everything(),
        owner: 9,
        groups: Vec::new(),
        stays_for: Some(USER),
    };
    let attach = |daemon: &Daemon| {
        let mut client = Client::connect_to(&daemon.socket()).unwrap();
        client.attach_vm(spec.clone()).unwrap()
    };
    let ready = attach(&daemon);
    let record = state.join("vms/probe.toml");
    daemon.kill();
    boot(&daemon, &record);
    daemon.launch().unwrap();
    assert_eq!(label(counted(&daemon.audit(), "vm"), "state"), "waiting");
    let pool = ready.pool_path.clone();
    let open = move || fs::File::options().read(true).write(true).open(pool);
    as_user(open).expect("QEMU's user may have it");
    let mode = fs::metadata(&ready.pool_path).unwrap().mode();
    assert_eq!(mode & 0o007, 0, "others may not");
    let config = QemuConfig {
        image: image().unwrap(),
        qemu_args: defined(&ready),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    let _job = agent(&guest).unwrap();
    reads(&guest);
    guest.kill();

    // The control: a machine that is started before the daemon makes the file itself, and what is in it nobody reads.
    daemon.kill();
    boot(&daemon, &record);
    let file = fs::File::create(&ready.pool_path).unwrap();
    file.set_len(ready.pool_len).unwrap();
    std::os::unix::fs::chown(&ready.pool_path, Some(USER), None).unwrap();
    daemon.launch().unwrap();
    assert_eq!(label(counted(&daemon.audit(), "vm"), "state"), "broken");
    let log = daemon.log();
    assert!(
        log.contains("was started before the daemon: attach it again"),
        "{log}"
    );
    assert_ne!(attach(&daemon).pool_path, ready.pool_path);
    assert_ne!(label(counted(&daemon.audit(), "vm"), "state"), "broken");
}
