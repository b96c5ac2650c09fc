//! libvirt itself, with its own QEMUs: what the pages promise of domains, and a live migration from one libvirt to another. With
//! `VNPLUG_LONG=1` the domain starts more often.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use vnplug_e2e::attached::{image, small_program, summary};
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::libvirt::{Domain, Libvirt};
use vnplug_e2e::user::open_to_all;
use vnplug_e2e::{Lab, Machine};
use vnplug_testing::{PATIENCE, eventually, until};

const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/vm/libvirt-hook");
/// What libvirt says of a domain whose monitor somebody used.
const TAINTED: &str = "custom monitor control commands issued";

/// The hook, with these options for a domain.
fn hook(host: &Libvirt, uuid: &str, options: &str) {
    let hook = host.file("/etc/libvirt/hooks/qemu.d/vnplug");
    fs::copy(HOOK, &hook).unwrap();
    fs::set_permissions(&hook, Permissions::from_mode(0o755)).unwrap();
    fs::write(host.file(&format!("/etc/vnplug/vms/{uuid}")), options).unwrap();
    // It looks for hooks when it starts.
    host.restart();
}

fn daemon(lab: &Lab, host: &Libvirt) -> Daemon {
    let config = open_to_all(
        lab,
        "[[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 1000\n",
    );
    host.daemon(lab, &["--config", &config]).unwrap()
}

fn vm(daemon: &Daemon) -> Option<String> {
    let all = daemon.audit();
    let vm = all.iter().find(|it| it.kind == "vm")?;
    assert_eq!(vm.name, "probe");
    Some(label(vm, "state").to_owned())
}

fn becomes(daemon: &Daemon, state: Option<&str>) {
    let what = format!("the daemon's VM is {state:?}");
    until(&what, || vm(daemon), |it| it.as_deref() == state);
}

/// Starts the agent, and reads numbered packets in the guest, none of which is lost.
fn reads(domain: &Domain) {
    let start = "[ -e /run/agent ] || { >/run/agent; setsid vnplug agent >/run/agent 2>&1 & }; \
                 until vnplug list >/dev/null 2>&1; do sleep 0.1; done";
    domain.run(start, PATIENCE).unwrap();
    let count = "vnplug count host:lab --packets 2000 --witness --json 2>&1";
    let said = domain.run(count, PATIENCE).unwrap();
    assert!(said.success(), "{}", said.text());
    let summary = summary(&said.text()).unwrap();
    assert!(summary["packets"].as_u64() >= Some(2000), "{summary}");
    assert_eq!(summary["lost"].as_u64(), Some(0), "{summary}");
}

fn succeeds(host: &Libvirt, words: &[&str]) -> String {
    let (code, said) = host.vnplug(words);
    assert_eq!(code, Some(0), "{words:?}: {said}");
    said
}

