//! A guest forges its sender with a tool that nobody here wrote, on a port of a switch that is locked to its own addresses.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::{Guest, Image, Lab, Uml, UmlConfig};
use vnplug_testing::{Deadline, PATIENCE};

const OWN: [u8; 4] = [10, 77, 9, 1];
const OTHER: [u8; 4] = [10, 77, 9, 6];
/// Datagrams of each kind.
const COUNT: usize = 200;

fn ran(guest: &Guest, command: &str) -> String {
    let done = guest.run(command, PATIENCE).unwrap();
    assert!(done.success(), "{command}: {}", done.text());
    done.text()
}

/// Datagrams to the reader, with these words of hping3. It fails when nobody answers, and nobody does.
fn hping(guest: &Guest, words: &str) {
    let command =
        format!("hping3 -q -n -2 -p 7 -d 32 -i u300 -c {COUNT} {words} 10.77.9.2 2>&1; true");
    let said = ran(guest, &command);
    assert!(said.contains(&format!("{COUNT} packets tr")), "{said}");
}

/// Senders of the datagrams that have come.
fn senders(port: &mut Port) -> Vec<[u8; 4]> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        all.push(packet.bytes[26..30].try_into().unwrap());
    }
    all
}

/// The same, when `count` of this sender are there.
fn with(port: &mut Port, sender: [u8; 4], count: usize) -> Vec<[u8; 4]> {
    let deadline = Deadline::new("the datagrams come");
    let mut all = senders(port);
    while all.iter().filter(|it| **it == sender).count() < count {
        deadline.check_seen(&all.len());
        port.wait(Some(Duration::from_millis(100))).unwrap();
        all.extend(senders(port));
    }
    all
}

#[test]
fn what_hping_spoofs_in_a_guest_reaches_nobody_while_its_port_is_locked() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let config = UmlConfig::vhost_user(&socket, Image::default().program("/usr/sbin/hping3"));
    let guest = Uml::boot(&lab, config).unwrap();
    ran(
        &guest,
        "ip addr add 10.77.9.1/24 dev eth0 && ip link set eth0 up && \
         arp -s 10.77.9.2 02:00:00:00:00:02 && ip link set lo up",
    );
    let mac = ran(&guest, "cat /sys/class/net/eth0/address");
    let reader = daemon.port("host:lan0").join().ring_bytes(1 << 20);
    let mut reader = reader.filter("udp port 7").open().unwrap();
    let set = |settings: &[&str]| {
        let (code, said) =
            daemon.vnplug(&[&["switch", "set", "lan0/port1"][..], settings].concat());
        assert_eq!(code, Some(0), "{said}");
    };
    let dropped = || value(counted(&daemon.counters(), "source"), "in_dropped_lock");

    set(&[&format!("lock={}", mac.trim()), "ip=10.77.9.1"]);
    let before = dropped();
    hping(&guest, "--spoof 10.77.9.6");
    hping(&guest, "--rand-source");
    ran(&guest, "ip link set eth0 address 02:00:00:00:00:99");
    ran(&guest, "arp -s 10.77.9.2 02:00:00:00:00:02");
    hping(&guest, "");
    ran(&guest, &format!("ip link set eth0 address {}", mac.trim()));
    ran(&guest, "arp -s 10.77.9.2 02:00:00:00:00:02");
    let forged = dropped() - before;
    // What else a kernel says under a foreign address is dropped, too.
    assert!(forged >= 3 * COUNT as u64, "{forged}");
    hping(&guest, "");
    assert_eq!(with(&mut reader, OWN, COUNT), vec![OWN; COUNT]);

    // The control: without the lock it is as hping wants it.
    set(&["lock=no", "ip=no"]);
    hping(&guest, "--spoof 10.77.9.6");
    let came = with(&mut reader, OTHER, COUNT);
    assert_eq!(came.len(), COUNT);
    daemon.audit();
}
