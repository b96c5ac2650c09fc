//! What operators take from programs in guests of QEMU and User-mode Linux, and in a container: their ports follow, they are told, and others lose
//! nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

use base64::Engine;
use vnplug::{Next, Port};
use vnplug_e2e::attached::{AttachedUml, agent, image};
use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::traffic::sequence;
use vnplug_e2e::user::{USER, open_to_all};
use vnplug_e2e::{Guest, Lab, Qemu, QemuConfig, container};
use vnplug_ring::control::{Grant, REVOKED};
use vnplug_testing::{PATIENCE, eventually};

/// Numbered packets of two flows in turns.
const SOURCE: &str = "lab=gen,pps=500,flows=2,size=64";
/// The last byte of a packet's source address: its flow.
const FLOW: usize = 29;

/// Whose programs they are.
struct Owner {
    /// As grants have it.
    whose: String,
    /// As `vnplug revoke` has it.
    revoke: [String; 2],
    /// As counters have it.
    label: String,
}

impl Owner {
    fn new(kind: &str, name: &str) -> Self {
        Self {
            whose: format!("{kind}:{name}"),
            revoke: [format!("--{kind}"), name.to_owned()],
            label: format!("{kind} {name}"),
        }
    }

    /// The owner's ports, and a counter of all of them.
    fn ports(&self, daemon: &Daemon, name: &str) -> (usize, u64) {
        let all = daemon.counters();
        let own = all.iter().filter(|it| it.kind == "port");
        let own = own.filter(|it| label(it, "owner") == self.label);
        own.fold((0, 0), |(count, sum), it| {
            (count + 1, sum + value(it, name))
        })
    }
}

fn vnplug(daemon: &Daemon, args: &[&str]) {
    let begun = Instant::now();
    let (code, text) = daemon.vnplug(args);
    eprintln!("vnplug {args:?}: {:?}", begun.elapsed());
    assert_eq!(code, Some(0), "{args:?}: {text}");
}

/// Reads on, with the number of the last packet in `last`: none is missing.
fn reads_on(port: &mut Port, last: &AtomicU64, over: &AtomicBool) {
    let mut next = None;
    while !over.load(Ordering::Relaxed) {
        match port.next().unwrap() {
            Next::Packet(packet) => {
                let number = sequence(packet.bytes);
                assert_eq!(number, *next.get_or_insert(number));
                next = Some(number + 1);
                last.store(number, Ordering::Relaxed);
            }
            _ => drop(port.wait(Some(Duration::from_millis(20))).unwrap()),
        }
    }
}

/// The packets of a pcap file in a guest that has no file in common with the host.
fn packets(guest: &Guest, path: &str) -> Vec<Vec<u8>> {
    let text = guest.run(&format!("base64 {path}"), PATIENCE).unwrap();
    let text: String = text.text().split_whitespace().collect();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text);
    let bytes = bytes.unwrap();
    let (mut packets, mut rest) = (Vec::new(), &bytes[24..]);
    while let [head, ..] = rest.as_chunks::<16>().0 {
        let len = u32::from_le_bytes(head[8..12].try_into().unwrap()) as usize;
        packets.push(rest[16..16 + len].to_vec());
        rest = &rest[16 + len..];
    }
    packets
}

fn follows(guest: &Guest, daemon: &Daemon, owner: &Owner) {
    let mut bystander = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    let (last, over) = (AtomicU64::new(0), AtomicBool::new(false));
    scope(|threads| {
        let ends = Ends([&over; 2]);
        let reader = threads.spawn(|| reads_on(&mut bystander, &last, &over));
        let narrowed = narrowed(guest, daemon, owner, &last);
        sending_is_taken(guest, daemon, owner);
        all_is_taken(guest, daemon, owner, narrowed);
        the_grant_is_taken(guest, daemon, owner);
        drop(ends);
        reader.join().unwrap();
    });
    assert_eq!(bystander.counts().lost, 0);
    daemon.audit();
}

/// A port of which a packet may be there, and one number of its: from then on nothing of the other flow is.
struct Narrowed {
    dump: vnplug_e2e::Job,
    since: u64,
}

/// What a port sees becomes narrower, and it goes on.
fn narrowed(guest: &Guest, daemon: &Daemon, owner: &Owner, last: &AtomicU64) -> Narrowed {
    let dump = guest.spawn("exec vnplug dump host:lab -w /tmp/seen.pcap 2>&1");
    let dump = dump.unwrap();
    let delivered = || owner.ports(daemon, "delivered").1;
    eventually("it sees both flows", || delivered() > 200);
    let grant = format!("{}=lab:src host 10.0.0.1", owner.whose);
    vnplug(daemon, &["grant", "set", &grant, "--once"]);
    // What comes from now on has higher numbers than what a reader has then.
    let seen = value(counted(&daemon.counters(), "source"), "seen");
    eventually("the other reader has come as far", || {
        last.load(Ordering::Relaxed) >= seen
    });
    let since = last.load(Ordering::Relaxed);
    let (before, refused) = (delivered(), owner.ports(daemon, "refused").1);
    eventually("it goes on", || delivered() > before + 200);
    assert!(owner.ports(daemon, "refused").1 >= refused + 100);
    Narrowed { dump, since }
}

