//! Ten thousand targets on one wire, each with a port of its own: every port gets exactly its target's
//! packets, and all of them, within ordinary limits of open files.

use std::time::{Duration, Instant};

use vnplug::{Bundle, Next, Port, Ready};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::Holdings;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_testing::Deadline;

/// Targets with a port, and addresses on the wire: some are nobody's target.
const TARGETS: u32 = 10_000;
const FLOWS: u32 = 10_500;
/// Packets of each address.
const EACH: u64 = 5;
const RATE: u64 = 40_000;
const RUN: u32 = 77;

/// The address of a flow; see `vnplug_frame::witness::Shape`.
fn address(flow: u32) -> String {
    let [_, x, y, z] = flow.to_be_bytes();
    format!("10.{x}.{y}.{z}")
}

/// Takes all packets that are there; their sequences.
fn drain(port: &mut Port, into: &mut Vec<u64>) {
    while let Next::Packet(packet) = port.next().expect("the port lives") {
        let Parsed::Witness(witness) = parse(packet.bytes) else {
            panic!("not a witness: {:02x?}", packet.bytes);
        };
        assert_eq!((witness.run, packet.meta.lost), (RUN, 0));
        into.push(witness.seq);
    }
}

#[test]
fn ten_thousand_targets_each_get_their_packets_and_nobody_elses() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let begin = Instant::now();
    let pids = [daemon.pid(), std::process::id()];
    let before = pids.map(Holdings::of);
    let mut bundle = Bundle::new().unwrap();
    for target in 0..TARGETS {
        let filter = format!("host {}", address(target));
        let options = daemon.port("wire1").ring_bytes(1 << 14).filter(&filter);
        bundle.open(options).unwrap();
    }
    println!("{TARGETS} ports opened in {:?}", begin.elapsed());
    for (name, (pid, before)) in ["daemon", "reader"].iter().zip(pids.iter().zip(&before)) {
        let now = Holdings::of(*pid);
        println!("{name}: {before:?} became {now:?}");
        assert!(now.fds <= before.fds + 16, "{name}: {now:?}");
    }
    let sent = netns
        .enter(|| {
            let stream = Stream {
                flows: FLOWS,
                pps: RATE.try_into().ok(),
                run: RUN,
                ..Stream::new("wire0", EACH * u64::from(FLOWS))
            };
            stream.send()
        })
        .unwrap()
        .unwrap();
    assert_eq!(sent.frames, EACH * u64::from(FLOWS));
    let mut taken = vec![Vec::new(); bundle.ports().len()];
    let deadline = Deadline::new("all are taken");
    while taken.iter().map(|seqs| seqs.len() as u64).sum::<u64>() < EACH * u64::from(TARGETS) {
        deadline.check_seen(&taken.iter().map(Vec::len).collect::<Vec<_>>());
        for (port, seqs) in bundle.ports().iter_mut().zip(&mut taken) {
            drain(port, seqs);
        }
        let woken = bundle.wait(Some(Duration::from_secs(1))).unwrap();
        assert_ne!(woken, Ready::Interrupted);
    }
    for (target, seqs) in (0..u64::from(TARGETS)).zip(&taken) {
        let own: Vec<u64> = (0..EACH)
            .map(|nth| nth * u64::from(FLOWS) + target)
            .collect();
        assert_eq!(*seqs, own, "target {target}");
    }
    // Everything is accounted for, also what nobody asked for.
    let counters = daemon.audit();
    let read = value(&counters[1], "read");
    assert!(read >= sent.frames, "{:?}", counters[1]);
    let mut seen = 0;
    for counted in counters.iter().filter(|counted| counted.kind == "port") {
        let of = |name| value(counted, name);
        assert_eq!(of("delivered"), EACH, "{counted:?}");
        assert_eq!(
            of("offered"),
            of("delivered") + of("filtered"),
            "{counted:?}"
        );
        seen += 1;
    }
    assert_eq!(seen, TARGETS);
    let begin = Instant::now();
    drop(bundle);
    daemon.await_no_ports();
    println!("and closed in {:?}", begin.elapsed());
    let source = &daemon.audit()[1];
    assert_eq!(value(source, "duties"), value(source, "departed_offered"));
    assert_eq!(
        value(source, "departed_offered"),
        value(source, "departed_accounted")
    );
}
