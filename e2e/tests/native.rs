//! Filters as machine code, in a daemon that serves readers.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vnplug::{Counted, Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_testing::{Deadline, eventually};

const SOURCE: &str = "lab=gen,size=100,pps=20000,flows=16,protocols=udp4+tcp4";

fn of_daemon(daemon: &Daemon) -> Counted {
    counted(&daemon.counters(), "daemon").clone()
}

/// Takes packets; each must be of this IP protocol.
fn take(port: &mut Port, count: u32, protocol: u8) {
    let deadline = Deadline::new(format!("{count} packets come"));
    let mut taken = 0;
    while taken < count {
        deadline.check_seen(&taken);
        match port.next().unwrap() {
            Next::Packet(packet) => {
                assert_eq!(packet.bytes[23], protocol);
                taken += 1;
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_secs(1))).unwrap();
            }
            Next::Ended => panic!("the source ended"),
        }
        port.release();
    }
}

#[test]
fn filters_become_machine_code_while_packets_flow_and_leave_nothing_behind() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", SOURCE]).unwrap();
    let open = |text: &str| daemon.port("lab").filter(text).open().unwrap();
    let mut ports = [open("udp"), open("udp"), open("tcp")];
    eventually("three filters are native", || {
        value(&of_daemon(&daemon), "native_filters") == 3
    });
    for (port, protocol) in ports.iter_mut().zip([17, 17, 6]) {
        take(port, 2_000, protocol);
    }
    let counters = of_daemon(&daemon);
    assert!(value(&counters, "native_bytes") >= 4096);
    for name in ["native_waiting", "native_refused", "native_failed"] {
        assert_eq!(value(&counters, name), 0, "{name}");
    }
    daemon.audit();
    drop(ports);
    eventually("the code is gone with its ports", || {
        let counters = of_daemon(&daemon);
        value(&counters, "native_filters") + value(&counters, "native_bytes") == 0
    });
}

#[test]
fn without_machine_code_the_same_packets_arrive() {
    let lab = Lab::new().unwrap();
    let args = ["--source", SOURCE, "--jit", "off"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut port = daemon.port("lab").filter("tcp").open().unwrap();
    take(&mut port, 2_000, 6);
    let counters = of_daemon(&daemon);
    assert!(
        counters
            .values
            .iter()
            .all(|(name, _)| !name.starts_with("native"))
    );
    daemon.audit();
}