/// Its ports may not send any more: nothing of what waits is sent, and it is told.
fn sending_is_taken(guest: &Guest, daemon: &Daemon, owner: &Owner) {
    let sent = || value(counted(&daemon.counters(), "source"), "sent");
    let before = sent();
    let sender = guest.spawn("exec vnplug send host:lab --pps 2000 2>&1");
    let sender = sender.unwrap();
    eventually("it sends", || sent() > before + 100);
    let [key, name] = &owner.revoke;
    vnplug(daemon, &["revoke", key, name, "--sending"]);
    let then = sent();
    let ended = sender.wait(PATIENCE).unwrap();
    assert!(
        ended.status != 0 && ended.text().contains("revoked sending"),
        "{}",
        ended.text()
    );
    assert_eq!(sent(), then);
}

/// All its ports are taken: they end, and what they had is whole.
fn all_is_taken(guest: &Guest, daemon: &Daemon, owner: &Owner, narrowed: Narrowed) {
    let Narrowed { dump, since } = narrowed;
    // Sending was not its, and who sent is gone.
    eventually("one is left", || owner.ports(daemon, "delivered").0 == 1);
    let [key, name] = &owner.revoke;
    vnplug(daemon, &["revoke", key, name]);
    let ended = dump.wait(PATIENCE).unwrap();
    assert!(
        ended.status != 0 && ended.text().contains(REVOKED),
        "{}",
        ended.text()
    );
    assert_eq!(owner.ports(daemon, "delivered").0, 0);
    let seen = packets(guest, "/tmp/seen.pcap");
    let of = |packet: &Vec<u8>| (sequence(packet), packet[FLOW]);
    let (before, after): (Vec<_>, Vec<_>) = seen.iter().map(of).partition(|it| it.0 <= since);
    for flow in [0, 1] {
        let count = before.iter().filter(|it| it.1 == flow).count();
        assert!(count > 50, "{count} of flow {flow} before");
    }
    assert!(after.len() > 100, "{}", after.len());
    assert!(after.iter().all(|it| it.1 == 1), "{after:?}");
    assert!(seen.iter().map(of).is_sorted());
}

/// Its grant is taken: a port that is open is over, and there is no other.
fn the_grant_is_taken(guest: &Guest, daemon: &Daemon, owner: &Owner) {
    let count = guest.spawn("exec vnplug count host:lab 2>&1").unwrap();
    // For a second: it has its ring by then.
    eventually("it reads", || owner.ports(daemon, "delivered").1 > 500);
    let grant = format!("{}=lab", owner.whose);
    vnplug(daemon, &["grant", "rm", &grant, "--once"]);
    assert_eq!(owner.ports(daemon, "delivered").0, 0);
    let ended = count.wait(PATIENCE).unwrap();
    assert!(
        ended.status != 0 && ended.text().contains("changed the grants"),
        "{}",
        ended.text()
    );
    let again = guest.run("vnplug count host:lab -c 1 2>&1", PATIENCE);
    let again = again.unwrap();
    assert!(
        again.status != 0 && again.text().contains("no source"),
        "{}",
        again.text()
    );
}

#[test]
fn ports_of_a_guest_of_qemu_follow_what_is_granted_and_revoked() {
    let lab = Lab::new().unwrap();
    let owner = Owner::new("vm", "qemu");
    let args = ["--source", SOURCE, "--allow-send", "vm:qemu=lab"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let config = QemuConfig {
        image: image().unwrap(),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    let qmp = guest.qmp_path().unwrap();
    let attach = ["attach", "qemu", "--name", "qemu", "--allow", "lab"];
    let qmp = ["--qmp", qmp.to_str().unwrap(), "--wait", "0s"];
    vnplug(&daemon, &[&attach[..], &qmp].concat());
    let _agent = agent(&guest).unwrap();
    follows(&guest, &daemon, &owner);
}

#[test]
fn ports_of_a_guest_of_user_mode_linux_follow_what_is_granted_and_revoked() {
    let lab = Lab::new().unwrap();
    let owner = Owner::new("vm", "uml");
    let args = ["--source", SOURCE, "--allow-send", "vm:uml=lab"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let sees = Grant {
        source: "lab".into(),
        filter: String::new(),
    };
    let uml = AttachedUml::boot(&lab, &daemon, "uml", vec![sees], image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    follows(&uml.guest, &daemon, &owner);
}

#[test]
fn ports_of_a_container_follow_what_is_granted_and_revoked() {
    let lab = Lab::new().unwrap();
    let owner = Owner::new("uid", &USER.to_string());
    let config = open_to_all(&lab, "");
    let grant = format!("{}=lab", owner.whose);
    let args = ["--config", &config, "--source", SOURCE];
    let grants = ["--allow", &grant, "--allow-send", &grant];
    let daemon = Daemon::start(&lab, None, &[&args[..], &grants].concat()).unwrap();
    let guest = container::start(&lab, USER, &daemon.socket(), &image().unwrap());
    let guest = guest.unwrap_or_else(|error| panic!("{error}"));
    follows(&guest, &daemon, &owner);
}