#[test]
fn a_domain_is_attached_by_its_hook_and_by_command_as_long_as_it_lives() {
    let lab = Lab::new().unwrap();
    let host = Libvirt::start(&lab, "host1").unwrap_or_else(|error| panic!("{error}"));
    let daemon = daemon(&lab, &host);
    let image = image().unwrap().program("/usr/sbin/qemu-ga");
    let uuid = host.define("old", Machine::Pc, &image).unwrap();
    hook(&host, &uuid, "--name probe --allow lab --pool 16M\n");
    let guest = host.boot("old").unwrap_or_else(|error| panic!("{error}"));
    becomes(&daemon, Some("connected"));
    reads(&guest);
    assert!(host.ok(&["dominfo", "old"]).contains(TAINTED));

    // libvirt comes back, and calls the hook once more.
    host.restart();
    eventually("the hook was called", || {
        host.said().contains("attached already")
    });
    reads(&guest);

    // By hand, with another name of the same domain.
    let on = |verb: &'static str| {
        [verb, "qemu", "--name", "probe", "--libvirt", &uuid].map(str::to_owned)
    };
    let on = |verb, more: &[&str]| {
        let words: Vec<_> = on(verb)
            .into_iter()
            .chain(more.iter().map(|&it| it.to_owned()))
            .collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        succeeds(&host, &words)
    };
    assert_eq!(on("detach", &[]), "probe: detached\n");
    becomes(&daemon, None);
    let said = on(
        "attach",
        &["--allow", "lab", "--pool", "16M", "--wait", "60s"],
    );
    assert!(said.contains("attached: pool of 16 MiB"), "{said}");
    reads(&guest);

    // QEMU's guest agent is asked by libvirt whether the kernel is locked down, and installs ours.
    let agent = "mount -t securityfs none /sys/kernel/security; \
                 exec qemu-ga -t /run -p $(vport org.qemu.guest_agent.0)";
    let _agent = guest.spawn(agent).unwrap();
    let ping = ["qemu-agent-command", "old", r#"{"execute": "guest-ping"}"#];
    eventually("the agent answers", || host.virsh(&ping).0 == Some(0));
    let end = "kill $(pidof vnplug); while vnplug list; do sleep 0.1; done";
    guest.run(end, PATIENCE).unwrap();
    on("detach", &[]);
    let program = small_program(&lab).unwrap().display().to_string();
    let push = ["--guest-agent", "--guest-program", &program];
    let with = ["--allow", "lab", "--pool", "16M"];
    let said = on("attach", &[&with[..], &push].concat());
    let unlocked = "memory: ivshmem, for the guest's kernel is not locked down";
    assert!(said.contains(unlocked), "{said}");
    let installed = "/usr/local/bin/vnplug is in the guest (";
    assert!(said.contains(installed), "{said}");
    // One that hangs keeps nobody for long.
    guest.run("kill -STOP $(pidof qemu-ga)", PATIENCE).unwrap();
    on("detach", &[]);
    let begun = Instant::now();
    let said = on("attach", &[&with[..], &["--wait", "0s"]].concat());
    assert!(
        said.contains("attached: ") && !said.contains(unlocked),
        "{said}"
    );
    println!("an agent that hangs: attached after {:?}", begun.elapsed());

    // It ends, is renamed, and starts.
    host.ok(&["destroy", "old"]);
    drop(guest);
    becomes(&daemon, None);
    host.ok(&["domrename", "old", "new"]);
    let guest = host.boot("new").unwrap_or_else(|error| panic!("{error}"));
    becomes(&daemon, Some("connected"));
    reads(&guest);

    // Its QEMU is killed.
    let pid = fs::read_to_string(host.file("/run/libvirt/qemu/new.pid")).unwrap();
    let killed = host.command("kill").args(["-KILL", pid.trim()]).status();
    assert!(killed.unwrap().success());
    becomes(&daemon, None);
    drop(guest);

    // In its definition, without the hook.
    fs::remove_file(host.file(&format!("/etc/vnplug/vms/{uuid}"))).unwrap();
    let said = on(
        "attach",
        &["--allow", "lab", "--pool", "16M", "--permanent"],
    );
    assert!(said.contains("attached when it starts"), "{said}");
    // More than one with `VNPLUG_LONG=1`.
    let more = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 5,
        None => 0,
    };
    let start = || host.boot("new").unwrap_or_else(|error| panic!("{error}"));
    let mut guest = start();
    for _ in 0..more {
        reads(&guest);
        host.ok(&["destroy", "new"]);
        guest = start();
    }
    reads(&guest);
    host.restart();
    reads(&guest);
    assert!(!host.ok(&["dominfo", "new"]).contains("taint"));
    assert_eq!(on("detach", &["--permanent"]), "probe: detached\n");
    becomes(&daemon, None);
    let said = on("attach", &["--allow", "lab", "--permanent"]);
    assert!(said.contains("and attached"), "{said}");
    reads(&guest);
    on("detach", &["--permanent"]);
    for more in [&[][..], &["--inactive"]] {
        let xml = host.ok(&[&["dumpxml", "new"], more].concat());
        assert!(!xml.contains("vnplug"), "{xml}");
    }
}

fn delivered(daemon: &Daemon) -> u64 {
    let counters = daemon.audit();
    let ports = counters.iter().filter(|it| it.kind == "port");
    ports.map(|it| value(it, "delivered")).sum()
}

fn gets_packets(daemon: &Daemon) {
    eventually("the reader gets packets", || delivered(daemon) > 100);
}

