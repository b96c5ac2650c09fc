//! Many targets on one wire, each with a port of its own: every port gets exactly its target's
//! packets, and all of them.

use std::time::{Duration, Instant};

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::witness::{Parsed, parse};

/// Targets with a port, and addresses on the wire: some are nobody's target.
const TARGETS: u32 = 2_000;
const FLOWS: u32 = 2_500;
/// Packets of each address.
const EACH: u64 = 20;
const RATE: u64 = 40_000;
const RUN: u32 = 77;

/// The address of a flow; see `vnplug_ring::witness::Shape`.
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
fn two_thousand_targets_each_get_their_packets_and_nobody_elses() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let begin = Instant::now();
    let mut ports: Vec<Port> = (0..TARGETS)
        .map(|target| {
            let filter = format!("host {}", address(target));
            let options = daemon.port("wire1").ring_bytes(1 << 14).filter(&filter);
            options.open().unwrap()
        })
        .collect();
    println!("{TARGETS} ports opened in {:?}", begin.elapsed());
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
    let mut taken = vec![Vec::new(); ports.len()];
    let deadline = Instant::now() + Duration::from_secs(120);
    while taken.iter().map(|seqs| seqs.len() as u64).sum::<u64>() < EACH * u64::from(TARGETS) {
        assert!(Instant::now() < deadline, "{:?}", daemon.counters()[1]);
        for (port, seqs) in ports.iter_mut().zip(&mut taken) {
            drain(port, seqs);
        }
        std::thread::sleep(Duration::from_millis(1));
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
    drop(ports);
    daemon.await_no_ports();
    let source = &daemon.audit()[1];
    assert_eq!(value(source, "duties"), value(source, "departed_offered"));
    assert_eq!(
        value(source, "departed_offered"),
        value(source, "departed_accounted")
    );
}