#[test]
fn a_reader_goes_on_where_libvirt_moves_its_domain() {
    let lab = Lab::new().unwrap();
    let hosts = ["host1", "host2"]
        .map(|name| Libvirt::start(&lab, name).unwrap_or_else(|error| panic!("{error}")));
    let daemons = [&hosts[0], &hosts[1]].map(|host| daemon(&lab, host));
    // libvirt takes two of the ports itself.
    let q35 = Machine::Q35 { root_ports: 8 };
    let uuid = hosts[0].define("vm", q35, &image().unwrap()).unwrap();
    for host in &hosts {
        hook(host, &uuid, "--name probe --allow lab --pool 16M\n");
    }
    let mut guest = hosts[0]
        .boot("vm")
        .unwrap_or_else(|error| panic!("{error}"));
    becomes(&daemons[0], Some("connected"));
    reads(&guest);
    let _reader = guest
        .spawn("echo $$ >/run/reader; exec vnplug count host:lab --witness --json >/run/said 2>&1")
        .unwrap();
    gets_packets(&daemons[0]);
    // Where the memory goes by, in which QEMU's user makes a socket.
    let by = lab.dir().join("by");
    fs::create_dir(&by).unwrap();
    fs::set_permissions(&by, Permissions::from_mode(0o1777)).unwrap();
    let way = |to: &str| {
        // So slowly that the hook there is called long before the machine is there.
        let by = format!("--migrateuri=unix://{}/{to}", by.display());
        ["--p2p".to_owned(), "--bandwidth=16".to_owned(), by]
    };

    // By hand, and the hook there.
    let (here, there) = (&hosts[0], &hosts[1]);
    let uri = there.uri();
    let usual = [
        "migrate",
        "--live",
        "--persistent",
        "--undefinesource",
        "vm",
        &uri,
    ];
    let way_there = way("there");
    let migrate: Vec<&str> = usual
        .into_iter()
        .chain(way_there.iter().map(String::as_str))
        .collect();
    let (code, said) = here.virsh(&migrate);
    assert!(code == Some(1) && said.contains("peer mode"), "{said}");
    succeeds(
        here,
        &["detach", "qemu", "--name", "probe", "--libvirt", "vm"],
    );
    let mut moving = here.command("virsh").args(&migrate).spawn().unwrap();
    // What the hook waits by.
    let stands = || there.virsh(&["domstate", "--reason", "vm"]).1;
    until("it is on its way", stands, |it| {
        it.trim() == "paused (migrating)"
    });
    assert!(moving.wait().unwrap().success(), "{}", here.said());
    guest = there.arrived(&guest).unwrap();
    gets_packets(&daemons[1]);
    becomes(&daemons[0], None);

    // By one command, while the hook there does the same.
    let (here, there) = (&hosts[1], &hosts[0]);
    let _ssh = here.reaches(there).unwrap();
    let uri = there.uri();
    let migrate = [
        "migrate",
        "qemu",
        "--name",
        "probe",
        "--libvirt",
        "vm",
        "--ssh",
        "host1",
    ];
    let command = |more: &[&str], by: [String; 3]| {
        let by = by.iter().map(String::as_str);
        let words = migrate.into_iter().chain(more.iter().copied());
        here.vnplug(&words.chain(["--"]).chain(by).collect::<Vec<_>>())
    };
    let to = ["--to", &uri];
    let nowhere = "qemu+unix:///system?socket=/nowhere";
    // What is refused there leaves the guest alone.
    for (more, why) in [
        (&to[..], "shows it no such source"),
        (
            &[to, ["--allow", "other"]].concat()[..],
            "no source \"other\"",
        ),
        (
            &[to, ["--allow", "lab"], ["--pool", "1024G"]].concat()[..],
            "the target refuses",
        ),
        (
            &[to, ["--target-connect", nowhere]].concat()[..],
            "failed to connect",
        ),
        (
            &["--allow", "lab", "--to", nowhere][..],
            "nothing was changed",
        ),
    ] {
        let (code, said) = command(more, way("back"));
        assert!(code == Some(1) && said.contains(why), "{more:?}: {said}");
        assert_eq!(vm(&daemons[1]).as_deref(), Some("ready"), "{more:?}");
        assert_eq!(vm(&daemons[0]), None, "{more:?}");
    }
    // What libvirt does not do is undone.
    let (code, said) = command(&[to, ["--allow", "lab"]].concat(), way("nowhere/back"));
    assert!(
        code == Some(1) && said.contains("attached here as before"),
        "{said}"
    );
    gets_packets(&daemons[1]);
    becomes(&daemons[0], None);
    let (code, said) = command(&[to, ["--allow", "lab"]].concat(), way("back"));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("probe: moved: unplugged for "), "{said}");
    println!("{said}");
    guest = there.arrived(&guest).unwrap();
    gets_packets(&daemons[0]);
    becomes(&daemons[1], None);

    let end = "pid=$(cat /run/reader); kill -INT $pid; while kill -0 $pid; do sleep 0.1; done 2>/dev/null; cat /run/said";
    let said = guest.run(end, PATIENCE).unwrap().text();
    let summary = summary(&said).unwrap();
    // Two moves, and one that did not come about.
    assert_eq!(summary["gaps"].as_u64(), Some(3), "{said}");
    assert_eq!(summary["lost"].as_u64(), Some(0), "{said}");
}
